"""Whether partitioned models compute what they compute in one process.

The reference is plain Chainer, one micro-batch after the other, on rank 0.
Models that draw random numbers in forward, or that go on from their state,
have no such reference: draws depend on the place in the training, and each
micro-batch has a state of its own.  They are compared with themselves,
partitioned over one rank.
"""
from __future__ import annotations

import itertools
import os
import sys
import time
import traceback

from chainer_fp8pipe import PipelineUpdater, partition
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.chains.recorder import Tracer
from chainer_fp8pipe.planning.calls import order_of
from chainer_fp8pipe.planning.intervals import Intervals
from chainer_fp8pipe.planning.partition_plan import PartitionPlan

import chainer
import numpy
from chainer.functions.loss.hinge import Hinge
from mpi4py import MPI

from .calls import Around

UPDATES = 3
#: Of a gradient, relative to its norm.
LIMIT = 1e-5
#: A gradient whose norm is less than this share of the largest one's is the
#: rounding of a sum that is zero, as that of a bias before normalisation.
#: Only its absolute error is looked at, relative to the largest norm.
NOISE = 1e-6
SCHEDULES = (('gpipe', 1), ('1f1b', 1), ('zero_bubble', 1),
             ('interleaved', 2))


def _careful(backward):
    """Chainer's hinge divides the gradient that it is given, in place.

    What is added to the hinge has the same array for its gradient, which is
    wrong then in one process, and right where a cut is between the two.
    """
    def run(self, inputs, gradients):
        return backward(self, inputs, tuple(
            gradient.copy() for gradient in gradients))
    return run


Hinge.backward_cpu = _careful(Hinge.backward_cpu)


class Refused(Exception):
    """The package has said that it does not do this."""


class Failed(Exception):
    """An exception in training."""


class Same(chainer.dataset.Iterator):
    """One batch for ever."""

    epoch, is_new_epoch, epoch_detail, previous_epoch_detail = 0, False, 0, 0

    def __init__(self, batch):
        self.batch = batch

    def next(self):
        return self.batch


def judge_model(comm, case, schedule, chunks, known):
    """A row for one of the models and a schedule, on these ranks.

    Its ``outcome`` is ``'right'``, or ``'refused'`` or ``'too few parts'`` in
    the words of its ``reason``; or ``'wrong'`` or ``'failed'``.
    """
    parts = max(case.samples // 2, 2)
    batch = case.batch(numpy.random.RandomState(1), case.samples)

    def make():
        numpy.random.seed(0)
        return case.make()
    options = {'micro_batches': parts, 'schedule': schedule,
               'chunks': chunks}
    alone = case.draws or case.stateful
    try:
        try:
            return judged(comm, make, batch, options, alone, known)
        except Refused as error:
            if 'loss_weight' not in str(error):
                raise
            # The remedy that the message names.
            return {**judged(comm, make, batch, options, alone, known,
                             loss_weight=_samples),
                    'note': 'with loss_weight=: ' + str(error)}
    except Refused as error:
        few = 'parts at most' in str(error)
        return {'outcome': 'too few parts' if few else 'refused',
                'reason': str(error)}
    except Failed as error:
        return {'outcome': 'failed', 'reason': str(error)}


def _samples(*arrays, **named):
    return len([*arrays, *named.values()][0])


def judged(comm, make, batch, options, alone, known, loss_weight=None,
           plan=None, updates=UPDATES):
    """Trains over the ranks and in one process, and compares.

    Args:
        make: Makes the model, on all ranks.
        batch: On all ranks.
        options: Of partition() and the updater.
        alone: Whether the reference is a partition over one rank.
        known: References by their values, from other cuts.
        loss_weight: As for the updater.
        plan: As for partition().
        updates: How many.
    """
    model = make()
    first = {name: None if parameter.array is None
             else parameter.array.copy()
             for name, parameter in Names(model).parameters.items()
             } if comm.rank == 0 else {}
    losses = _train(comm, model, batch, options, loss_weight, plan, updates)
    after = (_drawn(make, _part(batch, 0, options['micro_batches']))
             if any(array is None for array in first.values()) else first)
    late = {name for name, array in first.items()
            if array is None or not numpy.array_equal(
                array, after[name], equal_nan=True)}
    values = _gathered(comm, model, lambda name, parameter: (
        parameter.array))
    gradients = _gathered(comm, model, lambda name, parameter: (
        parameter.grad))
    row = None
    problem = ''
    if comm.rank == 0:
        try:
            row = _compare(make, after, late, losses, values, gradients,
                           (batch, options, alone, loss_weight, updates),
                           known)
        except Exception:
            problem = traceback.format_exc()
    # Leaves the cores to those who still work.
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    problem = comm.bcast(problem)
    if problem:
        raise Failed('the reference: ' + problem)
    return comm.bcast(row)


def _compare(make, first, late, losses, values, gradients, how, known):
    changed = [name for name, array in first.items()
               if name not in late and name in values
               and not numpy.array_equal(array, values[name],
                                         equal_nan=True)]
    if changed:
        return {'outcome': 'wrong', 'reason': 'other initial values of '
                + ', '.join(changed)}
    changed += [name for name in late if name in values
                and not _alike(values[name], first[name])]
    if changed:
        return {'outcome': 'wrong', 'reason': 'initial values of another '
                'size than in one process: ' + ', '.join(sorted(changed))}
    lost = set(first) - set(values)
    if lost:
        return {'outcome': 'wrong', 'reason': 'no rank has '
                + ', '.join(lost)}
    key = tuple(values[name].tobytes() if values[name] is not None else b''
                for name in sorted(late)), how[3] is None
    if key not in known:
        known.clear()
        known[key] = _reference(make, values, *how)
    expected, expected_gradients = known[key]
    error, noise, worst = _distance(gradients, expected_gradients)
    row = {'losses': losses, 'expected': expected, 'error': error,
           'noise': noise, 'worst': worst}
    if losses != expected:
        return {**row, 'outcome': 'wrong', 'reason': 'the loss is '
                f'{losses}, and {expected} in one process'}
    if not error <= LIMIT or not noise <= LIMIT:
        return {**row, 'outcome': 'wrong', 'reason':
                f'the gradient of {worst} has an error of {error:.1e}, '
                f'those that are noise {noise:.1e}'}
    return {**row, 'outcome': 'right', 'reason': ''}


def _drawn(make, example):
    """Values that links give in their first forward pass."""
    model = make()
    _call(model, example)
    return {name: None if parameter.array is None
            else parameter.array.copy()
            for name, parameter in Names(model).parameters.items()}


def _alike(values, drawn):
    """Whether both may have been drawn from one distribution."""
    if values is None or drawn is None:
        return values is drawn
    one, other = (float(numpy.linalg.norm(array))
                  for array in (values, drawn))
    return one == other or bool(other) and 1 / 3 < one / other < 3


def _distance(found, expected):
    """The largest relative errors, of gradients and of noise."""
    norms = {name: float(numpy.linalg.norm(array.astype('d')))
             for name, array in expected.items() if array is not None}
    largest = max(norms.values(), default=0.0)
    error, noise, worst = 0.0, 0.0, ''
    for name, array in expected.items():
        other = found.get(name)
        if array is None or other is None:
            # None is a gradient of zero.
            some = array if other is None else other
            distance = (0.0 if some is None
                        else float(numpy.linalg.norm(some)))
        else:
            distance = float(numpy.linalg.norm(
                array.astype('d') - other.astype('d')))
        norm = norms.get(name, 0.0)
        if norm < NOISE * largest or not norm:
            noise = max(noise, distance / largest if largest else distance)
        elif not distance / norm <= error:
            error, worst = distance / norm, name
    return error, noise, worst


# --- over the ranks ----------------------------------------------------------

def _train(comm, model, batch, options, loss_weight, plan, updates):
    """The loss of each update, with gradients left in the model.

    Raises:
        Refused: By the package, in words; on all ranks.
        Failed: Otherwise; on all ranks.
    """
    parts = options['micro_batches']
    _telling(model)

    def cut():
        partition(model, _part(batch, 0, parts), comm, plan=plan, **options)
    _together(comm, cut, Refused)
    optimizer = chainer.optimizers.SGD(0).setup(model)
    found = []

    def train():
        updater = PipelineUpdater(
            Same(batch), optimizer, comm, micro_batches=parts,
            schedule=options['schedule'], loss_weight=loss_weight,
            converter=lambda batch, device: batch)
        reporter = chainer.Reporter()
        reporter.add_observer('main', model)
        reporter.add_observers('main', model.namedlinks(skipself=True))
        for _ in range(updates):
            reporter.observation = {}
            with reporter, _silent():
                updater.update()
            found.append(float(reporter.observation['main/returned']))
    _together(comm, train, Failed)
    return found


class _silent:
    """The line on a new plan is not for whoever reads the progress."""

    def __enter__(self):
        self._before = sys.stderr
        self._null = sys.stderr = open(os.devnull, 'w')

    def __exit__(self, *_):
        sys.stderr = self._before
        self._null.close()


def _together(comm, action, kind):
    """On all ranks the first error of any, if it is one in words.

    Both are told apart: a refusal is a ValueError, TypeError or GhostError
    that partition() raises on all ranks.
    """
    error, text = '', ''
    try:
        action()
    except Exception as problem:
        error, text = type(problem).__name__, str(problem)
        if kind is Failed and error != 'RemoteError':
            text = traceback.format_exc()
    found = comm.allgather((error, text))
    if not any(name for name, _ in found):
        return
    if kind is Refused and {name for name, _ in found} <= {
            'ValueError', 'TypeError', 'GhostError', 'DoesNotFit'}:
        raise Refused(found[0][1])
    words = [text for name, text in found if 'loss_weight=' in text]
    if words:                   # what ChainWork says before a step
        raise Refused(words[0].strip().splitlines()[-1])
    raise Failed(next((text for name, text in found
                       if name and name != 'RemoteError'), found[0][1]))


def _telling(model):
    """Has the model report what it returns, whatever else it reports."""
    kind = type(model)
    # Some write the one, some the other.
    name = ('forward' if kind.__call__ is chainer.Link.__call__
            else '__call__')

    def told(self, *args, **kwargs):
        loss = getattr(kind, name)(self, *args, **kwargs)
        chainer.report({'returned': loss}, self)
        return loss
    model.__class__ = type(kind.__name__, (kind,), {
        name: told, '__module__': kind.__module__})


def _gathered(comm, model, what):
    """By name, on rank 0; copies on several ranks must be alike."""
    own = dict(model.namedparams())
    found = {}
    for rank, names in enumerate(comm.allgather(sorted(own))):
        for name in names:
            array = what(name, own[name]) if rank == comm.rank else None
            if rank and comm.rank == rank:
                comm.send(array, 0)
            elif rank and comm.rank == 0:
                array = comm.recv(source=rank)
            if comm.rank:
                continue
            if name in found and not numpy.array_equal(
                    found[name], array, equal_nan=True):
                array = numpy.full_like(array, numpy.nan)
            found[name] = array
    return found


# --- the reference -----------------------------------------------------------

def _reference(make, values, batch, options, alone, loss_weight, updates):
    """Losses and gradients of one process that begins with these values."""
    model = make()
    for name, parameter in Names(model).parameters.items():
        if values[name] is not None:
            if parameter.array is None:
                parameter.initialize(values[name].shape)
            parameter.array[...] = values[name]
    if alone:
        losses = _train(MPI.COMM_SELF, model, batch, {
            **options, 'schedule': '1f1b', 'chunks': 1}, loss_weight, None,
            updates)
    else:
        losses = [_serial(model, batch, options['micro_batches'],
                          loss_weight)] * updates
    return losses, {name: parameter.grad for name, parameter
                    in Names(model).parameters.items()}


def _serial(model, batch, parts, loss_weight):
    counting = _Counting()
    every = []
    for number in range(parts):
        with counting:
            every.append(_call(model, _part(batch, number, parts)))
        counting.end()
    weights = counting.weights(loss_weight is None)
    total = sum(weights)
    model.cleargrads()
    for loss, weight in zip(every, weights, strict=True):
        (loss * (weight / total)).backward()
    return sum(weight * float(loss.array) for loss, weight
               in zip(every, weights, strict=True)) / total


class _Counting(chainer.FunctionHook):
    """Counts the labels that losses do not leave out."""

    def __init__(self):
        self._now, self._found = [], []

    def forward_postprocess(self, function, in_data):
        function = getattr(function, 'function', function)
        label = getattr(function, 'ignore_label', None)
        if (label is not None and getattr(function, 'normalize', False)
                and getattr(function, 'reduce', 'mean') != 'no'):
            self._now.append((in_data[1] != label).sum())

    def end(self):
        """Of a micro-batch."""
        self._found.append(self._now)
        self._now = []

    def weights(self, wanted):
        """Of the micro-batches; alike where a loss has no such labels."""
        if wanted and all(self._found):
            return [float(counts[0]) for counts in self._found]
        return [1.0] * len(self._found)


def _call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def _part(batch, number, parts):
    """A micro-batch."""
    def of(array):
        size = len(array) // parts
        return array[number * size:(number + 1) * size]
    if isinstance(batch, dict):
        return {name: of(array) for name, array in batch.items()}
    return tuple(map(of, batch))


# --- functions ---------------------------------------------------------------

_BATCH, _PARTS = 8, 2


def judge_function(comm, call):
    """A row for a function or link, cut between two ranks at every place."""
    rng = numpy.random.RandomState(2)
    batch = (rng.uniform(-1, 1, (_BATCH, 6)).astype('f'),
             numpy.resize([0, 1, 2, 0], _BATCH).astype('i'))
    example = _part(batch, 0, _PARTS)
    shapes, draws = _tried(call, example)

    def make():
        numpy.random.seed(3)
        model = Around(call)
        for name, parameter in sorted(model.namedparams()):
            if parameter.array is None:
                parameter.initialize(shapes[name])
        return model
    cuts, worst, known = 0, 0.0, {}
    options = {'micro_batches': _PARTS, 'schedule': '1f1b'}
    try:
        try:
            plans = _every_cut(make(), example)
        except (ValueError, RuntimeError) as error:
            raise Refused(str(error)) from None
        for plan in plans:
            row = judged(comm, make, batch, options, draws, known,
                         plan=plan, updates=1)
            cuts += 1
            if row['outcome'] != 'right':
                return {**row, 'cuts': cuts, 'cut': plan['cuts']}
            worst = max(worst, row['error'])
    except Refused as error:
        return {'outcome': 'refused', 'reason': str(error), 'cuts': cuts}
    except Failed as error:
        return {'outcome': 'failed', 'reason': str(error), 'cuts': cuts}
    return {'outcome': 'right', 'reason': '', 'error': worst, 'cuts': cuts}


def _tried(call, example):
    """Shapes of the parameters, and whether the function draws."""
    numpy.random.seed(3)
    model = Around(call)
    model(*example)
    before = numpy.random.get_state()
    model(*example)
    after = numpy.random.get_state()
    draws = before[2] != after[2] or (before[1] != after[1]).any()
    return {name: parameter.shape
            for name, parameter in model.namedparams()}, bool(draws)


def _every_cut(model, example):
    """A plan for each place between two ranks where a cut can be."""
    names = Names(model)
    with chainer.using_config('train', True):
        trace = Tracer(names).trace(
            lambda: model(*example), timed=False)
    order = order_of(trace.calls, list(names.parameters))
    starts = Intervals(trace.calls, order, parameters_of(names)).starts
    return [PartitionPlan(order, (start,), 2, (False, False), _PARTS,
                 '1f1b').as_dict()
            for start in itertools.islice(starts, 1, None)]

"""Whether partitioned models compute what they compute in one process.

The reference is plain Chainer, one micro-batch after the other.  Models that
draw random numbers in forward, or that go on from their state, have no such
reference: draws depend on the place in the training, and each micro-batch has
a state of its own.  They are compared with themselves, partitioned over one
rank.

`Both` compares a model at each update, `judge_model` one of the collection
after some updates to the bit, and `judge_function` a call at every cut.
"""
import contextlib
import copy
import dataclasses
import itertools
from unittest import mock

from chainer_fp8pipe import PipelineUpdater, partition
from chainer_fp8pipe.chains import measure
from chainer_fp8pipe.chains.attributes import Names, parameters_of
from chainer_fp8pipe.chains.calls import order_of
from chainer_fp8pipe.chains.cuts import Intervals
from chainer_fp8pipe.chains.plan import PartitionPlan
from chainer_fp8pipe.chains.recorder import Recorder, record_example
from chainer_fp8pipe.mpi.agreement import raise_together
from chainer_fp8pipe.pipeline.schedules import bounds

import chainer
import numpy
import pytest
from chainer.functions.loss.hinge import Hinge
from mpi4py import MPI

from . import MODELS
from .calls import Around

UPDATES = 3
#: Of a gradient, relative to its norm.
LIMIT = 1e-5
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


# --- models, batches and updaters --------------------------------------------

def batch_of(name, seed=1, samples=None):
    """A batch for one of the collection's models."""
    case = MODELS[name]
    return case.batch(numpy.random.RandomState(seed),
                      samples or case.samples)


def make(name):
    """One of the collection's models, with the same values each time."""
    numpy.random.seed(3)
    return reporting(MODELS[name].make())


def reporting(model):
    """Has a model report what it returns as ``total``, to any digit."""
    kind = type(model)
    # Some write the one, some the other.
    name = ('forward' if kind.__call__ is chainer.Link.__call__
            else '__call__')

    def told(self, *args, **kwargs):
        loss = getattr(kind, name)(self, *args, **kwargs)
        # A mean of variables would be shown in their dtype.
        chainer.report({'total': loss.array}, self)
        return loss
    model.__class__ = type(kind.__name__, (kind,), {
        name: told, '__module__': kind.__module__})
    return model


def part(batch, start, end):
    """Some samples of a batch."""
    if isinstance(batch, dict):
        return {key: array[start:end] for key, array in batch.items()}
    if isinstance(batch, tuple):
        return tuple(array[start:end] for array in batch)
    return batch[start:end]


def samples_of(batch):
    arrays = batch.values() if isinstance(batch, dict) else batch
    return len(next(iter(arrays)))


class Batches(chainer.dataset.Iterator):
    """Whole batches, as they are; the converter finds them converted."""

    epoch, is_new_epoch = 0, False
    epoch_detail, previous_epoch_detail = 0.0, 0.0

    def __init__(self, *batches):
        self.batches, self.number = batches, 0

    def __next__(self):
        self.number += 1
        return self.batches[(self.number - 1) % len(self.batches)]
    next = __next__


@chainer.dataset.converter()
def as_it_is(batch, device):
    return batch


def plan_of(order, *cuts, schedule='1f1b', again=False, later=0):
    """A plan of two stages that cuts before these parameters."""
    starts = {name: index for index, group in enumerate(order)
              for name in group}
    return {'stages': 2, 'schedule': schedule,
            'micro_batches': 2, 'order': order,
            'cuts': [[starts[name], later] for name in cuts],
            'recompute': [again] * (len(cuts) + 1)}


@contextlib.contextmanager
def counted_times():
    """A block in which all calls of a model are found to be equally long.

    What is measured would cut a model now here, now there, as the machine is
    busy.
    """
    with mock.patch.object(measure, 'clock', side_effect=(
            1e-3 * tick for tick in itertools.count())):
        yield


def updater_of(comm, model, batches, *, optimizer=None, micro_batches=2,
               schedule='1f1b', cut=None, example=None, plan=None, **options):
    """Cuts a model; its updater.

    Args:
        batches: One after the other, then again.
        cut: Options of ``partition``.
        example: Of a micro-batch; default: the first of the first batch.
        plan: Of :func:`plan_of`, to be followed.
        optimizer: Or what makes it of the model.
        options: Of ``PipelineUpdater``.
    """
    if plan is not None:
        schedule = plan['schedule']
        plan = {**plan, 'micro_batches': micro_batches}
        cut = {**(cut or {}), 'plan': plan,
               'chunks': (len(plan['cuts']) + 1) // plan['stages']}
    if example is None:
        start, end = bounds(samples_of(batches[0]), micro_batches)[0]
        example = part(batches[0], start, end)
    with counted_times():
        partition(model, example, comm, micro_batches=micro_batches,
                  schedule=schedule, **(cut or {}))
    optimizer = optimizer or chainer.optimizers.SGD(0.1)
    if callable(optimizer):
        optimizer = optimizer(model)
    elif optimizer.target is None:
        optimizer.setup(model)
    return PipelineUpdater(
        Batches(*batches), optimizer, comm, micro_batches=micro_batches,
        schedule=schedule, converter=as_it_is, **options)


def observed(model, action):
    """What is reported while something is done, without paths of links."""
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    reporter.add_observers('main', model.namedlinks(skipself=True))
    found = {}
    with reporter.scope(found):
        action()
    return {key.rpartition('/')[2]: float(getattr(value, 'array', value))
            for key, value in found.items()}


def gathered(comm, model, what):
    """``what`` of each parameter, by path, from all ranks."""
    found = {}
    for several in comm.allgather({
            name: what(parameter)
            for name, parameter in model.namedparams()}):
        for name, value in several.items():
            if name in found and value is not None:     # a tied one
                numpy.testing.assert_array_equal(found[name], value, name)
            found[name] = value
    return found


def values(comm, model):
    return gathered(comm, model, lambda p: None if p.array is None
                    else p.array.copy())


def gradients(comm, model):
    return gathered(comm, model, lambda p: None if p.grad is None
                    else p.grad.copy())


def running(comm, model):
    """Persistent values of all links, from the ranks that have them."""
    found = {}
    for several in comm.allgather({
            (path, key): vars(link)[key]
            for path, link in model.namedlinks() for key in link._persistent
            if model.partition.placement.is_own(link, key)}):
        found.update(several)
    return found


def own(model, what='grad'):
    """What a plain model's parameters have, each by one path only."""
    return {name: copy.copy(getattr(parameter, what))
            for name, parameter in Names(model).parameters.items()}


def give(model, found):
    """Gives a plain model these values."""
    for path, link in model.namedlinks():
        # Or it would draw its parameters again in its first forward pass.
        if isinstance(link, chainer.links.BatchNormalization) and (
                link.avg_mean is None):
            link._initialize_params(found[f'{path}/beta'].shape)
    for name, parameter in Names(model).parameters.items():
        value = found[name]
        if value is None:
            continue
        if not parameter.is_initialized:
            parameter.initialize(value.shape)
        parameter.array[...] = value


def _call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


class _Counting(chainer.FunctionHook):
    """Counts the labels that losses do not leave out."""

    def __init__(self):
        self.found = []

    def forward_postprocess(self, function, in_data):
        function = getattr(function, 'function', function)
        label = getattr(function, 'ignore_label', None)
        if (label is not None and getattr(function, 'normalize', False)
                and getattr(function, 'reduce', 'mean') != 'no'):
            self.found.append((in_data[1] != label).sum())


def serially(model, batch, micro_batches, weight=None):
    """Loss and gradients with plain Chainer, on one graph.

    Args:
        model: With its values; keeps the gradients.
        batch: The whole batch.
        micro_batches: Into how many it is cut.
        weight: Of a micro-batch; default: its labels that losses do not
            leave out, or its samples.

    Returns:
        The mean loss, as the pipeline adds it up.
    """
    losses, weights = [], []
    for start, end in bounds(samples_of(batch), micro_batches):
        # Arrays of their own, to which a model may write.
        few = copy.deepcopy(part(batch, start, end))
        with _Counting() as counting:
            losses.append(_call(model, few))
        weights.append(weight(few) if weight else float(
            counting.found[0] if counting.found else end - start))
    total = sum(weights)
    mean = sum(weight * float(loss.array) for loss, weight
               in zip(losses, weights, strict=True)) / total
    model.cleargrads()
    sum(loss * (weight / total) for loss, weight
        in zip(losses, weights, strict=True)).backward()
    return mean


def still(model):
    """An optimizer that does not learn."""
    return chainer.optimizers.SGD(0.).setup(model)


class Both:
    """A partitioned model, and the same one that plain Chainer trains.

        both = Both(comm, Net, batch, plan=plan)
        both.update()
        assert both.model.seen == both.plain.seen

    Args:
        comm: The ranks.
        make: Makes a model, or is one, which is copied.
        batches: One after the other, then again.
        micro_batches: Into which each is cut.
        weight: Of a micro-batch, as for :func:`serially`.
        tolerance: Of each gradient.
        optimizer: Makes an optimizer of a model; default: of one that does
            not learn.
        options: As for :func:`updater_of`.
    """

    def __init__(self, comm, make, *batches, micro_batches=2, weight=None,
                 tolerance=1e-6, optimizer=still, **options):
        self.comm, self.batches = comm, batches
        self.model, self.plain = (
            reporting(copy.deepcopy(make) if isinstance(make, chainer.Link)
                      else make()) for _ in range(2))
        self.updater = updater_of(
            comm, self.model, batches, micro_batches=micro_batches,
            optimizer=optimizer, **options)
        self._optimizer = optimizer(self.plain)
        self._serially = micro_batches, weight
        self._tolerance = tolerance

    def update(self, times=None):
        """Compares losses, gradients, values; what the last one reported.

        Each update begins with the same values; default: one of each batch.
        """
        for _ in range(times or len(self.batches)):
            batch = self.batches[self.updater.iteration % len(self.batches)]
            self.give()
            found = observed(self.model, self.updater.update)
            loss = serially(self.plain, batch, *self._serially)
            self._optimizer.update()
            assert found['total'] == pytest.approx(loss, rel=1e-6)
            close(self.gradients(), own(self.plain), self._tolerance)
            expected = own(self.plain, 'array')
            for name, value in values(self.comm, self.model).items():
                if value is not None:   # of a shape that comes later
                    numpy.testing.assert_allclose(
                        value, expected[name], atol=1e-4, err_msg=name)
        return found

    def give(self):
        """Gives the plain model the values of the other one."""
        give(self.plain, values(self.comm, self.model))

    def gradients(self):
        """Those of the partitioned model, on all ranks."""
        return gradients(self.comm, self.model)


def close(found, expected, tolerance=1e-6):
    """Compares arrays by name, each as a whole, None being zero.

    A norm of less than this share of the largest one's is the rounding of a
    sum that is zero, as that of a bias before normalisation; its error is
    relative to the largest norm.
    """
    assert found.keys() == expected.keys()

    def norm(array):
        return 0. if array is None else float(
            numpy.linalg.norm(array.astype('d')))
    norms = {name: norm(array) for name, array in expected.items()}
    largest = max(norms.values(), default=0.)
    for name, array in expected.items():
        error = norm(array) + norm(found[name]) if (
            array is None or found[name] is None) else norm(
                array.astype('d') - found[name])
        unit = norms[name] if norms[name] > 1e-6 * largest else largest
        assert error <= tolerance * unit, (name, error, unit)


# --- models of the collection ------------------------------------------------

class Refused(Exception):
    """The package has said that it does not do this."""


def judge_model(comm, case, schedule, chunks, known):
    """Compares a model and a schedule on these ranks.

    Args:
        known: References by their values, from other schedules.

    Raises:
        Refused: The model was not cut.
        AssertionError: On all ranks: other values, losses or gradients.
    """
    batch = case.batch(numpy.random.RandomState(1), case.samples)

    def make():
        numpy.random.seed(0)
        return reporting(case.make())
    given = (comm, make, batch, max(case.samples // 2, 2),
             case.draws or case.stateful, known)
    options = {'schedule': schedule, 'cut': {'chunks': chunks}}
    try:
        judge(*given, **options)
    except (ValueError, RuntimeError) as error:
        if 'loss_weight=' not in str(error):
            raise
        # The remedy that the message names.
        judge(*given, **options, loss_weight=lambda *arrays, **named: len(
            [*arrays, *named.values()][0]))


def judge(comm, make, batch, micro_batches, alone, known, *, updates=UPDATES,
          loss_weight=None, **options):
    """Trains over the ranks and in one process.

    Args:
        make: Makes the model, on all ranks.
        batch: On all ranks.
        micro_batches: Into which it is cut.
        alone: Whether the reference is a partition over one rank.
        known: References by their values, from other cuts.
        updates: How many.
        options: Of :func:`updater_of`.
    """
    def train(comm, model, **options):
        """The loss of each update, with gradients left in the model."""
        try:
            updater = updater_of(
                comm, model, [batch], optimizer=still, **options,
                micro_batches=micro_batches, loss_weight=loss_weight)
        except (ValueError, RuntimeError) as error:
            raise Refused(str(error)) from error
        return [observed(model, updater.update)['total']
                for _ in range(updates)]

    def reference():
        """Losses and gradients in one process, from the values found."""
        plain = make()
        give(plain, found)
        return (train(MPI.COMM_SELF, plain) if alone else [serially(
            plain, batch, micro_batches,
            None if loss_weight is None else lambda few: 1.)] * updates,
            own(plain))

    def check():
        assert set(first) == set(found)
        after = first
        if any(array is None for array in first.values()):
            plain = make()              # links draw values in forward
            _call(plain, part(batch, 0, samples_of(batch) // micro_batches))
            after = own(plain, 'array')
        late = [name for name, array in first.items() if array is None
                or not numpy.array_equal(array, after[name], equal_nan=True)]
        for name, array in found.items():
            assert (_alike(array, after[name]) if name in late else
                    numpy.array_equal(array, first[name], equal_nan=True)), (
                        f'other initial values of {name}')
        key = tuple(b'' if found[name] is None else found[name].tobytes()
                    for name in sorted(late)), loss_weight is None
        if key not in known:
            known.clear()
            known[key] = reference()
        expected, expected_gradients = known[key]
        assert losses == expected       # bit for bit
        close(of_all, expected_gradients, LIMIT)
    model = make()
    first = own(model, 'array') if comm.rank == 0 else {}
    losses = train(comm, model, **options)
    found, of_all = values(comm, model), gradients(comm, model)
    raise_together(comm, lambda: comm.rank or check(), AssertionError)


def _alike(found, drawn):
    """Whether both may have been drawn from one distribution."""
    if found is None or drawn is None:
        return found is drawn
    one, other = map(float, map(numpy.linalg.norm, (found, drawn)))
    return one == other or bool(other) and 1 / 3 < one / other < 3


# --- functions ---------------------------------------------------------------

_BATCH, _PARTS = 8, 2


def judge_function(comm, call):
    """Cuts a function or link between two ranks at every place.

    Returns:
        The number of cuts.
    """
    rng = numpy.random.RandomState(2)
    batch = (rng.uniform(-1, 1, (_BATCH, 6)).astype('f'),
             numpy.resize([0, 1, 2, 0], _BATCH).astype('i'))
    example = part(batch, 0, _BATCH // _PARTS)
    shapes, draws = _tried(call, example)

    def make():
        numpy.random.seed(3)
        model = Around(call)
        for name, parameter in sorted(model.namedparams()):
            if parameter.array is None:
                parameter.initialize(shapes[name])
        return reporting(model)
    plans, known = _every_cut(make(), example), {}
    for plan in plans:
        judge(comm, make, batch, _PARTS, draws, known, plan=plan, updates=1)
    return len(plans)


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
    calls = record_example(
        Recorder(names), lambda: model(*example), timed=False).calls
    order = order_of(calls, list(names.parameters))
    starts = Intervals(calls, order, parameters_of(names)).starts
    return [dataclasses.asdict(PartitionPlan(
        order, (start,), 2, (False, False), _PARTS, '1f1b'))
            for start in itertools.islice(starts, 1, None)]

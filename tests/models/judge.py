"""Whether partitioned models compute what they compute in one process.

The reference is plain Chainer, one micro-batch after the other, on rank 0.
Models that draw random numbers in forward, or that go on from their state,
have no such reference: draws depend on the place in the training, and each
micro-batch has a state of its own.  They are compared with themselves,
partitioned over one rank.
"""
from __future__ import annotations

import itertools
import time
import traceback

from chainer_fp8pipe.chains.calls import order_of
from chainer_fp8pipe.chains.cuts import Intervals
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.chains.plan import Cut, PartitionPlan
from chainer_fp8pipe.chains.recorder import Recorder, record_example

import numpy
from chainer.functions.loss.hinge import Hinge
from mpi4py import MPI

from tests.training.updaters.partitions import (
    close,
    give,
    gradients,
    observed,
    own,
    part,
    reporting,
    samples_of,
    serially,
    still,
    updater_of,
    values,
)

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


class Failed(Exception):
    """An exception in training, on all ranks."""


class Refused(Failed):
    """The package has said on all ranks that it does not do this."""


def judge_model(comm, case, schedule, chunks, known):
    """What is wrong with a model and a schedule on these ranks; '': nothing.

    Raises:
        Failed: The model was not cut, or did not train.
    """
    parts = max(case.samples // 2, 2)
    batch = case.batch(numpy.random.RandomState(1), case.samples)

    def make():
        numpy.random.seed(0)
        return reporting(case.make())
    options = {'micro_batches': parts, 'schedule': schedule,
               'chunks': chunks}
    alone = case.draws or case.stateful
    try:
        return judged(comm, make, batch, options, alone, known)
    except Failed as error:
        if 'loss_weight=' not in str(error):
            raise
        # The remedy that the message names.
        return judged(comm, make, batch, options, alone, known,
                      loss_weight=lambda *arrays, **named: len(
                          [*arrays, *named.values()][0]))


def judged(comm, make, batch, options, alone, known, loss_weight=None,
           plan=None, updates=UPDATES):
    """Trains over the ranks and in one process; what is wrong.

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
    first = _values(model) if comm.rank == 0 else {}
    losses = _train(comm, model, batch, options, loss_weight, plan, updates)
    found = values(comm, model), gradients(comm, model)
    problem = ''
    if comm.rank == 0:
        try:
            _check(make, first, losses, *found, (
                batch, options, alone, loss_weight, updates), known)
        except Exception:
            problem = traceback.format_exc()
    # Leaves the cores to those who still work.
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    return comm.bcast(problem)


def _check(make, first, losses, found, found_gradients, how, known):
    batch, options, *_, loss_weight, _ = how
    assert set(first) == set(found)
    after = first
    if any(array is None for array in first.values()):
        model = make()              # links draw values in forward
        _call(model, part(batch, 0, samples_of(batch)
                          // options['micro_batches']))
        after = _values(model)
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
        known[key] = _reference(make, found, *how)
    expected, expected_gradients = known[key]
    assert losses == expected       # bit for bit
    close(found_gradients, expected_gradients, LIMIT)


def _values(model):
    return {name: None if array is None else array.copy()
            for name, array in own(model, 'array').items()}


def _alike(found, drawn):
    """Whether both may have been drawn from one distribution."""
    if found is None or drawn is None:
        return found is drawn
    one, other = map(float, map(numpy.linalg.norm, (found, drawn)))
    return one == other or bool(other) and 1 / 3 < one / other < 3


def _train(comm, model, batch, options, loss_weight, plan, updates):
    """The loss of each update, with gradients left in the model."""
    updater = _on_all(comm, Refused, lambda: updater_of(
        comm, model, [batch], optimizer=still, loss_weight=loss_weight,
        plan=plan, micro_batches=options['micro_batches'],
        schedule=options['schedule'],
        cut={'chunks': options.get('chunks', 1)}))
    return _on_all(comm, Failed, lambda: [
        observed(model, updater.update)['total'] for _ in range(updates)])


def _on_all(comm, kind, action):
    """What an action gives; its error in the words of the first rank."""
    found, text, name = None, '', ''
    try:
        found = action()
    except Exception as error:
        text, name = traceback.format_exc(), type(error).__name__
    texts, names = zip(*comm.allgather((text, name)), strict=True)
    if any(texts):
        if not all(texts):
            kind = Failed
        raise kind(next((text for text, name in zip(texts, names, strict=True)
                         if name not in ('', 'RemoteError')), texts[0]))
    return found


# --- the reference -----------------------------------------------------------

def _reference(make, found, batch, options, alone, loss_weight, updates):
    """Losses and gradients of one process that begins with these values."""
    model = make()
    give(model, found)
    if alone:
        losses = _train(MPI.COMM_SELF, model, batch, {
            **options, 'schedule': '1f1b', 'chunks': 1}, loss_weight, None,
            updates)
    else:
        losses = [serially(
            model, batch, options['micro_batches'],
            None if loss_weight is None else lambda few: 1.)] * updates
    return losses, own(model)


def _call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


# --- functions ---------------------------------------------------------------

_BATCH, _PARTS = 8, 2


def judge_function(comm, call):
    """Cuts a function or link between two ranks at every place.

    Returns:
        What is wrong, and the number of cuts.
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
        problem = judged(
            comm, make, batch, {'micro_batches': _PARTS, 'schedule': '1f1b'},
            draws, known, plan=plan, updates=1)
        if problem:
            return f'{plan["cuts"]}: {problem}', len(plans)
    return '', len(plans)


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
    return [PartitionPlan(order, (Cut.at(order, start),), 2, (False, False),
                          _PARTS, '1f1b').as_dict()
            for start in itertools.islice(starts, 1, None)]

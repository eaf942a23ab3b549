"""Partitioned models, and what plain Chainer makes of the same ones."""
import contextlib
import copy
import itertools
from unittest import mock

from chainer_fp8pipe import PipelineUpdater, partition
from chainer_fp8pipe.chains import measure
from chainer_fp8pipe.chains.names import Names
from chainer_fp8pipe.pipeline.schedules import bounds

import chainer
import numpy
import pytest

from tests.models import MODELS


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
        chainer.report({'total': loss}, self)
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
    return {'stages': 2, 'schedule': schedule,
            'micro_batches': 2, 'order': order,
            'cuts': [{'before': name, 'calls_later': later}
                     for name in cuts],
            'recompute': [again] * (len(cuts) + 1)}


@contextlib.contextmanager
def counted_times():
    """A block in which all calls of a model are found to be equally long.

    What is measured would cut a model now here, now there, as the machine is
    busy.
    """
    ticks = itertools.count()
    with mock.patch.object(measure, 'clock_of', return_value=(
            lambda: 1e-3 * next(ticks))):
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
    return {name: getattr(parameter, what)
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
            losses.append(model(**few) if isinstance(few, dict)
                          else model(*few))
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

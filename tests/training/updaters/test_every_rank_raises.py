"""What raises on one rank, wherever in a step, raises on every rank.

The same three calls are made of four kinds of jobs, which call what a user has
written in many places; one rank raises in one of them.  A rank that is left
alone makes its test run into the time limit.
"""
import random
from unittest import mock

import chainer_fp8pipe
from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    create_grouped_bn_model,
    partition,
)
from chainer_fp8pipe.links import Divisible
from chainer_fp8pipe.pipeline import channel
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest

from tests.models.judge import plan_of
from tests.ranks import on_ranks

X = np.random.RandomState(0).rand(8, 4).astype('f')
T = (np.arange(8) % 3).astype('i')
DATA = list(zip(X, T, strict=True))

#: Where this rank raises, and what.
armed = {}


def maybe(place):
    if armed.get('place') == place:
        raise armed['error']


class Trap(chainer.FunctionNode):
    def forward(self, inputs):
        maybe('function')
        return inputs[0].copy(),

    def backward(self, indexes, gradients):
        maybe('backward')
        return gradients


def trapped(x):
    maybe('layer')
    return Trap().apply((x,))[0]


class LinkHook(chainer.LinkHook):
    name = 'mine'

    def forward_postprocess(self, args):
        maybe('link hook')


class Hook:
    call_for_each_param = True

    def __init__(self, place, timing='pre'):
        self.name, self.timing = place, timing

    def __call__(self, *args):
        maybe(self.name)


class Iterator(chainer.iterators.SerialIterator):
    whole = 8

    def next(self):
        maybe('iterator')
        return super().next()


class Reporter(chainer.Reporter):
    def report(self, values, observer=None):
        maybe('report')
        super().report(values, observer)


def converter(batch, device):
    maybe('converter')
    return chainer.dataset.concat_examples(batch, device)


def loss(y, t):
    maybe('loss')
    return F.softmax_cross_entropy(y, t)


def weight(*args):
    maybe('loss_weight')
    return len(args[-1])


def first():
    layer = L.Linear(4, 6, initialW=np.ones((6, 4), 'f'))
    layer.add_hook(LinkHook())
    return layer


def last():
    layer = L.Linear(6, 3, initialW=np.ones((3, 6), 'f'))
    layer.add_hook(LinkHook())
    return layer


class Cleared:
    """A part of a model that is told of new steps."""

    def cleargrads(self):
        maybe('cleargrads')
        super().cleargrads()


class Layers(Cleared, Divisible):
    def __init__(self):
        super().__init__(first(), trapped, last(), trapped)


class Chain(Cleared, chainer.Chain):
    times = 0

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.last = first(), last()

    def predict(self, x):
        maybe('predict')
        return trapped(self.last(trapped(self.first(x))))

    def forward(self, x, t):
        self.times += 1
        maybe('forward')
        if self.times % 2 == 0:
            maybe('second forward')
        value = loss(self.predict(x), t)
        chainer.report({'loss': value}, self)
        return value


class Rule(chainer.optimizers.sgd.SGDRule):
    def update_core(self, parameter):
        maybe('update rule')
        super().update_core(parameter)


class SGD(chainer.optimizers.SGD):
    def create_update_rule(self):
        return Rule(self.hyperparam)


def prepared(optimizer):
    """With hooks of all kinds."""
    optimizer.loss_scaling()
    optimizer.add_hook(Hook('hook before clipping'))
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1e-3))
    optimizer.add_hook(Hook('hook after clipping'))
    optimizer.add_hook(Hook('hook after the update', 'post'))
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(Hook('hook of a rule'))
    return optimizer


def multi_node(optimizer, comm):
    return chainermn.create_multi_node_optimizer(
        optimizer, chainer_fp8pipe.create_communicator('float32', comm))


def of_layers(comm):
    grid = ProcessGrid(comm, pipeline=2)
    optimizer = prepared(SGD().setup(Layers().stage(grid, balance='layers')))
    if grid.replicas > 1:
        optimizer = multi_node(optimizer, grid.data)
    return PipelineUpdater(
        Iterator(DATA, 4), optimizer, grid, micro_batches=2, loss_func=loss,
        loss_weight=weight, converter=converter,
        schedule='zero_bubble')


def of_a_chain(comm):
    plan = plan_of([[f'/{name}/W', f'/{name}/b']
                    for name in ('first', 'last')], '/last/W')
    model = partition(Chain(), (X[:2], T[:2]), comm, micro_batches=2,
                      plan=plan)
    return PipelineUpdater(
        Iterator(DATA, 4), prepared(SGD().setup(model)), comm,
        loss_weight=weight, converter=converter)


def call(updater, step):
    model = updater.get_optimizer('main').target
    reporter = Reporter()
    reporter.add_observer('main', model)
    with reporter:
        if step == 'update':
            updater.update()
        elif step == 'evaluate':
            updater.evaluate(X, T)
        else:
            updater.predict(X)


def outcome(updater, step):
    try:
        call(updater, step)
    except BaseException as reason:
        return reason
    return None


def everywhere(comm, updater, step, place, here, error):
    """All is well; then a rank raises, and so do all others.

    Afterwards all go on, or all are told that they cannot.
    """
    armed.clear()
    call(updater, step)
    if here:
        armed.update(place=place, error=error)
    raised = outcome(updater, step)
    armed.clear()
    kinds = comm.allgather(raised and type(raised).__name__)
    texts = comm.allgather(str(raised))
    assert None not in kinds, (kinds, texts)
    assert all('here' in text for text in texts), texts
    if here and not isinstance(error, Exception):
        assert raised is error
    texts = set(comm.allgather(str(outcome(updater, step))))
    assert texts == {'None'} or all('failed before' in text
                                    for text in texts), texts


HOOKS = ('hook before clipping', 'hook after clipping',
         'hook after the update', 'hook of a rule', 'update rule', 'report')
ERRORS = (KeyError, SystemExit, KeyboardInterrupt)


def cases(*steps):
    """Each (job, step, places, ranks) at each place and rank, by an error.

    Errors of all kinds come in turn.
    """
    found = [(make, step, place, rank) for make, step, places, ranks in steps
             for rank in ranks for place in places]
    return [(*case, ERRORS[number % len(ERRORS)]('here'))
            for number, case in enumerate(found)]


READING = 'iterator', 'converter'
LAYERS = 'cleargrads', 'layer', 'backward', *HOOKS


@pytest.mark.parametrize(('make', 'step', 'place', 'rank', 'error'), cases(
    (of_layers, 'update', READING, [0]),
    (of_layers, 'update', ('link hook', *LAYERS), [0, 1]),
    (of_layers, 'update', ('loss', 'loss_weight'), [1]),
    (of_layers, 'evaluate', ('layer', 'report'), [0, 1]),
    (of_layers, 'evaluate', ('loss',), [1]),
    (of_layers, 'predict', ('layer',), [0, 1]),
    (of_a_chain, 'update', READING, [0]),
    (of_a_chain, 'update', ('forward', 'function', 'link hook',
                            'second forward', 'loss_weight', *LAYERS), [0, 1]),
    (of_a_chain, 'evaluate', ('forward', 'second forward', 'loss_weight',
                              'function', 'report'), [0, 1]),
    (of_a_chain, 'predict', ('predict', 'function'), [0, 1])))
@on_ranks(2, timeout=60)
def test_on_one_of_two_ranks(comm, make, step, place, rank, error):
    updater, state = make(comm), random.getstate()
    everywhere(comm, updater, step, place, comm.rank == rank, error)
    assert random.getstate() == state
    if place == 'function':     # what forward counts, it counts everywhere
        times = getattr(updater.get_optimizer('main').target, 'times', 0)
        assert len({*comm.allgather(times)}) == 1
    if step != 'update':
        call(updater, 'update')     # is well


@pytest.mark.parametrize(('make', 'step', 'place', 'stage', 'error'), cases(
    (of_layers, 'update', READING, [0]),
    (of_layers, 'update', ('loss', 'loss_weight'), [1]),
    (of_layers, 'update', LAYERS, [0, 1])))
@on_ranks(4, timeout=60)
def test_in_one_replica_of_a_pipeline(comm, make, step, place, stage, error):
    updater = make(comm)
    grid = updater.grid
    everywhere(comm, updater, step, place,
               (grid.stage_index, grid.replica_index) == (stage, 1), error)
    grid.free()


@pytest.mark.parametrize('step', ['update', 'evaluate', 'predict'])
@on_ranks(3, timeout=60)
def test_while_a_batch_is_passed_on(comm, step):
    def memory(*args):
        maybe('message')
        return found(*args)
    found = channel.empty_wire
    updater = PipelineUpdater(
        Iterator(DATA, 4), SGD().setup(Layers().stage(comm, 'layers')), comm,
        micro_batches=2, loss_func=loss)
    with mock.patch.object(channel, 'empty_wire', memory):
        everywhere(comm, updater, step, 'message', comm.rank == 1,
                   MemoryError('here'))


@on_ranks(2, timeout=60)
def test_two_failures_of_a_rank_are_both_said(comm):
    """And what follows has channels without messages of that."""
    pipeline = Pipeline(SGD().setup(Layers().stage(comm, 'layers')), comm,
                        micro_batches=2)
    with mock.patch.object(channel, 'empty_wire', side_effect=MemoryError(
            'full')), pytest.raises(ValueError, match='1: method=.*; .*full'):
        pipeline.predict(X, method='x' * comm.rank or None)
    pipeline.predict(X)


class Normalised(Chain):
    """Fails on one replica, while the other one waits in the middle."""

    def __init__(self, normalise):
        super().__init__()
        with self.init_scope():
            self.normalise = normalise

    def predict(self, x):
        return self.last(self.normalise(trapped(self.first(x))))


@pytest.mark.parametrize('way', ['layers', 'chain'])
@pytest.mark.parametrize('place', ['layer', 'loss', 'backward'])
@on_ranks(2, timeout=60)
def test_while_a_replica_waits_in_batch_normalisation(comm, way, place):
    grid = ProcessGrid(comm, pipeline=1)
    ranks = chainer_fp8pipe.create_communicator('float32', grid.data)
    link = L.BatchNormalization(6)
    model = create_grouped_bn_model(
        Divisible(first(), trapped, link, last()) if way == 'layers'
        else Normalised(link), grid.data)
    if way == 'layers':
        model = model.stage(grid)
    if way == 'chain':
        partition(model, (X[:2], T[:2]), grid, micro_batches=2)
    optimizer = chainermn.create_multi_node_optimizer(SGD().setup(model),
                                                      ranks)
    optimizer.is_changed(model)
    updater = PipelineUpdater(
        Iterator(DATA, 4), optimizer, grid, micro_batches=2,
        loss_func=loss if way == 'layers' else None)
    everywhere(comm, updater, 'update', place, grid.replica_index == 1,
               KeyError('here'))
    grid.free()


@on_ranks(4, timeout=60)
def test_in_the_exchange_of_one_stage(comm):
    """Its gradients are not finite; the other stages' are."""
    updater = of_layers(comm)
    grid, optimizer = updater.grid, updater.get_optimizer('main')
    optimizer.loss_scaling(scale=2.0)
    optimizer._loss_scaling_is_dynamic = False      # which skips the update
    updater.update()
    actual = optimizer.communicator
    exchange = actual.multi_node_mean_grad

    def spoiled(model, zero_fill):
        if grid.stage_index:
            for parameter in model.params():
                parameter.grad[...] = np.nan
        exchange(model, zero_fill)
    actual.multi_node_mean_grad = spoiled
    with pytest.raises(RuntimeError, match='rank|NaN|finite'):
        updater.update()
    grid.free()


@pytest.mark.parametrize('objects', [True, False])
@on_ranks(2, timeout=60)
def test_what_cannot_be_sent_from_the_first_stage(comm, objects):
    updater = of_a_chain(comm)
    bad = np.array(['a'] * 4, object) if objects else [lambda: 1] * 4
    with pytest.raises(ValueError, match='TypeError: .* dtype object cannot|'
                                         'PicklingError|AttributeError'):
        updater.evaluate(X[:4], bad)
    updater.update()            # and no harm was done

"""What a step is divided into, by a clock of the tests' own."""
import copy

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.exchange.deferred_update import deferred
from chainer_fp8pipe.report.stream import EventStream
from chainer_fp8pipe.training.extensions.step_parts import (
    PARTS,
    ReplicaParts,
    StepParts,
)

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy

from tests.ranks import on_ranks

from .made_up import Clock


class Slow(chainer.Chain):
    """Forward takes 3 seconds of the clock."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock
        with self.init_scope():
            self.layer = L.Linear(2, 1)

    def forward(self, x):
        self._clock.passes(3)
        return F.sum(self.layer(x))


X = numpy.ones((1, 2), 'f')


def replica(hooks=()):
    clock, stream = Clock(), EventStream()
    optimizer = chainer.optimizers.SGD().setup(Slow(clock))
    for number, (seconds, timing) in enumerate(hooks):
        optimizer.add_hook(lambda _, seconds=seconds: clock.passes(seconds),
                           f'hook {number}', timing)
    return clock, stream, optimizer, ReplicaParts(stream, clock, optimizer)


def update(clock, stream, optimizer, exchange=2.0):
    """As ChainerMN's optimizer makes an update."""
    loss = optimizer.target(X)
    optimizer.target.cleargrads()
    loss.backward()
    clock.passes(5)
    stream.seconds['exchange'] += exchange
    clock.passes(exchange)
    optimizer.update()


def by_name(lap):
    whole, *parts = lap
    assert sum(parts) == whole
    return whole, {name: seconds for name, seconds
                   in zip(PARTS, parts, strict=True) if seconds}


def test_a_pipelines_sections_are_added_up():
    clock, stream = Clock(), EventStream()
    stream.seconds['forward'] = 99.0        # before the first lap
    parts = StepParts(stream, clock)
    for name in ('forward', 'recompute', 'backward', 'backward_weight'):
        stream.seconds[name] += 1
    for name in ('send', 'receive'):
        stream.seconds[name] += 2
    for name in ('encode', 'exchange', 'decode'):
        stream.seconds[name] += 4
    stream.seconds['update'] += 3
    clock.passes(30)
    assert by_name(parts.lap()) == (30, {
        'forward and backward': 4, 'waiting for stages': 4, 'exchange': 12,
        'update': 3, 'other': 7})
    clock.passes(1)
    assert by_name(parts.lap()) == (1, {'other': 1})


def test_replicas_parts_follow_from_the_model_and_the_optimizer():
    clock, stream, optimizer, parts = replica([(7, 'pre'), (1, 'post')])
    for _ in range(2):
        clock.passes(10)        # a batch is read
        update(clock, stream, optimizer)
        assert by_name(parts.lap()) == (28, {
            'forward and backward': 8, 'exchange': 2, 'update': 8,
            'other': 10})


def test_an_evaluation_is_no_pass():
    clock, stream, optimizer, parts = replica()
    with chainer.using_config('train', False):
        optimizer.target(X)
    update(clock, stream, optimizer)
    assert by_name(parts.lap()) == (13, {
        'forward and backward': 8, 'exchange': 2, 'other': 3})


def test_a_model_that_is_called_twice_begins_once():
    clock, stream, optimizer, parts = replica()
    optimizer.target(X)
    update(clock, stream, optimizer)
    assert by_name(parts.lap()) == (13, {
        'forward and backward': 11, 'exchange': 2})


def test_where_the_model_itself_is_not_called_passes_begin_with_the_step():
    clock, _, optimizer, parts = replica()
    clock.passes(4)
    optimizer.target.cleargrads()
    F.sum(optimizer.target.layer(X)).backward()
    optimizer.update()
    assert by_name(parts.lap()) == (4, {'forward and backward': 4})


def test_an_update_that_only_sends_parameters_is_forgotten():
    clock, stream, optimizer, parts = replica()
    optimizer.target(X)
    clock.passes(100)
    assert by_name(parts.lap()) == (103, {'other': 103})
    update(clock, stream, optimizer)
    assert by_name(parts.lap()) == (10, {
        'forward and backward': 8, 'exchange': 2})


def test_no_hook_stays():
    _, _, optimizer, parts = replica([(1, 'pre')])
    parts.end()
    assert not optimizer.target.local_link_hooks
    assert list(optimizer._hookable._pre_update_hooks) == ['hook 0']
    assert not optimizer._hookable._post_update_hooks


def test_a_copy_of_the_model_is_not_what_trains():
    clock, stream, optimizer, parts = replica()
    copy.deepcopy(optimizer.target)(X)
    update(clock, stream, optimizer)
    _, found = by_name(parts.lap())
    assert found['forward and backward'] == 8


@on_ranks(2)
def test_updates_still_wait_for_the_next_forward_pass(comm):
    communicator = create_communicator('fp8', comm, warmup=1,
                                       overlap='next_forward')
    model = Slow(Clock())
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), communicator).setup(model)
    parts = ReplicaParts(communicator.events, Clock(),
                         optimizer.actual_optimizer)
    for _ in range(8):
        optimizer.update(model, X)
    assert deferred(model) is not None
    parts.end()
    communicator.finalize()

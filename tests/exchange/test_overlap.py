"""With overlap, results are those without, bit for bit, or all ranks raise."""
import contextlib
import threading
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.images.processes import eventually
from tests.ranks import on_ranks

from ..communicators.networks import NETWORKS, Plain
from .jobs import (
    accumulated,
    broadcast,
    counting,
    failed,
    failed_everywhere,
    make,
    one_more_pass,
    optimizer_of,
    replaced,
    restored,
    same,
    update,
    values,
    warm,
    wrapped,
)


@on_ranks(3)
@pytest.mark.parametrize(('network', 'name'), [
    *((network, 'fp8') for network in NETWORKS),
    ('Plain', 'float32'), ('Shared', 'float16'), ('Mixed', 'int4')])
def test_results_are_those_without_overlap(comm, network, name):
    sent = same(comm, NETWORKS[network], name=name)
    assert sent[0] == 0
    if network not in ('Unused', 'Changing', 'Lazy', 'Forgetful'):
        assert set(sent[1:]) == {max(sent)}, sent
    if network not in ('Changing', 'Forgetful'):
        assert max(sent) > 0


class Exploding(Plain):
    """An update that dynamic loss scaling skips."""

    def loss(self, step, rank):
        return super().loss(step, rank) * (
            numpy.float32('inf') if step == 5 and rank else 1)


class Alike(Plain):
    """Two layers' weights are one array: one's update would change what the
    other's mean is made with.
    """

    def __init__(self):
        super().__init__()
        del self.l3
        with self.init_scope():
            self.l3 = self.l2.copy('share')


class Empty(Plain):
    """A parameter has no elements."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.empty = chainer.Parameter(numpy.ones((0, 3), 'f4'))

    def loss(self, step, rank):
        return super().loss(step, rank) + F.sum(self.empty)


class Branching(NETWORKS['Unused']):
    """Rank 1 has no gradient of a layer now and then."""

    def loss(self, step, rank=0):
        return super().loss(step, rank) + (
            F.sum(self.m.W) * 0.01 if rank != 1 or step % 3 else 0)


@on_ranks(4)
@pytest.mark.parametrize('options', [
    {'algorithm': 'torus2d', 'shape': (2, 2), 'period': 1},
    {'ranks_per_node': 2, 'two_level': 'yes'}])
def test_so_they_are_in_grids(comm, options):
    assert max(same(comm, Plain, **options)) > 0


@on_ranks(2)
@pytest.mark.parametrize(('network', 'options'), [
    *((Plain, options) for options in (
        {'algorithm': 'ring'}, {'bucket_bytes': 1 << 20, 'warmup': 0},
        {'scaling': {'scale': 64.0}},
        {'scaling': {'scale': 64.0}, 'name': 'int4'},
        {'scaling': {'interval': 2, 'scale': None}})),
    (Exploding, {'scaling': {}}),
    *((Plain, {'step': step}) for step in (
        one_more_pass, accumulated, failed, failed_everywhere, restored,
        broadcast, replaced)),
    *((Plain, {'step': step, 'name': 'int4'}) for step in (failed, restored)),
    (Plain, {'optimizer': 'adam'}), (Plain, {'optimizer': 'clipped'}),
    (Plain, {'optimizer': 'lars'}), (Alike, {}), (Empty, {}),
    (Branching, {'bucket_bytes': 100})])
def test_so_they_are_for_every_way_to_train(comm, network, options):
    with numpy.errstate(invalid='ignore'):
        sent = same(comm, network, **options)
    assert max(sent) > 0


@on_ranks(2)
@pytest.mark.parametrize('zero_fill', [True, False])
def test_unused_parameters_do_not_hold_up_the_others(comm, zero_fill):
    sent = same(comm, NETWORKS['Unused'], zero_fill=zero_fill,
                bucket_bytes=100)       # each alone
    assert set(sent[1:]) == {4}


@on_ranks(2)
@pytest.mark.parametrize(('fails', 'same_communicator'), [
    (False, True), (False, False), (True, True)])
def test_a_generator_and_a_discriminator_are_trained_together(
        comm, fails, same_communicator):
    def adversaries(overlap):
        numpy.random.seed(2)
        networks = generator, discriminator = [chainer.Sequential(
            L.Linear(4, 12), F.tanh, L.Linear(12, 12), F.tanh,
            L.Linear(12, size)) for size in (4, 1)]
        first = make(comm, 'fp8', overlap)
        second = first if same_communicator else make(comm, 'fp8', overlap)
        optimizers = [
            wrapped(chainer.optimizers.Adam(0.01), communicator).setup(model)
            for model, communicator in zip(networks, (first, second),
                                           strict=True)]
        draws = numpy.random.default_rng(comm.rank)

        def loss(own):
            fake = discriminator(generator(
                draws.normal(0, 1, (5, 4)).astype('f4')))
            real = discriminator(draws.random((5, 4)).astype('f4'))
            return F.sum(F.softplus(-real)) + F.sum(F.softplus(fake)) if (
                own) else F.sum(F.softplus(-fake))

        def fail(step):
            if fails and step % 3 == 2:     # the other model goes on
                with contextlib.suppress(ZeroDivisionError), mock.patch.object(
                        first, 'multi_node_mean_grad',
                        side_effect=ZeroDivisionError):
                    optimizers[0].update(loss, False)
        with counting(first) as sent:
            for step in range(8):
                fail(step)
                for _ in range(2):
                    optimizers[1].update(loss, True)
                optimizers[0].update(loss, False)
        for communicator in {first, second}:
            communicator.finalize()
        return [values(model) for model in networks], sent
    plain, _ = adversaries(False)
    overlapped, sent = adversaries(True)
    assert plain == overlapped
    assert max(sent) > 0


@on_ranks(3)
@pytest.mark.parametrize('name', ['fp8', 'int4'])
def test_aggregators_sum_what_is_sent_early(comm, name):
    results = []
    for overlap in False, True:
        communicator = make(comm, name, overlap, algorithm='aggregator')
        if communicator is None:
            continue
        numpy.random.seed(1)
        models = Plain(), Plain()
        optimizers = [optimizer_of('sgd', model, communicator)
                      for model in models]
        with counting(communicator) as sent:
            for number in range(6):
                for optimizer, model in zip(optimizers, models, strict=True):
                    update(optimizer, model, number, comm.rank)
        results.append([values(model) for model in models])
        assert not overlap or min(sent[-2:]) > 0
        communicator.finalize()
    assert results[:1] == results[1:]


# --- errors ------------------------------------------------------------------

class Choosing(NETWORKS['Changing']):
    """One rank lacks a gradient that the others have sent already."""

    def forward(self, x):
        rank = MPI.COMM_WORLD.rank
        for name in 'abc' if self.step < 6 or rank else 'ac':
            x = F.tanh(self[name](x))
        return x


def lacking(comm, optimizer, model):
    update(optimizer, model, 7, comm.rank)


def scaled(comm, optimizer, model):
    if comm.rank == 1:
        optimizer.loss_scaling(scale=3.0)
    update(optimizer, model, 9, comm.rank)


def grown(comm, optimizer, model):
    def loss():
        if comm.rank == 1:
            model.l9.W.grad, model.l9.W.array = None, numpy.zeros((9, 9), 'f4')
        return model.loss(9, comm.rank) if comm.rank != 1 else F.sum(
            model.l9.W)
    optimizer.update(loss)


def thread_fails(comm, optimizer, model):
    known = optimizer.communicator.watcher(model)
    with mock.patch.object(type(known), '_send', side_effect=(
            KeyError('lost') if comm.rank else None)):
        update(optimizer, model, 9, comm.rank)


@on_ranks(3)
@pytest.mark.parametrize(('change', 'network', 'match'), [
    (lacking, Choosing, '/b/W is float32 .* without gradient on rank 0 but '
     'float32 .* on rank 1.*zero_fill=True'),
    (scaled, Plain, 'the loss scale is None on rank 0 but 3.0 on rank 1'),
    (grown, Plain, r'(?s)/l9/W.*float32 \(9, 9\) on rank 1'),
    (thread_fails, Plain, '(?s)the exchange failed beside.*lost')])
def test_every_rank_raises_and_refuses_to_go_on(comm, change, network, match):
    communicator, model, optimizer = warm(
        comm, True, 4, network=network, zero_fill=network is Plain)
    with pytest.raises((ValueError, RuntimeError), match=match) as raised:
        change(comm, optimizer, model)
    if change is not thread_fails:
        assert len(set(comm.allgather(str(raised.value)))) == 1
    with pytest.raises(RuntimeError, match='make a new communicator'):
        communicator.multi_node_mean_grad(model)
    communicator.finalize()


@on_ranks(1)
def test_an_algorithm_that_can_only_wait_is_an_error(comm):
    with pytest.raises(ValueError, match="'mpi_op' can only wait"):
        make(comm, 'fp8', True, algorithm='mpi_op')


@on_ranks(2)
def test_without_threads_in_mpi_it_says_so_and_goes_on(comm):
    level = MPI.THREAD_SERIALIZED if comm.rank else MPI.THREAD_MULTIPLE
    with mock.patch.object(MPI, 'Query_thread', return_value=level), (
            contextlib.nullcontext() if comm.rank else
            pytest.warns(RuntimeWarning, match='THREAD_MULTIPLE')):
        communicator, *_ = warm(comm)
    assert not any(communicator.events.hidden.values())


# --- the thread --------------------------------------------------------------

class Held(chainer.FunctionNode):
    """Its backward waits until something was done."""

    def __init__(self, done):
        super().__init__()
        self.done = done

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        assert eventually(self.done), 'nothing happens during backward'
        return gradients


@on_ranks(3)
@pytest.mark.parametrize('algorithm', ['direct', 'ring'])
def test_means_arrive_while_backward_still_runs(comm, algorithm):
    communicator = make(comm, 'fp8', True, algorithm=algorithm, warmup=0)
    first, last = L.Linear(8, 8), L.Linear(8, 8)
    model = chainer.Sequential(first, last)
    optimizer = optimizer_of('sgd', model, communicator)

    def arrived():
        sent = communicator.watcher(model).sent.values()
        return len(sent) >= 1 and all(one.finished for one in sent)

    def loss(held):
        h = first(numpy.ones((2, 8), 'f4') * (comm.rank + 1))
        if held:
            h, = Held(arrived).apply((h,))
        return F.mean(last(h) ** 2)
    before = threading.active_count()
    for step in range(6):
        optimizer.update(lambda step=step: loss(step >= 3))
        assert threading.active_count() <= before
    events = communicator.events
    assert events.hidden['encode'] > 0
    assert sum(events.seconds.values()) > 0
    communicator.finalize()

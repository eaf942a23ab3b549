"""An error that one rank raises alone is an error of all, wherever it is."""
import contextlib
import threading

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce.engine import Bucket, Engine
from chainer_fp8pipe.codecs import Fp8Ratio, Tensors
from chainer_fp8pipe.exchange import drift
from chainer_fp8pipe.exchange import ranks as ranks_module
from chainer_fp8pipe.exchange.exchange import Exchange
from chainer_fp8pipe.exchange.gradients import Gradients

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

from ..communicators.helpers import Model, set_gradients
from .jobs import update, warm

EITHER, LATE, EARLY = (False, True), (False,), (True,)
#: What fails on one rank, and whether with overlap.
PLACES = {
    'gradients are looked up': (Gradients, '__init__', EITHER),
    'replicas are compared': (drift, 'digest', EITHER),
    'the codec starts': (Fp8Ratio, 'begin', EITHER),
    'memory for a wire': (Exchange, 'wire', EITHER),
    'maxima are found': (Fp8Ratio, 'propose', EITHER),
    'maxima are there': (Fp8Ratio, 'step', EITHER),
    'a bucket is submitted': (Engine, 'submit', EITHER),
    'residuals are looked up': (Tensors, 'means', EITHER),
    'a bucket is finished': (Tensors, 'conclude', EITHER),
    'means are looked at': (Bucket, 'decode', EITHER),
    'gradients are written back': (Gradients, 'write_back', LATE),
    'it waits': (Engine, 'finish', EITHER),
    'an interrupt': (Engine, 'finish', LATE),
    'the rest is sent': (Exchange, '_send_rest', EARLY)}


@contextlib.contextmanager
def soon():
    """Ranks hear of each other's failures without delay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, '_EVERY', 1e-3)
        patch.setattr(ranks_module, '_GRACE', 0.0)
        yield patch


@on_ranks(2, timeout=60)
@pytest.mark.parametrize(('overlap', 'place'), [
    (overlap, place) for place, (*_, ways) in PLACES.items()
    for overlap in ways])
def test_every_rank_raises_where_one_fails(comm, overlap, place):
    communicator, model, optimizer = warm(
        comm, overlap, 6, warmup=0, check_every=1)
    # As ranks raise that disagree.
    error = KeyboardInterrupt if place == 'an interrupt' else ValueError

    def fail(*_, **__):
        raise error('here')
    with soon() as patch:
        if comm.rank == 1:
            patch.setattr(*PLACES[place][:2], fail)

        def updates():
            for number in range(6, 20):
                update(optimizer, model, number, comm.rank)
        with pytest.raises((RuntimeError, error)) as raised:
            updates()
        text = f'{type(raised.value).__name__}: {raised.value}'
        assert 'here' in text, text
        assert error.__name__ in text
        assert 'rank 1' in text or comm.rank == 1
        # Also who has been in the middle of something goes on no more.
        for _ in range(2):
            with pytest.raises(Exception, match='here|new communicator'):
                communicator.multi_node_mean_grad(model)
    with contextlib.suppress(Exception):
        communicator.finalize()


@on_ranks(2, timeout=60)
def test_what_all_ranks_raise_is_told_to_nobody(comm):
    """The same communicator goes on."""
    communicator = create_communicator('float32', comm)
    model = Model()
    for _ in range(2):
        set_gradients(model, comm.rank)
        model.p0.grad[0, 0] = numpy.nan
        with pytest.raises(RuntimeError, match='p0 is not finite'):
            communicator.multi_node_mean_grad(model)
    with soon():
        set_gradients(model, comm.rank)
        communicator.multi_node_mean_grad(model)
    communicator.finalize()


@on_ranks(1, 2, timeout=60)
def test_a_second_thread_is_an_error_on_its_rank(comm):
    communicator = create_communicator('fp8', comm, warmup=0)
    model, found = Model(), []

    def another():
        with pytest.raises(RuntimeError, match=(
                f'two threads .* on rank {comm.rank}; call')) as raised:
            communicator.multi_node_mean_grad(Model())
        found.append(raised.value)
    original = Fp8Ratio.begin

    def start(self, state, scale):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        original(self, state, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Ratio, 'begin', start)
        set_gradients(model, comm.rank)
        communicator.multi_node_mean_grad(model)
    assert len(found) == 1
    communicator.multi_node_mean_grad(model)
    communicator.finalize()


@on_ranks(2, timeout=60)
def test_calls_of_the_users_communicator_may_come_in_another_order(comm):
    communicator, model = create_communicator('float32', comm), Model()
    total = numpy.array([1.0])
    request = comm.Iallreduce(MPI.IN_PLACE, total) if comm.rank else None
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    (request or comm.Iallreduce(MPI.IN_PLACE, total)).Wait()
    assert total == 2
    communicator.finalize()

"""What the exchange's thread does while training goes on, and for whom."""
import contextlib
import gc
import os
import threading
import weakref
from unittest import mock

from chainer_fp8pipe.exchange.thread import exchange_thread

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.images.processes import eventually
from tests.ranks import on_ranks, run_script

from ..communicators.networks import Plain
from .jobs import (
    early,
    make,
    optimizer_of,
    update,
    values,
    warm,
)


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
        sent = early(communicator, model).sent.values()
        return len(sent) >= 1 and all(one.finished for one in sent)

    def loss(held):
        h = first(numpy.ones((2, 8), 'f4') * (comm.rank + 1))
        if held:
            h, = Held(arrived).apply((h,))
        return F.mean(last(h) ** 2)
    for step in range(6):
        optimizer.update(lambda step=step: loss(step >= 3))
    events = communicator.events
    assert events.hidden['encode'] > 0
    assert events.waited == sum(events.seconds.values()) > 0
    communicator.finalize()


@on_ranks(2)
def test_without_threads_in_mpi_it_says_so_and_goes_on(comm):
    level = MPI.THREAD_SERIALIZED if comm.rank else MPI.THREAD_MULTIPLE
    with mock.patch.object(MPI, 'Query_thread', return_value=level), (
            contextlib.nullcontext() if comm.rank else
            pytest.warns(RuntimeWarning, match='THREAD_MULTIPLE')):
        communicator, *_ = warm(comm)
    assert not any(communicator.events.hidden.values())


# --- for whom: models, threads and the end of the program ---

@on_ranks(2)
def test_models_that_are_no_more_leave_nothing_behind(comm):
    """Their queues are the next ones', and have no threads of their own."""
    communicator = make(comm, 'fp8', True, warmup=0)
    setup = communicator._setup
    counts, threads = [], []
    for number in range(4):
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        for step in range(5):
            update(optimizer, model, step + number, comm.rank)
        counts.append((len(setup.engines), len(setup.exchanges)))
        threads.append(len(os.listdir('/proc/self/task')))
        del model, optimizer
        gc.collect()
    assert counts == [(1, 1)] * 4
    assert threads[-1] <= threads[0]    # others of the process may have ended
    communicator.finalize()


@on_ranks(2)
def test_models_of_a_rank_that_keeps_them_keep_their_queues(comm):
    communicator = make(comm, 'fp8', True, warmup=0)
    kept_models = []
    for _ in range(3):
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        for step in range(5):
            update(optimizer, model, step, comm.rank)
        if comm.rank:
            kept_models.append(model)
        del model, optimizer
        gc.collect()
    assert len(communicator._setup.engines) == 3
    communicator.finalize()


@on_ranks(2)
def test_a_communicator_that_was_dropped_is_told_nothing(comm):
    """Another one goes on with the model."""
    communicator, model, optimizer = warm(comm, True, 3, warmup=0)
    dropped = weakref.ref(communicator)
    assert early(communicator, model).learnt.is_known
    del communicator, optimizer
    gc.collect()
    assert dropped() is None
    communicator = make(comm, 'fp8', True)
    optimizer = optimizer_of('sgd', model, communicator)
    for step in range(6):
        update(optimizer, model, step, comm.rank)
    assert len(set(comm.allgather(values(model)))) == 1
    communicator.finalize()


@on_ranks(2)
def test_a_process_has_one_thread_for_all_communicators(comm):
    jobs = [warm(comm) for _ in range(4)]
    for step in range(3):
        for _, model, optimizer in jobs:
            update(optimizer, model, step, comm.rank)
    assert [thread.name for thread in threading.enumerate()].count(
        exchange_thread._thread.name) == 1
    for communicator, *_ in jobs:
        communicator.finalize()
    assert eventually(lambda: not exchange_thread._exchanges)


@on_ranks(1)
def test_an_interrupt_while_the_thread_is_waited_for_leaves_it_working(comm):
    communicator = make(comm, 'fp8', True)
    setup = communicator._setup
    with mock.patch.object(setup.turn, '_lock', mock.MagicMock()) as lock:
        lock.__enter__.side_effect = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), setup.taken():
            pass
    assert not setup.turn._main_waits
    communicator.finalize()


SCRIPT = '''
import chainer_fp8pipe
import chainer, chainermn
from chainer import _backprop
from mpi4py import MPI
from tests.communicators.networks import Plain


def in_chainer():
    return _backprop._backprop_to_all, _backprop._backprop_utils


rank = MPI.COMM_WORLD.rank
original = in_chainer()
communicator = chainer_fp8pipe.create_communicator(
    'fp8', overlap=True, warmup=0, bucket_bytes=300)
model = Plain()
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.1), communicator).setup(model)
for step in range(5):
    optimizer.update(lambda: model.loss(step, rank))
assert communicator._known(model).learnt.is_known
replaced = [mine is not theirs for mine, theirs in zip(in_chainer(), original)]
assert replaced == [True, True], replaced
{end}
if communicator._is_finalized:
    assert in_chainer() == original
print('left', rank)
'''


@pytest.mark.parametrize('end', [
    '', 'if rank == 0: model.loss(9, rank).backward()',
    'model.loss(9, rank).backward(); communicator.finalize()'])
def test_the_end_of_the_program_does_not_hang(tmp_path, end):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.format(end=end))
    done = run_script(2, script, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('left') == 2

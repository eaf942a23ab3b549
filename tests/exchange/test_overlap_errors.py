"""What was sent early and is void is sent again; errors are of all ranks."""
import contextlib
import time
from unittest import mock

from chainer_fp8pipe import create_communicator

import chainer
import chainer.functions as F
import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

from ..communicators.networks import NETWORKS, Plain
from .jobs import (
    counting,
    early,
    make,
    optimizer_of,
    update,
    values,
    warm,
)


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
    model.cleargrads()
    model.loss(9, comm.rank).backward(
        loss_scale=3.0 if comm.rank == 1 else None)
    optimizer.update()


def grown(comm, optimizer, model):
    model.cleargrads()
    model.loss(9, comm.rank).backward()
    if comm.rank == 1:
        model.l9.W.grad, model.l9.W.array = None, numpy.zeros((9, 9), 'f4')
        model.l9.W.grad = numpy.zeros((9, 9), 'f4')
    optimizer.update()


def thread_fails(comm, optimizer, model):
    known = early(optimizer.communicator, model)
    with mock.patch.object(type(known), '_send', side_effect=(
            KeyError('lost') if comm.rank else None)):
        model.cleargrads()
        model.loss(9, comm.rank).backward()
        while comm.rank and not known.learnt.failure:
            time.sleep(1e-3)
        optimizer.update()


AGREED = [
    (lacking, Choosing, '/b/W is float32 .* without gradient on rank 0 but '
     'float32 .* on rank 1.*zero_fill=True'),
    (scaled, Plain, 'the loss scale is None on rank 0 but 3.0 on rank 1'),
    (grown, Plain, r'(?s)/l9/W.*float32 \(9, 9\) on rank 1')]


@on_ranks(3)
@pytest.mark.parametrize(('overlap', 'change', 'network', 'match'), [
    *((overlap, *one) for overlap in (False, True) for one in AGREED),
    (True, thread_fails, Plain,
     '(?s)rank 1: the exchange failed beside backward.*lost')])
def test_every_rank_raises_and_refuses_to_go_on(
        comm, change, network, match, overlap):
    communicator = make(comm, 'fp8', overlap)
    numpy.random.seed(1)
    model = network()
    optimizer = optimizer_of('sgd', model, communicator,
                             zero_fill=network is Plain)
    for number in range(4):
        update(optimizer, model, number, comm.rank)
    with pytest.raises(ValueError, match=match) as raised:
        change(comm, optimizer, model)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    with pytest.raises(RuntimeError, match='make a new communicator'):
        communicator.multi_node_mean_grad(model)
    communicator.finalize()


# --- what was sent and is void, is sent again ---

def replaced(model, rank):
    if rank == 1:
        model.l9.W.grad = model.l9.W.grad * 2


def clipped_in_place(model, rank):
    for parameter in model.params():
        parameter.grad *= 0.5


def one_element(model, rank):
    if rank == 2:
        model.l1.W.grad[0, 0] = 0


def saliency_map(model, rank):
    model.loss(10, rank).backward()


def passes_of_its_own(model, rank):
    for step in range(rank):
        model.loss(11 + step, rank).backward()


def dropped_step(model, rank):
    model.cleargrads()
    model.loss(12, rank).backward()


def failed_step(model, rank):
    if rank:
        model.cleargrads()
        with contextlib.suppress(ZeroDivisionError):
            raising(model.loss(13, rank)).backward()
    model.cleargrads()
    model.loss(14, rank).backward()


def raising(loss):
    class Raising(chainer.FunctionNode):
        def forward(self, inputs):
            return inputs

        def backward(self, indexes, gradients):
            raise ZeroDivisionError
    return loss + Raising().apply((loss,))[0]


def other_scale(model, rank):
    model.cleargrads()
    model.loss(15, rank).backward(loss_scale=4.0)


@on_ranks(3)
@pytest.mark.parametrize('name', ['fp8', 'int4', 'float32'])
@pytest.mark.parametrize('change', [
    replaced, clipped_in_place, one_element, saliency_map, passes_of_its_own,
    dropped_step, failed_step, other_scale])
def test_what_is_void_is_exchanged_again_with_the_bits_of_no_overlap(
        comm, change, name):
    """Now and then, so that the change is no rule."""
    found, early_sent = [], 0
    for overlap in False, True:
        communicator = make(comm, name, overlap)
        numpy.random.seed(1)
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        states = []
        with counting(communicator) as sent:
            for number in range(12):
                model.cleargrads()
                model.loss(number, comm.rank).backward()
                if number in (5, 8, 9):
                    change(model, comm.rank)
                optimizer.update()
                states.append(values(model))
        found.append(states)
        early_sent = sum(sent)
        communicator.finalize()
    assert early_sent > 0
    assert found[0] == found[1]
    assert comm.allgather(found[1][-1]) == [found[1][-1]] * comm.size


@on_ranks(2)
def test_parameters_can_be_broadcast_in_the_middle_of_a_step(comm):
    """What was sent is dropped, also by ranks that sent nothing."""
    communicator, model, optimizer = warm(comm)
    if comm.rank == 0:
        model.loss(9, comm.rank).backward()
    communicator.bcast_data(model)
    for number in range(4):
        update(optimizer, model, number, comm.rank)
    assert len(set(comm.allgather(model.l1.W.array.tobytes()))) == 1


@on_ranks(3)
def test_an_update_that_is_dropped_leaves_error_feedback_as_small(comm):
    """Rank 2 has sent nothing of it, and sends zeros for the others."""
    communicator = create_communicator(
        'fp8', comm, overlap=True, warmup=0, partial_sums='float32')
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(numpy.random.default_rng(0).normal(
            0, 0.01, 20000).astype(numpy.float32))

    def backward(step):
        gradient = numpy.random.default_rng((comm.rank, step)).normal(
            0, 0.001, 20000).astype(numpy.float32)
        model.cleargrads()
        F.sum(model.w * gradient).backward()
        return gradient

    errors = []
    for step in range(8):
        if step == 6:
            if comm.rank != 2:
                backward(99)
            communicator.bcast_data(model)
        mean = comm.allreduce(backward(step).astype(float)) / comm.size
        communicator.multi_node_mean_grad(model)
        errors.append(abs(model.w.grad - mean).mean() / abs(mean).mean())
    assert max(errors[6:]) < 3 * max(errors[:6])
    communicator.finalize()


@on_ranks(1)
def test_an_algorithm_that_can_only_wait_is_an_error(comm):
    with pytest.raises(ValueError, match="'mpi_op' can only wait"):
        make(comm, 'fp8', True, algorithm='mpi_op')

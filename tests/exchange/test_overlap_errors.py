"""What cannot be exchanged during backward is an error, on all ranks."""
import time
from unittest import mock

import chainer
import chainer.functions as F
import numpy
import pytest

from tests.ranks import on_ranks

from ..communicators.networks import NETWORKS, Plain
from .test_exchange_thread import early, make, update, warm, wrapped


def rejected(comm, match, change, network=Plain, before=4, zero_fill=True):
    """Every rank raises the same error, and refuses to go on."""
    communicator = make(comm, 'fp8', True)
    numpy.random.seed(1)
    model = network()
    optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator, zero_fill)
    optimizer.setup(model)
    for number in range(before):
        update(optimizer, model, number, comm.rank)
    with pytest.raises(ValueError, match=match) as raised:
        change(optimizer, model)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    with pytest.raises(RuntimeError, match='make a new communicator'):
        communicator.multi_node_mean_grad(model)
    assert not any(one.update.frozen
                   for one in communicator._reducer.exchanges)
    communicator.finalize()


@on_ranks(2, 4)
def test_a_gradient_that_is_replaced_is_an_error_on_all_ranks(comm):
    def change(optimizer, model):
        model.cleargrads()
        model.loss(9, comm.rank).backward()
        if comm.rank == 1:
            model.l9.W.grad = model.l9.W.grad * 2
        optimizer.update()
    rejected(comm, 'rank 1: the gradient of parameter /l9/W was changed '
             'after.*pass overlap=False', change)


@on_ranks(2)
def test_a_gradient_that_is_changed_in_place_is_an_error_at_once(comm):
    _, model, optimizer = warm(comm)
    model.cleargrads()
    model.loss(9, comm.rank).backward()
    with pytest.raises(ValueError, match='read-only'):
        model.l9.W.grad *= 2
    optimizer.update()
    model.l9.W.grad *= 2


@on_ranks(2)
def test_one_pass_more_than_usual_is_an_error(comm):
    def change(optimizer, model):
        model.cleargrads()
        model.loss(9, comm.rank).backward()
        model.loss(10, comm.rank).backward()
        optimizer.update()
    rejected(comm, 'the gradient of parameter .* was changed after', change)


@on_ranks(2)
def test_a_step_without_an_update_is_an_error_at_the_next(comm):
    def change(optimizer, model):
        model.loss(9, comm.rank).backward()
        update(optimizer, model, 10, comm.rank)
    rejected(comm, 'the gradient of parameter .* was changed after', change)


@on_ranks(2, 4)
def test_a_gradient_that_one_rank_lacks_is_an_error_on_all(comm):
    """The others have sent it already."""
    class Choosing(NETWORKS['Changing']):
        def forward(self, x):
            names = 'abc' if self.step < 6 or comm.rank else 'ac'
            for name in names:
                x = F.tanh(self[name](x))
            return x

    def change(optimizer, model):
        update(optimizer, model, 7, comm.rank)
    rejected(comm, '/b/W is float32 .* without gradient on rank 0 but '
             'float32 .* on rank 1.*zero_fill=True', change, Choosing,
             zero_fill=False)


@on_ranks(2)
def test_other_loss_scales_on_one_rank_are_an_error(comm):
    def change(optimizer, model):
        model.cleargrads()
        model.loss(9, comm.rank).backward(loss_scale=2.0 + comm.rank)
        optimizer.update()
    rejected(comm, 'the loss scale is 2.0 on rank 0 but 3.0 on rank 1',
             change)


@on_ranks(2)
def test_what_fails_in_the_exchanges_thread_is_raised_on_all_ranks(comm):
    def change(optimizer, model):
        known = early(optimizer.communicator, model)
        with mock.patch.object(type(known), 'send', side_effect=(
                KeyError('lost') if comm.rank else None)):
            model.cleargrads()
            model.loss(9, comm.rank).backward()
            while comm.rank and not known.failure:
                time.sleep(1e-3)
            optimizer.update()
    rejected(comm, '(?s)rank 1: the exchange failed beside backward.*lost',
             change)


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


@on_ranks(1)
def test_an_algorithm_that_can_only_wait_is_an_error(comm):
    with pytest.raises(ValueError, match="'mpi_op' can only wait"):
        make(comm, 'fp8', True, algorithm='mpi_op')

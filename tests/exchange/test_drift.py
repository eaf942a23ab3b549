"""Replicas that differ are found and named."""
from chainer_fp8pipe.exchange import exchange as exchange_module
from chainer_fp8pipe.exchange.drift import ReplicaDrift

import chainer
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training import trainers

from ..communicators.networks import Plain
from .jobs import warm


class Job:
    """Training that compares replicas after every second update."""

    def __init__(self, comm, name='float32', overlap=False, **options):
        self.rank = comm.rank
        # The one update only broadcasts.
        self.communicator, self.model, self.optimizer = warm(
            comm, overlap, 1, name=name, optimizer='adam',
            **{'check_every': 2, **options})

    def update(self, *numbers, before=lambda: None):
        for number in numbers:
            def loss(number=number):
                before()
                return self.model.loss(number, self.rank)
            self.optimizer.update(loss)


def flip(array):
    """Flips the highest bit of the mantissa, where nothing can hide it.

    The lowest bit of a small element is lost when an update is rounded, or
    is not, as the BLAS has it that computed the gradients.  This changes the
    largest element by a quarter or more.
    """
    bits = array.reshape(-1).view(numpy.uint32)
    bits[abs(array).argmax()] ^= 1 << 22


@on_ranks(3)
@pytest.mark.parametrize('overlap', [False, True])
def test_a_flipped_bit_is_named_on_all_ranks(comm, overlap):
    job = Job(comm, 'fp8', overlap)
    job.update(*range(5))

    def before():
        if comm.rank == 1:
            flip(job.model.l2.W.array)
            flip(job.model.l3.b.array)
    job.update(5, before=before)        # not compared
    with pytest.raises(ReplicaDrift, match=(
            r'after 6 updates: parameter /l2/W, .* is not the same on rank '
            r'0, 2 \| rank 1; 1 more parameters differ')) as raised:
        job.update(6)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    # Nothing is left on its way.
    job.communicator.bcast_data(job.model)
    job.communicator.finalize()


def a_state(job):
    if job.rank == 2:
        flip(job.model.l9.W.update_rule.state['v'])


def a_count(job):
    job.model.l1.b.update_rule.t += job.rank


def a_master_copy(job):
    if job.rank == 0:
        flip(job.model.l1.W.update_rule._fp32_param.array)


@on_ranks(3)
@pytest.mark.parametrize(('change', 'message'), [
    (a_state, '^replicas have drifted apart, as seen after 2 updates: '
     r'parameter /l9/W.* on rank 0, 1 \| rank 2'),
    (a_count, r'/l1/b.* on rank 0 \| rank 1 \| rank 2'),
    (a_master_copy, '/l1/W')])
def test_an_optimizers_state_is_compared_too(comm, change, message):
    job = Job(comm, network=halved if change is a_master_copy else Plain)
    if change is a_master_copy:
        job.optimizer.use_fp32_update()
    job.update(1, 2)
    change(job)
    with pytest.raises(ReplicaDrift, match=message):
        job.update(3)
    job.communicator.finalize()


def halved():
    model = Plain()
    for parameter in model.params():
        parameter.array = parameter.array.astype('f2')
    model.loss = lambda number, rank: sum(
        chainer.functions.sum(parameter * 2.0) for parameter in model.params())
    return model


@on_ranks(2)
@pytest.mark.parametrize('options', [{'check_every': 0}, {}])
def test_replicas_are_compared_as_often_as_is_asked_for(comm, options):
    job, compared = Job(comm, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, 'compare',
                      lambda *_: compared.append(1))
        job.update(*range(1, 6))
    assert len(compared) == (0 if options else 2)
    job.communicator.finalize()


@on_ranks(4)
def test_replicas_of_a_stage_are_compared(comm):
    job = trainers.Job(comm, 'Plain', 2, codec={'check_every': 1}).updated(2)
    if job.grid.replica_index:
        flip(next(iter(job.model.params())).array)
    with pytest.raises(ReplicaDrift, match=r'rank 0 \| rank 1'):
        job.update()

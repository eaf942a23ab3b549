"""Replicas that differ are found and named."""
import re

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.exchange import reducer
from chainer_fp8pipe.exchange.drift import Difference, ReplicaDrift

import chainer
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters import test_hybrid
from tests.training.updaters.networks import Plain as PlainStages
from tests.training.updaters.networks import dataset
from tests.training.updaters.test_pipeline_updater import update as step

from ..communicators.networks import NETWORKS, Plain
from .test_exchange_thread import make, wrapped

OVERLAPS = False, True, 'next_forward'


class Job:
    """Training that compares replicas after every second update."""

    def __init__(self, comm, name='float32', overlap=False, network=Plain,
                 optimizer=chainer.optimizers.Adam, **options):
        self.rank = comm.rank
        self.communicator = make(comm, name, overlap,
                                 **{'check_every': 2, **options})
        numpy.random.seed(1)
        self.model = network()
        self.optimizer = wrapped(optimizer(0.01), self.communicator)
        self.optimizer.setup(self.model)
        self.update(0)      # only broadcasts

    def update(self, number, before=lambda: None):
        self.model.cleargrads()
        self.model.loss(number, self.rank).backward()
        before()
        self.optimizer.update()

    def bits(self):
        return [parameter.array.tobytes()
                for _, parameter in sorted(self.model.namedparams())]


def flip(array):
    """Flips the highest bit of the mantissa, where nothing can hide it.

    The lowest bit of a small element is lost when an update is rounded, or
    is not, as the BLAS has it that computed the gradients.  This changes the
    largest element by a quarter or more.
    """
    bits = array.reshape(-1).view(numpy.uint32)
    bits[abs(array).argmax()] ^= 1 << 22


@on_ranks(3, 4)
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_a_flipped_bit_is_named_on_all_ranks(comm, overlap):
    job = Job(comm, 'fp8', overlap)
    for number in range(5):
        job.update(number)

    def before():
        if comm.rank == 1:
            flip(job.model.l2.W.array)
            flip(job.model.l3.b.array)
    job.update(5, before)       # not compared
    with pytest.raises(ReplicaDrift, match=(
            'after 6 updates: .* of parameter /l2/W is another on rank 1 '
            'than on most, ranks 0')) as raised:
        job.update(6)
    assert '1 more parameters differ: /l3/b' in str(raised.value)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    # Nothing is left on its way.
    job.communicator.bcast_data(job.model)
    job.communicator.finalize()


@on_ranks(3)
def test_a_state_of_the_optimizer_is_compared_too(comm):
    job = Job(comm)
    job.update(1)
    job.update(2)
    if comm.rank == 2:
        flip(job.model.l9.W.update_rule.state['v'])
    with pytest.raises(ReplicaDrift, match=(
            "^replicas have drifted apart, as seen after 2 updates: the "
            "optimizer's v of parameter /l9/W is another on rank 2 than on "
            'most, ranks 0 and 1')):
        job.update(3)
    job.communicator.finalize()


@on_ranks(2)
def test_without_a_majority_all_groups_are_named(comm):
    job = Job(comm)
    job.update(1)
    job.update(2)
    job.model.l1.b.update_rule.t += comm.rank
    with pytest.raises(ReplicaDrift, match=re.escape(
            'the count of updates of parameter /l1/b is another on each of '
            'rank 0 | rank 1, none of which is a majority')):
        job.update(3)
    job.communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize('options', [{'check_every': 0}, {}])
def test_replicas_are_compared_as_often_as_is_asked_for(comm, options):
    job, compared = Job(comm, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, 'compare', lambda *_: compared.append(1))
        for number in range(1, 6):
            job.update(number)
    assert len(compared) == (0 if options else 2)
    job.communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize('network', NETWORKS)
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_what_is_trained_alike_never_differs(comm, network, overlap):
    job = Job(comm, 'fp8', overlap, NETWORKS[network], check_every=1,
              warmup=1)
    for number in range(1, 6):
        job.update(number)
    job.communicator.finalize()


@on_ranks(2, 4)
@pytest.mark.parametrize(('name', 'options'), [
    ('fp8_paper', {}), ('fp8', {'rounding': 'stochastic'}),
    ('int4', {'algorithm': 'ring'}), ('float16', {'algorithm': 'torus2d'})])
def test_no_codec_lets_replicas_differ(comm, name, options):
    if name != 'float16':
        options = {**options, 'warmup': 1}
    communicator = create_communicator(name, comm, check_every=1, **options)
    model = Plain()
    optimizer = wrapped(chainer.optimizers.MomentumSGD(0.01), communicator)
    optimizer.setup(model)
    for number in range(6):
        optimizer.update(lambda number=number: model.loss(number, comm.rank))
    communicator.finalize()


@on_ranks(2)
def test_nan_that_all_ranks_have_is_no_difference(comm):
    job = Job(comm, nonfinite='pass')
    job.update(1)
    job.update(2)
    job.model.l1.W.array[0, 0] = numpy.nan
    job.update(3)
    assert numpy.isnan(job.model.l1.W.array).any()
    job.communicator.finalize()


@on_ranks(2)
def test_master_copies_in_float32_are_compared(comm):
    job = Job(comm, check_every=1, network=lambda: _halved(Plain()))
    job.optimizer.use_fp32_update()
    job.update(1)
    job.update(2)
    if comm.rank:
        flip(job.model.l1.W.update_rule._fp32_param.array)
    with pytest.raises(ReplicaDrift, match=(
            'the float32 copy of parameter /l1/W')):
        job.update(3)
    job.communicator.finalize()


def _halved(model):
    for parameter in model.params():
        parameter.array = parameter.array.astype('f2')
    model.loss = lambda number, rank: sum(
        chainer.functions.sum(parameter * 2.0) for parameter in model.params())
    return model


@on_ranks(4)
def test_replicas_of_a_stage_are_compared(comm):
    grid, updater = test_hybrid.make(
        comm, 2, PlainStages, dataset(16), 8, micro_batches=2, rate=0.1,
        options={'check_every': 1})
    step(updater)
    step(updater)
    model = updater.get_optimizer('main').target
    parameter = next(iter(model.params()))
    if grid.replica_index:
        flip(parameter.array)
    with pytest.raises(ReplicaDrift, match=r'rank 0 \| rank 1'):
        step(updater)
    grid.free()


def test_a_majority_is_more_than_half():
    assert Difference('/W', 'the value', ((0, 2), (1,))).has_majority
    assert not Difference('/W', 'the value', ((0, 1), (2, 3))).has_majority
    assert not Difference('/W', 'the value', ((0, 1), (2,), (3,))
                          ).has_majority

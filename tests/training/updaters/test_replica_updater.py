"""Replicas share each batch, and learn what one process learns."""
from chainer_fp8pipe.communicators import create_communicator
from chainer_fp8pipe.training.replica_updater import ReplicaUpdater
from chainer_fp8pipe.training.unmodified.dividing import divided

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks
from tests.training.trainers import reports

DATA = [(numpy.random.RandomState(n).rand(3).astype('f'), numpy.int32(n % 2))
        for n in range(12)]


class Net(L.Classifier):
    """Reports a mean over samples, and on some batches a second one."""

    def __init__(self):
        with chainer.using_config('dtype', numpy.float32):
            super().__init__(L.Linear(3, 2, initialW=numpy.ones((2, 3)) / 3))

    def forward(self, x, t):
        chainer.report({'x': F.mean(x)}, self)
        if (t == 1).all():
            chainer.report({'ones': x.shape[0]}, self)
        return super().forward(x, t)


def made(comm, data, batch, **options):
    """A model, and its updater on the ranks of ``comm``."""
    model = Net()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.5).setup(model),
        create_communicator('float32', comm, **options))
    optimizer.is_changed(model)         # no update is spent on it
    iterator = divided(
        chainer.iterators.SerialIterator(data, batch, shuffle=False), comm)
    return model, ReplicaUpdater(iterator, optimizer, comm)


@pytest.mark.parametrize('overlap', [False, True])
@on_ranks(1, 2, 3)
def test_updates_and_reports_are_those_of_one_process(comm, overlap):
    """A batch of 7 gives 2 or 3 samples to each of 3 ranks."""
    model, updater = made(comm, DATA, 7, overlap=overlap)
    serial = Net()
    expected = reports(StandardUpdater(
        chainer.iterators.SerialIterator(DATA, 7, shuffle=False),
        chainer.optimizers.MomentumSGD(0.5).setup(serial)), 6)
    found = reports(updater, 6)
    for one, other in zip(found, expected, strict=True):
        one.pop('main/ones', None)
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(model.params(), serial.params(), strict=True):
        numpy.testing.assert_allclose(one.array, other.array, rtol=1e-5)
    assert (updater.epoch, updater.epoch_detail) == (3, 3.5)


@on_ranks(2)
def test_what_only_one_rank_reports_reaches_all(comm):
    zeros = [(x, numpy.int32(0)) for x, _ in DATA[:2]]
    ones = [(x, numpy.int32(1)) for x, _ in DATA[2:4]]
    _, updater = made(comm, zeros + ones, 4)
    assert reports(updater, 1)[0]['main/ones'] == 2


@on_ranks(2)
def test_a_rank_without_a_sample_says_so_on_all_ranks(comm):
    _, updater = made(comm, DATA, 1)
    with pytest.raises(ValueError, match='rank 0: a batch of 1 has no sample '
                                         'for rank 0'):
        updater.update()

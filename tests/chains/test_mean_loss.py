"""A loss that micro-batches would change is told of at the first update."""
import contextlib
import warnings

from chainer_fp8pipe import (
    ProcessGrid,
    create_communicator,
    deferred,
    partition,
)
from chainer_fp8pipe.mpi.grid import grid_of
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainermn.links import MultiNodeBatchNormalization
from mpi4py import MPI

from tests.ranks import on_ranks


def dice(y, t):
    p = F.sigmoid(y[:, 0])
    return 1 - 2 * F.sum(p * t) / (F.sum(p) + float(t.sum()))


class Kept:
    """Weighs by how often it was called, which an object keeps."""

    calls = 0

    def __call__(self, y, t):
        self.calls += 1
        return self.calls * F.softmax_cross_entropy(y, t)


def valid(y, t):
    return F.sum(F.softmax_cross_entropy(y, abs(t), reduce='no')
                 * (t >= 0)) / max(1, int((t >= 0).sum()))


#: Of outputs of shape (samples, 3) and labels; whether micro-batches give
#: the same.
LOSSES = {
    'mean': (F.softmax_cross_entropy, True),
    'labels left out': (lambda y, t: F.softmax_cross_entropy(
        y, t - 1, ignore_label=-1), True),
    'random': (lambda y, t: F.mean(F.gaussian(y, y)), True),
    'samples dropped': (lambda y, t: F.softmax_cross_entropy(
        F.dropout(y), t), True),
    'sum': (lambda y, t: F.sum(y ** 2), False),
    'random sum': (lambda y, t: F.sum(F.gaussian(y + 1, y - y - 4)), False),
    'valid labels': (lambda y, t: valid(y, t - 1), False),
    'once more each time': (Kept(), False),
    'dice': (lambda y, t: dice(y, (t > 0).astype('f')), False),
    'pairs': (lambda y, t: F.mean(F.matmul(y, y, transb=True) ** 2), False)}


class Net(chainer.Chain):
    def __init__(self, loss):
        super().__init__()
        with self.init_scope():
            self.a, self.norm = L.Linear(None, 5), L.BatchNormalization(5)
            self.b = L.Linear(5, 3)
        self.loss, self.calls = loss, 0

    def forward(self, x, t):
        self.calls += 1
        return self.loss(self.b(F.relu(self.norm(self.a(x)))), t)


def said(loss, comm, samples=4, later=True, micro_batches=2,
         labels=((0, 1, 2, 2),) * 2, over_replicas=False):
    """What two updates warn of, and the model."""
    rng = numpy.random.RandomState(0)
    numpy.random.seed(0)        # or one sample's outputs may all be zero
    batch = (rng.uniform(-1, 1, (samples, 6)).astype('f'),
             numpy.array(labels[0], 'i')[:samples])
    with deferred() if later else contextlib.nullcontext():
        model = Net(loss)
    example = tuple(one[:samples // micro_batches] for one in batch)
    optimizer = chainer.optimizers.SGD(0.)
    grid = grid_of(comm)
    if grid.replicas > 1:
        data = create_communicator('float32', grid.data)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, data)
        if over_replicas:
            model.norm = MultiNodeBatchNormalization(5, data)
    partition(model, example, comm, micro_batches=micro_batches)
    pipeline = Pipeline(optimizer.setup(model), grid,
                        micro_batches=micro_batches)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        for one in labels:
            pipeline.step(batch[0], numpy.array(one, 'i')[:samples])
    found = [one for one in found if '--micro-batches 1' in str(one.message)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found], model


def test_a_loss_that_is_no_mean_over_samples_is_told_of():
    for number, (loss, is_mean) in enumerate(LOSSES.values()):
        found, model = said(loss, MPI.COMM_SELF, later=number % 2)
        assert len(found) == (not is_mean)
        assert all('loss of 4 samples' in one for one in found)
        assert model.calls == 2         # two updates
    assert not said(LOSSES['sum'][0], MPI.COMM_SELF, micro_batches=1)[0]
    # The first batch whose labels do not all count is not the first one.
    found, _ = said(valid, MPI.COMM_SELF, labels=(
        (0, 1, 2, 2), (0, 1, -1, 2), (-1, 1, 2, 2)))
    assert len(found) == 1


@on_ranks(2)
@pytest.mark.parametrize('pipeline', [1, 2])
def test_one_rank_tells(comm, pipeline):
    """Replicas of one sample each, which is taken twice; or two stages."""
    samples, micro_batches = (1, 1) if pipeline == 1 else (4, 2)
    for name in 'sum', 'mean':
        found, model = said(LOSSES[name][0], ProcessGrid(comm, pipeline),
                            samples, True, micro_batches)
        assert len(found) == (comm.rank == pipeline - 1 and name == 'sum')
        assert sum(comm.allgather(len(list(model.params())))) == (
            12 // pipeline)


@on_ranks(2)
def test_a_replica_may_compare_alone(comm):
    found, _ = said(valid, ProcessGrid(comm, 1), labels=(
        (0, 1, 2, 2), (0, 1, comm.rank - 1, 2)), over_replicas=True)
    assert len(found) == 1 - comm.rank


@on_ranks(2)
def test_a_warning_as_an_error_is_one_on_all_ranks_and_breaks_nothing(comm):
    calls = []

    def loss(y, t):
        calls.append(t)
        for _ in calls:         # all ranks must have called it equally often
            y = F.identity(y)
        return F.sum(y ** 2)
    x, t = numpy.ones((4, 6), 'f'), numpy.zeros(4, 'i')
    model = Net(loss)
    partition(model, (x[:2], t[:2]), comm, micro_batches=2)
    calls.clear()
    pipeline = Pipeline(chainer.optimizers.SGD(0.).setup(model), comm,
                        micro_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(ValueError, match='UserWarning: .* no mean'):
            pipeline.step(x, t)
    pipeline.step(x, t)
    assert comm.allgather(len(calls)) == [2 + 8 + 2] * 2

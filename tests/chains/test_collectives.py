"""Collective operations in the forward pass of a model that is cut."""
from chainer_fp8pipe import (
    ProcessGrid,
    atomic,
    create_communicator,
    create_grouped_bn_model,
    partition,
)

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest

from tests.models.judge import (
    close,
    own,
    plan_of,
    running,
    updater_of,
    values,
)
from tests.ranks import on_ranks


class Mean(chainer.FunctionNode):
    """The mean over ranks, forward and backward."""

    def __init__(self, comm):
        self.comm = comm

    def forward(self, inputs):
        return self.comm.allreduce(inputs[0]) / self.comm.size,

    def backward(self, indexes, gradients):
        return Mean(self.comm).apply(gradients)


class Net(chainer.Chain):
    def __init__(self, between):
        super().__init__()
        numpy.random.seed(1)
        with self.init_scope():
            self.a, self.b = L.Linear(4, 5), L.Linear(5, 3)
            if isinstance(between, chainer.Link):
                self.between = between
        if not isinstance(between, chainer.Link):
            self.between = between

    def forward(self, x, t):
        h = F.tanh(self.between(self.a(x)))
        return F.softmax_cross_entropy(self.b(h), t)


PLAN = plan_of([['/a/W', '/a/b'], ['/b/W', '/b/b']], '/b/W')


def batch_of(part=slice(0, 16)):
    random = numpy.random.RandomState(0)
    return random.randn(16, 4).astype('f')[part], (
        numpy.arange(16, dtype='i') % 3)[part]


#: What the layer between is, made of a communicator and its group of ranks.
NORMS = {
    'grouped': lambda size, comm: L.BatchNormalization(
        size, decay=.5, axis=0),
    'multi-node': lambda size, comm:
        chainermn.links.MultiNodeBatchNormalization(size, comm, decay=.5)}


@on_ranks(4)
def test_replicas_normalise_together(comm):
    """Two stages of two replicas: the averages are those of both batches."""
    grid = ProcessGrid(comm, pipeline=2)
    replicas = create_communicator('float32', mpi_comm=grid.data)
    plain = Net(L.BatchNormalization(5, decay=.5))
    reference = chainer.optimizers.SGD(.1).setup(plain)
    expected = []
    for _ in range(2):
        reference.update(plain, *batch_of())
        expected.append({name: value.copy() for name, value
                         in own(plain, 'array').items()})
    mine = slice(8 * grid.replica_index, 8 * grid.replica_index + 8)
    for kind, size in (('grouped', 5), ('grouped', None), ('multi-node', 5)):
        model = Net(NORMS[kind](size, replicas))
        if kind == 'grouped':
            model = create_grouped_bn_model(model, grid.data)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(.1), replicas).setup(model)
        updater = updater_of(
            grid, model, [batch_of(mine)], optimizer=optimizer,
            micro_batches=1, cut={'plan': {**PLAN, 'micro_batches': 1}})
        for one in expected:
            updater.update()
            close(values(grid.pipeline, model), one, 1e-4)
        found = running(grid.pipeline, model)
        numpy.testing.assert_allclose(found['/between', 'avg_mean'],
                                      plain.between.avg_mean, 1e-4)


class Held(chainer.Chain):
    """Keeps a communicator of mpi4py's."""

    def __init__(self, comm):
        super().__init__()
        self.comm = comm

    def forward(self, h):
        return h * self.comm.allreduce(1.)


REFUSED = {
    'all ranks normalise': (
        lambda all_ranks: chainermn.links.MultiNodeBatchNormalization(
            5, all_ranks), 'over several stages of the pipeline'),
    'a function over all ranks': (
        lambda all_ranks: lambda h: Mean(all_ranks).apply((h,))[0],
        r'allreduce\(\) in forward is an operation of several ranks'),
    'objects between functions': (
        lambda all_ranks: lambda h: h * all_ranks.allreduce_obj(1.),
        r'allreduce_obj\(\) in forward'),
    'objects inside of a function': (
        lambda all_ranks: atomic(lambda h: h * all_ranks.allreduce_obj(1.)),
        'in forward is an operation of several ranks'),
    'what another rank sends': (
        lambda all_ranks: lambda h: chainermn.functions.recv(
            all_ranks, 1 - all_ranks.rank, h),
        'in forward is an operation of several ranks'),
    "mpi4py's": (
        lambda all_ranks: Held(all_ranks.mpi_comm),
        "link /between keeps a communicator of several ranks in 'comm'"),
    'a layer fails on one rank': (
        lambda all_ranks: lambda h: h + all_ranks.rank // (
            1 - all_ranks.rank), 'ZeroDivisionError')}


@on_ranks(2)
def test_what_would_wait_for_ever_is_refused_on_all_ranks(comm):
    all_ranks = create_communicator('float32', mpi_comm=comm)
    for make, said in REFUSED.values():
        with pytest.raises(ValueError, match=said):
            partition(Net(make(all_ranks)), batch_of(), comm)

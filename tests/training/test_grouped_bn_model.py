"""Models of which every batch normalisation is that of a group."""
import functools
import io

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.links.grouped_bn import GroupedBatchNormalization
from chainer_fp8pipe.mpi.grid import group_of
from chainer_fp8pipe.training.grouped_bn_model import create_grouped_bn_model

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainermn.links import MultiNodeBatchNormalization
from mpi4py import MPI

from ..links.groups import assert_close
from ..ranks import on_ranks

ALONE = MPI.COMM_SELF


class Block(chainer.Chain):
    """With links in init_scope, in a plain list and in a dictionary."""

    def __init__(self):
        super().__init__()
        self.plain = [L.BatchNormalization(4)]
        self.named = {'one': L.BatchNormalization(4), 'two': F.relu}
        with self.init_scope():
            self.conv = L.Convolution2D(4, 4, 1, nobias=True)
            self.bn = L.BatchNormalization(4, decay=0.7)
            self.same = self.bn
            self.registered = self.plain[0]

    def forward(self, x):
        return self.plain[0](self.bn(self.conv(x)))


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.block = Block()
            self.chains = chainer.ChainList(Block(), L.BatchNormalization(4))
            self.layers = chainer.Sequential(
                L.BatchNormalization(4), F.relu, Block())
            self.out = L.Linear(None, 3)

    def forward(self, x):
        for layer in (self.block, *self.chains, self.layers, self.out):
            x = layer(x)
        return x


def cut():
    """A model of layers: built, lazy, shared and bound."""
    shared = lazy(L.BatchNormalization, 4)
    bound = L.BatchNormalization(4)
    return Divisible(
        lazy(L.Convolution2D, 4, 4, 1), shared, F.relu, lazy(Block),
        Block(), shared, L.BatchNormalization(4), bound.forward,
        functools.partial(bound), lazy(functools.partial(Block)), seed=5)


def grouped(model):
    return [link for link in model.links()
            if isinstance(link, GroupedBatchNormalization)]


def snapshot(model):
    saved = io.BytesIO()
    chainer.serializers.save_npz(saved, model)
    return dict(np.load(io.BytesIO(saved.getvalue())))


@pytest.mark.parametrize('make', [Net, cut])
def test_all_become_grouped_and_nothing_else_changes(make):
    np.random.seed(0)
    model = make()
    before = repr(model)
    result = create_grouped_bn_model(model, ALONE)
    x = np.random.RandomState(0).randn(3, 4, 2, 2).astype('f')
    with chainer.using_config('train', True):
        np.random.seed(1)
        wanted = model(x)
        np.random.seed(1)
        found = result(x)
    assert_close(found.array, wanted.array)
    assert type(result) is type(model)
    assert repr(model) == before
    names = [(path, type(link).__name__) for path, link in model.namedlinks()]
    assert [(path, type(link).__name__) for path, link
            in result.namedlinks()] == [
        (path, name.replace('BatchN', 'GroupedBatchN'))
        for path, name in names]
    assert not grouped(model)
    found, wanted = snapshot(result), snapshot(model)
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert_close(found[key], wanted[key], largest=1)
    for (path, one), (other, two) in zip(
            result.namedparams(), model.namedparams(), strict=True):
        assert path == other
        assert one is not two


def with_default(x, *, link=L.BatchNormalization(2)):   # noqa: B008
    return link(x)


THE_MODULES = L.BatchNormalization(2)


class OfTheModule:
    """Calls a link that only the module holds."""

    def __call__(self, x):
        return THE_MODULES(x)


@pytest.mark.filterwarnings('ignore:chainermn.links')
def test_what_cannot_be_grouped_is_an_error():
    model = chainer.Sequential(L.BatchNormalization(2),
                               L.BatchRenormalization(2))
    with pytest.raises(ValueError, match='a BatchRenormalization .called 1.'):
        create_grouped_bn_model(model, ALONE)
    with pytest.raises(ValueError, match='is None; it must be a link'):
        create_grouped_bn_model(None, ALONE)
    link = L.BatchNormalization(2)
    with pytest.raises(ValueError, match='make it a layer'):
        create_grouped_bn_model(Divisible(lambda x: link(x)), ALONE)
    with pytest.raises(ValueError, match='make it a layer'):
        create_grouped_bn_model(chainer.Sequential(with_default), ALONE)
    with pytest.raises(ValueError, match='make it a layer'):
        create_grouped_bn_model(chainer.Sequential(OfTheModule()), ALONE)
    with pytest.raises(ValueError, match='a MultiNodeBatch.*cannot be'):
        create_grouped_bn_model(chainer.Sequential(
            MultiNodeBatchNormalization(
                2, create_communicator('naive', ALONE))), ALONE)


@on_ranks(2, 4)
def test_bad_input_is_an_error_on_every_rank(comm):
    with pytest.raises(ValueError, match='it can be 1'):
        create_grouped_bn_model(L.BatchNormalization(2), comm, group_size=3)
    with pytest.raises(ValueError, match=(
            r'size \(2,\) on rank 0 but of size \(3,\) on rank 1')):
        create_grouped_bn_model(
            L.BatchNormalization(3 if comm.rank == 1 else 2), comm)
    with pytest.raises(ValueError, match='rank 1: .*BatchRenormalization'):
        create_grouped_bn_model(
            L.BatchRenormalization(2) if comm.rank == 1
            else L.BatchNormalization(2), comm)
    with pytest.raises(ValueError, match='is missing on rank 0|on rank 1'):
        create_grouped_bn_model(
            chainer.Sequential(*[L.BatchNormalization(2)]
                               * (1 + (comm.rank == 1))), comm)
    assert comm.allreduce(1) == comm.size


def network():
    np.random.seed(0)
    model = chainer.Sequential(
        L.Linear(8, 6, nobias=True), L.BatchNormalization(6), F.relu,
        L.Linear(6, 4, nobias=True), L.BatchNormalization(4), L.Linear(4, 5))
    for parameter in model.params():
        parameter.array[...] += 0.1 * np.random.randn(*parameter.shape)
    model.cleargrads()
    return model


def step(model, x, t):
    """Gradients of the sum of losses; inputs may be empty."""
    with chainer.using_config('train', True):
        loss = F.sum(F.log_softmax(model(x)) * np.eye(5, dtype='f')[t])
    model.cleargrads()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.namedparams()}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(('arguments', 'sizes'), [
    ({}, (4, 4, 4, 4)), ({}, (5, 1, 3, 0)),
    ({'group_size': 1}, (4, 3, 2, 5)), ({'group_size': 'half'}, (5, 1, 3, 2))
])
def test_a_group_trains_like_one_process(comm, arguments, sizes):
    """Two layers deep: gradients go through the statistics of all ranks."""
    if arguments.get('group_size') == 'half':
        arguments = {'group_size': max(comm.size // 2, 1)}
    group = group_of(comm, **arguments).comm
    model = create_grouped_bn_model(network(), create_communicator(
        'fp8', mpi_comm=comm), **arguments)
    sizes = sizes[:comm.size]
    ends = np.cumsum(sizes)
    random = np.random.RandomState(3)
    x = random.randn(sum(sizes), 8).astype('f')
    t = random.randint(0, 5, len(x))
    me = slice(ends[comm.rank] - sizes[comm.rank], ends[comm.rank])
    whole = np.concatenate([np.arange(*part) for part in
                            group.allgather((me.start, me.stop))])
    serial = network()
    wanted = step(serial, x[whole], t[whole])
    found = step(model, x[me], t[me])
    for name in wanted:
        assert_close(group.allreduce(found[name].astype(float)),
                     wanted[name], 3e-5, largest=1)
    for layer in (1, 4):
        assert_close(model[layer].avg_mean, serial[layer].avg_mean)
        assert_close(model[layer].avg_var, serial[layer].avg_var)

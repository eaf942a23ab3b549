"""Means of gradients in records of 32, over every way that bytes may take."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators.options import make_options

import chainer
import numpy
import pytest

from tests.ranks import on_ranks

from .helpers import Model, bits, mean_gradients, set_gradients

#: Around a record, and more than a frame has.
SHAPES = (1,), (31,), (32,), (33,), (), (3, 5, 7), (60_000,)
#: Of a mean of normal gradients, relative; twice what is found.
ERRORS = {('int4', 'int4'): .35, ('int4', 'e2m1'): .4, ('int5', None): .2}
WAYS = [{}, {'algorithm': 'ring'}, {'algorithm': 'torus2d', 'shape': (2, 2)},
        {'ranks_per_node': 2}, {'frame_bytes': 0}, {'frame_bytes': 500},
        {'bucket_bytes': 4000}, {'overlap': True},
        {'overlap': 'next_forward'}]


def make(comm, name='int4', values=None, **options):
    return create_communicator(name, comm, warmup=0, **options, **(
        {'values': values} if values else {}))


def error_of(model, mean):
    """Of all gradients together, relative."""
    found = numpy.concatenate([
        parameter.grad.ravel() for _, parameter in sorted(
            model.namedparams())]).astype(float)
    true = numpy.concatenate([mean[name].ravel() for name in sorted(mean)])
    return numpy.linalg.norm(found - true) / numpy.linalg.norm(true)


@pytest.mark.parametrize('way', WAYS, ids=str)
@on_ranks(4)
def test_all_ranks_get_the_mean_with_the_same_bits(comm, way):
    communicator, model = make(comm, **way), Model(SHAPES)
    for step in range(3):
        set_gradients(model, comm.rank, step)
        communicator.multi_node_mean_grad(model)
        assert len(set(comm.allgather(bits(model)))) == 1
        assert error_of(model, mean_gradients(4, step, shapes=SHAPES)) < .5


@pytest.mark.parametrize('kind', ERRORS, ids=str)
@on_ranks(1, 3)
def test_what_one_update_leaves_out_the_next_ones_bring(comm, kind):
    """The mean of many updates of the same gradients comes near the truth."""
    communicator, model = make(comm, *kind), Model(SHAPES)
    true, updates = mean_gradients(comm.size, shapes=SHAPES), 20
    sums = dict.fromkeys(true, 0.0)
    for _ in range(updates):
        set_gradients(model, comm.rank)
        communicator.multi_node_mean_grad(model)
        assert error_of(model, true) < ERRORS[kind]
        for name, parameter in model.namedparams():
            sums[name] = sums[name] + parameter.grad.astype(float)
    for name, parameter in model.namedparams():
        parameter.grad = numpy.asarray(sums[name] / updates, 'f')
    assert error_of(model, true) < ERRORS[kind] / 10


@on_ranks(2)
def test_without_feedback_the_same_error_comes_again(comm):
    communicator = make(comm, error_feedback=False)
    model = Model(SHAPES)
    found = []
    for _ in range(2):
        set_gradients(model, comm.rank)
        communicator.multi_node_mean_grad(model)
        found.append(bits(model))
    assert found[0] == found[1]


@pytest.mark.parametrize('overlap', [True, 'next_forward'])
@on_ranks(2)
def test_overlap_changes_no_bits(comm, overlap):
    def trained(**options):
        communicator = make(comm, bucket_bytes=2000, **options)
        model = chainer.links.Classifier(Net())
        numpy.random.seed(comm.rank)
        optimizer = chainermn_optimizer(communicator, model)
        for _ in range(4):
            x = numpy.random.randn(4, 20).astype('f')
            optimizer.update(model, x, numpy.zeros(4, 'i'))
        values = [parameter.array.tobytes()
                  for _, parameter in sorted(model.namedparams())]
        communicator.finalize()
        return values
    assert trained(overlap=overlap) == trained()


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            state = numpy.random.RandomState(0)
            self.l1 = chainer.links.Linear(20, 50, initialW=state.randn(
                50, 20).astype('f'))
            self.l2 = chainer.links.Linear(50, 7, initialW=state.randn(
                7, 50).astype('f'))

    def forward(self, x):
        return self.l2(chainer.functions.relu(self.l1(x)))


def chainermn_optimizer(communicator, model):
    import chainermn
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), communicator)
    optimizer.setup(model)
    return optimizer


@on_ranks(3)
def test_a_nan_on_one_rank_is_an_error_on_all_that_names_the_parameter(comm):
    communicator, model = make(comm), Model(SHAPES)
    set_gradients(model, comm.rank)
    if comm.rank == 1:
        model.p3.grad[5] = numpy.nan
    with pytest.raises(RuntimeError, match='the gradient of /p3'):
        communicator.multi_node_mean_grad(model)


@on_ranks(2)
def test_a_resumed_run_goes_on_with_the_same_bits(comm):
    model = Model(SHAPES)
    first, second = make(comm), make(comm)
    for step in range(3):
        set_gradients(model, comm.rank, step)
        first.multi_node_mean_grad(model)
    second.load_state(first.state(model), model)
    found = []
    for communicator in first, second:
        set_gradients(model, comm.rank, 3)
        communicator.multi_node_mean_grad(model)
        found.append(bits(model))
    assert found[0] == found[1]


@pytest.mark.parametrize('name', ['int4', 'int5'])
@pytest.mark.parametrize(('option', 'value'), [
    ('algorithm', 'mpi_op'), ('partial_sums', 'wire')])
def test_sums_in_the_format_of_the_wire_are_refused(name, option, value):
    with pytest.raises(ValueError, match=f'{option}=.* makes sums in the '
                       f'format of the wire.*pass another {option}'):
        make_options(name, {option: value})

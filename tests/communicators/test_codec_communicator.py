import contextlib
from functools import partial

from chainer_fp8pipe.codecs import CODECS
from chainer_fp8pipe.intercept.patching import AroundCalls
from chainer_fp8pipe.mpi.watch import updates

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training import extensions

from tests.mpi.scarcity import communicators_left
from tests.ranks import on_ranks
from tests.training.trainers import make_trainer

from .helpers import (
    Model,
    average_two_models,
    bits,
    check_means,
    make,
    mean_gradients,
    set_gradients,
)


@pytest.mark.parametrize(('name', 'tolerance'), [('float32', 0), ('fp8', .9)])
@on_ranks(2)
def test_gradients_of_any_dtype_and_order_are_averaged_where_they_are(
        comm, name, tolerance):
    dtypes = 'f4', 'f2', 'f8', 'f4'
    model = Model(dtypes=dtypes)
    set_gradients(model, comm.rank)
    model.p0.grad = numpy.asfortranarray(model.p0.grad)
    with model.init_scope():
        model.again = model.p1      # averaged once
    make(name, comm).multi_node_mean_grad(model)
    assert model.again is model.p1
    means = mean_gradients(comm.size, dtypes=dtypes)
    for key, mean in means.items():
        parameter = getattr(model, key[1:])
        assert parameter.grad.dtype == parameter.dtype
        numpy.testing.assert_allclose(
            parameter.grad, mean, rtol=0, atol=tolerance or (
                2e-3 if parameter.dtype == 'f2' else 1e-5))


@pytest.mark.parametrize('name', ['naive', 'fp8'])
@on_ranks(2)
def test_each_update_of_chainermns_optimizer_is_counted(comm, name):
    """Also the first one, which sends parameters: the watch begins then."""
    communicator = make(name, comm)
    model, before = Model(shapes=((4,),)), updates.total
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), communicator).setup(model)
    communicator.bcast_data(model)
    with AroundCalls() as calls:        # as a report is
        calls.add(communicator, 'bcast_data', contextlib.nullcontext)
        for count in range(3):
            assert updates.total == before + count
            model.cleargrads()
            model.p0.grad = numpy.ones(4, 'f4')
            optimizer.update()


@pytest.mark.parametrize('name', CODECS)
@on_ranks(1, 2)
def test_what_is_not_there_is_zero_or_left_alone(comm, name):
    """A gradient, a parameter that is not initialised, all of a model."""
    communicator = make(name, comm)
    communicator.bcast_data(chainer.Chain())
    communicator.multi_node_mean_grad(chainer.Chain())
    assert communicator.events.updates == 1
    model = Model(shapes=((4,), (5,)))
    model.p1.grad = numpy.ones(5, 'f4')
    communicator.multi_node_mean_grad(model)
    assert model.p0.grad is None
    if comm.rank == 0:
        model.p0.grad = numpy.full(4, comm.size, 'f4')
    communicator.multi_node_mean_grad(model, zero_fill=True)
    assert (model.p0.grad > 0).all()
    numpy.testing.assert_allclose(model.p0.grad, 1, rtol=0.5)
    model = chainer.Sequential(L.Linear(None, 3), L.Linear(3, 2))
    set_gradients(model, comm.rank)
    communicator.bcast_data(model)
    communicator.multi_node_mean_grad(model, zero_fill=True)
    assert model[0].W.array is None


# --- as a ChainerMN communicator -------------------------------------------

@pytest.mark.parametrize('name', CODECS)
@on_ranks(2)
def test_chainermns_optimizer_trains_as_serial_training_does(comm, name):
    communicator = make(name, comm)
    x = numpy.random.RandomState(0).rand(8, 5).astype('f4')
    t = (x[:, :1] * 2 - x[:, 1:2]).astype('f4')

    def train(optimizer, rows, steps):
        model = chainer.Sequential(L.Linear(5, 1, initialW=0.1))
        optimizer.setup(model)
        for _ in range(steps):
            optimizer.update(
                lambda: F.mean_squared_error(model(x[rows]), t[rows]))
        return model[0].W.array
    serial = train(chainer.optimizers.SGD(0.3), slice(None), 60)
    parallel = train(
        chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(0.3), communicator),
        slice(comm.rank, None, 2), 61)      # the first one broadcasts
    numpy.testing.assert_allclose(
        parallel, serial, atol={'float32': 1e-5}.get(name, 0.1))
    assert set(comm.allgather(parallel.tobytes())) == {parallel.tobytes()}


@on_ranks(3)
def test_bcast_data_gives_rank_0s_bits_in_every_dtype_and_order(comm):
    model = Model(shapes=((3, 4), (), (5,)), dtypes=('f2', 'f8', 'f4'))
    model.p0.array = numpy.asfortranarray(model.p0.array)
    for parameter in model.params():
        parameter.array[...] = numpy.asarray(
            (parameter.array + 1) * (comm.rank + 1), parameter.dtype)
    communicator = make('fp8', comm)
    communicator.bcast_data(model)
    with pytest.raises(ValueError, match='on rank 1'):
        communicator.bcast_data(Model(dtypes=('f8' if comm.rank else 'f4',)))
    reference = Model(shapes=((3, 4), (), (5,)), dtypes=('f2', 'f8', 'f4'))
    for (_, parameter), (_, expected) in zip(
            sorted(model.namedparams()), sorted(reference.namedparams()),
            strict=True):
        numpy.testing.assert_array_equal(
            parameter.array,
            numpy.asarray(expected.array + 1, expected.dtype))


@on_ranks(4)
def test_split_gives_a_communicator_of_the_same_kind(comm):
    part = make('fp8', comm, period=7).split(comm.rank % 2, comm.rank)
    assert (part.size, part.name, part.options.period) == (2, 'fp8', 7)
    model = Model()
    set_gradients(model, part.rank)
    part.multi_node_mean_grad(model)
    check_means(model, 2, 0.6)
    part.finalize()
    # A part of a torus chooses a shape itself.
    whole = make('float32', comm, algorithm='torus2d',
                 shape=(numpy.int64(2), numpy.int64(2)))
    part = whole.split(comm.rank % 2, comm.rank)
    assert part.size == 2
    part.finalize()
    whole.finalize()


@on_ranks(4)
def test_chainermns_other_methods_and_parts_work(comm):
    communicator = make('fp8', comm, ranks_per_node=2)
    # Pretended nodes are ChainerMN's, too.
    assert (communicator.intra_rank, communicator.intra_size,
            communicator.inter_rank, communicator.inter_size) == (
        comm.rank % 2, 2, comm.rank // 2, 2)
    assert communicator.bcast_obj(
        'x' if comm.rank == 0 else None) == 'x'
    numpy.testing.assert_array_equal(
        communicator.allreduce(numpy.full(2, comm.rank, 'f4')), [6, 6])
    data = chainermn.scatter_dataset(list(range(10)), communicator)
    assert len(data) == 3
    assert sorted(set(comm.allreduce(list(data)))) == list(range(10))

    class Rank(extensions.Evaluator):
        def evaluate(self):
            return {'loss': float(comm.rank)}
    evaluator = chainermn.create_multi_node_evaluator(
        Rank({}, chainer.Chain()), communicator)
    assert evaluator.evaluate() == {'loss': 1.5}
    x = numpy.random.RandomState(0).rand(8, 3).astype('f4')
    serial = L.BatchNormalization(3)
    serial(x)
    parallel = chainermn.links.MultiNodeBatchNormalization(3, communicator)
    parallel(x[comm.rank::4])
    numpy.testing.assert_allclose(
        parallel.avg_mean, serial.avg_mean, rtol=1e-5)


@on_ranks(2)
def test_chainermns_snapshot_works_with_it(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, epochs=2)
    trainer.extend(chainermn.extensions.multi_node_snapshot(
        communicator, extensions.snapshot(), [0]))
    trainer.run()
    comm.Barrier()
    assert (tmp_path / f'snapshot_iter_10.{comm.rank}').exists()


# --- state --------------------------------------------

@pytest.mark.parametrize(('name', 'options'), [
    ('fp8', {'period': 3}), ('fp8', {'error_feedback': False}),
    ('fp8_paper', {'period': 3}), ('int4', {})])
@on_ranks(2)
def test_a_restored_communicator_goes_on_bit_for_bit(comm, name, options):
    def steps(communicator, first, last):
        results = []
        for step in range(first, last):
            set_gradients(model, comm.rank, step)
            for parameter in model.params():    # scales change, too
                parameter._loss_scale = 1.0 + 999 * (step % 2)
                parameter.grad *= numpy.float32(parameter._loss_scale)
            communicator.multi_node_mean_grad(model)
            results.append(bits(model))
        return results
    model = Model()
    whole = steps(make(name, comm, warmup=2, **options), 0, 8)
    first = make(name, comm, warmup=2, **options)
    for start, stop in (0, 3), (3, 6):
        steps(first, start, stop)
        second = make(name, comm, warmup=2, **options)
        second.load_state(first.state(model), model)
        assert steps(second, stop, 8) == whole[stop:]


# --- bad input -------------------------------------------------------------

def with_another(dtype, model, bad):
    if bad:
        with model.init_scope():
            model.extra = chainer.Parameter(numpy.zeros(2, dtype))


def of_another(shape, dtype, model, bad):
    if bad:
        model.p0.cleargrad()
        model.p0.array = numpy.zeros(shape, dtype)
        model.p0.grad = numpy.zeros(shape, dtype)


def without_gradient(model, bad):
    if bad:
        model.p1.grad = None


def with_element(value, model, bad, part='grad', scale=None,
                 everywhere=False):
    for parameter in model.params():
        parameter._loss_scale = scale
    if bad or everywhere:
        getattr(model.p3, part)[700] = value     # rank 1 sums these


def loss_scales(model, bad):
    for parameter in model.params():
        parameter._loss_scale = 128.0 if bad else 64.0


GRADIENT = 'the gradient of /p3 is not finite in .* on rank 1'


@pytest.mark.parametrize(('change', 'message', 'name', 'options'), [
    (partial(with_another, 'f4'),
     '/extra is missing on rank 0 but .* on rank 1', 'fp8', {}),
    (partial(with_another, 'i4'),
     'rank 1: parameter /extra has dtype int32', 'fp8', {}),
    (partial(of_another, (3, 5), 'f4'), r'/p0 is float32 \(3, 4\) on rank '
     r'0 but float32 \(3, 5\) on rank 1', 'fp8', {}),
    (partial(of_another, (3, 4), 'f8'),
     '/p0 is float32 .* but float64 .* on rank 1', 'fp8', {}),
    (without_gradient, '/p1 is .* on rank 0 but .* without gradient on '
     'rank 1.*zero_fill=True', 'fp8', {}),
    (loss_scales, 'the loss scale is 64.0 on rank 0 but 128.0 on rank 1',
     'fp8', {}),
    (partial(with_element, numpy.nan), GRADIENT, 'fp8', {}),
    (partial(with_element, numpy.inf), GRADIENT, 'fp8', {'warmup': 10}),
    (partial(with_element, numpy.nan), GRADIENT, 'int4', {'warmup': 10}),
    (partial(with_element, numpy.inf), GRADIENT, 'int4', {}),
    # With a static loss scale, Chainer would let it into the weights.
    (partial(with_element, numpy.nan, scale=128.0, everywhere=True),
     'the gradient of /p3 is not finite', 'fp8', {}),
    (partial(with_element, numpy.nan, scale=128.0), GRADIENT, 'fp8',
     {'nonfinite': 'raise'}),
    # A gradient is undone with each rank's own parameter.
    (partial(with_element, numpy.inf, part='array'),
     'the value of /p3 is not finite in fp8 on rank 1', 'fp8', {})])
@on_ranks(3)
def test_all_ranks_raise_the_same_error_in_words(comm, change, message, name,
                                                 options):
    model = Model()
    set_gradients(model, comm.rank)
    change(model, comm.rank == 1)
    communicator = make(name, comm, **options)
    with pytest.raises(RuntimeError if 'not finite' in message
                       else ValueError, match=message) as raised:
        communicator.multi_node_mean_grad(model)
    assert len(set(comm.allgather(str(raised.value)))) == 1


@on_ranks(2)
def test_nan_is_passed_or_named_where_only_its_own_rank_sees_it(comm):
    model = Model(shapes=((3,), (4,)))
    set_gradients(model, comm.rank)
    model.p0.grad[0] = numpy.nan
    make('fp8', comm, nonfinite='pass').multi_node_mean_grad(model)
    assert numpy.isnan(model.p0.grad[0])
    set_gradients(model, comm.rank)
    communicator = make('fp8', comm)
    if comm.rank == 1:
        model.p1.array[0] = numpy.inf   # rank 0 encodes it, and sees nothing
        with pytest.raises(RuntimeError, match='the value of /p1'):
            communicator.multi_node_mean_grad(model)
    else:
        communicator.multi_node_mean_grad(model)


@pytest.mark.parametrize('codec', ['fp8', 'fp8_paper'])
@on_ranks(2)
def test_scales_follow_dynamic_loss_scaling(comm, codec):
    """It doubles at every update: 2^12 times between two choices of q."""
    communicator = make(codec, comm)
    model = Model()
    for step in range(12):
        gradients = set_gradients(model, comm.rank)
        for name, parameter in model.namedparams():
            parameter.grad[...] = gradients[name] * 2.0 ** step
            parameter._loss_scale = 2.0 ** step
        communicator.multi_node_mean_grad(model)
    reports = communicator.report(model).values()
    clipped = sum(report.clipped for report in reports)
    encoded = sum(report.encoded for report in reports)
    assert clipped / encoded < (0.25 if codec == 'fp8_paper' else 1e-3)


@on_ranks(2)
def test_two_models_on_one_communicator_do_not_mix(comm):
    communicator = make('fp8', comm, period=2)
    average_two_models(communicator)


@on_ranks(1)
def test_finalize_gives_mpis_communicators_back(comm):
    communicator = make('fp8', comm, two_level='yes')
    with communicators_left(comm, 20):
        for _ in range(40):
            communicator.split(0, 0).finalize()
    communicator.finalize()


@on_ranks(2)
def test_ranks_resumed_at_different_updates_are_an_error(comm):
    communicator, model = make('fp8', comm), Model()
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    saved = communicator.state(model)
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    if comm.rank == 0:
        communicator.load_state(saved, model)
    with pytest.raises(ValueError, match='number of updates is 1 on rank 0 '
                       'but 2 on rank 1'):
        communicator.multi_node_mean_grad(model)

"""What becomes of an exchange after one faulty gradient."""
import chainer
import numpy
import pytest

from tests.ranks import on_ranks

from .helpers import Model, make

SIZE = 1000
SIGMA = 1e-3
WAYS = [
    ('fp8', {}), ('fp8', {'error_feedback': False}),
    ('fp8', {'algorithm': 'ring'}),
    ('fp8', {'algorithm': 'aggregator'}),
    ('int4', {}),
    ('int4', {'algorithm': 'aggregator'})]


def fresh():
    model = Model(((SIZE,),))
    model.p0.array[...] = 0.1
    return model


def gradients(rank, step):
    return numpy.random.default_rng((rank, step)).normal(
        0, SIGMA, SIZE).astype('f')


@pytest.mark.parametrize('at', [0, 3])
@pytest.mark.parametrize(('name', 'options'), WAYS, ids=str)
@on_ranks(3)
def test_an_outlier_is_over_with_its_update(comm, name, options, at):
    """Whether it saturates or not, where it is sent and where it is summed.

    And where it falls on the update that chooses scales, the first.
    """
    communicator = make(name, comm, **options)
    if communicator is None:
        return
    for outlier in 1e30, 7.9, 0.05:
        if name.startswith('int') and outlier > 1e6:
            continue        # no scale is large enough: an error
        model, late = fresh(), []
        for step in range(at + 5):
            model.p0.grad = gradients(comm.rank, step)
            if step == at and comm.rank == 1:
                model.p0.grad[500] = -outlier
            communicator.multi_node_mean_grad(model)
            if abs(model.p0.grad[500]) > 10 * SIGMA:
                late.append(step)
            if step > at + 1:   # and others are as before
                assert numpy.linalg.norm(model.p0.grad) < (
                    2 * SIGMA * SIZE ** .5)
        assert set(late) <= {at}, (outlier, late)
    communicator.finalize()


@pytest.mark.parametrize(('name', 'options'), [
    ('fp8', {}), ('fp8', {'algorithm': 'aggregator'}), ('int4', {})], ids=str)
@on_ranks(3)
def test_a_skipped_update_leaves_nothing_behind(comm, name, options):
    """Of one that a dynamic loss scale was too large for."""
    communicator = make(name, comm, **options)
    if communicator is None:
        return
    model, scale = fresh(), 1.0
    optimizer = chainer.optimizers.SGD().setup(model)
    optimizer.loss_scaling()        # it is asked whether that is dynamic
    for step in range(10):
        model.p0.grad = gradients(comm.rank, step) * numpy.float32(scale)
        model.p0._loss_scale = scale
        if step == 4:       # of what overflowed
            model.p0.grad[[40, 500]] = numpy.inf, 6e4
        communicator.multi_node_mean_grad(model)
        mean = model.p0.grad.astype(float) / scale
        if step == 4:
            assert not numpy.isfinite(mean).all()
            scale /= 2
        else:
            assert numpy.linalg.norm(mean) < 2 * SIGMA * SIZE ** .5, step
            scale *= 2
    communicator.finalize()

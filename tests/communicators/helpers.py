"""Models whose gradients every rank can compute for every other rank."""
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators import factory
from chainer_fp8pipe.communicators.options import (
    make_options,
    without_warmup,
)

import chainer
import numpy


def make(name, comm, **options):
    """As ``create_communicator``, without warm-up.

    None on an aggregator that is done, whose process would end otherwise.
    """
    options = {**without_warmup(name), **options}
    if options.get('algorithm') != 'aggregator':
        return create_communicator(name, comm, **options)
    with mock.patch.object(factory, '_aggregators', set()):
        return factory.with_aggregators(comm, make_options(name, options))


class Model(chainer.Chain):
    """A few parameters of different shapes (and, if wanted, dtypes)."""

    def __init__(self, shapes=((3, 4), (4,), (), (2000,)), dtypes=('f4',)):
        super().__init__()
        with self.init_scope():
            for number, shape in enumerate(shapes):
                dtype = numpy.dtype(dtypes[number % len(dtypes)])
                generator = numpy.random.default_rng(number)
                value = generator.normal(0, 0.1, shape)
                setattr(self, f'p{number}', chainer.Parameter(
                    numpy.asarray(value, dtype)))


def set_gradients(model, rank, step=0):
    """Normal gradients that depend on rank and step; returns them."""
    generator = numpy.random.default_rng((rank, step))
    gradients = {}
    for name, parameter in sorted(model.namedparams()):
        if parameter.array is not None:
            value = generator.normal(0, 1, parameter.shape)
            parameter.grad = numpy.asarray(value, parameter.dtype)
            gradients[name] = parameter.grad.copy()
    return gradients


def mean_gradients(size, step=0, **model):
    """The float64 mean over ranks of what :func:`set_gradients` sets."""
    everyone = [set_gradients(Model(**model), rank, step)
                for rank in range(size)]
    return {name: numpy.mean([one[name].astype(float) for one in everyone],
                             axis=0) for name in everyone[0]}


def check_means(model, size, atol, step=0, factor=1.0):
    """The gradients are the mean of what :func:`set_gradients` sets."""
    for name, mean in mean_gradients(size, step).items():
        numpy.testing.assert_allclose(
            dict(model.namedparams())[name].grad, mean * factor, rtol=0,
            atol=atol)


def average_two_models(communicator):
    """A generator and a discriminator with parameters of the same names."""
    models = Model(), Model()
    for step in range(6):
        for model, factor in zip(models, (1e3, 1e-3), strict=True):
            set_gradients(model, communicator.rank, step)
            for parameter in model.params():
                parameter.grad *= numpy.float32(factor)
            communicator.multi_node_mean_grad(model)
            check_means(model, communicator.size, 1.5 * factor, step, factor)


def bits_of_updates(communicator, shapes, updates=3):
    """The bits of several updates' means of a model; ends the communicator."""
    model, found = Model(shapes), []
    for step in range(updates):
        set_gradients(model, communicator.rank, step)
        communicator.multi_node_mean_grad(model)
        found.append(bits(model))
    communicator.finalize()
    return found


def bits(model):
    """All gradients' bytes."""
    return b''.join(numpy.asarray(parameter.grad).tobytes()
                    for _, parameter in sorted(model.namedparams()))

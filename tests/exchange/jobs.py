"""Training whose gradients travel in tiny buckets, so that there are many."""
import contextlib
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators.options import Options
from chainer_fp8pipe.exchange.exchange import Exchange, Setup
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainermn
import numpy
from chainer import optimizer_hooks, optimizers

from ..communicators.networks import Plain

CODECS = {'float32': {}, 'float16': {},
          'fp8': {'warmup': 2, 'period': 2}, 'int4': {'warmup': 2}}
#: Each with a hook of the optimizer.
OPTIMIZERS = {
    'sgd': (lambda: optimizers.SGD(0.02), None),
    'adam': (lambda: optimizers.Adam(0.01),
             optimizer_hooks.WeightDecay(0.01)),
    # Needs all gradients before it changes a parameter.
    'clipped': (lambda: optimizers.SGD(0.02),
                optimizer_hooks.GradientClipping(1.0)),
    'lars': (optimizers.MomentumSGD, None),
}


def exchange_of(codec, warmup=0):
    """A model's exchange without a model."""
    return Exchange(lambda: None, Setup(
        None, [], codec, None, Options('fp8', warmup=warmup, bucket_bytes=0)))


def make(comm, name, overlap, **options):
    if options.get('algorithm') != 'mpi_op':     # which has no frames
        options = {'frame_bytes': 64, **options}
    return create_communicator(name, comm, overlap=overlap, **{
        **CODECS[name], 'bucket_bytes': 300, **options})


def wrapped(optimizer, communicator, zero_fill=True):
    return chainermn.create_multi_node_optimizer(
        optimizer, communicator, zero_fill=zero_fill)


def optimizer_of(name, model, communicator, zero_fill=True):
    made, hook = OPTIMIZERS[name]
    optimizer = wrapped(made(), communicator, zero_fill)
    if name == 'lars':
        optimizer = large_batch(optimizer, 8, 0.05, 8, 0.2, 2, samples=64)
    optimizer.setup(model)
    if hook:
        optimizer.add_hook(hook)
    return optimizer


def update(optimizer, model, step, rank):
    optimizer.update(lambda: model.loss(step, rank))


def warm(comm, overlap=True, updates=4, **options):
    """A job whose buckets are sent during backward from now on."""
    communicator = make(comm, 'fp8', overlap, **options)
    numpy.random.seed(1)
    model = Plain()
    optimizer = optimizer_of('sgd', model, communicator)
    for number in range(updates):
        update(optimizer, model, number, comm.rank)
    return communicator, model, optimizer


def early(communicator, model):
    """What a communicator knows of a model's exchange during backward."""
    return communicator._known(model)


@contextlib.contextmanager
def counting(communicator):
    """How many buckets each update sent early."""
    found = []
    original = communicator.multi_node_mean_grad

    def mean(model, *arguments):
        known = early(communicator, model)
        found.append(known.early.ready if communicator.options.overlap
                     and known else 0)
        original(model, *arguments)
    with mock.patch.object(communicator, 'multi_node_mean_grad', mean):
        yield found


def values(model):
    return b''.join(parameter.array.tobytes() for _, parameter
                    in sorted(model.namedparams())
                    if parameter.array is not None)


def train(comm, overlap, network, *, name='fp8', optimizer='sgd', steps=9,
          step=update, scaling=None, zero_fill=True, **options):
    """Trains a model.

    Returns:
        Parameters' bytes after each update; buckets sent early in each.
    """
    communicator = make(comm, name, overlap, **options)
    numpy.random.seed(1)
    model = network()
    made = optimizer_of(optimizer, model, communicator, zero_fill)
    if scaling is not None:
        made.loss_scaling(**scaling)
    found = []
    with counting(communicator) as sent:
        for number in range(steps):
            step(made, model, number, comm.rank)
            found.append(values(model))
    communicator.finalize()
    return found, sent


def same(comm, network, **options):
    """Checks that results are the same bits.

    Returns:
        Buckets sent early in each update.
    """
    plain, _ = train(comm, False, network, **options)
    overlapped, sent = train(comm, True, network, **options)
    assert overlapped == plain
    assert len(set(plain)) > 3, 'it does not learn at all'
    assert comm.allgather(plain[-1]) == [plain[-1]] * comm.size
    return sent


def found_by_grad(optimizer, model, number, rank):
    """Rank 1 finds every second update's gradients in an unwatched way."""
    model.cleargrads()
    loss = model.loss(number, rank)
    if rank == 1 and number % 2:
        parameters = [p for _, p in sorted(model.namedparams())]
        for parameter, gradient in zip(
                parameters, chainer.grad([loss], parameters), strict=True):
            parameter.grad = gradient.array
    else:
        loss.backward()
    optimizer.update()


def accumulated(optimizer, model, number, rank):
    """Gradients add up over several passes."""
    model.cleargrads()
    for part in range(3):
        model.loss(3 * number + part, rank).backward()
    optimizer.update()


def kept(optimizer, model, number, rank):
    """Gradients are kept for a second derivative."""
    model.cleargrads()
    model.loss(number, rank).backward(retain_grad=True,
                                      enable_double_backprop=True)
    optimizer.update()

"""Training whose gradients travel in tiny buckets, so that there are many."""
import contextlib
from unittest import mock

from chainer_fp8pipe.communicators.options import Options
from chainer_fp8pipe.exchange.exchange import Exchange, Setup
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainer.functions as F
import chainermn
import numpy
from chainer import optimizer_hooks, optimizers

from ..communicators import helpers
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


def exchange_of(codec):
    """A model's exchange without a model."""
    return Exchange(lambda: None, Setup(
        None, None, codec, None, Options(
            'fp8', warmup=0, bucket_bytes=0)))


def make(comm, name, overlap, **options):
    if options.get('algorithm') != 'mpi_op':     # which has no frames
        options = {'frame_bytes': 64, **options}
    return helpers.make(name, comm, overlap=overlap, **{
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


def warm(comm, overlap=True, updates=3, *, name='fp8', network=Plain,
         optimizer='sgd', zero_fill=True, **options):
    """A job; after 3 updates buckets are sent during backward."""
    communicator = make(comm, name, overlap, **options)
    numpy.random.seed(1)
    model = network()
    made = optimizer_of(optimizer, model, communicator, zero_fill)
    for number in range(updates):
        update(made, model, number, comm.rank)
    return communicator, model, made


@contextlib.contextmanager
def counting(communicator):
    """How many buckets each mean has found sent early."""
    found = []
    original = communicator.multi_node_mean_grad

    def mean(model, *arguments):
        known = communicator.watcher(model)
        found.append(known.early.ready if known else 0)
        original(model, *arguments)
    with mock.patch.object(communicator, 'multi_node_mean_grad', mean):
        yield found


def values(model):
    return b''.join(parameter.array.tobytes() for _, parameter
                    in sorted(model.namedparams())
                    if parameter.array is not None)


def train(comm, overlap, network, *, steps=9, step=update, scaling=None,
          **options):
    """Trains a model.

    Returns:
        Parameters' bytes after each update; buckets sent early in each.
    """
    communicator, model, made = warm(
        comm, overlap, 0, network=network, **options)
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


# --- ways to make an update -------------------------------------------------

def failed(optimizer, model, number, rank, ranks=(1,)):
    """Backward fails half way on some ranks at every third update."""
    if number % 3 == 1 and rank in ranks:
        with contextlib.suppress(ZeroDivisionError):
            optimizer.update(lambda: model.loss(number + 50, rank)
                             + raising(model.l1.b))
    update(optimizer, model, number, rank)


def raising(variable):
    class Raising(chainer.FunctionNode):
        def forward(self, inputs):
            return numpy.asarray(inputs[0].sum()),

        def backward(self, indexes, gradients):
            raise ZeroDivisionError
    return Raising().apply((variable,))[0]


def failed_everywhere(optimizer, model, number, rank):
    failed(optimizer, model, number, rank, range(4))


def restored(optimizer, model, number, rank):
    """A state is saved and loaded when ranks failed after unequal buckets."""
    if number == 5:
        communicator = optimizer.communicator
        saved, variable = communicator.state(model), model.l1.b
        for _ in range(rank % 2 * 6):    # raises the earlier
            variable = F.tanh(variable)
        with contextlib.suppress(ZeroDivisionError):
            optimizer.update(lambda: model.loss(50, rank) + raising(variable))
        numpy.testing.assert_equal(communicator.state(model), saved)
        communicator.load_state(saved, model)
    update(optimizer, model, number, rank)


def broadcast(optimizer, model, number, rank):
    """What was sent is dropped, also by ranks that sent nothing."""
    if number == 5:
        with contextlib.suppress(ZeroDivisionError):
            optimizer.update(lambda: raising(model.l1.b) + (
                0 if rank else model.loss(50, rank)))
        optimizer.communicator.bcast_data(model)
    update(optimizer, model, number, rank)


def replaced(optimizer, model, number, rank):
    """A communicator of the script's own changes gradients on one rank."""
    communicator = optimizer.communicator
    original = communicator.multi_node_mean_grad

    def mean(target, *arguments):
        if rank == 1 and number % 3 == 1:
            target.l9.W.grad = target.l9.W.grad * 2
        original(target, *arguments)
    with mock.patch.object(communicator, 'multi_node_mean_grad', mean):
        update(optimizer, model, number, rank)


def one_more_pass(optimizer, model, number, rank):
    """For a saliency map; its gradients are cleared."""
    def loss():
        model.loss(number + 50, rank).backward()
        return model.loss(number, rank)
    optimizer.update(loss)


def accumulated(optimizer, model, number, rank):
    """Gradients add up over passes, as many as one likes, on one rank."""
    if rank == 1 and number % 2:
        model.cleargrads()
        for part in range(3):
            model.loss(3 * number + part, rank).backward(retain_grad=True)
        optimizer.update()
    else:
        update(optimizer, model, number, rank)

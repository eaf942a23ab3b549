"""Training steps over a slow network: fp8 and overlap against PyTorch DDP.

    python benchmarks/training.py steps       # an MLP of 4.2 M parameters
    python benchmarks/training.py accelerator # as many, computed elsewhere

4 virtual hosts of this machine (Linux, iproute2) on a star of 500 Mbit/s
links, one rank each, time blocks of 10 whole steps in turns, batch 32 per
rank.  All ranks compute on this machine, each on its share of the cores;
layers of ``accelerator`` sleep instead, 5 ms forward and 10 ms backward each,
as a computation on a GPU leaves the processors alone.

Where a processor has AVX-512, OpenBLAS's kernels for it may be slower for a
batch of 32 than those for Haswell: OPENBLAS_CORETYPE=Haswell takes these.
"""
from __future__ import annotations

import os
import statistics
import time

import chainer_fp8pipe

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from environment import (
    describe,
    milliseconds,
    parser,
    ranks_of,
    start,
    with_torch,
)
from mpi4py import MPI
from network import Star, begin

_HOSTS = 4


def main() -> None:
    options = _arguments()
    begin()
    print(describe(), flush=True)
    torch = with_torch(not options.without_torch)
    network = Star(_HOSTS, options.rate)
    print(network.describe(), flush=True)
    rows = ranks_of('training.py', {
        'what': options.what, 'repeats': options.repeats, 'torch': torch},
        network=network)
    print()
    _show(rows)


def _show(rows):
    base = statistics.median(rows[0]['seconds'])
    print(f'{"":<32}{"median [ms]":>12}{"spread [ms]":>20}  '
          f'x {rows[0]["label"]}')
    for row in rows:
        median, spread = milliseconds(row['seconds'])
        print(f'{row["label"]:<32}{median:>12}{spread:>20}  '
              f'{base / statistics.median(row["seconds"]):.2f}')


def _arguments():
    given = parser(__doc__, 'torch')
    given.add_argument('what', choices=['steps', 'accelerator'])
    given.add_argument('--rate', type=float, default=500e6, metavar='BIT/S',
                       help='of every link (default: 500e6)')
    given.add_argument('--repeats', type=int, default=15, metavar='N',
                       help='blocks of steps that are timed (default: 15)')
    return given.parse_args()


# --- ranks -------------------------------------------------------------------

BATCH = 32
WIDTHS = (1024, 2048, 1024, 10)
# (label, communicator, options): the exchange of an update in four ways.
CASES = [('float32', 'float32', {}),
         ('fp8', 'fp8', {'warmup': 0}),
         ('fp8, overlapped', 'fp8', {'warmup': 0, 'overlap': True}),
         ('int4', 'int4', {'warmup': 0}),
         ('int4, overlapped', 'int4', {'warmup': 0, 'overlap': True})]
# Steps that are timed together: what one leaves to the next is in it.
BLOCK = 10


def rank(comm, job):
    keep_to_own_cores(comm.rank, comm.size)
    return steps(comm, NETWORK[job['what']], job['repeats'], job['torch'])


def keep_to_own_cores(host, hosts):
    """Hosts share this machine's cores evenly, and none moves to another's.

    Otherwise three of four hosts may meet on one of two cores for a while,
    and all wait for them.
    """
    if not hasattr(os, 'sched_setaffinity'):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // hosts, 1)
    os.sched_setaffinity(0, {
        cores[(host * each + index) % len(cores)] for index in range(each)})


def steps(comm, network, repeats, with_torch):
    """Seconds of a training step, ours and PyTorch's in turns.

    Each figure is the mean of a block of steps, until all parameters of the
    last one can be read.
    """
    made = {label: _chainer_step(comm, network, name, options)
            for label, name, options in CASES}
    if with_torch:
        made['PyTorch DDP, gloo, float32'] = _torch_step(comm, network, False)
        made['PyTorch DDP, gloo, fp16 hook'] = _torch_step(comm, network,
                                                           True)
    seconds = {label: [] for label in made}
    warming_up = 2
    for repeat in range(repeats + warming_up):
        for label, step in made.items():
            taken = _timed(comm, step)
            if repeat >= warming_up:
                seconds[label].append(taken)
    return [{'label': label, 'seconds': times}
            for label, times in seconds.items()]


def _timed(comm, step):
    comm.Barrier()
    begun = time.perf_counter()
    for _ in range(BLOCK):
        parameters = step()
    for parameter in parameters:
        assert parameter.data is not None       # waits, if it must
    return comm.allreduce(time.perf_counter() - begun, MPI.MAX) / BLOCK


def _chainer_step(comm, network, name, options):
    model = network.make()
    communicator = chainer_fp8pipe.create_communicator(name, comm, **options)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1e-3), communicator)
    optimizer.setup(model)
    x, t = network.data(comm.rank)

    def step():
        optimizer.update(model, x, t)
        return model.params()
    return step


def _torch_step(comm, network, half):
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group('gloo', rank=comm.rank, world_size=comm.size)
    model = torch.nn.parallel.DistributedDataParallel(
        network.make_torch(), bucket_cap_mb=4)      # as ours
    if half:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, t = map(torch.from_numpy, network.data(comm.rank))
    t = t.long()

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), t).backward()
        optimizer.step()
        return model.parameters()
    return step


class Mlp(chainer.ChainList):
    """Linear layers with ReLU between them."""

    def __init__(self, widths):
        super().__init__(*(L.Linear(n_in, n_out) for n_in, n_out
                           in zip(widths[:-1], widths[1:], strict=True)))

    def forward(self, x):
        *hidden, last = self
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


class _Perceptron:
    """An MLP that the ranks compute themselves."""

    @staticmethod
    def make():
        model = L.Classifier(Mlp(WIDTHS))
        model.compute_accuracy = False
        return model

    @staticmethod
    def make_torch():
        import torch
        layers = []
        for n_in, n_out in zip(WIDTHS[:-1], WIDTHS[1:], strict=True):
            layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    @staticmethod
    def data(rank):
        return _random(rank, BATCH, WIDTHS[0], WIDTHS[-1])


# A network that computes elsewhere: its layers take time, but no processor.
# So does one on a GPU: the processors are free for the exchange meanwhile.
# Every layer sleeps in its forward and in its backward pass.
_LAYERS, _WIDTH = 8, 724        # 4.2 M parameters
_FORWARD, _BACKWARD = 5e-3, 10e-3       # seconds of a layer


class _Elsewhere(chainer.FunctionNode):
    """The identity, which takes its time."""

    def forward(self, inputs):
        time.sleep(_FORWARD)
        return inputs

    def backward(self, indexes, gradients):
        time.sleep(_BACKWARD)
        return gradients


class _Accelerator(chainer.ChainList):
    """Called with a batch, it returns the loss."""

    def __init__(self):
        super().__init__(*(L.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    def forward(self, x, t):
        for layer in self:
            x, = _Elsewhere().apply((F.relu(layer(x)),))
        return F.softmax_cross_entropy(x, t)

    make = classmethod(lambda cls: cls())

    @staticmethod
    def make_torch():
        """The same for PyTorch; called with a batch, it returns outputs."""
        import torch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                time.sleep(_FORWARD)
                return x.view_as(x)

            @staticmethod
            def backward(context, gradient):
                time.sleep(_BACKWARD)
                return gradient

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(
                    torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

            def forward(self, x):
                for layer in self.layers:
                    x = Function.apply(torch.relu(layer(x)))
                return x
        return Module()

    @staticmethod
    def data(rank):
        # A batch that takes next to nothing to compute here.
        return _random(rank, 2, _WIDTH, _WIDTH)


NETWORK = {'steps': _Perceptron, 'accelerator': _Accelerator}


def _random(rank, batch, inputs, outputs):
    generator = numpy.random.default_rng(rank)
    return (generator.standard_normal((batch, inputs), numpy.float32),
            generator.integers(0, outputs, batch).astype(numpy.int32))


if __name__ == '__main__':
    start(main, rank)

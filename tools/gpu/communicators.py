"""A communicator on the GPU against itself on the CPU.

    mpiexec -n 4 python -m tools.gpu.communicators fp8 --device @cupy:0

First gradients that are drawn, so the same on both sides, are averaged a few
times: the means must have the same bits.  Then a small network is trained
from the same weights on the same batches; forward and backward passes round
in another way there, so the losses are only close.
"""
from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable

import chainer_fp8pipe
from chainer_fp8pipe.communicators.options import parse_option
from chainer_fp8pipe.compat import require_gpu

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from mpi4py import MPI

#: What runs on a GPU only is compared with another's means on the CPU.
ON_THE_CPU: dict[str, str | None] = {
    'flat': 'naive', 'non_cuda_aware': 'naive', 'pure_nccl': 'naive',
    'dummy': None}
CLOSE = 0.05


class Net(chainer.Chain):
    """A convolution, a batch normalisation and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(1, 16, 3, pad=1)
            self.norm = L.BatchNormalization(16)
            self.hidden = L.Linear(16 * 8 * 8, 128)
            self.out = L.Linear(128, 10)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        h = F.relu(self.norm(self.conv(x)))
        return self.out(F.relu(self.hidden(h)))


def make_model(device: chainer.backend.Device) -> chainer.Link:
    """The same weights everywhere, drawn on the CPU."""
    numpy.random.seed(0)
    model = L.Classifier(Net())
    model(numpy.zeros((1, 1, 8, 8), 'f'), numpy.zeros(1, 'i'))
    model.cleargrads()
    model.to_device(device)
    return model


def means(communicator: chainermn.CommunicatorBase,
          device: chainer.backend.Device, exchanges: int
          ) -> list[numpy.ndarray]:
    """What becomes of drawn gradients, exchange by exchange."""
    model = make_model(device)
    rng = numpy.random.default_rng(communicator.rank)
    found = []
    for _ in range(exchanges):
        for _, parameter in sorted(model.namedparams()):
            # Arrays and no views, which would keep what they are cut from.
            gradient = rng.standard_normal(parameter.shape) * 1e-3
            parameter.grad = device.send(gradient.astype(numpy.float32))
        communicator.multi_node_mean_grad(model)
        found += [chainer.backends.cuda.to_cpu(parameter.grad).copy()
                  for _, parameter in sorted(model.namedparams())]
    return found


def losses(communicator: chainermn.CommunicatorBase,
           device: chainer.backend.Device, updates: int) -> list[float]:
    """This rank's losses of a short training."""
    model = make_model(device)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.02), communicator).setup(model)
    rng = numpy.random.default_rng(communicator.rank)
    centres = numpy.random.default_rng(99).standard_normal((10, 1, 8, 8))
    found = []
    for _ in range(updates):
        labels = rng.integers(0, 10, 16).astype(numpy.int32)
        images = (centres[labels] + rng.standard_normal((16, 1, 8, 8))
                  ).astype(numpy.float32)
        optimizer.update(model, *map(device.send, (images, labels)))
        found.append(float(chainer.backends.cuda.to_cpu(
            chainer.as_array(model.loss))))
    return found


class Nobody:
    """What ``dummy`` is, without a GPU: nothing is exchanged."""

    def __init__(self) -> None:
        self.rank = MPI.COMM_WORLD.rank

    def multi_node_mean_grad(self, model: chainer.Link,
                             zero_fill: bool = False) -> None:
        """Leaves the gradients as they are."""

    def bcast_data(self, model: chainer.Link) -> None:
        """Leaves the parameters as they are: all ranks draw the same."""


def create(spec: str, **defaults: object) -> chainermn.CommunicatorBase:
    """The communicator of ``fp8`` or ``fp8:overlap=true``."""
    name, _, given = spec.partition(':')
    options = defaults if name.startswith('fp8') else {}
    for part in filter(None, given.split(',')):
        option, _, value = part.partition('=')
        options[option] = parse_option(name, option, value)
    return chainer_fp8pipe.create_communicator(name, **options)


def on(device: chainer.backend.Device, what: Callable[..., list],
       communicator: chainermn.CommunicatorBase, times: int) -> list:
    """Runs :func:`means` or :func:`losses` there."""
    device.use()
    found = what(communicator, device, times)
    if hasattr(communicator, 'events'):
        communicator.finalize()
    return found


def both(device: chainer.backend.Device, what: Callable[..., list],
         spec: str, times: int, warmup: int) -> tuple[list, list, float]:
    """What the CPU and the device find, and the device's seconds."""
    there = ON_THE_CPU.get(spec, spec)
    wanted = on(chainer.get_device('@numpy'), what,
                create(there, warmup=warmup) if there else Nobody(), times)
    communicator = create(spec, warmup=warmup)
    start = time.perf_counter()
    found = on(device, what, communicator, times)
    return wanted, found, time.perf_counter() - start


def differing(wanted: list, found: list) -> tuple[int, float]:
    """Elements with other bits, and the largest difference."""
    count, largest = 0, 0.0
    for one, other in zip(wanted, found, strict=True):
        count += int(numpy.count_nonzero(
            one.view(numpy.uint32) != other.view(numpy.uint32)))
        largest = max(largest, float(numpy.abs(one - other).max()))
    return count, largest


def check(spec: str, device: chainer.backend.Device, times: int) -> bool:
    """Prints a few lines on rank 0; whether all is as it should be."""
    world = MPI.COMM_WORLD
    wanted, found, seconds = both(device, means, spec, times, 0)
    counts, sizes = zip(*world.allgather(differing(wanted, found)),
                        strict=True)
    here, there, _ = both(device, losses, spec, 4 * times, 2)
    apart = max(world.allgather(max(
        abs(one - other) / max(abs(one), 0.1)
        for one, other in zip(here, there, strict=True))))
    # Another communicator may add in another order.
    same = (max(sizes) < 1e-7 if ON_THE_CPU.get(spec) else sum(counts) == 0)
    good = same and apart < CLOSE
    total = world.size * sum(array.size for array in wanted)
    if world.rank == 0:
        print(f'{spec} on {world.size} ranks, {device}: '
              f'{"as on the CPU" if good else "NOT AS ON THE CPU"}\n'
              f'  means of drawn gradients: {sum(counts):,} of {total:,} '
              f'elements differ, by at most {max(sizes):.3g} '
              f'({seconds:.2f} s)\n'
              f'  losses, first and last of {4 * times} updates: '
              f'{there[0]:.4f}, {there[-1]:.4f} (CPU: {here[0]:.4f}, '
              f'{here[-1]:.4f}; at most {apart:.2%} apart)', flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', help='with options, as in fp8:overlap=true')
    parser.add_argument('--device', default='@cupy:0')
    parser.add_argument('--exchanges', type=int, default=5, metavar='N')
    options = parser.parse_args()
    warnings.simplefilter('ignore')
    if options.device != '@numpy':
        require_gpu()
    good = check(options.name, chainer.get_device(options.device),
                 options.exchanges)
    sys.exit(not good)


if __name__ == '__main__':
    main()

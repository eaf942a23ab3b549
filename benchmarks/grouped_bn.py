"""Batch normalisation over several ranks beside ChainerMN's and Chainer's.

    mpiexec -n 2 python benchmarks/grouped_bn.py

Time of a forward and a backward pass of one layer in float32, each rank with
a batch of its own: the median over repetitions of the slowest rank.  Chainer's
link normalises each rank's batch by itself and sends nothing.  The layers are
some of ResNet-50's, by channels and pixels.  The error is that of the running
variance over one batch with a mean of 1000 standard deviations, against
float64.
"""
from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable

from chainer_fp8pipe.links.grouped_bn import GroupedBatchNormalization
from chainer_fp8pipe.mpi.grid import Group, split_groups

import chainer
import chainer.links as L
import chainermn
import numpy
from environment import describe, parser, write_json
from mpi4py import MPI

COMM = MPI.COMM_WORLD
LOCAL = 'Chainer, local'
LAYERS = [(64, 56 * 56), (256, 28 * 28), (512, 14 * 14), (2048, 7 * 7)]


def makers() -> dict[str, Callable[..., chainer.Link]]:
    """Links by name."""
    naive = chainermn.create_communicator('naive', mpi_comm=COMM)
    return {
        LOCAL: L.BatchNormalization,
        'ChainerMN': functools.partial(
            chainermn.links.MultiNodeBatchNormalization, comm=naive),
        'grouped': functools.partial(
            GroupedBatchNormalization, group=Group(split_groups(COMM))),
    }


def step(link: chainer.Link, x: numpy.ndarray, gy: numpy.ndarray) -> float:
    """Seconds that the slowest rank takes for forward and backward."""
    link.cleargrads()
    variable = chainer.Variable(x)
    COMM.Barrier()
    start = time.perf_counter()
    y = link(variable)
    y.grad = gy
    y.backward()
    return COMM.allreduce(time.perf_counter() - start, MPI.MAX)


def times(channels: int, pixels: int, batch: int, repetitions: int
          ) -> dict[str, float]:
    """Milliseconds of each link, taking turns."""
    random = numpy.random.default_rng(COMM.rank)
    x, gy = (random.standard_normal((batch, channels, pixels), numpy.float32)
             for _ in range(2))
    links = {name: make(channels) for name, make in makers().items()}
    found: dict[str, list[float]] = {name: [] for name in links}
    for _ in range(repetitions + 1):
        for name, link in links.items():
            found[name].append(step(link, x, gy))
    # The first repetition warms up.
    return {name: 1e3 * statistics.median(seconds[1:])
            for name, seconds in found.items()}


def error(name: str, make: Callable[..., chainer.Link]) -> float:
    """Of the running variance, relative."""
    x = numpy.random.default_rng(COMM.rank).normal(
        1000, 1, (32, 64, 28 * 28)).astype(numpy.float32)
    link = make(64, decay=0.0)
    link(x)
    whole = x if name == LOCAL else numpy.concatenate(COMM.allgather(x))
    wanted = whole.astype(float).var(axis=(0, 2), ddof=1)
    return float(abs(link.avg_var / wanted - 1).max())


def table(rows: dict[tuple[int, int], dict[str, float]],
          errors: dict[str, float]) -> str:
    """Both as text."""
    lines = [f'{"channels x pixels [ms]":24}'
             + ''.join(f'{name:>16}' for name in errors)]
    for (channels, pixels), found in rows.items():
        lines.append(f'{channels:14} x {pixels:<7}' + ''.join(
            f'{value:16.2f}' for value in found.values()))
    lines.append(f'{"error of the variance":24}' + ''.join(
        f'{value:16.1e}' for value in errors.values()))
    return '\n'.join(lines)


def main() -> None:
    given = parser(__doc__)
    given.add_argument('--batch', type=int, default=8,
                       help='samples of each rank (8)')
    given.add_argument('--repetitions', type=int, default=15,
                       help='of which the median is told (15)')
    options = given.parse_args()
    rows = {layer: times(*layer, options.batch, options.repetitions)
            for layer in LAYERS}
    errors = {name: error(name, make) for name, make in makers().items()}
    if COMM.rank:
        return
    about = describe().replace(
        '\npython', f'\nmpiexec -n {COMM.size} python')
    print(f'{about}\n{options.batch} samples on each rank\n\n'
          f'{table(rows, errors)}')
    if options.json:
        write_json(options.json, {
            'ranks': COMM.size, 'batch': options.batch, 'errors': errors,
            'milliseconds': {f'{channels} x {pixels}': found for (
                channels, pixels), found in rows.items()}})


if __name__ == '__main__':
    with warnings.catch_warnings(), chainer.using_config('train', True):
        # ChainerMN says that its link is experimental.
        warnings.simplefilter('ignore', FutureWarning)
        main()

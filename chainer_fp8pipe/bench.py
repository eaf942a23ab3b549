"""``python -m chainer_fp8pipe bench allreduce``: what is fastest here."""
# All that is compared is timed in turns, so that a slow minute hits all of it,
# beside the MPI library's own float32 all-reduce.
from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from .allreduce.plan import ALGORITHMS
from .codecs import CODECS
from .command_line import Parser, as_type, count, some_of
from .communicators import create_communicator
from .communicators.options import make_options, without_warmup
from .report.quantities import columns, parse_count

#: The name of the MPI library's float32 all-reduce in tables.
MPI_LIBRARY = "MPI's Allreduce"
#: Those that a communicator can have without ranks that only sum.
_ALGORITHMS = [row for row in ALGORITHMS.values() if not row.has_servers]
_DESCRIPTION = """
Times the mean of gradients over all ranks, for every codec with every
algorithm, beside the MPI library's own float32 all-reduce:

    mpiexec -n 8 python -m chainer_fp8pipe bench allreduce --sizes 1M,25M

Start it as you start your training: same hosts, same ranks per host.  The
times are those of a communicator in an update: encode, exchange, decode.  A
note says where no codec is faster than float32.
"""


class Result(NamedTuple):
    """Seconds and bytes of one mean of gradients."""

    size: int           # elements of the gradients
    codec: str
    algorithm: str
    seconds: tuple[float, ...]  # until the last rank was through
    nbytes: int = 0     # that the rank sends that sends most

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)


def measure(comm: MPI.Comm, cases: Sequence[tuple[str, str]],
            sizes: Sequence[int], repeats: int) -> list[Result]:
    """Times all cases, and the MPI library's own beside them.

    A case is a codec and an algorithm, a size the elements of the gradients.
    Each is repeated so often, after one update for warming up.
    """
    results = []
    for size in sizes:
        link, data = gradients(comm, size), numpy.zeros((2, size), 'f')
        made: list[Any] = [create_communicator(
            codec, comm, algorithm=algorithm, **without_warmup(codec))
            for codec, algorithm in cases]
        actions: list[Callable[[], Any]] = [
            # MPICH took up to a fifth longer in place, as naive calls it.
            functools.partial(comm.Allreduce, *data),
            *(functools.partial(one.multi_node_mean_grad, link)
              for one in made)]
        found = [[_timed(comm, action) for action in actions]
                 for _ in range(repeats + 1)][1:]
        sent = [0, *(one.events.bytes_sent // (repeats + 1) for one in made)]
        results += [
            Result(size, *case, seconds, comm.allreduce(nbytes, MPI.MAX))
            for case, seconds, nbytes in zip(
                [('float32', MPI_LIBRARY), *cases], zip(*found, strict=True),
                sent, strict=True)]
        for communicator in made:
            communicator.finalize()
    return results


def gradients(comm: MPI.Comm, size: int) -> chainer.Link:
    """A parameter, the same on all ranks, with a gradient that is not."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(numpy.random.default_rng(
            0).standard_normal(size, numpy.float32))
    link.x.grad = numpy.random.default_rng((1, comm.rank)).standard_normal(
        size, numpy.float32)
    return link


def _timed(comm: MPI.Comm, action: Callable[[], Any]) -> float:
    comm.Barrier()
    start = time.perf_counter()
    action()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def table(results: Sequence[Result]) -> str:
    """The results as text, the fastest of each size marked, and why."""
    rows = [('elements', 'codec', 'algorithm', 'median', 'spread',
             'x MPI float32', 'sent', '')]
    for size in dict.fromkeys(result.size for result in results):
        ours = [result for result in results if result.size == size]
        best = min(ours, key=lambda one: one.median)
        rows += [(f'{size:,}', one.codec, one.algorithm,
                  f'{one.median * 1e3:.4g} ms', f'{min(one.seconds) * 1e3:.4g}'
                  f' - {max(one.seconds) * 1e3:.4g}',
                  f'{ours[0].median / one.median:.2f}',
                  f'{one.nbytes / 1e6:.3g} MB' * bool(one.nbytes),
                  '<- fastest' * (one is best)) for one in ours]
    lines = columns(rows)
    rounded = [one.median for one in ours if one.codec != 'float32']
    if rounded and best.codec == 'float32':
        lines.append('\nwarning: no compression pays here: float32 takes '
                     f'{best.median * 1e3:.3g} ms, the best codec '
                     f'{min(rounded) * 1e3:.3g} ms')
    return '\n'.join(lines)


def add_bench(parser: Parser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.add_argument('what', metavar='allreduce', choices=('allreduce',))
    parser.add_argument(
        '--sizes', metavar='N,N...', default='1M,8M', type=lambda text: [
            as_type(parse_count)(part) for part in text.split(',')],
        help='elements of the gradients, with k, M or G (default: 1M,8M)')
    for name, default, known in (
            ('codecs', 'int4,fp8,float16,float32', [
                name for name, row in CODECS.items() if not row.for_study]),
            ('algorithms', ','.join(
                row.name for row in _ALGORITHMS if row.differs(4)),
             [row.name for row in _ALGORITHMS])):
        parser.add_argument(
            f'--{name}', type=some_of(known), default=default,
            metavar='NAME,...',
            help=f'some of {", ".join(known)} (default: {default})')
    parser.add_argument('--repeats', type=count, default=5, metavar='N',
                        help='of each case, after one more (default: 5)')
    parser.set_defaults(call=_allreduce, parser=parser)


def _allreduce(options: argparse.Namespace) -> None:
    comm, refuse = MPI.COMM_WORLD, options.parser.error
    cases = [(codec, algorithm) for codec in options.codecs
             for algorithm in options.algorithms]
    try:
        for codec, algorithm in cases:
            make_options(codec, {'algorithm': algorithm})
        if comm.size < 2:
            refuse('there is one rank only; start it with mpiexec -n 2 or '
                   'more')
        hosts = len(set(comm.allgather(MPI.Get_processor_name())))
        found = measure(comm, cases, options.sizes, options.repeats)
    except ValueError as error:         # the same on all ranks
        refuse(str(error))
    print(f'{comm.size} ranks, number of hosts: {hosts}, medians of '
          f'{options.repeats}\n\n{table(found)}', flush=True)

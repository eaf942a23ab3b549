"""Times means of gradients by real communicators, and links between stages.
"""
# For every number of stages that divides the ranks, the ranks are put on the
# grid that a plan would make, and each stage's replicas make the communicator
# of a plan and have it average made-up gradients: all stages at once, as in a
# training, and without warm-up.  Two sizes give a line.  So all that an
# exchange costs is in it: agreement, Python, encoding, shared cores, wires
# that several groups share, links that are slow.  Nothing of a network has to
# be known.
from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..communicators import create_communicator
from ..communicators.options import without_warmup
from ..mpi.grid import ProcessGrid
from ..mpi.measured import measure_links
from ..mpi.ranks import once
from ..mpi.waiting import wait_until
from ..planning.choices import algorithms
from ..planning.schedule_time import Link
from ..planning.step import ExchangeFigures

#: Elements of the larger exchange at most, and how many times as many it has
#: as the smaller one.
_ELEMENTS, _TIMES = 1 << 20, 8
#: Repeats of an exchange, after one that is not timed.
_FEWEST, _MOST = 2, 9
#: Elements of a tensor; models have many.
_TENSOR = 1 << 17


def measure_layouts(comm: MPI.Comm, stages: Sequence[int],
                    codecs: Sequence[str], elements: int, seconds: float
                    ) -> tuple[dict[tuple[int, str, str], ExchangeFigures],
                               dict[int, Link]]:
    """Measures all that ranks of different layouts do together.

    Call it on all ranks.

    Args:
        comm: All ranks, mpi4py's.
        stages: Numbers of stages that may be chosen.
        codecs: Names of communicators that may be chosen.
        elements: Of the model's parameters.
        seconds: For all of it; each exchange is measured a few times,
            whatever that takes.

    Returns:
        Exchanges by stages, codec and algorithm; links by stages.  The same
        on all ranks, bit for bit.

    Raises:
        RuntimeError: An exchange has failed on a rank; on all ranks.
    """
    ways = [(number, codec, algorithm) for number in stages
            if number < comm.size for codec in codecs
            for algorithm in algorithms(comm.size // number)]
    exchanges, links = {}, {}
    for number in stages:
        grid = once(comm, f'grid of {number} stages', functools.partial(
            ProcessGrid, comm, pipeline=number))
        if number > 1:
            latencies, bandwidths = zip(*comm.allgather(
                measure_links(grid.pipeline)), strict=True)
            links[number] = Link(max(latencies), min(bandwidths))
        for way in ways:
            if way[0] == number:
                exchanges[way] = time_exchange(
                    comm, grid.data, way[1], way[2], elements // number,
                    seconds / len(ways))
    return comm.bcast((exchanges, links))


def time_exchange(comm: MPI.Comm, group: MPI.Comm, codec: str,
                  algorithm: str, elements: int, seconds: float
                  ) -> ExchangeFigures:
    """Times the means of a communicator; call it on all ranks.

    Args:
        comm: All ranks, which exchange at the same time.
        group: Those of them that this rank exchanges with.
        codec: Name of the communicator.
        algorithm: Its option.
        elements: Of the gradients, at most.
        seconds: That both sizes together may take.
    """
    large = max(min(elements, _ELEMENTS), 64)
    small = max(large // _TIMES, 8)
    communicator: Any = create_communicator(
        codec, group, algorithm=algorithm, **without_warmup(codec))
    with contextlib.ExitStack() as stack:
        stack.callback(communicator.finalize)
        times = []
        for size in (small, large):
            link = made_up(size)
            before = _processor(communicator)
            of = timed(comm, functools.partial(
                communicator.multi_node_mean_grad, link), seconds / 2)
            spent = (_processor(communicator) - before) / (len(of) + 1)
            times.append((statistics.median(of), comm.allreduce(
                spent, MPI.MAX)))
    return line(group.size, (small, large), *zip(*times, strict=True))


def line(replicas: int, sizes: tuple[int, int], seconds: Sequence[float],
         processor: Sequence[float]) -> ExchangeFigures:
    """What is fixed, and what each element adds, by two measurements."""
    small, large = sizes
    each = max((seconds[1] - seconds[0]) / (large - small),
               0.1 * seconds[1] / large)
    return ExchangeFigures(
        replicas, max(seconds[1] - each * large, 0.0), each,
        min(processor[1] / large, each))


def timed(comm: MPI.Comm, work: Callable[[], object], seconds: float,
          clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of repeats, each that of the slowest rank.

    All ranks begin each repeat together, and make equally many.
    """
    found: list[float] = []
    begin = clock()
    while len(found) <= _FEWEST or len(found) < _MOST and comm.bcast(
            clock() - begin < seconds):
        wait_until(comm.Ibarrier().Test)
        start = clock()
        work()
        found.append(comm.allreduce(clock() - start, MPI.MAX))
    return found[1:]            # the first one connects ranks


def made_up(elements: int) -> chainer.Link:
    """Parameters with gradients: tensors as a model has them."""
    link = chainer.Link()
    with link.init_scope():
        for number, start in enumerate(range(0, elements, _TENSOR)):
            size = min(_TENSOR, elements - start)
            values = numpy.linspace(-1, 1, size, dtype=numpy.float32)
            setattr(link, f'p{number}', chainer.Parameter(values))
    for parameter in link.params():
        parameter.grad = parameter.array * 1e-2
    return link


def _processor(communicator: Any) -> float:
    """Seconds in which this rank has encoded, added and decoded."""
    seconds = communicator.events.seconds
    return seconds['encode'] + seconds['decode']

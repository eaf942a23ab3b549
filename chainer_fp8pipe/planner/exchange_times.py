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
#: Repeats of what is timed, after one that is not.
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
                exchanges[way] = _exchange(
                    comm, grid.data, way[1], way[2], elements // number,
                    seconds / len(ways))
    return comm.bcast((exchanges, links))


def _exchange(comm: MPI.Comm, group: MPI.Comm, codec: str, algorithm: str,
              elements: int, seconds: float) -> ExchangeFigures:
    """Times the means of a group of ranks, while other groups do the same."""
    large = max(min(elements, _ELEMENTS), 64)
    small = max(large // _TIMES, 8)
    communicator: Any = create_communicator(
        codec, group, algorithm=algorithm, **without_warmup(codec))

    def timed(link: chainer.Link) -> tuple[float, float]:
        begin, (busy, _) = time.perf_counter(), spent(communicator, link)
        return comm.allreduce(time.perf_counter() - begin, MPI.MAX), busy
    try:
        found = [repeated(comm, functools.partial(timed, _made_up(size)),
                          seconds / 2) for size in (small, large)]
    finally:
        communicator.finalize()
    whole, busy = zip(*(map(statistics.median, zip(*of, strict=True))
                        for of in found), strict=True)
    return line(group.size, (small, large), whole,
                comm.allreduce(busy[1], MPI.MAX))


def line(replicas: int, sizes: tuple[int, int], seconds: Sequence[float],
         processor: float) -> ExchangeFigures:
    """What is fixed, and what each element adds, by two measurements.

    ``processor`` is what a rank encodes, adds and decodes in the longer one.
    """
    small, large = sizes
    each = max((seconds[1] - seconds[0]) / (large - small),
               0.1 * seconds[1] / large)
    return ExchangeFigures(replicas, max(seconds[1] - each * large, 0.0),
                           each, min(processor / large, each))


def repeated(comm: MPI.Comm, work: Callable[[], Any], seconds: float,
             clock: Callable[[], float] = time.perf_counter) -> list[Any]:
    """What some work returns each time; all ranks begin together.

    Args:
        comm: The ranks, which repeat the work equally often.
        work: The first time, which connects ranks and gets memory, does not
            count.
        seconds: After which the work is not repeated again.
        clock: Gives seconds.
    """
    found: list[Any] = []
    begin = clock()
    while len(found) <= _FEWEST or len(found) <= _MOST and comm.bcast(
            clock() - begin < seconds):
        wait_until(comm.Ibarrier().Test)
        found.append(work())
    return found[1:]


def _made_up(elements: int) -> chainer.Link:
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


def spent(communicator: Any, link: chainer.Link) -> tuple[float, int]:
    """Averages gradients, as in an update.

    Returns:
        Seconds in which this rank has encoded, added and decoded, and bytes
        that it has sent.
    """
    events = communicator.events

    def so_far() -> tuple[float, int]:
        return (events.seconds['encode'] + events.seconds['decode'],
                events.bytes_sent)
    seconds, sent = so_far()
    communicator.multi_node_mean_grad(link)
    after, sent_after = so_far()
    return after - seconds, sent_after - sent

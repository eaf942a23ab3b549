"""For how long a message of an exchange keeps a rank of a host busy."""
from __future__ import annotations

import functools
import math
import statistics
import time
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ...allreduce.bucket import Bucket
from ...allreduce.executor import Framing, PlanExecutor
from ...allreduce.plan import direct
from ...codecs import Cast, Tensors
from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from ...planning.job.job_profile import Figure
from ...report.stream import EventStream

#: Bytes of frames that are compared, and of a rank's wire.
_SHORT, _LONG, _BYTES = 1 << 13, Framing.frame_bytes, 1 << 23
_FEWEST, _MOST = 4, 31          # repeats
# Share of an exchange's processor time that messages take at least.
_LEAST = 0.1


class MessageCosts(NamedTuple):
    """For how long a rank is busy, at either end.

    Attributes:
        message: Seconds of each message.
        byte: Seconds of each byte.
    """

    message: Figure
    byte: Figure


def measure_local_messages(comm: MPI.Comm, budget: float = 1.0
                           ) -> MessageCosts | None:
    """Measures messages between ranks of a host; call it on all ranks.

    The ranks of each host exchange wires that are encoded already, as in an
    update: compiled code sends and receives.  Their processor time counts,
    without that of sums.  Messages that Python starts and asks for keep a
    rank busy for twice as long.

    Args:
        comm: All ranks of the job, mpi4py's.
        budget: Seconds; a few repeats are made whatever they take.

    Returns:
        The costs, of all hosts in the mean; the same on all ranks, bit for
        bit.  None if no two ranks share a host.

    Raises:
        RuntimeError: A rank has failed; on all ranks.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        if max(comm.allgather(host.size)) == 1:
            return None
        wires = [raise_together(comm, functools.partial(
            _Wire, frame, host.size)) for frame in (_SHORT, _LONG)]
        exchanges = [_Exchange(host, wire) for wire in wires]
        try:
            found = _repeat(comm, exchanges, budget)
        finally:
            for exchange in exchanges:
                exchange.executor.free()
    finally:
        host.Free()
    return comm.bcast(costs_of(found))


def costs_of(seconds: list[tuple[float, float]]) -> MessageCosts:
    """The costs by the seconds of an end of a short and of a long frame."""
    bytes_ = [max(long - short, 0.0) / (_LONG - _SHORT)
              for short, long in seconds]
    byte = statistics.median(bytes_)
    return MessageCosts(
        Figure.of(max(short - _SHORT * byte, 0.0) for short, _ in seconds),
        Figure.of(bytes_))


def _repeat(comm: MPI.Comm, exchanges: list[_Exchange], budget: float
            ) -> list[tuple[float, float]]:
    """For each repeat, the mean of the ranks that send anything."""
    found: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(found) <= _FEWEST or len(found) < _MOST and comm.bcast(
            time.perf_counter() - start < budget):
        means = []
        for exchange in exchanges:
            wait_until(comm.Ibarrier().Test)
            means.append(statistics.fmean(
                seconds for seconds in comm.allgather(exchange.seconds())
                if not math.isnan(seconds)))
        found.append((means[0], means[1]))
    return found[1:]            # the first one connects ranks


class _Wire:
    """Memory of an exchange.

    Args:
        frame: Bytes of a frame.
        ranks: Between which it is exchanged.

    Attributes:
        frame: As given.
        ends: Of messages, that each rank has.
        values: float32.
        tensors: The same memory, as a fused vector.
    """

    def __init__(self, frame: int, ranks: int) -> None:
        chunks = max(_BYTES // frame // ranks, 12)
        self.frame = frame
        self.ends = chunks * 4 * (ranks - 1)
        self.values = numpy.zeros(chunks * frame * ranks // 4, numpy.float32)
        self.tensors = Tensors(['/x'], [self.values], [self.values])


class _Exchange:
    """Exchanges a wire, frame by frame."""

    def __init__(self, host: MPI.Comm, wire: _Wire) -> None:
        self._state = Cast('float32').init()
        self._wire = wire
        self._events = EventStream()
        self.executor = PlanExecutor(host, [direct(host.size)], self._events,
                                     Framing(wire.frame))

    def seconds(self) -> float:
        """Processor time of an end of a message; NaN if there is none."""
        if not self._wire.ends:
            return math.nan
        before = sum(self._events.seconds.values())
        start = time.thread_time()
        tensors = self._wire.tensors
        self.executor.submit(Bucket(
            self._state, tensors, self._wire.values,
            coding=self._state.codec.step(self._state, tensors)))
        self.executor.run()
        taken = time.thread_time() - start
        return busy_of(taken, sum(self._events.seconds.values()) - before
                       ) / self._wire.ends


def busy_of(taken: float, sums: float) -> float:
    """Seconds of messages, from those of a whole exchange.

    Args:
        taken: Of the processor, for the exchange.
        sums: On the wall, in its sums: they go on while other processes have
            the core, and may be more than the exchange has taken.
    """
    return max(taken - sums, _LEAST * taken)

"""Sums in the wire's own format (the fp8 paper's way, ``'mpi_op'``)."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Coding
from ..mpi.forever import HeldRequest
from ..mpi.waiting import wait_until
from ..report.stream import EventStream
from .algorithm import Algorithm
from .frames import piece_bounds


class MpiOp(Algorithm):
    """``MPI_Allreduce`` with the codec's sum as a user-defined operation.

    Sections 3.2.2 and 3.2.4 of the fp8 paper.  Gradients are divided by the
    number of ranks before they are encoded, so that a sum of saturated
    values cannot saturate.  A value is rounded at every sum it passes
    through, and small values vanish: the paper's figure 11 shows what that
    costs.  Use the plan :func:`.plan.direct` unless you want to
    study just this.

    An all-reduce is a reduce-scatter followed by an all-gather; the two
    halves are public for :class:`TwoLevel` to put something between.

    Never with non-blocking collectives: MPI libraries are known to give
    wrong results there with user-defined operations.
    """

    def __init__(self, comm: MPI.Comm, events: EventStream) -> None:
        super().__init__(comm, events)
        self._received = numpy.empty(0, numpy.uint8)

    def reduce_scatter(self, coding: Coding, wire: numpy.ndarray, start: int,
                       stop: int) -> tuple[int, int]:
        """Leaves the mean of this rank's piece in ``wire``.

        Piece j belongs to rank j.

        Args:
            coding: Of the fused vector.
            wire: Of all of the vector.
            start: First element of the range.
            stop: Last element plus one.

        Returns:
            The piece's range.
        """
        everyone = piece_bounds(start, stop, self.comm.size)
        bounds = everyone[self.comm.rank], everyone[self.comm.rank + 1]
        pieces = self._pieces(wire, start, stop)
        total = next(pieces).copy()
        for piece in pieces:
            with self.events.section('decode'):
                coding.add(piece, total)
        wire[slice(*bounds)] = total
        return bounds

    def allreduce(self, coding: Coding, wire: numpy.ndarray, start: int,
                  stop: int) -> None:
        buffer = wire[start:stop]
        if buffer.dtype == numpy.float32:
            self.comm.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT])
        else:
            self._allreduce_with(coding, buffer)
        # What MPI sends inside is not to be seen; this is what its
        # reduce-scatter and all-gather need for long messages.
        size = self.comm.size
        self.events.sent(2 * buffer.nbytes * (size - 1) // size)

    def allgather(self, wire: numpy.ndarray, start: int, stop: int) -> None:
        """Brings every rank's piece to every rank."""
        size, rank = self.comm.size, self.comm.rank
        bounds = piece_bounds(start, stop, size)
        others = [(rank + step) % size for step in range(1, size)]
        requests = [HeldRequest(self.comm.Irecv(
            _bytes(wire[bounds[peer]:bounds[peer + 1]]), peer), wire)
            for peer in reversed(others)]
        own = _bytes(wire[bounds[rank]:bounds[rank + 1]])
        requests += [HeldRequest(self.comm.Isend(own, peer), wire)
                     for peer in others]
        for request in requests:
            wait_until(request.test)
        self.events.sent(own.nbytes * len(others))

    def _pieces(self, wire: numpy.ndarray, start: int, stop: int
               ) -> Iterator[numpy.ndarray]:
        """All ranks' versions of this rank's piece, in the order of ranks.

        Sends the others theirs meanwhile.  A piece is valid until the next
        call of any method of this algorithm.
        """
        size, rank = self.comm.size, self.comm.rank
        bounds = piece_bounds(start, stop, size)
        own = wire[bounds[rank]:bounds[rank + 1]]
        received = self._buffer(own, size)
        others = [(rank + step) % size for step in range(1, size)]
        # Receives are posted before sends, so that no message has to wait
        # in a buffer of MPI's.
        arrivals = {peer: HeldRequest(
            self.comm.Irecv(_bytes(received[peer]), peer), received)
            for peer in reversed(others)}
        sends = []
        for peer in others:
            part = _bytes(wire[bounds[peer]:bounds[peer + 1]])
            sends.append(HeldRequest(self.comm.Isend(part, peer), wire))
            self.events.sent(part.nbytes)
        for peer in range(size):
            if peer == rank:
                yield own
            else:
                wait_until(arrivals[peer].test)
                yield received[peer]
        for request in sends:
            wait_until(request.test)

    def _allreduce_with(self, coding: Coding, buffer: numpy.ndarray) -> None:
        def add(wire: Any, total: Any, datatype: MPI.Datatype) -> None:
            coding.add(numpy.frombuffer(wire, buffer.dtype),
                       numpy.frombuffer(total, buffer.dtype))

        # MPI may cut a message between any two elements of the datatype, so
        # that an element must be one number.
        unit = MPI.BYTE.Create_contiguous(buffer.itemsize).Commit()
        operation = MPI.Op.Create(add, commute=True)
        try:
            self.comm.Allreduce(MPI.IN_PLACE, [buffer, buffer.size, unit],
                                operation)
        finally:
            operation.Free()
            unit.Free()

    def _buffer(self, like: numpy.ndarray, count: int) -> numpy.ndarray:
        """``count`` receive buffers like ``like``; kept for the next call."""
        if self._received.nbytes < like.nbytes * count:
            self._received = numpy.empty(like.nbytes * count, numpy.uint8)
        used = self._received[:like.nbytes * count]
        return used.view(like.dtype).reshape(count, like.size)


class TwoLevel(Algorithm):
    """In the node first, then between nodes (lines 16 to 23 of Algorithm 1).

    Every local rank gets an equal piece of the node's mean, exchanges it
    with the same local rank of the other nodes, and the node gathers the
    pieces again: a node's network link carries the wire once, however many
    ranks the node has.

    Args:
        intra: Among the ranks of this node.
        inter: Among the ranks that have this local rank, one per node.
    """

    def __init__(self, intra: MpiOp, inter: MpiOp) -> None:
        self.intra = intra
        self.inter = inter

    def allreduce(self, coding: Coding, wire: numpy.ndarray, start: int,
                  stop: int) -> None:
        low, high = self.intra.reduce_scatter(coding, wire, start, stop)
        coding.rescale(wire[low:high], self.inter.prescale(coding.codec))
        self.inter.allreduce(coding, wire, low, high)
        self.intra.allgather(wire, start, stop)

    def prescale(self, codec: Codec) -> float:
        return self.intra.prescale(codec)

    def share_inside(self, node: Collection[int]) -> float:
        local, nodes = self.intra.comm.size, self.inter.comm.size
        # Of the wire, twice each: pieces there and back, one piece between.
        inside = (local - 1) / local
        between = (nodes - 1) / nodes / local
        return inside / ((inside + between) or 1.0)

    def free(self) -> None:
        self.intra.free()
        self.inter.free()


def _bytes(array: numpy.ndarray) -> numpy.ndarray:
    return array.view(numpy.uint8)

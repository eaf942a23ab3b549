"""Sums in the wire's own format (the fp8 paper's way, ``'mpi_op'``)."""
# Algorithm 1 of the fp8 paper, to be compared with: MPI_Allreduce with the
# codec's sum as a user-defined operation (sections 3.2.2 and 3.2.4).
# Gradients are divided by the number of ranks before they are encoded, so that
# a sum of saturated values cannot saturate.  A value is rounded at every sum
# it passes through, and small values vanish: the paper's figure 11 shows what
# that costs.  Use plan.direct unless you want to study just this.
#
# With nodes (lines 16 to 23) every local rank gets an equal piece of the
# node's mean, exchanges it with the same local rank of the other nodes, and
# the node gathers the pieces again: a node's network link carries the wire
# once, however many ranks the node has.
#
# Never with non-blocking collectives: MPI libraries are known to give wrong
# results there with user-defined operations.
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Coding
from ..mpi.finalizing import HeldRequest
from ..mpi.waiting import wait_until
from ..report.stream import EventStream
from .engine import Algorithm, Bucket
from .plan import cut


class MpiOp(Algorithm):
    """``MPI_Allreduce`` with the codec's sum; see the comment above.

    Args:
        comm: The ranks.
        events: Where to write what happens.
        nodes: The ranks of every node, equally many; None: one level.
    """

    def __init__(self, comm: MPI.Comm, events: EventStream,
                 nodes: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(comm, events)
        self._inside = self._between = None
        if nodes is not None:
            node, local = next(
                (node, ranks.index(comm.rank))
                for node, ranks in enumerate(nodes) if comm.rank in ranks)
            self._inside = comm.Split(node, local)
            self._between = comm.Split(local, node)

    def let_in(self, bucket: Bucket, until: int) -> None:
        coding, wire = bucket.coding, bucket.wire
        assert coding is not None
        if bucket.finished:
            return
        if self._inside and self._between:
            pieces = cut(bucket.start, bucket.stop, self._inside.size)
            own = _piece(wire, pieces, self._inside.rank)
            self._reduce_scatter(self._inside, coding, wire, pieces)
            coding.rescale(own, 1.0 / self._between.size)
            self._allreduce(self._between, coding, own)
            self._allgather(self._inside, wire, pieces)
        else:
            self._allreduce(self.comm, coding, wire[bucket.start:bucket.stop])
        bucket.conclude()

    def prescale(self, codec: Codec) -> float:
        return 1.0 / (self._inside or self.comm).size

    def share_inside(self, node: Collection[int]) -> float:
        if not self._inside or not self._between:
            return super().share_inside(node)
        local, nodes = self._inside.size, self._between.size
        # Of the wire, twice each: pieces there and back, one piece between.
        inside = (local - 1) / local
        between = (nodes - 1) / nodes / local
        return inside / ((inside + between) or 1.0)

    def free(self) -> None:
        super().free()
        if self._inside and self._between:
            self._inside.Free()
            self._between.Free()

    def _allreduce(self, comm: MPI.Comm, coding: Coding,
                   buffer: numpy.ndarray) -> None:
        def add(wire: Any, total: Any, datatype: MPI.Datatype) -> None:
            coding.add(numpy.frombuffer(wire, buffer.dtype),
                       numpy.frombuffer(total, buffer.dtype))

        # What MPI sends inside is not to be seen; this is what its
        # reduce-scatter and all-gather need for long messages.
        self.events.sent(2 * buffer.nbytes * (comm.size - 1) // comm.size)
        if buffer.dtype == numpy.float32:
            comm.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT])
            return
        # MPI may cut a message between any two elements of the datatype, so
        # that an element must be one number.
        unit = MPI.BYTE.Create_contiguous(buffer.itemsize).Commit()
        operation = MPI.Op.Create(add, commute=True)
        try:
            comm.Allreduce(MPI.IN_PLACE, [buffer, buffer.size, unit],
                           operation)
        finally:
            operation.Free()
            unit.Free()

    def _reduce_scatter(self, comm: MPI.Comm, coding: Coding,
                        wire: numpy.ndarray, pieces: list[int]) -> None:
        """Makes this rank's piece the sum of all ranks', in their order."""
        own = _piece(wire, pieces, comm.rank)
        received = {peer: numpy.empty_like(own) for peer in _others(comm)}
        # Receives are posted before sends, so that no message has to wait in
        # a buffer of MPI's.
        arrivals = {peer: HeldRequest(comm.Irecv(_bytes(buffer), peer), buffer)
                    for peer, buffer in received.items()}
        sends = list(self._sends(comm, {
            peer: _piece(wire, pieces, peer) for peer in received}))
        received[comm.rank] = own.copy()
        total = None
        for peer in range(comm.size):
            if peer in arrivals:
                wait_until(arrivals[peer].test)
            with self.events.section('decode'):
                if total is None:
                    total = received[peer]
                else:
                    coding.add(received[peer], total)
        own[...] = total
        for request in sends:
            wait_until(request.test)

    def _allgather(self, comm: MPI.Comm, wire: numpy.ndarray,
                   pieces: list[int]) -> None:
        own = _piece(wire, pieces, comm.rank)
        requests = [HeldRequest(comm.Irecv(
            _bytes(_piece(wire, pieces, peer)), peer), wire)
            for peer in _others(comm)]
        requests += self._sends(comm, dict.fromkeys(_others(comm), own))
        for request in requests:
            wait_until(request.test)

    def _sends(self, comm: MPI.Comm, parts: dict[int, numpy.ndarray]
               ) -> Iterator[HeldRequest]:
        for peer in reversed(list(parts)):
            part = _bytes(parts[peer])
            self.events.sent(part.nbytes)
            yield HeldRequest(comm.Isend(part, peer), part)


def _others(comm: MPI.Comm) -> list[int]:
    """In the order in which they send to this rank; it sends the other way."""
    return [(comm.rank - step) % comm.size for step in range(1, comm.size)]


def _piece(wire: numpy.ndarray, pieces: list[int], rank: int
           ) -> numpy.ndarray:
    return wire[pieces[rank]:pieces[rank + 1]]


def _bytes(array: numpy.ndarray) -> numpy.ndarray:
    return array.view(numpy.uint8)

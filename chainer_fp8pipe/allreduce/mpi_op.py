"""Sums in the wire's own format (the fp8 paper's way, ``'mpi_op'``)."""
# Algorithm 1 of the fp8 paper, to be compared with: MPI_Allreduce with the
# codec's sum as a user-defined operation (sections 3.2.2 and 3.2.4).
# Gradients are divided by the number of ranks before they are encoded, so that
# a sum of saturated values cannot saturate.  A value is rounded at every sum
# it passes through, and small values vanish (figure 11).
#
# With nodes (lines 16 to 23) every local rank gets an equal piece of the
# node's mean, exchanges it with the same local rank of the other nodes, and
# the node gathers the pieces again.
#
# Never with non-blocking collectives: MPI libraries are known to give wrong
# results there with user-defined operations.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Tensors
from ..report.stream import EventStream
from .engine import Bucket, Engine, Sums
from .plan import Framing, cut


class MpiOp(Engine):
    """``MPI_Allreduce`` with the codec's sum; see the comment above.

    Args:
        comm: The ranks.
        events: Where to write what happens.
        nodes: The ranks of every node, equally many; None: one level.
    """

    by_frame = False

    def __init__(self, comm: MPI.Comm, events: EventStream,
                 nodes: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(comm, None, events, Framing(shared_memory=False))
        self._inside = self._between = None
        if nodes is not None:
            node, local = next(
                (node, ranks.index(comm.rank))
                for node, ranks in enumerate(nodes) if comm.rank in ranks)
            self._inside = comm.Split(node, local)
            self._between = comm.Split(local, node)

    def sums(self, codec: Codec) -> Sums:
        return Sums(True, codec.wire_dtype.itemsize, 1.0,
                    1.0 / (self._inside or self.comm).size)

    def prepare(self, bucket: Bucket) -> None:
        tensors, wire = bucket.tensors, bucket.wire
        if self._inside and self._between:
            own = self._sum_of_node(self._inside, tensors, wire)
            tensors.rescale(own, 1.0 / self._between.size)
            self._allreduce(self._between, tensors, own)
            self._gather_in_node(self._inside, own, wire)
        else:
            self._allreduce(self.comm, tensors, wire)

    def free(self) -> None:
        super().free()
        if self._inside and self._between:
            self._inside.Free()
            self._between.Free()

    def _allreduce(self, comm: MPI.Comm, tensors: Tensors,
                   buffer: numpy.ndarray) -> None:
        def add(wire: Any, total: Any, datatype: MPI.Datatype) -> None:
            tensors.add(numpy.frombuffer(wire, buffer.dtype),
                       numpy.frombuffer(total, buffer.dtype))

        # What MPI sends inside is not to be seen; this is what its
        # reduce-scatter and all-gather need for long messages.
        self.events.sent(2 * buffer.nbytes * (comm.size - 1) // comm.size)
        if buffer.dtype == numpy.float32:
            comm.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT])
            return
        operation = MPI.Op.Create(add, commute=True)
        try:
            comm.Allreduce(MPI.IN_PLACE, _numbers(buffer), operation)
        finally:
            operation.Free()

    def _sum_of_node(self, comm: MPI.Comm, tensors: Tensors,
                     wire: numpy.ndarray) -> numpy.ndarray:
        """This rank's piece of all ranks' sum, added up in their order."""
        bounds = cut(0, wire.size, comm.size)
        counts = numpy.diff(bounds)
        came = numpy.empty((comm.size, counts[comm.rank]), wire.dtype)
        self.events.sent(wire.nbytes - came[0].nbytes)
        comm.Alltoallv([_numbers(wire), (counts, bounds[:-1])],
                       [_numbers(came), came[0].size])
        with self.events.section('decode'):
            for piece in came[1:]:
                tensors.add(piece, came[0])
        return came[0]

    def _gather_in_node(self, comm: MPI.Comm, own: numpy.ndarray,
                        wire: numpy.ndarray) -> None:
        bounds = cut(0, wire.size, comm.size)
        self.events.sent(own.nbytes * (comm.size - 1))
        comm.Allgatherv(_numbers(own), [
            _numbers(wire), (numpy.diff(bounds), bounds[:-1])])


def _numbers(array: numpy.ndarray) -> numpy.ndarray:
    # MPI may cut a message between any two elements of a datatype, so that an
    # element must be one number.
    return array.view(f'u{array.itemsize}')

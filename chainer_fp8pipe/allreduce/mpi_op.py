"""Sums in the wire's own format (the fp8 paper's way, ``'mpi_op'``)."""
from __future__ import annotations

from typing import Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Tensors
from .piecewise import Algorithm


class MpiOp(Algorithm):
    """``MPI_Allreduce`` with the codec's sum as a user-defined operation.

    Sections 3.2.2 and 3.2.4 of the fp8 paper.  Gradients are divided by the
    number of ranks before they are encoded, so that a sum of saturated
    values cannot saturate.  A value is rounded at every sum it passes
    through, and small values vanish: the paper's figure 11 shows what that
    costs.  Use the plan :func:`.plan.direct` unless you want to
    study just this.

    Never with non-blocking collectives: MPI libraries are known to give
    wrong results there with user-defined operations.
    """

    def reduce_scatter(self, codec: Codec, tensors: Tensors,
                       wire: numpy.ndarray, start: int, stop: int
                       ) -> tuple[int, int]:
        bounds = self.own_piece(start, stop)
        pieces = self.pieces(wire, start, stop)
        total = next(pieces).copy()
        for piece in pieces:
            with self.statistics.section('decode'):
                codec.add(piece, total)
        wire[slice(*bounds)] = total
        return bounds

    def allreduce(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                  start: int, stop: int) -> None:
        buffer = wire[start:stop]
        if codec.wire_dtype == numpy.float32:
            self.comm.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT])
        else:
            self._allreduce_with(codec, buffer)
        # What MPI sends inside is not to be seen; this is what its
        # reduce-scatter and all-gather need for long messages.
        size = self.comm.size
        self.statistics.bytes_sent += 2 * buffer.nbytes * (size - 1) // size

    def _allreduce_with(self, codec: Codec, buffer: numpy.ndarray) -> None:
        def add(wire: Any, total: Any, datatype: MPI.Datatype) -> None:
            codec.add(numpy.frombuffer(wire, codec.wire_dtype),
                      numpy.frombuffer(total, codec.wire_dtype))

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

"""Every rank sums one piece, in float32 (``exchange='direct'``)."""
from __future__ import annotations

import numpy

from ..codecs import Codec, Tensors
from .base import Algorithm


class Direct(Algorithm):
    """All-to-all, a float32 sum in the order of ranks, all-gather.

    Each rank sends 2 (P - 1) / P of the wire, like a ring, in two steps
    instead of 2 (P - 1).  A gradient is rounded twice whatever P is: when it
    is encoded and when the mean is.  The order of the sum is fixed, so the
    same gradients give the same bits again.
    """

    def reduce_scatter(self, codec: Codec, tensors: Tensors,
                       wire: numpy.ndarray, start: int, stop: int
                       ) -> tuple[int, int]:
        bounds = self.own_piece(start, stop)
        if self.comm.size == 1:
            return bounds
        total = codec.zeros(tensors, bounds[1] - bounds[0])
        for piece in self.pieces(wire, start, stop):
            with self.statistics.section('decode'):
                codec.accumulate(piece, total)
        with self.statistics.section('encode'):
            codec.encode_mean(tensors, total, self.comm.size,
                              wire[slice(*bounds)], bounds[0], self.site)
        return bounds

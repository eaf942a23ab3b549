"""In the node first, then between nodes (lines 16 to 23 of Algorithm 1)."""
from __future__ import annotations

import numpy

from ..codecs import Codec, Tensors
from .base import Algorithm


class TwoLevel:
    """Composes an algorithm within nodes with one between them.

    Every local rank gets an equal piece of the node's mean, exchanges it
    with the same local rank of the other nodes, and the node gathers the
    pieces again: a node's network link carries the wire once, however many
    ranks the node has.

    Args:
        intra: Among the ranks of this node.
        inter: Among the ranks that have this local rank, one per node.
    """

    def __init__(self, intra: Algorithm, inter: Algorithm) -> None:
        self.intra = intra
        self.inter = inter
        self.prescale = intra.prescale

    def allreduce(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                  start: int, stop: int) -> None:
        """Leaves the mean of the whole range in ``wire``, on every rank."""
        low, high = self.intra.reduce_scatter(
            codec, tensors, wire, start, stop)
        if self.inter.prescale != 1.0:
            codec.rescale(wire[low:high], self.inter.prescale)
        self.inter.allreduce(codec, tensors, wire, low, high)
        self.intra.allgather(wire, start, stop)

    def free(self) -> None:
        """Gives the communicators of both levels back to MPI."""
        self.intra.free()
        self.inter.free()

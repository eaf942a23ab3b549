"""In the node first, then between nodes (lines 16 to 23 of Algorithm 1)."""
from __future__ import annotations

import numpy

from ..codecs import Codec, Tensors
from .piecewise import Algorithm


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

    def allreduce(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                  start: int, stop: int) -> None:
        """Leaves the mean of the whole range in ``wire``, on every rank."""
        low, high = self.intra.reduce_scatter(
            codec, tensors, wire, start, stop)
        codec.rescale(wire[low:high], self.inter.prescale(codec))
        self.inter.allreduce(codec, tensors, wire, low, high)
        self.intra.allgather(wire, start, stop)

    def prescale(self, codec: Codec) -> float:
        """The factor that gradients must carry when they are encoded."""
        return self.intra.prescale(codec)

    def free(self) -> None:
        """Gives the communicators of both levels back to MPI."""
        self.intra.free()
        self.inter.free()

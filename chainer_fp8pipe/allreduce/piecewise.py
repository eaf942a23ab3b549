"""What the communicator asks of an algorithm, and how pieces travel."""
from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy
from mpi4py import MPI

from ..codecs import Codec, Tensors
from ..report.statistics import Statistics
from .frames import piece_bounds


class Algorithm(abc.ABC):
    """Makes the range ``[start, stop)`` of all ranks' wires their mean.

    The range is divided into one piece per rank, piece j belonging to rank
    j, so an all-reduce is a reduce-scatter followed by an all-gather; the
    two halves are public for :class:`TwoLevel` to put something between.

    Args:
        comm: The ranks that take part; the algorithm works on a duplicate,
            so its messages cannot meet the caller's.
        statistics: Counters to add to.
    """

    def __init__(self, comm: MPI.Comm, statistics: Statistics) -> None:
        self.comm = comm.Dup()
        self.statistics = statistics
        self._received = numpy.empty(0, numpy.uint8)

    @abc.abstractmethod
    def reduce_scatter(self, codec: Codec, tensors: Tensors,
                       wire: numpy.ndarray, start: int, stop: int
                       ) -> tuple[int, int]:
        """Leaves the mean of this rank's piece in ``wire``.

        Returns the piece's range.
        """

    def allreduce(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                  start: int, stop: int) -> None:
        """Leaves the mean of the whole range in ``wire``, on every rank."""
        self.reduce_scatter(codec, tensors, wire, start, stop)
        self.allgather(wire, start, stop)

    def allgather(self, wire: numpy.ndarray, start: int, stop: int) -> None:
        """Brings every rank's piece to every rank."""
        size, rank = self.comm.size, self.comm.rank
        bounds = piece_bounds(start, stop, size)
        others = [(rank + step) % size for step in range(1, size)]
        requests = [
            self.comm.Irecv(_bytes(wire[bounds[peer]:bounds[peer + 1]]), peer)
            for peer in reversed(others)]
        own = _bytes(wire[bounds[rank]:bounds[rank + 1]])
        requests += [self.comm.Isend(own, peer) for peer in others]
        MPI.Request.Waitall(requests)
        self.statistics.bytes_sent += own.nbytes * len(others)

    def pieces(self, wire: numpy.ndarray, start: int, stop: int
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
        arrivals = {peer: self.comm.Irecv(_bytes(received[peer]), peer)
                    for peer in reversed(others)}
        sends = []
        for peer in others:
            part = _bytes(wire[bounds[peer]:bounds[peer + 1]])
            sends.append(self.comm.Isend(part, peer))
            self.statistics.bytes_sent += part.nbytes
        for peer in range(size):
            if peer == rank:
                yield own
            else:
                arrivals[peer].Wait()
                yield received[peer]
        MPI.Request.Waitall(sends)

    def prescale(self, codec: Codec) -> float:
        """The factor that gradients must carry when they are encoded.

        With it, sums in the wire's own format cannot overflow.
        """
        return 1.0 / self.comm.size

    def own_piece(self, start: int, stop: int) -> tuple[int, int]:
        """The range of this rank's piece."""
        bounds = piece_bounds(start, stop, self.comm.size)
        return bounds[self.comm.rank], bounds[self.comm.rank + 1]

    def free(self) -> None:
        """Gives the duplicated communicator back to MPI."""
        self.comm.Free()

    def _buffer(self, like: numpy.ndarray, count: int) -> numpy.ndarray:
        """``count`` receive buffers like ``like``; kept for the next call."""
        if self._received.nbytes < like.nbytes * count:
            self._received = numpy.empty(like.nbytes * count, numpy.uint8)
        used = self._received[:like.nbytes * count]
        return used.view(like.dtype).reshape(count, like.size)


def _bytes(array: numpy.ndarray) -> numpy.ndarray:
    return array.view(numpy.uint8)

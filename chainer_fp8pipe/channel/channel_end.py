"""What a sender and a receiver have in common."""
from __future__ import annotations

from typing import Any

import numpy
from mpi4py import MPI

from .progress import progress
from .wire import MessageLayout

CODECS = (None, 'fp8')


class ChannelEnd:
    """One of the two ends of a channel.

    Args:
        comm: The ranks.
        peer: The rank of the other end.
        tag: Number of the channel between the two ranks.
        codec: ``None`` or ``'fp8'``.

    Raises:
        ValueError: The codec is unknown or the tag is out of range.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int,
                 codec: str | None) -> None:
        if codec not in CODECS:
            raise ValueError(f'codec is {codec!r}, expected one of {CODECS}')
        largest: Any = comm.Get_attr(MPI.TAG_UB)
        if not 0 <= tag <= (largest - 1) // 2:
            raise ValueError(f'tag is {tag}, expected 0 to '
                             f'{(largest - 1) // 2}')
        self._comm, self._peer, self._codec = comm, peer, codec
        # MPI's tags: of the channel, and of what its receiver has to say.
        self._forward, self._back = 2 * tag, 2 * tag + 1
        self._far = peer in far_ranks(comm)
        self._layout: MessageLayout | None = None

    @property
    def _size(self) -> int:
        """Bytes of a message of arrays; -1 before there was one."""
        return self._layout.size if self._layout else -1

    def _mark(self, busy: bool) -> None:
        """Has messages move in the background while there are any."""
        if self._far:
            (progress.begin if busy else progress.end)(self)


def _inherit(comm: MPI.Comm, key: int, far: frozenset[int]) -> frozenset[int]:
    return far


_FAR = MPI.Comm.Create_keyval(copy_fn=_inherit)


def far_ranks(comm: MPI.Comm) -> frozenset[int]:
    """The ranks of ``comm`` that run on other nodes than this one.

    The first call for a communicator is collective; its duplicates know.
    """
    far: Any = comm.Get_attr(_FAR)
    if far is None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        near = numpy.empty(node.size, numpy.int32)
        node.Allgather(numpy.array([comm.rank], numpy.int32), near)
        node.Free()
        far = frozenset(range(comm.size)) - set(near.tolist())
        comm.Set_attr(_FAR, far)
    return far

"""Receives that wait for their message."""
from __future__ import annotations

import math
from collections.abc import MutableSequence
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs.staging import empty_wire
from ..mpi.forever import keep_forever
from .headers import FRAME
from .packing import shaped, unpack
from .wire import MessageLayout


class PostedReceive:
    """Posts a receive into new memory, which becomes that of the arrays.

    Args:
        comm: Where the message comes from.
        source: Its sender.
        tag: Its tag.
        layout: Of the arrays that came last; the buffer is large enough for
            such arrays, and for a frame.
        xp: ``numpy`` or ``cupy``: of which kind arrays are wanted.

    Attributes:
        request: MPI's.
    """

    __slots__ = ('_layout', '_views', '_wire', '_xp', 'request')

    def __init__(self, comm: MPI.Comm, source: int, tag: int,
                 layout: MessageLayout | None, xp: Any) -> None:
        self._xp, self._layout = xp, layout
        self._views: tuple[Any, ...] | None = None
        if layout and layout.bare and layout.size >= FRAME and xp is numpy:
            spec = layout.specs[0]
            assert spec is not None
            self._wire = numpy.empty(math.prod(spec.shape), spec.dtype)
            self._views = (shaped(self._wire, spec),)
        else:
            size = max(layout.size if layout else 0, FRAME)
            self._wire = empty_wire(xp, size, numpy.uint8)
        self.request = comm.Irecv([self._wire, MPI.BYTE], source, tag)

    def frame(self, size: int) -> bytes:
        """What has come, if it is a frame of so many bytes."""
        return self._bytes()[:size].tobytes()

    def arrays(self, layout: MessageLayout) -> tuple[Any, ...]:
        """What has come, if it is arrays of this layout."""
        if self._views is not None and layout is self._layout:
            return self._views
        return unpack(layout, self._bytes(), self._xp)

    def _bytes(self) -> numpy.ndarray:
        return self._wire.view(numpy.uint8)


def withdraw(posted: MutableSequence[PostedReceive]) -> None:
    """Gives up receives, without waiting for anybody; empties the list."""
    for receive in posted if not MPI.Is_finalized() else ():
        receive.request.Cancel()
        if not receive.request.Test():      # a message is on its way already
            keep_forever(receive)
    posted.clear()

"""Arrays from one rank to another, with one message per transfer.

Shapes and dtypes travel in a message of their own, and only when they differ
from those before; it is followed by the arrays that it describes.

A receiver has receives posted ahead: two while it waits, one while its rank
computes, never more than messages of arrays are still to come.  Their buffers
are large enough for arrays as last described and for a frame (see
:mod:`.headers`); the length tells which of them came, as the sender sees to it
that no frame is as long as the arrays would be.

When a description is read, one receive has been posted with a buffer of the
old size already, and all others are posted later.  So if the arrays do not
fit into a buffer of the old size, the sender puts a filler between: a frame
that says nothing.  (MPI delivers messages in the order in which they were
sent, to receives in the order in which they were posted.)

After a failure a channel cannot be used again.  Each side says that it gives
up, its sender by ``fail``, its receiver by ``cancel``, and whoever waits for
it gets a :class:`RemoteError`; nobody waits for messages that were under
way.  A new start needs new channels, on a duplicate of the communicator.
What was under way stays with MPI, and not every MPI_Finalize survives that:
end the job by MPI_Abort, as an exception that nobody catches does.
"""
from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs.staging import empty_wire
from ..mpi.failure.waits import Wait, waiting, world_ranks
from ..mpi.forever import keep_forever
from ..mpi.waiting import wait_until
from .headers import DESCRIPTION, FAILURE, FILLER, FRAME, Assembly, frames
from .message import (
    MessageLayout,
    crosses_as,
    decode_specs,
    describe,
    encode_specs,
    pack,
    shaped,
    unpack,
)
from .progress import far_ranks, progress

CODECS = (None, 'fp8')

_AHEAD = 2      # receives posted at a time, at most


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""

    is_shown = True     # by that rank


class _ChannelEnd:
    """One of the two ends of a channel.

    Attributes:
        world_peer: The rank of the other end, in ``MPI.COMM_WORLD``.
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
        self.world_peer = world_ranks(comm)[peer]
        # MPI's tags: of the channel, and of its receiver's giving up.
        self._forward, self._back = 2 * tag, 2 * tag + 1
        self._far = peer in far_ranks(comm)
        self._layout: MessageLayout | None = None

    @property
    def _size(self) -> int:
        """Bytes of a message of arrays; -1 before there was one."""
        return self._layout.size if self._layout else -1

    def _mark(self, busy: bool) -> None:
        """Keeps messages moving in the background, or stops to."""
        if self._far:
            (progress.begin if busy else progress.end)(self)


class Sender(_ChannelEnd):
    """Sends tuples of arrays to the :class:`Receiver` of another rank.

    Args:
        comm: The ranks.  To make the first channel of a communicator, all
            its ranks must make one.
        dest: The receiving rank.
        tag: Which of the channels from this rank to ``dest`` it is.
        codec: ``None``: arrays cross as they are; ``'fp8'``: those of
            float16, float32 and float64 as fp8, see :mod:`.fp8_wire`.

    Raises:
        ValueError: The codec is unknown or the tag is out of range.
    """

    def __init__(self, comm: MPI.Comm, dest: int, tag: int,
                 codec: str | None = None) -> None:
        super().__init__(comm, dest, tag, codec)
        self._leaving: deque[tuple[MPI.Request, Any]] = deque()
        weakref.finalize(self, keep_forever, self._leaving)
        self._failed = False

    def send(self, arrays: Sequence[Any]) -> int:
        """Starts to send and returns at once.

        Args:
            arrays: NumPy or CuPy arrays of any shape and of any dtype of
                plain numbers, bytes or text, and None.  NumPy arrays must
                not be changed before :meth:`flush`.

        Returns:
            Bytes of the message.

        Raises:
            RuntimeError: :meth:`fail` was called before.
            TypeError: Something cannot be sent; nothing was.
        """
        if self._failed:
            raise RuntimeError(
                f'the channel to rank {self._peer} was closed by a failure')
        layout = self._layout
        if layout is None or not layout.fits(arrays):
            layout = MessageLayout(describe(arrays, self._codec))
        wire = pack(layout, arrays)
        if layout is not self._layout:
            self._send_description(layout)
        self._start(wire)
        return layout.size

    def flush(self) -> None:
        """Waits until all that was sent has left.

        Arrays may be changed then.

        Raises:
            RemoteError: The receiver gave up.
        """
        with waiting(lambda: [Wait(
                f'rank {self.world_peer} to take what was sent',
                (self.world_peer,))]):
            wait_until(self._is_flushed)

    def fail(self, text: str) -> None:
        """Sends an error instead of arrays and returns at once.

        The receiver gets what was sent before, and then raises ``text`` as
        :class:`RemoteError`.  Nothing can be sent afterwards.
        """
        if not self._failed:
            self._failed = True
            self._send_text(FAILURE, text.encode(errors='replace'))

    def _send_description(self, layout: MessageLayout) -> None:
        self._send_text(DESCRIPTION, encode_specs(layout.specs))
        too_large = layout.size > max(self._size, FRAME)
        self._layout = layout
        if too_large:
            self._send_text(FILLER, b'')

    def _send_text(self, kind: int, text: bytes) -> None:
        for frame in frames(kind, text, self._size):
            self._start(frame)

    def _start(self, wire: Any) -> None:
        request = self._comm.Isend([wire, MPI.BYTE], self._peer,
                                   self._forward)
        if not self._have_left() or not request.Test():
            self._leaving.append((request, wire))
            self._mark(busy=True)

    def _have_left(self) -> bool:
        leaving = self._leaving
        while leaving and leaving[0][0].Test():
            leaving.popleft()
            if not leaving:
                self._mark(busy=False)
        return not leaving

    def _is_flushed(self) -> bool:
        status = MPI.Status()
        if not self._comm.Iprobe(self._peer, self._back, status):
            return self._have_left()
        keep_forever(tuple(self._leaving))
        self._leaving.clear()
        self._mark(busy=False)
        text = numpy.empty(status.Get_count(MPI.BYTE), numpy.uint8)
        self._comm.Recv([text, MPI.BYTE], self._peer, self._back)
        raise RemoteError(text.tobytes().decode())


class Receiver(_ChannelEnd):
    """Receives what the :class:`Sender` of another rank sends.

    Arguments are as the sender's, but for:

    Args:
        source: The sending rank.
        xp: ``numpy`` or ``cupy``: of which kind the arrays shall be,
            whatever they are where they come from.
    """

    def __init__(self, comm: MPI.Comm, source: int, tag: int,
                 codec: str | None = None, xp: Any = numpy) -> None:
        super().__init__(comm, source, tag, codec)
        self._xp = xp
        self._expected = 0
        self._posted: deque[_PostedReceive] = deque()
        weakref.finalize(self, _withdraw, self._posted, os.getpid())
        self._status = MPI.Status()
        self._assembly = Assembly()
        self._failure: str | None = None

    def expect(self, count: int) -> None:
        """Announces ``count`` more messages.

        Announced before they come, each is received without a copy.
        """
        self._expected += count
        self._post()

    def receive(self) -> tuple[Any, ...]:
        """Waits for the next message.

        Returns:
            Its arrays, which are the caller's to keep and to change, and
            None where there was none.  Arrays without gaps keep the order
            of their axes in memory; others come in C order.

        Raises:
            RemoteError: The sender failed; the message is what it said.
            RuntimeError: No more messages are expected.
            ValueError: The sender has another codec.
        """
        if self._failure is not None:
            raise RemoteError(self._failure)
        if not self._expected:
            raise RuntimeError(
                f'no message from rank {self._peer} is expected: say how '
                'many will come with expect() first')
        while True:
            self._post()
            posted = self._posted.popleft()
            size = self._wait(posted.request)
            if self._layout and size == self._layout.size:
                self._expected -= 1
                return posted.arrays(self._layout)
            self._read(posted.frame(size))

    def cancel(self, text: str = '') -> None:
        """Gives up what is still expected, and tells the sender.

        Args:
            text: Why; the sender's ``flush`` raises it.
        """
        self._withdraw()
        text = text or f'rank {self._comm.rank} gave up receiving'
        wire = text.encode(errors='replace')
        keep_forever((self._comm.Isend([wire, MPI.BYTE], self._peer,
                                       self._back), wire))

    def _post(self) -> None:
        """Posts receives until there are as many as there should be."""
        while len(self._posted) < min(self._expected, _AHEAD):
            self._posted.append(_PostedReceive(
                self._comm, self._peer, self._forward, self._layout,
                self._xp))
            self._mark(busy=True)

    def _withdraw(self) -> None:
        self._expected = 0
        _withdraw(self._posted, os.getpid())
        self._mark(busy=False)

    def _wait(self, request: MPI.Request) -> int:
        """Bytes of the message, when it is there."""
        status = self._status
        with waiting(lambda: [Wait(
                f'a message from rank {self.world_peer}',
                (self.world_peer,))]):
            wait_until(lambda: request.Test(status))
        if not self._posted:
            self._mark(busy=False)
        return status.Get_count(MPI.BYTE)

    def _read(self, frame: bytes) -> None:
        whole = self._assembly.add(frame)
        if whole is None:
            return
        kind, text = whole
        if kind == FILLER:
            return
        if kind == FAILURE:
            self._withdraw()
            self._failure = text.decode()
            raise RemoteError(self._failure)
        specs = decode_specs(text)
        if not crosses_as(specs, self._codec):
            raise ValueError(
                f'rank {self._peer} does not send as this rank receives, '
                f'with codec {self._codec!r}; give all ranks the same codec')
        self._layout = MessageLayout(specs)


class _PostedReceive:
    """Posts a receive into new memory, which becomes that of the arrays.

    The memory is large enough for a frame, and for arrays as ``layout``
    describes those that came last.
    """

    __slots__ = ('_layout', '_views', '_wire', '_xp', 'request')

    def __init__(self, comm: MPI.Comm, source: int, tag: int,
                 layout: MessageLayout | None, xp: Any) -> None:
        self._xp, self._layout = xp, layout
        self._views: tuple[Any, ...] | None = None
        size = max(layout.size if layout else 0, FRAME)
        if layout and layout.bare and xp is numpy:
            spec = layout.specs[0]
            assert spec is not None
            itemsize = numpy.dtype(spec.dtype).itemsize
            self._wire = numpy.empty(-(-size // itemsize), spec.dtype)
            self._views = (shaped(
                self._wire[:math.prod(spec.sent)], spec),)
        else:
            self._wire = empty_wire(xp, size, numpy.uint8)
        self.request = comm.Irecv([self._wire, MPI.BYTE], source, tag)

    def frame(self, size: int) -> bytes:
        """The first bytes of the message, which is a frame of this size."""
        return self._bytes()[:size].tobytes()

    def arrays(self, layout: MessageLayout) -> tuple[Any, ...]:
        """The arrays of the message, which has this layout."""
        if self._views is not None and layout is self._layout:
            return self._views
        return unpack(layout, self._bytes(), self._xp)

    def _bytes(self) -> numpy.ndarray:
        return self._wire.view(numpy.uint8)


def _withdraw(posted: MutableSequence[_PostedReceive], owner: int) -> None:
    """Gives up receives, without waiting for anybody; empties the list.

    A fork of the process that has posted them, ``owner``, does not.
    """
    for receive in () if MPI.Is_finalized() or os.getpid() != owner else (
            posted):
        receive.request.Cancel()
        if not receive.request.Test():      # a message is on its way already
            keep_forever(receive)
    posted.clear()

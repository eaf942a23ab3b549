"""Arrays from one rank to another: a header, and the arrays behind it."""
# A transfer is a message of text (JSON; reading it runs nothing that a rank
# has sent) and one message per array.  The header describes the arrays, or
# says that the sender has failed: so an error of the other rank takes the
# place of what this one waits for.
#
# Arrays are best received into memory that waits for them: MPI then moves
# them while both ranks compute, and copies nothing.  So the receiver posts
# the receives of the next transfer ahead, for the arrays of the last header;
# in a pipeline they are nearly always the same.  Where they are not, nothing
# of the new arrays may end in the old memory.  So arrays of each new
# description travel under the next one of some tags of MPI: the receives that
# are posted for the old description stay unmatched, and are cancelled.  A tag
# must not come round while the receiver may have posted something for it;
# ``flush`` says that it has not.  After too many changes since then arrays
# travel under a tag for which nothing is ever posted ahead of the header.
#
# One message with a header and the arrays in it would save a few
# microseconds, and cost a copy of everything on each side.
#
# After a failure a channel cannot be used again, and messages may be left
# under way for ever.  MPI keeps their memory; a new start needs a duplicate
# of the communicator.
from __future__ import annotations

import functools
import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs.staging import (
    array_module,
    download,
    empty_wire,
    upload_now,
)
from ..mpi.finalizing import keep_forever
from ..mpi.waiting import Wait, wait_until, waiting, world_ranks
from . import fp8_wire
from .progress import progress

CODECS = (None, 'fp8')

#: MPI's tags of a channel: of headers, of arrays whose receives are not
#: posted ahead, and of others.
_TAGS = 16
_HEADER, _PLAIN, _AHEAD = 0, 1, 2


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""

    is_shown = True     # by that rank


class _Spec(NamedTuple):
    """How to read an array.

    Attributes:
        dtype: As ``numpy.dtype.str`` writes it, e.g. ``'<f2'``.
        shape: Of the array.
        size: How many numbers cross: what is repeated in memory, as
            ``broadcast_to`` makes it, once.
        steps: From one number to the next along each axis, in numbers; None:
            as in C.  Sums over an array are rounded in its order of memory.
        coded: Whether it crosses as fp8 codes.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    steps: tuple[int, ...] | None
    coded: bool


Specs = tuple[_Spec | None, ...]


def describe(arrays: Sequence[Any], codec: str | None) -> Specs:
    """How arrays will be sent.

    Args:
        arrays: NumPy or CuPy arrays and None.
        codec: None or ``'fp8'``.

    Raises:
        TypeError: One is no array, or its elements are not plain numbers,
            text or bytes.
    """
    return tuple([None if array is None else _spec(array, codec, number)
                  for number, array in enumerate(arrays)])


class _End:
    """One of the two ends of a channel.

    Attributes:
        world_peer: The rank of the other end, in ``MPI.COMM_WORLD``.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int,
                 codec: str | None, far: bool) -> None:
        if codec not in CODECS:
            raise ValueError(f'codec is {codec!r}, expected one of {CODECS}')
        largest: Any = comm.Get_attr(MPI.TAG_UB)
        if not 0 <= tag <= largest // _TAGS - 1:
            raise ValueError(f'tag is {tag}, expected 0 to '
                             f'{largest // _TAGS - 1}')
        self._comm, self._peer, self._codec = comm, peer, codec
        self._first_tag, self._far = _TAGS * tag, far
        self.world_peer = world_ranks(comm)[peer]
        # Of the last transfer: its header, and the tag of its arrays.
        self._header, self._tag = b'', _TAGS - 1

    def _mark(self, busy: bool) -> None:
        """Keeps messages moving in the background, or stops to."""
        if self._far:
            (progress.begin if busy else progress.end)(self)


class Sender(_End):
    """Sends tuples of arrays to the :class:`Receiver` of another rank.

    Args:
        comm: The ranks.
        dest: The receiving rank.
        tag: Which of the channels from this rank to ``dest`` it is.
        codec: ``None``: arrays cross as they are; ``'fp8'``: those of
            float16, float32 and float64 as fp8, see :mod:`.fp8_wire`.
        far: Whether the other rank is on another node, so that messages
            need help to move while this rank computes.

    Raises:
        ValueError: The codec is unknown or the tag is out of range.
    """

    def __init__(self, comm: MPI.Comm, dest: int, tag: int,
                 codec: str | None = None, far: bool = False) -> None:
        super().__init__(comm, dest, tag, codec, far)
        self._specs: Specs | None = None
        self._leaving: deque[tuple[MPI.Request, Any]] = deque()
        weakref.finalize(self, keep_forever, self._leaving)
        self._failed = False
        self._changes = 0       # of descriptions since the last flush

    def send(self, arrays: Sequence[Any]) -> int:
        """Starts to send and returns at once.

        Args:
            arrays: NumPy or CuPy arrays of any shape and of any dtype of
                plain numbers, bytes or text, and None.  NumPy arrays must
                not be changed before :meth:`flush`.

        Returns:
            Bytes of the arrays on their way.

        Raises:
            RuntimeError: :meth:`fail` was called before.
            TypeError: Something cannot be sent; nothing was.
        """
        if self._failed:
            raise RuntimeError(
                f'the channel to rank {self._peer} was closed by a failure')
        specs = describe(arrays, self._codec)
        parts = [_wire(array, spec) for array, spec in zip(
            arrays, specs, strict=True) if spec and spec.size]
        if specs != self._specs:
            self._specs = specs
            self._tag = self._next_tag()
            self._header = json.dumps([self._tag, *specs]).encode()
        self._start(self._header, _HEADER)
        for part in parts:
            self._start(part, self._tag)
        return sum(part.nbytes for part in parts)

    def fail(self, text: str) -> None:
        """Sends an error instead of arrays and returns at once.

        The receiver gets what was sent before, and then raises ``text`` as
        :class:`RemoteError`.  Nothing can be sent afterwards.
        """
        if not self._failed:
            self._failed = True
            self._start(json.dumps({'failed': text}).encode(), _HEADER)

    def flush(self) -> None:
        """Waits until all that was sent has left; arrays may be changed then.

        Call it where the receiver is known to have received everything.
        """
        self._changes = 0
        if not self._have_left():
            with waiting(lambda: [Wait(
                    f'rank {self.world_peer} to take what was sent',
                    (self.world_peer,))]):
                wait_until(self._have_left)

    def _next_tag(self) -> int:
        self._changes += 1
        if self._changes >= _TAGS - _AHEAD:
            return _PLAIN
        return _AHEAD + (self._tag + 1 - _AHEAD) % (_TAGS - _AHEAD)

    def _start(self, wire: Any, tag: int) -> None:
        request = self._comm.Isend([wire, MPI.BYTE], self._peer,
                                   self._first_tag + tag)
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


class Receiver(_End):
    """Receives what the :class:`Sender` of another rank sends.

    Arguments are as the sender's, but for:

    Args:
        source: The sending rank.
        xp: ``numpy`` or ``cupy``: of which kind the arrays shall be,
            whatever they are where they come from.
    """

    def __init__(self, comm: MPI.Comm, source: int, tag: int,
                 codec: str | None = None, xp: Any = numpy,
                 far: bool = False) -> None:
        super().__init__(comm, source, tag, codec, far)
        self._xp = xp
        self._specs: Specs = ()
        self._expected = 0
        self._posted: deque[_Posted] = deque()
        weakref.finalize(self, _withdraw, self._posted, os.getpid())
        self._failure: str | None = None

    def expect(self, count: int) -> None:
        """Announces ``count`` more transfers, which are received ahead."""
        self._expected += count
        self._post(1)

    def receive(self, what: Callable[[], str] | None = None
                ) -> tuple[Any, ...]:
        """Waits for the next transfer.

        Args:
            what: Says what is waited for, in messages about a stalled job.

        Returns:
            Its arrays, which are the caller's to keep and to change, and
            None where there was none.  Arrays without gaps keep the order
            of their axes in memory; others come in C order.

        Raises:
            RemoteError: The sender failed; the message is what it said.
            RuntimeError: No more transfers are expected.
            ValueError: The sender has another codec.
        """
        if self._failure is not None:
            raise RemoteError(self._failure)
        if not self._expected:
            raise RuntimeError(
                f'no message from rank {self._peer} is expected: say how '
                'many will come with expect() first')
        with waiting(lambda: [Wait(
                what() if what else f'a message from rank {self.world_peer}',
                (self.world_peer,))]):
            self._read_header()
            self._post(2)
            posted = self._posted.popleft()
            self._expected -= 1
            wait_until(posted.have_arrived)
        if not self._posted:
            self._mark(busy=False)
        return posted.arrays(self._xp)

    def cancel(self) -> None:
        """Gives up what is still expected."""
        self._expected = 0
        _withdraw(self._posted, os.getpid())
        self._mark(busy=False)

    def _read_header(self) -> None:
        status = MPI.Status()
        tag = self._first_tag + _HEADER
        wait_until(lambda: self._comm.Iprobe(self._peer, tag, status))
        header = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([header, MPI.BYTE], self._peer, tag)
        if header == self._header:
            return
        self._header = bytes(header)
        said = json.loads(self._header)
        _withdraw(self._posted, os.getpid())
        if isinstance(said, dict):
            self.cancel()
            self._failure = said['failed']
            raise RemoteError(self._failure)
        self._tag, *specs = said
        # JSON has lists where specs have tuples.
        self._specs = tuple([spec and _Spec(
            spec[0], tuple(spec[1]), spec[2], spec[3] and tuple(spec[3]),
            spec[4]) for spec in specs])
        if any(spec.coded != _is_coded(numpy.dtype(spec.dtype), self._codec)
               for spec in self._specs if spec):
            raise ValueError(
                f'rank {self._peer} does not send as this rank receives, '
                f'with codec {self._codec!r}; give all ranks the same codec')

    def _post(self, ahead: int) -> None:
        """Has the receives of so many transfers posted, like the last one."""
        if self._tag == _PLAIN:
            ahead -= 1
        while self._header and len(self._posted) < min(ahead,
                                                       self._expected):
            self._posted.append(_Posted(
                self._comm, self._peer, self._first_tag + self._tag,
                self._specs, self._xp))
            self._mark(busy=True)


class _Posted:
    """The receives of one transfer, into new memory."""

    def __init__(self, comm: MPI.Comm, source: int, tag: int, specs: Specs,
                 xp: Any) -> None:
        self._parts: list[tuple[_Spec | None, Any]] = []
        self.requests: list[MPI.Request] = []
        for spec in specs:
            wire = None
            if spec and spec.size:
                wire = (empty_wire(xp, fp8_wire.EXPONENT + spec.size,
                                   numpy.uint8) if spec.coded else
                        empty_wire(xp, spec.size, spec.dtype))
                self.requests.append(comm.Irecv(
                    [wire.view(numpy.uint8), MPI.BYTE], source, tag))
            self._parts.append((spec, wire))

    def have_arrived(self) -> bool:
        while self.requests and self.requests[0].Test():
            self.requests.pop(0)
        return not self.requests

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        return tuple([None if spec is None else _read(wire, spec, xp)
                      for spec, wire in self._parts])


def _withdraw(posted: deque[_Posted], owner: int) -> None:
    """Gives up receives, without waiting for anybody.

    A fork of the process that has posted them, ``owner``, does not.
    """
    if not MPI.Is_finalized() and os.getpid() == owner:
        for request in [one for several in posted
                        for one in several.requests]:
            request.Cancel()
            if not request.Test():      # something is on its way already
                keep_forever(tuple(posted))
    posted.clear()


def _spec(array: Any, codec: str | None, number: int) -> _Spec:
    try:
        flags, dtype, shape = array.flags, array.dtype, array.shape
    except AttributeError:
        raise TypeError(
            f'array {number} of a message is of type '
            f'{type(array).__name__}; expected NumPy or CuPy arrays and '
            'None') from None
    if flags.c_contiguous:
        size, steps = array.size, None
    else:
        packed, steps = _packed(array)
        size = packed.size
    return _Spec(_name(dtype), shape, size, steps, _is_coded(dtype, codec))


def _packed(array: Any) -> tuple[Any, tuple[int, ...]]:
    """What crosses of an array, and the steps of the array's axes in that.

    Each number once; in their order of memory, unless there are gaps.
    """
    order: Sequence[int] = sorted(range(array.ndim),
                                  key=lambda axis: -array.strides[axis])
    once = array[tuple([slice(None if stride else 1)
                        for stride in array.strides])]
    packed = once.transpose(order)
    if not packed.flags.c_contiguous:
        packed, order = once, range(array.ndim)
    steps, step = [0] * array.ndim, 1
    for axis in reversed(order):
        if array.strides[axis]:
            steps[axis] = step
            step *= array.shape[axis]
    return packed, tuple(steps)


@functools.lru_cache(256)
def _name(dtype: numpy.dtype) -> str:
    if dtype.hasobject or numpy.dtype(dtype.str) != dtype:
        raise TypeError(
            f'arrays of dtype {dtype} cannot be sent to another rank; '
            'convert them to one of plain numbers')
    return dtype.str


def _is_coded(dtype: numpy.dtype, codec: str | None) -> bool:
    return codec == 'fp8' and fp8_wire.takes(dtype)


def _wire(array: Any, spec: _Spec) -> numpy.ndarray:
    """The bytes of an array, uint8; its own memory where MPI can take it."""
    if spec.steps:
        array, _ = _packed(array)
    if isinstance(array, numpy.ndarray) and not spec.coded:
        return _bytes(numpy.ascontiguousarray(array))
    flat, xp = array.reshape(-1), array_module(array)
    wire = empty_wire(xp, flat.size + fp8_wire.EXPONENT if spec.coded
                      else flat.nbytes, numpy.uint8)
    if spec.coded:
        fp8_wire.encode(flat, wire)
    else:
        download(flat, wire.view(spec.dtype))
    return wire


def _read(wire: Any, spec: _Spec, xp: Any) -> Any:
    """The array of its bytes, in the order of memory that it had."""
    dtype = numpy.dtype(spec.dtype)
    if not spec.size:
        return xp.empty(spec.shape, dtype)
    array = (fp8_wire.decode(wire, dtype, xp) if spec.coded
             else upload_now(xp, wire))
    if spec.steps is None:
        return array.reshape(spec.shape)
    return xp.lib.stride_tricks.as_strided(array, spec.shape, tuple(
        [step * dtype.itemsize for step in spec.steps]))


def _bytes(array: numpy.ndarray) -> numpy.ndarray:
    return array.reshape(-1).view(numpy.uint8)

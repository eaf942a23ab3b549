"""Arrays from one rank to another: a header, and the arrays behind it."""
# A transfer is a message of text (JSON; reading it runs nothing that a rank
# has sent) and one message per array.  The header describes the arrays, or
# says that the sender has failed: so an error of the other rank takes the
# place of what this one waits for.
#
# Arrays are best received into memory that waits for them: MPI then moves
# them while both ranks compute, and copies nothing.  So the receiver posts
# the receives of the next transfer ahead.  It can do so for arrays of one
# description, the *usual* one, which have a tag of their own: others are
# received when their header is there, and leave what is posted as it is.
# The first arrays are usual.  What is sent twice in a row becomes so, and
# gets the other of two tags, as receives are posted for what was usual
# before.  Such a change is made once between two calls of ``flush``, which
# says that the receiver has received everything, and so has nothing posted
# under the first of the tags.
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
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs.staging import array_module, download, empty_wire, upload_now
from ..mpi.finalizing import keep_forever
from ..mpi.waiting import Wait, wait_until, waiting, world_ranks
from .progress import progress

#: MPI's tags of a channel: of headers, of unusual arrays, and two of usual
#: ones.
_HEADER, _UNUSUAL, _USUAL, _TAGS = 0, 1, (2, 3), 4


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""

    is_shown = True     # by that rank


class _Spec(NamedTuple):
    """How to read an array.

    Attributes:
        dtype: As ``numpy.dtype.str`` writes it, e.g. ``'<f2'``.
        shape: Of the array.
        steps: From one number to the next along each axis, in numbers; 0
            where one is repeated, as by ``broadcast_to``; None: as in C.
            Sums over an array are rounded in its order of memory.
    """

    dtype: str
    shape: tuple[int, ...]
    steps: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """How many numbers cross."""
        return math.prod(self.shape if self.steps is None else [
            length for length, step in zip(self.shape, self.steps,
                                           strict=True) if step])


Specs = tuple[_Spec | None, ...]


def describe(arrays: Sequence[Any]) -> Specs:
    """How arrays, or None in place of some, will be sent.

    Raises:
        TypeError: One is no array, or its elements are not plain numbers,
            text or bytes.
    """
    return tuple([None if array is None else _spec(array, number)
                  for number, array in enumerate(arrays)])


class _End:
    """One of the two ends of a channel.

    Attributes:
        world_peer: The rank of the other end, in ``MPI.COMM_WORLD``.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int, far: bool
                 ) -> None:
        largest: Any = comm.Get_attr(MPI.TAG_UB)
        if not 0 <= tag <= largest // _TAGS - 1:
            raise ValueError(f'tag is {tag}, expected 0 to '
                             f'{largest // _TAGS - 1}')
        self._comm, self._peer, self._far = comm, peer, far
        self._first_tag = _TAGS * tag
        self.world_peer = world_ranks(comm)[peer]
        self._usual: Specs | None = None
        self._usual_tag = _USUAL[1]
        # Of the last transfer.
        self._header, self._specs, self._tag = b'', (), _UNUSUAL

    _specs: Specs

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
        far: Whether the other rank is on another node, so that messages
            need help to move while this rank computes.

    Raises:
        ValueError: The tag is out of range.
    """

    def __init__(self, comm: MPI.Comm, dest: int, tag: int,
                 far: bool = False) -> None:
        super().__init__(comm, dest, tag, far)
        self._leaving: deque[tuple[MPI.Request, Any]] = deque()
        weakref.finalize(self, keep_forever, self._leaving)
        self._failed, self._changed = False, False

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
        specs = describe(arrays)
        wires = [_wire(array, spec) for array, spec in zip(
            arrays, specs, strict=True) if spec and spec.size]
        if specs != self._usual and not self._changed and (
                self._usual is None or specs == self._specs):
            self._usual, self._changed = specs, True
            self._usual_tag = sum(_USUAL) - self._usual_tag
        tag = self._usual_tag if specs == self._usual else _UNUSUAL
        if not self._header or (specs, tag) != (self._specs, self._tag):
            self._specs, self._tag = specs, tag
            self._header = json.dumps([tag, *specs]).encode()
        self._start(self._header, _HEADER)
        for wire in wires:
            self._start(wire, tag)
        return sum(wire.nbytes for wire in wires)

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
        self._changed = False
        if not self._have_left():
            with waiting(lambda: [Wait(
                    f'rank {self.world_peer} to take what was sent',
                    (self.world_peer,))]):
                wait_until(self._have_left)

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
                 xp: Any = numpy, far: bool = False) -> None:
        super().__init__(comm, source, tag, far)
        self._xp = xp
        self._expected = 0
        self._posted: deque[_Posted] = deque()      # for the usual arrays
        weakref.finalize(self, _withdraw, self._posted, os.getpid(), False)
        self._failure: str | None = None

    def expect(self, count: int) -> None:
        """Announces ``count`` more transfers, which are received ahead.

        The sender sends no others before the last of them was received.
        """
        self._expected += count
        self._post(1)

    def receive(self, what: Callable[[], str] | None = None
                ) -> tuple[Any, ...]:
        """Waits for the next transfer, announced or not.

        Args:
            what: Says what is waited for, in messages about a stalled job.

        Returns:
            Its arrays, which are the caller's to keep and to change, and
            None where there was none.  Arrays without gaps keep the order
            of their axes in memory; others come in C order.

        Raises:
            RemoteError: The sender failed; the message is what it said.
        """
        if self._failure is not None:
            raise RemoteError(self._failure)
        with waiting(lambda: [Wait(
                what() if what else f'a message from rank {self.world_peer}',
                (self.world_peer,))]):
            self._read_header()
            if not self._expected or self._tag == _UNUSUAL:
                coming = self._receives(self._specs, self._tag)
            else:
                self._post(2)
                coming = self._posted.popleft()
            self._expected -= bool(self._expected)
            wait_until(coming.have_arrived)
        if not self._expected:
            self.cancel()
        return coming.arrays(self._xp)

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
        if isinstance(said, dict):
            self.cancel()
            self._failure = said['failed']
            raise RemoteError(self._failure)
        self._tag, *specs = said
        # JSON has lists where specs have tuples.
        self._specs = tuple([spec and _Spec(
            spec[0], tuple(spec[1]), spec[2] and tuple(spec[2]))
            for spec in specs])
        if self._tag != _UNUSUAL and (
                self._usual is None or self._tag != self._usual_tag):
            _withdraw(self._posted, os.getpid())
            self._usual, self._usual_tag = self._specs, self._tag

    def _post(self, ahead: int) -> None:
        """Has the receives of so many usual transfers posted."""
        while self._usual is not None and (
                len(self._posted) < min(ahead, self._expected)):
            self._posted.append(self._receives(self._usual, self._usual_tag))
            self._mark(busy=True)

    def _receives(self, specs: Specs, tag: int) -> _Posted:
        return _Posted(self._comm, self._peer, self._first_tag + tag, specs,
                       self._xp)


class _Posted:
    """The receives of one transfer, into new memory."""

    def __init__(self, comm: MPI.Comm, source: int, tag: int, specs: Specs,
                 xp: Any) -> None:
        self._specs, self.requests = specs, deque[MPI.Request]()
        self._wires = [empty_wire(xp, spec.size, spec.dtype)
                       if spec and spec.size else None for spec in specs]
        for wire in self._wires:
            if wire is not None:
                self.requests.append(comm.Irecv(
                    [wire.view(numpy.uint8), MPI.BYTE], source, tag))

    def have_arrived(self) -> bool:
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
        return not self.requests

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        return tuple([spec and _read(wire, spec, xp) for spec, wire in zip(
            self._specs, self._wires, strict=True)])


def _withdraw(posted: deque[_Posted], owner: int, frees: bool = True
              ) -> None:
    """Gives up receives, without waiting for anybody.

    A fork of the process that has posted them, ``owner``, does not.  Without
    ``frees`` nothing is given back to MPI, as garbage is collected at any
    time: with the last request of a communicator that was freed MPI would
    call what frees others, and wait for itself.
    """
    if not MPI.Is_finalized() and os.getpid() == owner:
        for request in [one for several in posted
                        for one in several.requests]:
            request.Cancel()
            # Or something is on its way already.
            if not frees or not request.Test():
                keep_forever(tuple(posted))
    posted.clear()


def _spec(array: Any, number: int) -> _Spec:
    try:
        in_order, shape = array.flags.c_contiguous, array.shape
    except AttributeError:
        raise TypeError(
            f'array {number} of a message is of type '
            f'{type(array).__name__}; expected NumPy or CuPy arrays and '
            'None') from None
    return _Spec(_name(array.dtype), shape,
                 None if in_order else _packed(array)[1])


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


def _wire(array: Any, spec: _Spec) -> numpy.ndarray:
    """The bytes of an array, uint8; its own memory where MPI can take it."""
    if spec.steps:
        array, _ = _packed(array)
    if isinstance(array, numpy.ndarray):
        return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    wire = empty_wire(array_module(array), array.nbytes, numpy.uint8)
    download(array.reshape(-1), wire.view(spec.dtype))
    return wire


def _read(wire: Any, spec: _Spec, xp: Any) -> Any:
    """The array of its bytes, in the order of memory that it had."""
    if wire is None:
        return xp.empty(spec.shape, spec.dtype)
    array = upload_now(xp, wire)
    if spec.steps is None:
        return array.reshape(spec.shape)
    return xp.lib.stride_tricks.as_strided(array, spec.shape, tuple(
        [step * array.dtype.itemsize for step in spec.steps]))

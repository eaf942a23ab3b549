"""Arrays from one rank to another: a header, and the arrays behind it."""
# A transfer is a message of text (JSON; reading it runs nothing that a rank
# has sent) that describes the arrays, and one message per array.  One message
# with all in it would cost a copy of everything on each side.
#
# Arrays are best received into memory that waits for them: MPI then moves
# them while both ranks compute, and copies nothing.  So the receiver posts
# the receives of the next transfer ahead.  It can do so for arrays of one
# description, the *usual* one, which is that of the first arrays and has a tag
# of its own; others are received when their header is there, and leave what
# is posted as it is.
#
# A channel knows nothing of failures.  Who waits is given a function that
# does, and may raise; then the channel cannot be used again, and messages may
# be left under way for ever.  MPI keeps their memory (`HeldRequest`).
from __future__ import annotations

import functools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs.staging import array_module, download, empty_wire, upload_now
from ..mpi.finalizing import HeldRequest
from ..mpi.waiting import Wait, wait_until, waiting, world_ranks
from .progress import progress

#: MPI's tags of a channel: of headers, of unusual and of usual arrays.
_HEADER, _UNUSUAL, _USUAL, TAGS = range(4)


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

    Args:
        comm: The ranks.
        peer: The rank of the other end.
        tag: Which of the channels between the two it is.
        far: Whether the other rank is on another node, so that messages
            need help to move while this rank computes.
        wait: Waits until a function returns a true value.

    Raises:
        ValueError: The tag is out of range.

    Attributes:
        world_peer: The rank of the other end, in ``MPI.COMM_WORLD``.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int, far: bool = False,
                 wait: Callable[[Callable[[], bool]], object] = wait_until
                 ) -> None:
        largest: Any = comm.Get_attr(MPI.TAG_UB)
        if not 0 <= tag <= largest // TAGS - 1:
            raise ValueError(f'tag is {tag}, expected 0 to '
                             f'{largest // TAGS - 1}')
        self._comm, self._peer, self._far = comm, peer, far
        self._first_tag, self._wait = TAGS * tag, wait
        self.world_peer = world_ranks(comm)[peer]
        self._usual: Specs | None = None
        self._specs: Specs = ()         # of the last transfer
        self._header = b''

    def _mark(self, busy: bool) -> None:
        """Keeps messages moving in the background, or stops to."""
        if self._far:
            progress.mark(self, busy)


class Sender(_End):
    """Sends tuples of arrays to the :class:`Receiver` of another rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leaving: deque[HeldRequest] = deque()

    def send(self, arrays: Sequence[Any]) -> int:
        """Starts to send and returns at once.

        Args:
            arrays: NumPy or CuPy arrays of any shape and of any dtype of
                plain numbers, bytes or text, and None.  NumPy arrays must
                not be changed before :meth:`flush`.

        Returns:
            Bytes of the arrays on their way.

        Raises:
            TypeError: Something cannot be sent; nothing was.
        """
        specs = describe(arrays)
        wires = [_wire(array, spec) for array, spec in zip(
            arrays, specs, strict=True) if spec and spec.size]
        if not self._header or specs != self._specs:
            self._specs, self._header = specs, json.dumps(specs).encode()
        if self._usual is None:
            self._usual = specs
        tag = _USUAL if specs == self._usual else _UNUSUAL
        for wire, of in ((self._header, _HEADER), *[
                (wire, tag) for wire in wires]):
            request = HeldRequest(self._comm.Isend(
                [wire, MPI.BYTE], self._peer, self._first_tag + of), wire)
            if not self._have_left() or not request.test():
                self._leaving.append(request)
                self._mark(busy=True)
        return sum(wire.nbytes for wire in wires)

    def flush(self) -> None:
        """Waits until all that was sent has left; arrays may be changed then.
        """
        if not self._have_left():
            with waiting(lambda: [Wait(
                    f'rank {self.world_peer} to take what was sent',
                    (self.world_peer,))]):
                self._wait(self._have_left)

    def _have_left(self) -> bool:
        leaving = self._leaving
        while leaving and leaving[0].test():
            leaving.popleft()
            if not leaving:
                self._mark(busy=False)
        return not leaving


class Receiver(_End):
    """Receives what the :class:`Sender` of another rank sends.

    Further arguments are as the sender's.

    Args:
        xp: ``numpy`` or ``cupy``: of which kind the arrays shall be,
            whatever they are where they come from.
    """

    def __init__(self, *args: Any, xp: Any = numpy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._xp, self._expected = xp, 0
        self._posted: deque[_Posted] = deque()      # for the usual arrays

    def expect(self, count: int) -> None:
        """Announces ``count`` more transfers, which are received ahead."""
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
        """
        with waiting(lambda: [Wait(
                what() if what else f'a message from rank {self.world_peer}',
                (self.world_peer,))]):
            self._read_header()
            if self._specs == self._usual:
                # Into memory that waits, and memory for the next one.
                self._post(1 + (self._expected > 1))
                coming = self._posted.popleft()
            else:
                coming = self._receives(self._specs, _UNUSUAL)
            self._expected -= bool(self._expected)
            self._wait(coming.have_arrived)
        if not self._expected:
            self._mark(busy=False)
        return coming.arrays(self._xp)

    def _read_header(self) -> None:
        status = MPI.Status()
        tag = self._first_tag + _HEADER
        self._wait(lambda: self._comm.Iprobe(self._peer, tag, status))
        header = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([header, MPI.BYTE], self._peer, tag)
        if header != self._header:
            self._header = bytes(header)
            # JSON has lists where specs have tuples.
            self._specs = tuple([spec and _Spec(
                spec[0], tuple(spec[1]), spec[2] and tuple(spec[2]))
                for spec in json.loads(self._header)])
            if self._usual is None:
                self._usual = self._specs

    def _post(self, count: int) -> None:
        """Has the receives of so many usual transfers posted."""
        while self._usual is not None and len(self._posted) < count:
            self._posted.append(self._receives(self._usual, _USUAL))
            self._mark(busy=True)

    def _receives(self, specs: Specs, tag: int) -> _Posted:
        return _Posted(self._comm, self._peer, self._first_tag + tag, specs,
                       self._xp)


class _Posted:
    """The receives of one transfer, into new memory."""

    def __init__(self, comm: MPI.Comm, source: int, tag: int, specs: Specs,
                 xp: Any) -> None:
        self._specs = specs
        self._wires = [empty_wire(xp, spec.size, spec.dtype)
                       if spec and spec.size else None for spec in specs]
        self._requests = deque(
            HeldRequest(comm.Irecv([wire.view(numpy.uint8), MPI.BYTE],
                                   source, tag), wire)
            for wire in self._wires if wire is not None)

    def have_arrived(self) -> bool:
        while self._requests and self._requests[0].test():
            self._requests.popleft()
        return not self._requests

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        return tuple([spec and _read(wire, spec, xp) for spec, wire in zip(
            self._specs, self._wires, strict=True)])


def _spec(array: Any, number: int) -> _Spec:
    if not hasattr(array, 'flags'):
        raise TypeError(
            f'array {number} of a message is of type '
            f'{type(array).__name__}; expected NumPy or CuPy arrays and '
            'None')
    return _Spec(_name(array.dtype), array.shape,
                 None if array.flags.c_contiguous else _packed(array)[1])


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

"""Arrays from one rank to another: a header, and the arrays behind it."""
# A transfer is a message that describes the arrays, and one message per array.
# One message with all in it would cost a copy of everything on each side.
#
# MPI moves a large message only after its receive was posted, and while both
# sides are inside a call of MPI.  Between nodes, a thread makes such calls
# while a rank records or computes (`moving`), and posts these receives.
#
# A channel knows nothing of failures.  Who waits is given a function that
# does, and may raise; then the channel cannot be used again, and messages may
# be left under way for ever.  MPI keeps their memory (`HeldRequest`).
from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs.staging import array_module, download, empty_wire, upload_now
from ..mpi.finalizing import HeldRequest
from ..mpi.waiting import Wait, wait_until, waiting, world_ranks

#: MPI's tags of a channel.
_HEADER, _ARRAYS, TAGS = range(3)
_PERIOD = 1e-3      # seconds between calls of MPI


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""

    is_shown = True     # by that rank


@contextlib.contextmanager
def moving(receivers: Callable[[], list[Receiver]],
           on_device: Callable[[], contextlib.AbstractContextManager[Any]]
           ) -> Iterator[None]:
    """A block in which messages between nodes move while this rank computes.

    Of each of the ``receivers`` one transfer is received ahead.  A thread does
    it in a block of ``on_device``, as a GPU is current in one thread only.
    """
    done = threading.Event()
    tag: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)      # nobody's

    def look() -> None:
        with on_device():
            while not done.wait(_PERIOD):
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, tag)
                for receiver in receivers():
                    try:
                        receiver.look()
                    except BaseException as error:
                        receiver.error = error  # raised where it is received
                        return
    thread = threading.Thread(target=look, name='MPI progress', daemon=True)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        done.set()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Spec(NamedTuple):
    """How an array is sent, with its axes as they lie in memory.

    Sums over an array are rounded in that order.
    """

    dtype: str                      # as of numpy.dtype.str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None    # in this order; None: as in C
    #: With what is repeated, as by ``broadcast_to``; None: nothing is.
    whole: tuple[int, ...] | None = None


def describe(arrays: Sequence[Any]) -> list[_Spec | None]:
    """How arrays, or None in place of some, will be sent.

    Raises TypeError if one is no array of plain numbers, text or bytes.
    """
    return [None if array is None else _spec(array, number)
            for number, array in enumerate(arrays)]


class _End:
    """One end of a channel to the rank ``peer``, of those with this tag.

    ``wait`` waits until a function returns a true value; ``world_peer`` is the
    rank of the other end in ``MPI.COMM_WORLD``.
    """

    def __init__(self, comm: MPI.Comm, peer: int, tag: int,
                 wait: Callable[[Callable[[], bool]], object] = wait_until
                 ) -> None:
        self._comm, self._peer, self._wait = comm, peer, wait
        self._first_tag = TAGS * tag
        self.world_peer = world_ranks(comm)[peer]


class Sender(_End):
    """Sends tuples of arrays to the :class:`Receiver` of another rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leaving: deque[HeldRequest] = deque()

    def send(self, arrays: Sequence[Any]) -> int:
        """Starts to send and returns at once, with the number of bytes.

        NumPy arrays must not be changed before :meth:`flush`.  Raises
        TypeError as :func:`describe`; nothing was sent then.
        """
        specs = describe(arrays)
        wires = [_wire(array, spec) for array, spec in zip(
            arrays, specs, strict=True) if spec and array.size]
        self._leaving.append(HeldRequest(self._comm.isend(
            specs, self._peer, self._first_tag + _HEADER)))
        self._leaving.extend([HeldRequest(self._comm.Isend(
            [wire, MPI.BYTE], self._peer, self._first_tag + _ARRAYS), wire)
            for wire in wires])
        _are_done(self._leaving)
        return sum(wire.nbytes for wire in wires)

    def flush(self) -> None:
        """Waits until all that was sent has left; arrays may be changed then.
        """
        if not _are_done(self._leaving):
            with waiting(lambda: [Wait(
                    f'rank {self.world_peer} to take what was sent',
                    (self.world_peer,))]):
                self._wait(lambda: _are_done(self._leaving))


class Receiver(_End):
    """Receives what the :class:`Sender` of another rank sends.

    ``xp`` says of which kind the arrays shall be, ``numpy`` or ``cupy``.
    """

    def __init__(self, *args: Any, xp: Any = numpy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._xp, self._lock = xp, threading.Lock()
        self._coming: Any = None        # what :meth:`_post` gave
        self.error: BaseException | None = None     # of a thread

    def look(self) -> bool:
        """Whether the next transfer is coming, which this starts to receive.
        """
        if self.error is not None:
            raise self.error
        header = self._peer, self._first_tag + _HEADER
        with self._lock:        # of a rank's own thread and of `moving`
            if self._coming is None and self._comm.Iprobe(*header):
                self._coming = self._post(self._comm.recv(None, *header))
        return self._coming is not None

    def receive(self, what: Callable[[], str] | None = None
                ) -> tuple[Any, ...]:
        """Waits for the next transfer; its arrays.

        They keep the order of their axes in memory.  ``what`` says what is
        waited for, where a job stalls.
        """
        with waiting(lambda: [Wait(
                what() if what else f'a message from rank {self.world_peer}',
                (self.world_peer,))]):
            self._wait(self.look)
            found, requests = self._coming
            self._wait(lambda: _are_done(requests))
        self._coming = None
        return tuple([spec and _read(wire, spec, self._xp)
                      for spec, wire in found])

    def _post(self, specs: list[_Spec | None]) -> tuple[
            list[tuple[_Spec | None, Any]], deque[HeldRequest]]:
        """Starts to receive a transfer into new memory, with its requests."""
        found = [(spec, empty_wire(self._xp, math.prod(spec.shape), spec.dtype)
                  if spec and 0 not in spec.shape else None) for spec in specs]
        return found, deque(HeldRequest(self._comm.Irecv(
            [wire.view(numpy.uint8), MPI.BYTE], self._peer,
            self._first_tag + _ARRAYS), wire)
            for _, wire in found if wire is not None)


def _are_done(requests: deque[HeldRequest]) -> bool:
    """Whether all are; those that are go."""
    while requests and requests[0].test():
        requests.popleft()
    return not requests


def _spec(array: Any, number: int) -> _Spec:
    if not hasattr(array, 'flags'):
        raise TypeError(
            f'array {number} of a message is of type '
            f'{type(array).__name__}; expected NumPy or CuPy arrays and '
            'None')
    if array.flags.c_contiguous:
        return _Spec(_name(array.dtype), array.shape, None)
    axes = sorted(range(array.ndim),
                  key=lambda axis: -abs(array.strides[axis]))
    once = _once(array)
    return _Spec(_name(array.dtype), once.transpose(axes).shape, tuple(axes),
                 None if once.shape == array.shape else array.shape)


def _once(array: Any) -> Any:
    """An array without what is repeated, as by ``broadcast_to``."""
    return array[tuple([slice(None if stride else 1)
                        for stride in array.strides])]


@functools.lru_cache(256)
def _name(dtype: numpy.dtype) -> str:
    if dtype.hasobject or numpy.dtype(dtype.str) != dtype:
        raise TypeError(
            f'arrays of dtype {dtype} cannot be sent to another rank; '
            'convert them to one of plain numbers')
    return dtype.str


def _wire(array: Any, spec: _Spec) -> numpy.ndarray:
    """The bytes of an array, uint8; its own memory where MPI can take it."""
    if spec.axes:
        array = _once(array).transpose(spec.axes)
    if isinstance(array, numpy.ndarray):
        return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    wire = empty_wire(array_module(array), array.nbytes, numpy.uint8)
    download(array.reshape(-1), wire.view(spec.dtype))
    return wire


def _read(wire: Any, spec: _Spec, xp: Any) -> Any:
    """The array of its bytes, in the order of memory that it had."""
    array = (xp.empty(spec.shape, spec.dtype) if wire is None
             else upload_now(xp, wire).reshape(spec.shape))
    if spec.axes is not None:
        array = array.transpose(sorted(spec.axes, key=spec.axes.__getitem__))
    return array if spec.whole is None else xp.lib.stride_tricks.as_strided(
        array, spec.whole, [
            stride if length == whole else 0 for length, whole, stride in zip(
                array.shape, spec.whole, array.strides, strict=True)])

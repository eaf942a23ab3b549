"""Arrays from one rank of a pipeline to another, and word of failures."""
# A transfer is a message that describes the arrays, and one message per array.
# One message with all in it would cost a copy of everything on each side.
#
# Sends do not wait.  Who waits for a message of any rank raises `RemoteError`
# as soon as one has failed; then the channels cannot be used again, and
# messages may be left under way for ever.  MPI keeps their memory
# (`HeldRequest`).
#
# MPI moves a large message only after its receive was posted, and while both
# sides are inside a call of MPI.  Between nodes, a thread makes such calls
# while a rank records or computes, and posts these receives.
from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..codecs.staging import array_module, download, empty_wire, upload_now
from ..mpi.finalizing import HeldRequest, keep_forever
from ..mpi.ranks import nodes_of, once
from ..mpi.waiting import Wait, wait_until, waiting, world_ranks

#: Tags of arrays from any rank to any other, of batches, and of failures.
#: Then come two for each boundary: of activations and of gradients.
ANY, BATCH, _FAILURE, _BOUNDARIES = range(4)
_PERIOD = 1e-3      # seconds between calls of MPI


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""

    is_shown = True     # by that rank


class _Shared:
    """The communicator that all pipelines on one communicator share."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self.world = comm, world_ranks(comm)
        self.far = len(set(nodes_of(comm))) > 1
        self.tags = 0       # the next unused one
        self.spoilt = False

    def free(self) -> None:
        # MPI gives the numbers of freed communicators to new ones, which
        # would receive what a failed step has left under way.
        if not self.spoilt:
            self.comm.Free()


class Channels:
    """What one rank of a pipeline sends to the others, and receives.

    Boundary b lies between chunks b and b + 1.

    Args:
        comm: The ranks of one pipeline.
        last: Number of the pipeline's last chunk.
        xp: ``numpy`` or ``cupy``: where received arrays lie; those of batches
            stay in the host's memory.
    """

    def __init__(self, comm: MPI.Comm, last: int, xp: Any = numpy) -> None:
        self.size, self.rank, self._xp = comm.size, comm.rank, xp
        self._tags = _BOUNDARIES + 2 * last
        self._lock = threading.Lock()
        self._error: BaseException | None = None    # of the thread
        # Apart from whatever else is sent there.
        self._shared = once(comm, 'channels', lambda: _Shared(comm.Dup()))
        self._comm = self._shared.comm
        self._begin()

    def _begin(self) -> None:
        self._leaving: deque[tuple[HeldRequest, int]] = deque()
        # By rank and tag: the next transfer; None: it has not begun to come.
        self._coming: dict[tuple[int, int], Any] = {}
        # All channels get tags of their own: no message that earlier ones left
        # under way can arrive here.
        self._tag, self._shared.tags = (
            self._shared.tags, self._shared.tags + self._tags)

    def renew(self) -> None:
        """Leaves what was sent behind, after a failure; on all ranks."""
        self._shared.spoilt = True
        self._begin()

    def crossing(self, sends: bool, what: str, boundary: int
                 ) -> tuple[int, int]:
        """Rank and tag over a boundary, for ``what``: activation, gradient."""
        is_after = sends == (what == 'activation')
        return ((boundary + is_after) % self.size,
                _BOUNDARIES + 2 * boundary + (what == 'gradient'))

    def send(self, arrays: Sequence[Any], rank: int, tag: int = ANY) -> int:
        """Starts to send and returns at once, with the number of bytes.

        NumPy arrays must not be changed before :meth:`flush`.  Raises
        TypeError as :func:`describe`; nothing was sent then.
        """
        specs = describe(arrays)
        wires = [_wire(array, spec) for array, spec in zip(
            arrays, specs, strict=True) if spec and array.size]
        header = self._header(tag)
        for request in [
                HeldRequest(self._comm.isend(specs, rank, header)),
                *[HeldRequest(self._comm.Isend([wire, MPI.BYTE], rank,
                                               header + 1), wire)
                  for wire in wires]]:
            self._leaving.append((request, self._shared.world[rank]))
        _are_done(self._leaving)
        return sum(wire.nbytes for wire in wires)

    def flush(self) -> None:
        """Waits until all that was sent has left; arrays may be changed then.
        """
        if not _are_done(self._leaving):
            with waiting(lambda: [
                    Wait(f'rank {rank} to take what was sent', (rank,))
                    for _, rank in [*self._leaving][:1]]):
                self._wait(lambda: _are_done(self._leaving))

    def receive(self, rank: int, tag: int = ANY, what: Callable[
            [int], str] = 'a message from rank {}'.format) -> tuple[Any, ...]:
        """Waits for the next transfer; its arrays.

        They keep the order of their axes in memory.  ``what`` says what is
        waited for, from this rank of all, where a job stalls.
        """
        end, world = (rank, tag), self._shared.world[rank]
        with waiting(lambda: [Wait(what(world), (world,))]):
            self._wait(lambda: self._look(end))
            found, requests = self._coming[end]
            self._wait(lambda: _are_done(requests))
        self._coming[end] = None
        xp = numpy if tag == BATCH else self._xp
        return tuple([spec and _read(wire, spec, xp) for spec, wire in found])

    @contextlib.contextmanager
    def moving(self, device: Any) -> Iterator[None]:
        """A block in which messages move while this rank computes.

        One transfer from each end is received ahead, to memory of Chainer's
        ``device``, as a GPU is current in one thread only.
        """
        if self.size == 1 or not self._shared.far or (
                MPI.Query_thread() < MPI.THREAD_MULTIPLE):
            yield
            return
        done = threading.Event()

        def move() -> None:
            try:
                with chainer.using_device(device):
                    while not done.wait(_PERIOD):
                        self._comm.Iprobe(MPI.ANY_SOURCE,
                                          self._header(_FAILURE))
                        for end in [*self._coming]:
                            self._look(end)
            except BaseException as error:
                self._error = error     # raised where it is received
        thread = threading.Thread(target=move, name='MPI progress',
                                  daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def fail(self, text: str) -> None:
        """Tells all ranks that this one cannot go on."""
        for rank in {*range(self.size)} - {self.rank}:
            keep_forever(self._comm.isend(text, rank, self._header(_FAILURE)))

    def _header(self, tag: int) -> int:
        """MPI's tag of descriptions; the next is that of their arrays."""
        return 2 * (self._tag + tag)

    def _wait(self, done: Callable[[], bool]) -> None:
        comm, status = self._comm, MPI.Status()
        failure = self._header(_FAILURE)

        def done_or_failed() -> bool:
            if done():
                return True
            if comm.Iprobe(MPI.ANY_SOURCE, failure, status):
                raise RemoteError(comm.recv(None, status.source, failure))
            return False
        wait_until(done_or_failed)

    def _look(self, end: tuple[int, int]) -> bool:
        """Whether a transfer is coming, which this starts to receive."""
        if self._error is not None:
            raise self._error
        rank, tag = end
        header = self._header(tag)
        with self._lock:        # of a rank's own thread and of `moving`
            if self._coming.setdefault(end) is None and (
                    self._comm.Iprobe(rank, header)):
                found = [(spec, empty_wire(
                    self._xp, math.prod(spec[1]), spec[0])
                    if spec and 0 not in spec[1] else None)
                    for spec in self._comm.recv(None, rank, header)]
                self._coming[end] = found, deque([(HeldRequest(
                    self._comm.Irecv([wire.view(numpy.uint8), MPI.BYTE], rank,
                                     header + 1), wire), rank)
                    for _, wire in found if wire is not None])
        return self._coming[end] is not None


def _are_done(requests: deque[tuple[HeldRequest, int]]) -> bool:
    """Whether all are; those that are go."""
    while requests and requests[0][0].test():
        requests.popleft()
    return not requests


# --- arrays ------------------------------------------------------------------

#: How an array is sent: its dtype, its shape with the axes as they lie in
#: memory, in which order these are (None: as in C), and the shape with what is
#: repeated, as by ``broadcast_to`` (None: nothing is).  Sums over an array are
#: rounded in the order of memory.
_Spec = tuple[Any, tuple[int, ...], Any, Any]


def describe(arrays: Sequence[Any]) -> list[_Spec | None]:
    """How arrays, or None in place of some, will be sent.

    Raises TypeError if one is no array of plain numbers, text or bytes.
    """
    found: list[_Spec | None] = []
    for array in arrays:
        dtype = getattr(array, 'dtype', None)
        if array is None:
            found.append(None)
        elif dtype is None or dtype.hasobject:
            raise TypeError(
                f'a {type(array).__name__} of dtype {dtype} cannot be sent to '
                'another rank; convert it to an array of plain numbers')
        elif array.flags.c_contiguous:
            found.append((dtype, array.shape, None, None))
        else:
            once, strides = _once(array), [-abs(one) for one in array.strides]
            axes = sorted(range(array.ndim), key=strides.__getitem__)
            found.append((
                dtype, once.transpose(axes).shape, axes,
                None if once.shape == array.shape else array.shape))
    return found


def _once(array: Any) -> Any:
    """An array without what is repeated, as by ``broadcast_to``."""
    return array[tuple([slice(None if stride else 1)
                        for stride in array.strides])]


def _wire(array: Any, spec: _Spec) -> numpy.ndarray:
    """The bytes of an array, uint8; its own memory where MPI can take it."""
    dtype, _, axes, _ = spec
    if axes:
        array = _once(array).transpose(axes)
    if isinstance(array, numpy.ndarray):
        return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    wire = empty_wire(array_module(array), array.nbytes, numpy.uint8)
    download(array.reshape(-1), wire.view(dtype))
    return wire


def _read(wire: Any, spec: _Spec, xp: Any) -> Any:
    """The array of its bytes, in the order of memory that it had."""
    dtype, shape, axes, whole = spec
    array = (xp.empty(shape, dtype) if wire is None
             else upload_now(xp, wire).reshape(shape))
    if axes is not None:
        array = array.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    return array if whole is None else xp.lib.stride_tricks.as_strided(
        array, whole, [stride if length == repeated else 0
                       for length, repeated, stride in zip(
                           array.shape, whole, array.strides, strict=True)])

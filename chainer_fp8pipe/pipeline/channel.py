"""Arrays from one rank of a pipeline to another, and word of failures."""
# A transfer is a message that describes the arrays, and one message per array.
# One message with all in it would cost a copy of everything on each side.
#
# Sends do not wait.  Who waits for a message of any rank raises `RemoteError`
# as soon as one has failed; then the channels cannot be used again, and
# messages may be left under way for ever.  MPI keeps their memory
# (`HeldRequest`).
#
# MPI moves a large message only while both sides are inside a call of MPI.
# Between nodes a thread makes such calls while a rank records or computes.
from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        # Apart from whatever else is sent there.
        self._shared = once(comm, 'channels', lambda: _Shared(comm.Dup()))
        self._comm = self._shared.comm
        self._begin()

    def _begin(self) -> None:
        self._leaving: deque[tuple[HeldRequest, int]] = deque()
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
        comm, header = self._comm, self._header(tag)
        world = self._shared.world[rank]
        with waiting(lambda: [Wait(what(world), (world,))]):
            self._wait(lambda: comm.Iprobe(rank, header))
            found = [(spec, empty_wire(self._xp, spec[1], spec[0])
                      if spec and spec[1] else None)
                     for spec in comm.recv(None, rank, header)]
            requests = deque([
                (HeldRequest(comm.Irecv(
                    [wire.view(numpy.uint8), MPI.BYTE], rank, header + 1),
                    wire), rank)
                for _, wire in found if wire is not None])
            self._wait(lambda: _are_done(requests))
        xp = numpy if tag == BATCH else self._xp
        return tuple([spec and _read(wire, spec, xp) for spec, wire in found])

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """A block in which what was sent leaves while this rank computes."""
        def move() -> None:
            while not done.wait(_PERIOD):
                self._comm.Iprobe(MPI.ANY_SOURCE, self._header(_FAILURE))
        done = threading.Event()
        thread = threading.Thread(target=move, name='MPI progress',
                                  daemon=True)
        if self._shared.far and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread.ident is not None:
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


def _are_done(requests: deque[tuple[HeldRequest, int]]) -> bool:
    """Whether all are; those that are go."""
    while requests and requests[0][0].test():
        requests.popleft()
    return not requests


# --- arrays ------------------------------------------------------------------

#: How an array is sent: its dtype, how many elements, its shape, and in bytes
#: the strides that it will have without gaps (None: those of C).  What is
#: repeated, as by ``broadcast_to``, is sent once, and its stride 0.  Sums over
#: an array are rounded in the order of memory.
_Spec = tuple[Any, int, tuple[int, ...], Any]


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
            found.append((dtype, array.size, array.shape, None))
        else:
            own, strides, count = array.strides, [0] * array.ndim, 1
            for axis in sorted(range(array.ndim), key=lambda n: abs(own[n])):
                if own[axis]:
                    strides[axis] = count * array.itemsize
                    count *= array.shape[axis]
            found.append((dtype, count, array.shape, strides))
    return found


def _wire(array: Any, spec: _Spec) -> numpy.ndarray:
    """The bytes of an array, uint8; its own memory where MPI can take it."""
    dtype, *_, strides = spec
    if strides is not None:
        array = array[tuple([slice(None if stride else 1)
                             for stride in strides])].transpose(sorted(
            range(array.ndim), key=strides.__getitem__, reverse=True))
    if isinstance(array, numpy.ndarray):
        return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    wire = empty_wire(array_module(array), array.nbytes, numpy.uint8)
    download(array.reshape(-1), wire.view(dtype))
    return wire


def _read(wire: Any, spec: _Spec, xp: Any) -> Any:
    """The array of its bytes, in the order of memory that it had."""
    dtype, _, shape, strides = spec
    if wire is None:
        return xp.empty(shape, dtype)
    array = upload_now(xp, wire)
    return (array.reshape(shape) if strides is None else
            xp.lib.stride_tricks.as_strided(array, shape, strides))

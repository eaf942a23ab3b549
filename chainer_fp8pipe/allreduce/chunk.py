"""One frame of every block, on its way through a plan."""
from __future__ import annotations

import collections
import dataclasses

import numpy
from mpi4py import MPI

from ..codecs import Codec
from .buffers import Buffers
from .frames import Frames
from .job import Job
from .plan import Kind
from .program import Program, Step
from .statistics import Statistics
from .sums import WideSums, WireSums


@dataclasses.dataclass
class Surroundings:
    """What all chunks of a plan share.

    Attributes:
        comm: The ranks.
        program: This rank's part of the plan.
        statistics: Counters to add to.
        form: What partial sums travel in, one of :data:`.sums.FORMS`.
        workers: How many ranks contribute.
        name: Of the plan, different from that of any other beside it.
        buffers: Memory for messages.
    """

    comm: MPI.Comm
    program: Program
    statistics: Statistics
    form: str
    workers: int
    name: str
    buffers: Buffers = dataclasses.field(default_factory=Buffers)


class Chunk:
    """Runs the program for one chunk; never waits.

    Partial sums are received into buffers that are posted at once.  Results
    are received where this rank's own contribution lies, and so not before
    all of that has left.

    Args:
        surroundings: See there.
        job: What it is a part of.
        frames: How the job is cut.
        number: Which frame of each block this is.
        tag: Of its messages; different from that of any chunk that may be
            under way on another rank.
    """

    def __init__(self, surroundings: Surroundings, job: Job, frames: Frames,
                 number: int, tag: int) -> None:
        self._comm = surroundings.comm
        self._name = surroundings.name
        self._program = surroundings.program
        self._statistics = surroundings.statistics
        self._buffers = surroundings.buffers
        self._job = job
        self._wire = job.wire
        self._frames = frames
        self._number = number
        self._tag = tag
        self._sums = _sums(surroundings, job, [
            frames.part(block, number) for block in self._program.held])
        self._position = 0
        self._site = 0
        self._partials: list[MPI.Request] = []
        self._results: list[MPI.Request] = []
        self._used: list[numpy.ndarray] = []
        self._receives: collections.deque[
            tuple[MPI.Request | None, numpy.ndarray]] = collections.deque()
        self._results_posted = False
        self._post(Kind.RECEIVE_PARTIAL)
        if job.encodes:
            with self._statistics.section('encode'):
                for part in self._all_parts():
                    job.encode(part)

    @property
    def finished(self) -> bool:
        """All is done, and all that was sent has left."""
        return (self._position == len(self._program.steps)
                and not self._partials and not self._results)

    def advance(self) -> bool:
        """Does what can be done now; whether it was anything."""
        before = self._position
        steps = self._program.steps
        while self._position < len(steps):
            step = steps[self._position]
            if not _HANDLERS[step.action.kind](self, step):
                break
            self._position += 1
        if self._position == len(steps):
            if self._position > before:
                with self._statistics.section('decode'):
                    for part in self._all_parts():
                        self._job.decode(part)
            self._partials = _under_way(self._partials)
            self._results = _under_way(self._results)
            if self.finished:
                self._buffers.give(self._used)
                self._used = []
        return self._position > before or self.finished

    # --- steps --------------------------------------------------------------

    def _send_partial(self, step: Step) -> bool:
        parts = self._parts(step)
        in_place = isinstance(self._sums, WireSums) and len(parts) == 1
        if step.summed and not in_place:
            message = self._buffer(_size(parts), self._sums.dtype)
            with self._statistics.section('encode'):
                self._sums.message(parts, message)
            self._send(step, message)
            return True
        return self._send_wire(step)

    def _send_wire(self, step: Step) -> bool:
        parts = self._parts(step)
        if len(parts) == 1:
            message = self._wire[parts[0]]
        else:
            message = self._buffer(_size(parts), self._wire.dtype)
            numpy.concatenate([self._wire[part] for part in parts],
                              out=message)
        self._send(step, message)
        return True

    def _receive_partial(self, step: Step) -> bool:
        message = self._arrived()
        if message is None:
            return False
        if message.size:
            with self._statistics.section('decode'):
                self._sums.add(self._parts(step), message, step.fresh,
                               step.summed)
        return True

    def _encode(self, step: Step) -> bool:
        if step.fresh:      # one contribution only; it is encoded
            return True
        bounds = self._frames.bounds
        with self._statistics.section('encode'):
            self._sums.encode(
                self._parts(step),
                (bounds[step.action.start], bounds[step.action.stop]),
                step.action.peer, f'{self._name} {self._site}')
        self._site += 1
        return True

    def _receive_result(self, step: Step) -> bool:
        if not self._results_posted:
            self._partials = _under_way(self._partials)
            if self._partials:
                return False
            self._post(Kind.RECEIVE_RESULT)
            self._results_posted = True
        message = self._arrived()
        if message is None:
            return False
        parts = self._parts(step)
        if len(parts) > 1:
            place = 0
            for part in parts:
                end = place + part.stop - part.start
                self._wire[part] = message[place:end]
                place = end
        return True

    # --- messages -----------------------------------------------------------

    def _post(self, kind: Kind) -> None:
        for step in self._program.steps:
            if step.action.kind is not kind:
                continue
            parts = self._parts(step)
            if kind is Kind.RECEIVE_RESULT and len(parts) == 1:
                target = self._wire[parts[0]]
            else:
                target = self._buffer(_size(parts), (
                    self._sums.dtype if step.summed
                    and kind is Kind.RECEIVE_PARTIAL else self._wire.dtype))
            request = None
            if target.size:
                request = self._comm.Irecv(
                    target.view(numpy.uint8), step.action.peer, self._tag)
            self._receives.append((request, target))

    def _arrived(self) -> numpy.ndarray | None:
        request, message = self._receives[0]
        if request is not None and not request.Test():
            return None
        self._receives.popleft()
        return message

    def _send(self, step: Step, message: numpy.ndarray) -> None:
        if message.size:
            data = message.view(numpy.uint8)
            sends = (self._partials if step.action.kind is Kind.SEND_PARTIAL
                     else self._results)
            sends.append(self._comm.Isend(data, step.action.peer, self._tag))
            self._statistics.bytes_sent += data.size

    def _parts(self, step: Step) -> list[slice]:
        return [self._frames.part(block, self._number)
                for block in range(step.action.start, step.action.stop)]

    def _all_parts(self) -> list[slice]:
        return [self._frames.part(block, self._number)
                for block in range(len(self._frames.bounds) - 1)]

    def _buffer(self, size: int, dtype: numpy.dtype) -> numpy.ndarray:
        memory = self._buffers.take(size * dtype.itemsize)
        self._used.append(memory)
        return memory[:size * dtype.itemsize].view(dtype)


_HANDLERS = {
    Kind.SEND_PARTIAL: Chunk._send_partial,
    Kind.RECEIVE_PARTIAL: Chunk._receive_partial,
    Kind.ENCODE: Chunk._encode,
    Kind.SEND_RESULT: Chunk._send_wire,
    Kind.RECEIVE_RESULT: Chunk._receive_result,
}


def _sums(surroundings: Surroundings, job: Job, parts: list[slice]
          ) -> WideSums | WireSums:
    contributes = surroundings.program.contributes
    if in_wire_format(surroundings.form, job.codec):
        return WireSums(job.codec, job.wire, contributes)
    return WideSums(job.codec, job.tensors, job.wire, parts, contributes,
                    numpy.dtype(surroundings.form), surroundings.workers)


def in_wire_format(form: str, codec: Codec) -> bool:
    """Whether sums are made in the wire's own format."""
    return form == 'wire' or codec.wire_dtype == numpy.float32


def _under_way(sends: list[MPI.Request]) -> list[MPI.Request]:
    return [] if not sends or MPI.Request.Testall(sends) else sends


def _size(parts: list[slice]) -> int:
    return sum(part.stop - part.start for part in parts)

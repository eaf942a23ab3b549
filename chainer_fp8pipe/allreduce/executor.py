"""Runs plans over MPI: frame by frame, several frames at a time."""
from __future__ import annotations

from collections.abc import Sequence

import numpy
from mpi4py import MPI

from ..codecs.compiled import IN_PYTHON, Compiled
from ..mpi.functions import exception, handle, library
from ..mpi.waiting import BRIEF, LONG
from ..report.statistics import Statistics
from . import _executor
from .frames import Frames, piece_bounds
from .job import Job
from .plan import Opcode, Plan
from .rank_plan import RankPlan, program
from .sums import in_wire_format, shrink
from .uncompiled import Uncompiled, site_name

# Elements of a message, whose length in bytes is an int of MPI.
_LARGEST = (1 << 31) // 4 - 1
# The numbers that compiled code has for them.
_KINDS = {kind: number for number, kind in enumerate((
    Opcode.SEND_PARTIAL, Opcode.RECEIVE_PARTIAL, Opcode.ENCODE,
    Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT))}

#: Into how many parts a job may be divided that goes in a bit at a time.
PARTS = 64


class Executor:
    """Runs one or more plans side by side, each on its share of a range.

    Every chunk goes through the whole plan by itself, so the first results
    are on their way back while the last contributions are still to be sent,
    and both directions of a link are busy.  Chunks start in one order on all
    ranks; messages find their chunk by their tag.

    Messages, sums and, for most codecs, all that is encoded are the business
    of compiled code, which works without the interpreter.

    Beside the wire, memory is needed for ``frames_in_flight`` chunks of each
    plan: a frame of every message and, for wide sums, 4 bytes for each
    element of a frame of each block that passes through.

    Args:
        comm: The ranks; not used for anything else.
        plans: The same on all ranks.
        statistics: Counters to add to.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.
        form: What partial sums travel in, one of :data:`.sums.FORMS`.
    """

    def __init__(self, comm: MPI.Comm, plans: Sequence[Plan],
                 statistics: Statistics, *, frame_bytes: int,
                 frames_in_flight: int, form: str) -> None:
        self._comm = comm
        self._plans = plans
        self._statistics = statistics
        self._frame_bytes = frame_bytes
        self._form = form
        self._programs = [program(plan, comm.rank) for plan in plans]
        self._jobs: list[Job] = []
        self._most_blocks = max(
            (action.stop - action.start for part in self._programs
             for action, *_ in part.steps), default=1)
        mpi = library()
        self._compiled = _executor.Executor(
            exception, mpi.functions, mpi.sizes, handle(comm), mpi.byte,
            tuple(_lane(plan, part) for plan, part in zip(
                plans, self._programs, strict=True)), frames_in_flight)

    @property
    def busy(self) -> bool:
        """Some job is not finished."""
        return self._compiled.busy

    @property
    def patience(self) -> float:
        """Seconds that may be slept without slowing anything down.

        That is a small part of what a chunk takes to go through its plan:
        the others in flight keep the links busy meanwhile.
        """
        return self._compiled.patience

    def submit(self, job: Job, until: int = PARTS) -> None:
        """Puts a job behind the others; same order on all ranks.

        Args:
            job: What is to be done.
            until: How much of it, in parts of :data:`PARTS`; the rest comes
                with :meth:`resume`, behind what is submitted until then.
        """
        lanes = self._lanes(job.start, job.stop, job.wire.itemsize)
        job.handle = self._handle(job, lanes)
        for number, (part, frames) in enumerate(lanes):
            self._compiled.share(
                job.handle, number, numpy.array(frames.bounds, numpy.int64),
                frames.frame, frames.chunks,
                self._residuals(job, number, part, frames))
        self._jobs.append(job)
        self.resume(job, until)

    def chunks(self, size: int, itemsize: int) -> int:
        """Into how many chunks a job is cut, in the lane with most.

        Args:
            size: Elements of the job.
            itemsize: Bytes of an element on the wire.
        """
        return max(frames.chunks
                   for _, frames in self._lanes(0, size, itemsize))

    def resume(self, job: Job, until: int = PARTS) -> None:
        """Puts more of a job behind the others; same order on all ranks."""
        self._compiled.let_in(job.handle, until, PARTS)
        self._take_notice()

    def begin_decoding(self, job: Job) -> None:
        """From now on, means are decoded as they come."""
        if job.compiled and not job.compiled.decode_into(
                job.tensors.gradients):
            raise ValueError(
                'gradients must be float32, C-contiguous and writeable')
        job.decodes = True
        try:
            self._compiled.decode(job.handle)
        finally:
            self._take_notice()

    def advance(self) -> bool:
        """Does what can be done without waiting; whether it was anything."""
        try:
            return self._compiled.advance()
        finally:
            self._take_notice()

    def work(self, seconds: float, brief: float = 0.0) -> bool:
        """Does what there is to do, and pauses in between.

        It returns when a job is finished, when there is none, when somebody
        calls :meth:`interrupt`, and when it pauses after so many seconds.

        Args:
            seconds: See above; 0: it does not pause at all.
            brief: Seconds of yielding the processor before it sleeps; 0
                where others have use for it.

        Returns:
            Whether anything was done.
        """
        try:
            return self._compiled.run(seconds, brief)
        finally:
            self._take_notice()

    def interrupt(self) -> None:
        """Has :meth:`work` return; for other threads."""
        self._compiled.interrupt()

    def run(self) -> None:
        """Waits until all jobs are finished."""
        while self.busy:
            self.work(LONG, BRIEF)

    def _lanes(self, start: int, stop: int, itemsize: int
               ) -> list[tuple[RankPlan, Frames]]:
        """How plans share a range, and into what frames they cut it."""
        bounds = piece_bounds(start, stop, len(self._plans))
        frame = max(1, min(self._frame_bytes // itemsize,
                           _LARGEST // self._most_blocks))
        return [(part, Frames(start, stop, plan.blocks, frame))
                for plan, part, start, stop in zip(
                    self._plans, self._programs, bounds[:-1], bounds[1:],
                    strict=True)]

    def _handle(self, job: Job, lanes: list[tuple[RankPlan, Frames]]
                ) -> _executor.Job:
        if not 0 <= job.start <= job.stop <= job.wire.size or (
                job.encodes and job.tensors.size != job.wire.size):
            raise ValueError(
                f'elements {job.start} to {job.stop} of {job.tensors.size} '
                f'are not in a wire of {job.wire.size}')
        in_place = in_wire_format(self._form, job.codec)
        workers = self._plans[0].workers
        dtype = job.wire.dtype if in_place else numpy.dtype(self._form)
        prescale = 1.0 if job.prescale is None else job.prescale
        job.compiled = job.codec.compiled(job.tensors, prescale)
        if job.compiled and job.decodes and not job.compiled.decode_into(
                job.tensors.gradients):
            job.compiled = None
        nothing = numpy.zeros(0, numpy.int64)
        of = job.compiled or Compiled(IN_PYTHON, nothing, nothing, nothing)
        return _executor.Job(
            python=None if job.compiled else Uncompiled(
                job, lanes, self._form, workers),
            wire=job.wire.view(numpy.uint8), itemsize=job.wire.itemsize,
            sum_size=dtype.itemsize, codec=of.codec,
            rounding=of.rounding, in_place=in_place, encodes=job.encodes,
            decodes=job.decodes, prescale=prescale, epsilon=of.epsilon,
            shrink=shrink(dtype, workers), tensors=of.tensors,
            scales=of.scales, findings=of.findings, shares=len(self._plans))

    def _residuals(self, job: Job, lane: int, part: RankPlan, frames: Frames
                   ) -> numpy.ndarray:
        """By site and tensor, where the codec keeps what means lose."""
        if not job.compiled or in_wire_format(self._form, job.codec):
            return numpy.zeros(0, numpy.int64)
        actions = [step.action for step in part.steps
                   if step.action.kind is Opcode.ENCODE and not step.fresh]
        return numpy.array([
            job.codec.residuals_of_means(
                job.compiled, job.tensors, site_name(lane, site),
                frames.owned(action))
            for site, action in enumerate(actions)], numpy.int64)

    def _take_notice(self) -> None:
        """Of what compiled code has done."""
        sent, encoding, decoding = self._compiled.taken()
        self._statistics.bytes_sent += sent
        self._statistics.divide(encode=encoding, decode=decoding)
        finished = [job for job in self._jobs if not job.handle.unfinished]
        for job in finished:
            self._jobs.remove(job)
            job.conclude()


def _lane(plan: Plan, part: RankPlan) -> tuple:
    return (tuple((_KINDS[step.action.kind], *step.action[1:], step.summed,
                   step.fresh) for step in part.steps),
            plan.blocks, part.held, part.contributes)


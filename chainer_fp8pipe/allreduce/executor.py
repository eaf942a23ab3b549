"""Runs plans over MPI: frame by frame, several frames at a time."""
from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from ..mpi.waiting import Pauses
from .chunk import Chunk, Surroundings
from .frames import Frames, piece_bounds
from .job import Job
from .plan import Plan
from .program import program
from .statistics import Statistics

_SHARE = 1 / 4          # of a chunk's time that is slept at most
_NEWEST = 1 / 8         # weight of the newest chunk in their mean time
_LONGEST = 10e-3        # seconds; a rank that is late makes no chunk slow

#: Into how many parts a job may be divided that goes in a bit at a time.
PARTS = 64


class Executor:
    """Runs one or more plans side by side, each on its share of a range.

    Every chunk goes through the whole plan by itself, so the first results
    are on their way back while the last contributions are still to be sent,
    and both directions of a link are busy.  Chunks start in one order on all
    ranks; messages find their chunk by their tag.

    Beside the wire, memory is needed for ``frames_in_flight`` chunks of each
    plan: a frame of every message to be received and, for wide sums, 4 bytes
    for each element of a frame of each block that passes through.

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
        self._frame_bytes = frame_bytes
        self._lanes = [_Lane(comm, plan, number, len(plans), statistics,
                             frames_in_flight, form)
                       for number, plan in enumerate(plans)]

    @property
    def busy(self) -> bool:
        """Some job is not finished."""
        return any(lane.active or lane.waiting for lane in self._lanes)

    @property
    def patience(self) -> float:
        """Seconds that may be slept without slowing anything down.

        That is a small part of what a chunk takes to go through its plan:
        the others in flight keep the links busy meanwhile.
        """
        return min(lane.duration for lane in self._lanes) * _SHARE

    def submit(self, job: Job, until: int = PARTS) -> None:
        """Puts a job behind the others; same order on all ranks.

        Args:
            job: What is to be done.
            until: How much of it, in parts of :data:`PARTS`; the rest comes
                with :meth:`resume`, behind what is submitted until then.
        """
        bounds = piece_bounds(job.start, job.stop, len(self._lanes))
        frame = max(1, self._frame_bytes // job.wire.itemsize)
        for lane, start, stop in zip(self._lanes, bounds[:-1], bounds[1:],
                                     strict=True):
            frames = Frames(start, stop, lane.plan.blocks, frame)
            job.unfinished += frames.chunks
            lane.partly[job] = frames, 0
        self.resume(job, until)

    def resume(self, job: Job, until: int = PARTS) -> None:
        """Puts more of a job behind the others; same order on all ranks."""
        for lane in self._lanes:
            lane.let_in(job, until)

    def advance(self) -> bool:
        """Does what can be done without waiting; whether it was anything."""
        # A list, so that every lane gets its turn.
        return any([lane.advance() for lane in self._lanes])

    def run(self) -> None:
        """Waits until all jobs are finished."""
        pauses = Pauses()
        while self.busy:
            if self.advance():
                pauses.shorten()
            else:
                pauses.pause(self.patience)


class _Active(NamedTuple):
    number: int         # of all chunks that the lane has started
    job: Job
    chunk: Chunk
    start: float        # seconds


class _Lane:
    """The chunks of one plan."""

    def __init__(self, comm: MPI.Comm, plan: Plan, number: int, lanes: int,
                 statistics: Statistics, in_flight: int, form: str) -> None:
        self.plan = plan
        self.waiting: collections.deque[tuple[Job, Frames, int]] = (
            collections.deque())
        self.active: list[_Active] = []
        #: Jobs not all of whose chunks are in, and the first that is not.
        self.partly: dict[Job, tuple[Frames, int]] = {}
        self._in_flight = in_flight
        self._surroundings = Surroundings(
            comm, program(plan, comm.rank), statistics, form, plan.workers,
            f'sum {number}')
        # A chunk that is finished here was started everywhere, and the oldest
        # one under way is less than in_flight behind the newest: ranks are
        # less than 2 in_flight apart, and tags may come again soon.
        self._tags = [lanes * step + number for step in range(4 * in_flight)]
        self._started = 0
        #: Seconds that a chunk takes, a moving average.
        self.duration = 0.0

    def let_in(self, job: Job, until: int) -> None:
        frames, start = self.partly.pop(job)
        stop = frames.chunks * until // PARTS
        self.waiting.extend((job, frames, number)
                            for number in range(start, stop))
        if stop < frames.chunks:
            self.partly[job] = frames, stop

    def advance(self) -> bool:
        moved = False
        while self.waiting and (
                not self.active
                or self._started - self.active[0].number < self._in_flight):
            job, frames, number = self.waiting.popleft()
            tag = self._tags[self._started % len(self._tags)]
            chunk = Chunk(self._surroundings, job, frames, number, tag)
            chunk.advance()     # sends before the next one encodes
            self.active.append(_Active(self._started, job, chunk,
                                       time.perf_counter()))
            self._started += 1
            moved = True
        for active in tuple(self.active):
            moved |= active.chunk.advance()
            if active.chunk.finished:
                self.active.remove(active)
                active.job.unfinished -= 1
                taken = min(time.perf_counter() - active.start, _LONGEST)
                self.duration += (taken - self.duration) * _NEWEST
        return moved

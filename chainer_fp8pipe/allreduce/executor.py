"""Runs plans over MPI: frame by frame, several frames at a time."""
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs import Codec, Coding
from ..mpi.failure.waits import Wait, world_ranks
from ..mpi.functions import exception, handle, library
from ..mpi.memory.node_memory import meet, node_memory
from ..mpi.memory.page_locked import page_locked_memory
from ..mpi.waiting import BRIEF, LONG
from ..report.stream import EventStream
from .algorithm import PARTS, Algorithm
from .bucket import Bucket
from .frames import Frames, piece_bounds
from .native import _executor
from .plan import Opcode, Plan
from .rank_plan import RankPlan, program
from .sums import in_wire_format, shrink

# Elements of a message, whose length in bytes is an int of MPI.
_LARGEST = (1 << 31) // 4 - 1
# Bytes of a message's slot in a mailbox.
_SLOT = 64
# Ranges whose cut is remembered; there are a few for each model.
_REMEMBERED = 1024
# The numbers that compiled code has for them.
_KINDS = {kind: number for number, kind in enumerate((
    Opcode.SEND_PARTIAL, Opcode.RECEIVE_PARTIAL, Opcode.ENCODE,
    Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT))}
_SENDS = Opcode.SEND_PARTIAL, Opcode.SEND_RESULT
# What it waits for in those steps that wait, by these numbers.
_AWAITED = {_KINDS[Opcode.RECEIVE_PARTIAL]: 'the sum',
            _KINDS[Opcode.RECEIVE_RESULT]: 'the mean'}


@dataclasses.dataclass(frozen=True)
class Framing:
    """How a vector is cut, and in which form it is summed.

    Attributes:
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.
        form: What partial sums travel in, one of :data:`.sums.FORMS`.
        shared_memory: Ranks of a node read each other's memory.
        threads: That encode, sum and decode; the one that exchanges messages
            is one of them.
    """

    frame_bytes: int = 3 << 14
    frames_in_flight: int = 3
    form: str = 'float32'
    shared_memory: bool = True
    threads: int = 1


class _Lane(NamedTuple):
    """A plan's share of a range.

    Attributes:
        part: What this rank does of the plan.
        frames: Into which the share is cut.
        bounds: Of the plan's blocks, int64.
        sites: Names of the places where means are encoded, each with the
            range whose means this rank encodes there.
    """

    part: RankPlan
    frames: Frames
    bounds: numpy.ndarray
    sites: tuple[tuple[str, tuple[int, int]], ...]


class _Sums(NamedTuple):
    """How sums of a wire's dtype are held and travel.

    Attributes:
        in_place: In the wire itself.
        itemsize: Bytes of an element.
        shrink: The power of two that they carry.
    """

    in_place: bool
    itemsize: int
    shrink: float


class PlanExecutor(Algorithm):
    """Runs one or more plans side by side, each on its share of a range.

    Every chunk goes through the whole plan by itself, so the first results
    are on their way back while the last contributions are still to be sent,
    and both directions of a link are busy.  Chunks start in one order on all
    ranks; messages find their chunk by their tag.

    Messages, sums and all that is encoded are the business of compiled code,
    which works without the interpreter.

    Beside the wire, memory is needed for ``frames_in_flight`` chunks of each
    plan: a frame of every message and, for wide sums, 4 bytes for each
    element of a frame of each block that passes through.

    Args:
        comm: The ranks; the executor works on a duplicate, so that its
            messages cannot meet the caller's.
        plans: The same on all ranks.
        events: Where to write what happens.
        framing: How vectors are cut and summed.
        beside: One whose threads are used here, too; None: this one starts
            its own.
    """

    by_frame = True
    one_order = False

    def __init__(self, comm: MPI.Comm, plans: Sequence[Plan],
                 events: EventStream, framing: Framing,
                 beside: PlanExecutor | None = None) -> None:
        super().__init__(comm, events)
        self.plans = tuple(plans)
        self.framing = framing
        self._parts = [program(plan, comm.rank) for plan in plans]
        self._buckets: list[Bucket] = []
        self._world_ranks = world_ranks(self.comm)
        self._cuts: dict[tuple[int, int, int, int], tuple[_Lane, ...]] = {}
        self._forms: dict[numpy.dtype, _Sums] = {}
        self._most_blocks = max(
            (action.stop - action.start for part in self._parts
             for action, *_ in part.steps), default=1)
        neighbours = (meet(self.comm, self._slots(), _SLOT)
                      if framing.shared_memory else ())
        self._memory = node_memory() if neighbours else None
        self._locked = page_locked_memory() if neighbours else None
        mpi = library()
        self._compiled: _executor.Executor = _executor.Executor(
            exception, mpi.functions, mpi.sizes, handle(self.comm), mpi.byte,
            tuple(_steps(plan, part) for plan, part in zip(
                plans, self._parts, strict=True)), framing.frames_in_flight,
            neighbours, self._memory.address if self._memory else 0,
            self._memory.empty if self._memory else _empty,
            framing.threads, beside._compiled if beside else None)

    def another(self) -> PlanExecutor:
        return PlanExecutor(self.comm, self.plans, self.events,
                            self.framing, self)

    def prescale(self, codec: Codec) -> float:
        return (1.0 / self.plans[0].workers if self._sums(codec).in_place
                else 1.0)

    def share_inside(self, node: Collection[int]) -> float:
        blocks: dict[bool, float] = {True: 0.0, False: 0.0}
        for plan, part in zip(self.plans, self._parts, strict=True):
            for action, *_ in part.steps:
                if action.kind in _SENDS:
                    blocks[action.peer in node] += (
                        (action.stop - action.start) / plan.blocks)
        return blocks[True] / (sum(blocks.values()) or 1.0)

    def empty_wire(self, xp: Any, size: int, dtype: Any) -> numpy.ndarray:
        """As :meth:`.Algorithm.empty_wire`; a GPU's, where neighbours read.

        They take what the GPU has written from there.
        """
        nbytes = size * numpy.dtype(dtype).itemsize
        if xp is not numpy and self._locked and nbytes:
            found = self._locked.empty(xp.cuda.runtime, nbytes)
            if found is not None:
                return found.view(dtype)
        return super().empty_wire(xp, size, dtype)

    def allreduce(self, coding: Coding, wire: numpy.ndarray, start: int,
                  stop: int) -> None:
        self.submit(Bucket(coding.state, coding.tensors, wire, start, stop,
                           coding))
        self.run()

    @property
    def busy(self) -> bool:     # type: ignore[override]
        return self._compiled.busy

    @property
    def patience(self) -> float:    # type: ignore[override]
        # A small part of what a chunk takes to go through its plan: the
        # others in flight keep the links busy meanwhile.
        return self._compiled.patience

    def submit(self, bucket: Bucket, until: int = PARTS) -> Bucket:
        lanes = self._lanes(bucket.start, bucket.stop, bucket.codec)
        bucket.handle = self._handle(bucket)
        assert bucket.coding is not None
        sites = [site for lane in lanes for site in lane.sites]
        means = bucket.coding.means(
            [] if self._sums(bucket.codec).in_place else sites)
        for number, lane in enumerate(lanes):
            self._compiled.share(
                bucket.handle, number, lane.bounds, lane.frames.frame,
                lane.frames.chunks, means[:len(lane.sites)])
            means = means[len(lane.sites):]
        self._buckets.append(bucket)
        self.resume(bucket, until)
        return bucket

    def resume(self, bucket: Bucket, until: int = PARTS) -> None:
        self._compiled.let_in(bucket.handle, until, PARTS)
        self._take_notice()

    def begin_decoding(self, bucket: Bucket) -> None:
        assert bucket.coding is not None
        bucket.coding.decode_into(bucket.tensors.gradients)
        bucket.decodes = True
        try:
            self._compiled.decode(bucket.handle)
        finally:
            self._take_notice()

    def waits(self) -> list[Wait]:
        names = {id(bucket.handle): bucket.name
                 for bucket in tuple(self._buckets)}
        found = []
        for job, lane, frame, step, kind, peer in self._compiled.waits():
            bucket = names.get(job)
            what = _AWAITED.get(kind)
            if bucket is None:      # it has just arrived
                continue
            of = f'frame {frame} of {bucket}' + (
                f', lane {lane}' if len(self.plans) > 1 else '')
            if what is None:
                found.append(Wait(f'what was sent of {of} to be taken, in '
                                  f'step {step}'))
            else:
                rank = self._world_ranks[peer]
                found.append(Wait(f'{of} ({what}, step {step}) from rank '
                                  f'{rank}', (rank,)))
        return found

    def advance(self) -> bool:
        try:
            return self._compiled.advance()
        finally:
            self._take_notice()

    def work(self, seconds: float, brief: float = 0.0) -> bool:
        try:
            return self._compiled.run(seconds, brief)
        finally:
            self._take_notice()

    def interrupt(self) -> None:
        self._compiled.interrupt()

    def run(self) -> None:
        """Waits until all buckets are finished."""
        while self.busy:
            self.work(LONG, BRIEF)

    def chunks(self, size: int, codec: Codec) -> int:
        return max(lane.frames.chunks for lane in self._lanes(0, size, codec))

    # --- what is the same at every update ------------------------------------

    def _lanes(self, start: int, stop: int, codec: Codec
               ) -> tuple[_Lane, ...]:
        """How plans share a range, and into what frames they cut it."""
        key = start, stop, codec.wire_dtype.itemsize, codec.grain
        found = self._cuts.get(key)
        if found is None:
            if len(self._cuts) >= _REMEMBERED:
                self._cuts.clear()
            found = self._cuts[key] = self._cut(*key)
        return found

    def _cut(self, start: int, stop: int, itemsize: int, grain: int
             ) -> tuple[_Lane, ...]:
        bounds = piece_bounds(start, stop, len(self.plans))
        frame = max(1, min(self.framing.frame_bytes // itemsize,
                           _LARGEST // grain // self._most_blocks))
        lanes = []
        for number, (plan, part) in enumerate(zip(
                self.plans, self._parts, strict=True)):
            frames = Frames(bounds[number], bounds[number + 1], plan.blocks,
                            frame)
            actions = [step.action for step in part.steps
                       if step.action.kind is Opcode.ENCODE
                       and not step.fresh]
            lanes.append(_Lane(
                part, frames, numpy.array(frames.bounds, numpy.int64), tuple(
                    (site_name(number, site), frames.owned(action))
                    for site, action in enumerate(actions))))
        return tuple(lanes)

    def _slots(self) -> int:
        """Messages to one rank, or from it, that are under way at most."""
        most = max(collections.Counter(
            (step.action.peer, step.action.kind in _SENDS)
            for part in self._parts for step in part.steps
            if step.action.kind is not Opcode.ENCODE).values(), default=0)
        return most * self.framing.frames_in_flight

    def _sums(self, codec: Codec) -> _Sums:
        found = self._forms.get(codec.wire_dtype)
        if found is None:
            in_place = in_wire_format(self.framing.form, codec)
            dtype = (codec.wire_dtype if in_place
                     else numpy.dtype(self.framing.form))
            found = self._forms[codec.wire_dtype] = _Sums(
                in_place, dtype.itemsize,
                shrink(dtype, self.plans[0].workers))
        return found

    # --- one bucket ----------------------------------------------------------

    def _handle(self, bucket: Bucket) -> _executor.Job:
        if not 0 <= bucket.start <= bucket.stop <= bucket.wire.size or (
                bucket.encodes and bucket.tensors.size != bucket.wire.size):
            raise ValueError(
                f'entries {bucket.start} to {bucket.stop} of '
                f'{bucket.tensors.size} are not in a wire of '
                f'{bucket.wire.size}')
        coding, sums = bucket.coding, self._sums(bucket.codec)
        assert coding is not None
        if bucket.decodes:
            coding.decode_into(bucket.tensors.gradients)
        # What is decoded as it comes need not be kept: frames stay in the
        # processor's caches.
        bucket.passes = bucket.encodes and bucket.decodes
        return _executor.Job(
            tables=coding.tables, kept=coding,
            wire=bucket.wire.view(numpy.uint8), sum_size=sums.itemsize,
            in_place=sums.in_place, keeps_wire=not bucket.passes,
            # Only a GPU's wires are ever there.
            shares_wire=bool(bucket.tensors.xp is not numpy and self._memory
                             and self._memory.holds(bucket.wire)),
            encodes=bucket.encodes, decodes=bucket.decodes,
            shrink=sums.shrink, shares=len(self.plans))

    def _take_notice(self) -> None:
        """Of what compiled code has done."""
        sent, encoding, decoding = self._compiled.taken()
        self.events.sent(sent)
        self.events.divide(encode=encoding, decode=decoding)
        finished = [bucket for bucket in self._buckets
                    if not bucket.handle.unfinished]
        for bucket in finished:
            self._buckets.remove(bucket)
            bucket.conclude()


def site_name(lane: int, site: int) -> str:
    """Names a place of an algorithm where means are encoded."""
    return f'sum {lane} {site}'


def _empty(nbytes: int) -> numpy.ndarray:
    return numpy.empty(nbytes, numpy.uint8)


def _steps(plan: Plan, part: RankPlan) -> tuple:
    """A rank's part of a plan as compiled code wants it."""
    return (tuple((_KINDS[step.action.kind], *step.action[1:], step.summed,
                   step.fresh) for step in part.steps),
            plan.blocks, part.held, part.contributes)

"""Runs plans on a clock, message by message.

The rules are the executor's: a rank takes one step at a time; chunks that
wait for a message let others go first; a chunk ends, and the next one starts,
when all its steps are through and what it sent has left.
"""
from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...allreduce.frames import Frames, piece_bounds
from ...allreduce.plan import Opcode, Plan
from ...allreduce.rank_plan import RankPlan, Step, program
from .cluster import Cluster, Hop
from .codec_costs import CodecCosts, StepCosts, form_of

_SENDS = (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT)
_RECEIVES = (Opcode.RECEIVE_PARTIAL, Opcode.RECEIVE_RESULT)


class Timing(NamedTuple):
    """How long an exchange takes, and what is busy for how long.

    Attributes:
        seconds: From the first send until the last rank is through, without
            encoding before and decoding after.
        link_seconds: Of these, the busiest link is busy.
        rank_seconds: Of these, the busiest rank is busy.
    """

    seconds: float
    link_seconds: float
    rank_seconds: float


def simulate(plans: Sequence[Plan], cluster: Cluster, codec: CodecCosts,
             elements: int, *, frame_bytes: int,
             frames_in_flight: int) -> Timing:
    """Predicts the time of an exchange by simulating all its messages.

    Takes about 20 µs per message on today's machines: for clusters of some
    64 ranks; for larger ones see :func:`~.prediction.estimate`.

    Args:
        plans: Run side by side, each on its share of the vector.
        cluster: Has a host for every rank.
        codec: What is sent and what it costs.
        elements: Of the vector.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.

    Raises:
        ValueError: The cluster has not as many ranks as a plan.
    """
    for plan in plans:
        if plan.ranks != len(cluster.hosts):
            raise ValueError(f'plan {plan.name!r} is for {plan.ranks} ranks, '
                             f'the cluster has {len(cluster.hosts)}')
    bounds = piece_bounds(0, elements, len(plans))
    frame = max(1, frame_bytes // codec.wire_bytes)
    run = _Run(cluster, codec)
    for number, plan in enumerate(plans):
        frames = Frames(bounds[number], bounds[number + 1], plan.blocks,
                        frame)
        for rank in range(plan.ranks):
            lane = _Lane(number, rank, program(plan, rank), frames)
            for _ in range(frames_in_flight):
                run.start_chunk(lane)
    run.go()
    return Timing(run.now, max(run.link_seconds.values(), default=0.0),
                  max(rank.seconds for rank in run.ranks))


class _Lane:
    """One rank's part of one plan."""

    def __init__(self, number: int, rank: int, part: RankPlan,
                 frames: Frames) -> None:
        self.number = number
        self.rank = rank
        self.program = part
        self.waiting = iter(range(frames.chunks))
        self._frames = frames
        self._known: dict[tuple[Sequence[int], int], int] = {}
        self._encoded = _first_needed(part)

    def elements(self, step: Step, chunk: int) -> int:
        """Of a step's message."""
        return self._count(range(step.action.start, step.action.stop), chunk)

    def encoded(self, position: int, chunk: int) -> int:
        """Elements that this step is the first to need of the rank."""
        return self._count(self._encoded[position], chunk)

    def total(self, chunk: int) -> int:
        """Of all blocks."""
        return self._count(range(len(self._frames.bounds) - 1), chunk)

    def _count(self, blocks: Sequence[int], chunk: int) -> int:
        found = self._known.get((blocks, chunk))
        if found is None:
            parts = (self._frames.part(block, chunk) for block in blocks)
            found = sum(part.stop - part.start for part in parts)
            self._known[blocks, chunk] = found
        return found


def _first_needed(part: RankPlan) -> list[tuple[int, ...]]:
    """For each step the blocks whose contribution is encoded for it."""
    encoded: set[int] = set()
    found = []
    for (kind, _, start, stop), _, fresh in part.steps:
        needs = kind is Opcode.SEND_PARTIAL or (
            fresh and kind in (Opcode.RECEIVE_PARTIAL, Opcode.ENCODE))
        found.append(tuple(block for block in range(start, stop)
                           if needs and block not in encoded))
        encoded.update(found[-1])
    return found


@dataclass(eq=False)
class _Chunk:
    lane: _Lane
    number: int
    position: int = 0
    prepared: bool = False
    sending: int = 0

    @property
    def step(self) -> Step | None:
        steps = self.lane.program.steps
        return steps[self.position] if self.position < len(steps) else None


@dataclass(eq=False)
class _Rank:
    ready: collections.deque[_Chunk] = field(
        default_factory=collections.deque)
    busy: bool = False
    seconds: float = 0.0
    since: float | None = None      # when it got the core that it has


class _Run:
    """The state of a simulation.

    Attributes:
        now: Of the clock.
        link_seconds: How long each link was busy.
        ranks: See there.
    """

    def __init__(self, cluster: Cluster, codec: CodecCosts) -> None:
        self.now = 0.0
        self.link_seconds: dict[Hashable, float] = (
            collections.defaultdict(float))
        self.ranks = [_Rank() for _ in cluster.hosts]
        self._cluster = cluster
        self._costs = StepCosts(cluster, codec)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._free: dict[Hashable, float] = {}
        self._arrived: collections.Counter[Hashable] = collections.Counter()
        self._blocked: dict[Hashable, _Chunk] = {}
        self._routes: dict[tuple[int, int], tuple[Hop, ...]] = {}
        groups = -(-len(cluster.hosts) // cluster.sharing)
        self._cores = [cluster.cores] * groups
        self._queues: list[collections.deque[int]] = [
            collections.deque() for _ in range(groups)]

    def go(self) -> None:
        """Until nothing is left to do."""
        for rank in range(len(self.ranks)):
            self._work(rank)
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    def start_chunk(self, lane: _Lane) -> None:
        """The next chunk of a lane, if there is one."""
        number = next(lane.waiting, None)
        if number is not None:
            self.ranks[lane.rank].ready.append(_Chunk(lane, number))

    # --- ranks --------------------------------------------------------------

    def _work(self, rank: int) -> None:
        """Begins the next thing that ``rank`` can do, if it has time."""
        state = self.ranks[rank]
        while state.ready and not state.busy:
            chunk = state.ready[0]
            step = chunk.step
            if step is None:
                state.ready.popleft()
                self._end(chunk)
            elif not chunk.prepared:
                self._occupy(rank, chunk, step, self._before(chunk),
                             self._prepare)
            elif not self._arrived_for(chunk, step):
                state.ready.popleft()
                self._blocked[_key(chunk, step)] = chunk
            else:
                self._occupy(rank, chunk, step, self._within(chunk, step),
                             self._finish_step)

    def _arrived_for(self, chunk: _Chunk, step: Step) -> bool:
        return (step.action.kind not in _RECEIVES
                or not chunk.lane.elements(step, chunk.number)
                or self._arrived[_key(chunk, step)] > 0)

    def _before(self, chunk: _Chunk) -> float:
        """Seconds of encoding, for which no message need be there."""
        lane = chunk.lane
        return self._costs.codec.first * lane.encoded(
            chunk.position, chunk.number) * lane.program.contributes

    def _within(self, chunk: _Chunk, step: Step) -> float:
        """Seconds of a step, and of decoding if it is the last."""
        lane = chunk.lane
        seconds = self._costs.seconds(
            step, lane.elements(step, chunk.number), lane.program.contributes)
        if chunk.position == len(lane.program.steps) - 1:
            seconds += (self._costs.codec.last * lane.total(chunk.number)
                        * lane.program.contributes)
        return seconds

    def _occupy(self, rank: int, chunk: _Chunk, step: Step, seconds: float,
                action: Callable[[_Chunk, Step], None]) -> None:
        """Does something that keeps a rank, and a core, busy."""
        if not seconds:
            action(chunk, step)
            return
        state, group = self.ranks[rank], rank // self._cluster.sharing
        state.busy = True
        if not self._cores[group]:
            self._queues[group].append(rank)
            return
        self._cores[group] -= 1
        if state.since is None:
            state.since = self.now
        state.seconds += seconds
        self._at(self.now + seconds, self._release, rank, chunk, step, action)

    def _release(self, rank: int, chunk: _Chunk, step: Step,
                 action: Callable[[_Chunk, Step], None]) -> None:
        """Its rank goes on, if it may, or another one gets the core."""
        group, state = rank // self._cluster.sharing, self.ranks[rank]
        self._cores[group] += 1
        action(chunk, step)
        state.busy = False
        assert state.since is not None
        if self.now - state.since < self._cluster.time_slice:
            self._work(rank)
        if not state.busy:
            state.since = None
            if self._queues[group]:     # whoever has waited longest
                waiting = self._queues[group].popleft()
                self.ranks[waiting].busy = False
                self._work(waiting)
            self._work(rank)

    def _prepare(self, chunk: _Chunk, step: Step) -> None:
        chunk.prepared = True

    def _finish_step(self, chunk: _Chunk, step: Step) -> None:
        chunk.position += 1
        chunk.prepared = False
        elements = chunk.lane.elements(step, chunk.number)
        if not elements:
            return
        if step.action.kind in _RECEIVES:
            self._arrived[_key(chunk, step)] -= 1
        elif step.action.kind in _SENDS:
            chunk.sending += 1
            size = elements * self._costs.codec.bytes_of(form_of(step))
            self._pass(chunk, step.action.peer, size)

    def _end(self, chunk: _Chunk) -> None:
        if chunk.step is None and not chunk.sending:
            self.start_chunk(chunk.lane)

    # --- messages -----------------------------------------------------------

    def _pass(self, chunk: _Chunk, target: int, size: float, index: int = 0,
              tail: float = 0.0) -> None:
        """The head of a message is at a link of its way.

        The tail comes at the time ``tail``: a link that is faster than the
        one before it has to wait.  What a link may pass at once is time that
        it is ahead of its rate.
        """
        source = chunk.lane.rank
        route = self._route(source, target)
        link, rate, latency, burst = route[index]
        ahead = burst / rate
        begin = max(self.now - ahead, self._free.get(link, -ahead))
        self._free[link] = max(begin + size / rate, tail - ahead)
        start = max(self.now, begin)
        end = max(self._free[link], self.now, tail)
        self.link_seconds[link] += size / rate
        if index == 0:
            self._at(end, self._left, chunk)
        if index + 1 < len(route):
            self._at(start + latency, self._pass, chunk, target, size,
                     index + 1, end + latency)
        else:
            self._at(end + latency, self._arrive, target,
                     (chunk.lane.number, chunk.number, source, target))

    def _left(self, chunk: _Chunk) -> None:
        chunk.sending -= 1
        self._end(chunk)
        self._work(chunk.lane.rank)

    def _arrive(self, target: int, key: Hashable) -> None:
        self._arrived[key] += 1
        chunk = self._blocked.pop(key, None)
        if chunk is not None:
            self.ranks[target].ready.append(chunk)
            self._work(target)

    def _route(self, source: int, target: int) -> tuple[Hop, ...]:
        if (source, target) not in self._routes:
            self._routes[source, target] = self._cluster.route(source, target)
        return self._routes[source, target]

    def _at(self, time: float, action: Callable[..., None],
            *arguments: Any) -> None:
        heapq.heappush(self._events,
                       (time, next(self._order), action, arguments))


def _key(chunk: _Chunk, step: Step) -> Hashable:
    """Of the messages that a step receives."""
    return (chunk.lane.number, chunk.number, step.action.peer,
            chunk.lane.rank)

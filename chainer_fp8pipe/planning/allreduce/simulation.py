"""All-reduces in simulated time, message by message.

The rules are the executor's: a rank takes one step at a time; chunks that
wait for a message let others go first; a chunk ends, and the next one starts,
when all its steps are through and what it sent has left.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...allreduce.frames import Frames, piece_bounds
from ...allreduce.plan import Opcode, Plan
from ...allreduce.rank_plan import RankPlan, Step, program
from ..cluster import Cluster
from ..engine import (
    Compute,
    Engine,
    EngineAction,
    Flush,
    Program,
    Receive,
    Send,
)
from .codec_costs import CodecCosts, StepCosts, form_of

_SENDS = (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT)
_RECEIVES = (Opcode.RECEIVE_PARTIAL, Opcode.RECEIVE_RESULT)


class Timing(NamedTuple):
    """How long an exchange takes, and what is busy for how long.

    Attributes:
        seconds: From the first send until the last rank is through, without
            encoding before and decoding after.
        link_seconds: Of these, the seconds for which the busiest link is busy.
        rank_seconds: Of these, the seconds for which the busiest rank is busy.
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
        codec: Bytes and rates of the elements.
        elements: Of the vector.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.

    Raises:
        Deadlock: Ranks wait for messages that the plan does not send.
        ValueError: The cluster has not as many ranks as a plan.
    """
    for plan in plans:
        if plan.ranks != len(cluster.hosts):
            raise ValueError(f'plan {plan.name!r} is for {plan.ranks} ranks, '
                             f'the cluster has {len(cluster.hosts)}')
    engine = Engine(cluster)
    add_exchange(engine, plans, StepCosts(cluster, codec), elements,
                 frame_bytes=frame_bytes, frames_in_flight=frames_in_flight)
    engine.run()
    return Timing(engine.seconds, engine.link_seconds, engine.rank_seconds)


def add_exchange(engine: Engine, plans: Sequence[Plan], costs: StepCosts,
                 elements: int, *, frame_bytes: int, frames_in_flight: int,
                 ranks: Sequence[int] | None = None,
                 after: Sequence[Program] | None = None) -> list[Program]:
    """Gives ranks of an engine the programs of an all-reduce.

    Args:
        engine: Before it runs.
        plans: Run side by side, each on its share of the vector.
        costs: For how long steps keep a rank busy.
        elements: Of the vector.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.
        ranks: The engine's rank for each rank of the plans; default: equal.
        after: For each of these ranks a program that must have ended before;
            None: the exchange begins at once.

    Returns:
        All programs.
    """
    ranks = range(plans[0].ranks) if ranks is None else ranks
    bounds = piece_bounds(0, elements, len(plans))
    frame = max(1, frame_bytes // costs.codec.wire_bytes)
    added = []
    for number, plan in enumerate(plans):
        frames = Frames(bounds[number], bounds[number + 1], plan.blocks,
                        frame)
        exchange = object()         # tells its messages from all others
        for place, rank in enumerate(ranks):
            lane = _RankLane(exchange, ranks, place, program(plan, place),
                             frames, costs)
            added += [engine.add(rank, lane.actions(),
                                 after[place] if after else None)
                      for _ in range(frames_in_flight)]
    return added


class _RankLane:
    """One rank's part of one plan.

    As many programs as frames may be in flight share the lane; each takes
    the next chunk when its last one is through.
    """

    def __init__(self, exchange: object, ranks: Sequence[int], place: int,
                 part: RankPlan, frames: Frames, costs: StepCosts) -> None:
        self._exchange, self._ranks, self._place = exchange, ranks, place
        self._part, self._frames, self._costs = part, frames, costs
        self._encoded = _first_needed(part)
        self._waiting = iter(range(frames.chunks))
        self._known: dict[tuple[Sequence[int], int], int] = {}

    def actions(self) -> Iterator[EngineAction]:
        for chunk in self._waiting:
            for position, step in enumerate(self._part.steps):
                yield from self._step(position, step, chunk)
            yield Flush()

    def _step(self, position: int, step: Step, chunk: int
              ) -> Iterator[EngineAction]:
        kind, peer, start, stop = step.action
        elements = self._count(range(start, stop), chunk)
        # Encoded while the message that the contribution is added to is
        # still on its way.
        before = self._encoding(position, chunk)
        if before:
            yield Compute(before)
        if elements and kind in _RECEIVES:
            yield Receive((self._exchange, chunk, peer, self._place), step)
        within = self._costs.seconds(step, elements, self._part.contributes)
        if position == len(self._part.steps) - 1:
            within += self._decoding(chunk)
        if within:
            yield Compute(within)
        if elements and kind in _SENDS:
            yield Send(self._ranks[peer],
                       elements * self._costs.codec.bytes_of(form_of(step)),
                       (self._exchange, chunk, self._place, peer))

    def _encoding(self, position: int, chunk: int) -> float:
        """Seconds for the rank's own blocks that no earlier step needs."""
        first = self._costs.codec.first
        return first and first * self._part.contributes * self._count(
            self._encoded[position], chunk)

    def _decoding(self, chunk: int) -> float:
        last = self._costs.codec.last
        return last and last * self._part.contributes * self._count(
            range(len(self._frames.bounds) - 1), chunk)

    def _count(self, blocks: Sequence[int], chunk: int) -> int:
        """Elements of the blocks in a chunk."""
        found = self._known.get((blocks, chunk))
        if found is None:
            parts = (self._frames.part(block, chunk) for block in blocks)
            found = sum(part.stop - part.start for part in parts)
            self._known[blocks, chunk] = found
        return found


def _first_needed(part: RankPlan) -> list[tuple[int, ...]]:
    """For each step, the blocks whose contribution it is first to need."""
    encoded: set[int] = set()
    found = []
    for (kind, _, start, stop), _, fresh in part.steps:
        needs = kind is Opcode.SEND_PARTIAL or (
            fresh and kind in (Opcode.RECEIVE_PARTIAL, Opcode.ENCODE))
        found.append(tuple(block for block in range(start, stop)
                           if needs and block not in encoded))
        encoded.update(found[-1])
    return found

"""All-reduces in simulated time, message by message.

The rules are the executor's: a rank takes one step at a time; chunks that
wait for a message let others go first; a chunk ends, and the next one starts,
when all its steps are through and what it sent has left.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...allreduce.frames import Frames, piece_bounds
from ...allreduce.plan import Opcode, Plan
from ...allreduce.rank_plan import Step, program
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
             elements: int, *, frame_bytes: float,
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
                 elements: int, *, frame_bytes: float, frames_in_flight: int,
                 ranks: Sequence[int] | None = None,
                 after: Sequence[Program] | None = None,
                 period: int | None = None) -> list[Program]:
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
        period: Only so many of the first ranks get programs, as rank r of
            each plan does what rank ``r % period`` does at the same time; a
            message to rank r arrives there.  Elements are rounded up, so
            that all blocks are equal.  None: all ranks get programs.

    Returns:
        All programs.
    """
    ranks = range(plans[0].ranks) if ranks is None else ranks
    period = period or len(ranks)
    if period < len(ranks):
        whole = len(plans) * math.lcm(*(plan.blocks for plan in plans))
        elements = -(-elements // whole) * whole
    bounds = piece_bounds(0, elements, len(plans))
    frame = costs.codec.frame(frame_bytes)
    added = []
    for number, plan in enumerate(plans):
        frames = Frames(bounds[number], bounds[number + 1], plan.blocks,
                        frame)
        exchange = object()         # tells its messages from all others
        for place, rank in enumerate(ranks[:period]):
            lane = _RankLane(exchange, ranks, place, plan, frames, costs,
                             period)
            added += [engine.add(rank, lane.actions(),
                                 after[place] if after else None)
                      for _ in range(max(1, min(frames_in_flight,
                                                frames.chunks)))]
    return added


class _RankLane:
    """One rank's part of one plan.

    As many programs as frames may be in flight share the lane; each takes
    the next chunk when its last one is through.
    """

    def __init__(self, exchange: object, ranks: Sequence[int], place: int,
                 plan: Plan, frames: Frames, costs: StepCosts, period: int
                 ) -> None:
        self._exchange, self._ranks, self._place = exchange, ranks, place
        self._part, self._frames, self._costs = (
            program(plan, place), frames, costs)
        self._period = period
        self._encoded = _first_needed(plan, place)
        self._waiting = iter(range(frames.chunks))
        self._whole: list[_TimedStep] = []

    def actions(self) -> Iterator[EngineAction]:
        last = self._frames.chunks - 1
        for chunk in self._waiting:
            # All chunks but the last one have the same elements.
            if chunk == last:
                steps = self._timed(chunk)
            else:
                steps = self._whole = self._whole or self._timed(chunk)
            for step, sender, before, within, send in steps:
                if before:
                    yield before
                if sender is not None:
                    yield Receive((self._exchange, chunk, sender,
                                   self._place), step)
                if within:
                    yield within
                if send:
                    target, size, ends = send
                    yield Send(target, size, (self._exchange, chunk, *ends))
            yield Flush()

    def _timed(self, chunk: int) -> list[_TimedStep]:
        parts = (self._frames.part(block, chunk)
                 for block in range(len(self._frames.bounds) - 1))
        counts = [part.stop - part.start for part in parts]
        return [self._step(position, step, counts)
                for position, step in enumerate(self._part.steps)]

    def _step(self, position: int, step: Step, counts: Sequence[int]
              ) -> _TimedStep:
        kind, peer, start, stop = step.action
        codec, elements = self._costs.codec, sum(counts[start:stop])
        # Encoded while the message that the contribution is added to is
        # still on its way.
        before = codec.first * self._part.contributes * sum(
            counts[block] for block in self._encoded[position])
        within = self._costs.seconds(step, elements, self._part.contributes)
        if position == len(self._part.steps) - 1:
            within += codec.last * self._part.contributes * sum(counts)
        return _TimedStep(
            step, peer if elements and kind in _RECEIVES else None,
            Compute(before) if before else None,
            Compute(within) if within else None,
            (self._ranks[peer], elements * codec.bytes_of(form_of(step)),
             self._ends(peer)) if elements and kind in _SENDS else None)

    def _ends(self, peer: int) -> tuple[int, int]:
        """Sender and receiver, as the rank that has programs sees them."""
        receiver = peer % self._period
        return (self._place + receiver - peer) % len(self._ranks), receiver


class _TimedStep(NamedTuple):
    """A step of a chunk, with how long its parts take.

    Attributes:
        step: Of the plan.
        sender: Whose message the step waits for, if not None.
        before: Encoding, before that.
        within: What follows the message, or precedes the one that is sent.
        send: Rank, bytes, and sender and receiver of what is sent.
    """

    step: Step
    sender: int | None
    before: Compute | None
    within: Compute | None
    send: tuple[int, float, tuple[int, int]] | None


@functools.lru_cache(1024)
def _first_needed(plan: Plan, place: int) -> list[tuple[int, ...]]:
    """For each step of a rank, the blocks that it is first to encode."""
    encoded: set[int] = set()
    found = []
    for (kind, _, start, stop), _, fresh in program(plan, place).steps:
        needs = kind is Opcode.SEND_PARTIAL or (
            fresh and kind in (Opcode.RECEIVE_PARTIAL, Opcode.ENCODE))
        found.append(tuple(block for block in range(start, stop)
                           if needs and block not in encoded))
        encoded.update(found[-1])
    return found

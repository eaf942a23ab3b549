"""How long a pipeline's step takes: a schedule and the seconds of its parts.

"The paper" is Takisawa, Yazaki, Ishihata: "Proposing an Implementation Method
for Pipeline Parallelism Distributed Deep Learning".
"""
# Stages share neither cores nor links here: what ranks lose by sharing is
# measured where they run (``plan``), not predicted.  Then no
# clock is needed.  Each rank does its actions in their order, as far as it can
# get, and stops at a message that has not been sent; the rank that sends that
# message has it go on.  As sends never block, messages and times are the same
# in whatever order the ranks are visited (Kahn, "The Semantics of a Simple
# Language for Parallel Programming", 1974), and ranks that wait when nobody
# can go on would wait forever.
#
# A search for cuts asks for the time of thousands of steps; a simulation with
# a queue of events took ten times as long for the same numbers.
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..pipeline.schedules import Action, Kind, Schedule, ScheduleError
from ..report.events import Event, idle_share

#: Kinds of actions that send or receive, and whether an activation.
_SENDS = {Kind.SEND_ACTIVATION: True, Kind.SEND_GRADIENT: False}
_RECEIVES = {Kind.RECEIVE_ACTIVATION: True, Kind.RECEIVE_GRADIENT: False}


class Costs(NamedTuple):
    """Seconds that one chunk takes for one micro-batch.

    Attributes:
        forward: The forward pass.
        backward_input: Gradients of the chunk's input.
        backward_weight: Gradients of the parameters.
        recompute: A second forward pass before backward; 0 where activations
            are kept.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float = 0.0


#: A unit of time for each pass; two for both halves of a backward pass.
UNIT = Costs(1.0, 1.0, 1.0)


class Link(NamedTuple):
    """A link between two ranks (the paper's equation 1).

    A message of n bytes takes ``latency + n / bandwidth``.  In each direction
    messages go one after the other; both directions go at a time.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes per second.
        message_bytes: Bytes of one micro-batch at each boundary between
            chunks (``stages * chunks - 1`` of them), the same for the
            activation and for its gradient; (): not said.
        overlapped: The sender computes on while a message is under way, and
            the next message follows before the first has arrived.  If not,
            the sender is busy until the message has arrived.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: Sequence[float] = ()
    overlapped: bool = True


@dataclass(frozen=True)
class Timeline:
    """A step as it is predicted.

    Attributes:
        events: What each rank did, in seconds from the start of the step.
            Waiting, and sending where that is overlapped, is no event.
        step_time: Seconds until the last rank is through, without update.
        idle_share: Share of all ranks' time in which they do not compute.
    """

    events: tuple[Event, ...]
    step_time: float
    idle_share: float


def simulate(schedule: Schedule, costs: Sequence[Costs],
             link: Link | None = None) -> Timeline:
    """Predicts a step: when each rank does what, and how long it takes.

    With equal stages and a link that is not overlapped, ``gpipe`` takes what
    the paper says: with m micro-batches, d stages, and t_comp the time of the
    whole batch on one rank, ::

        t_pipe = (m + d - 1) * t_comp / (m * d)             (equation 2)
        T_pipe = t_pipe + (m + d - 2) * t_comm              (equation 3)

    where t_comm is the time of one micro-batch's activation and gradient to
    cross one boundary.

    Args:
        schedule: Actions of all ranks.
        costs: One per chunk of the whole model.
        link: Between ranks; None if messages take no time.

    Raises:
        ScheduleError: The ranks wait for each other forever.
        ValueError: The number of costs is not that of chunks, or of bytes
            not that of boundaries.
    """
    events: list[Event] = []
    seconds = step_time(schedule, costs, link, events)
    return Timeline(tuple(events), seconds, idle_share(events))


def step_time(schedule: Schedule, costs: Sequence[Costs],
              link: Link | None = None, events: list[Event] | None = None
              ) -> float:
    """The seconds of :func:`simulate`, which adds to ``events`` if given."""
    if link is None:
        link = Link(0.0, math.inf, [0.0] * schedule.last_chunk)
    for name, values, what, count in (
            ('costs', costs, 'chunks', schedule.last_chunk + 1),
            ('link.message_bytes', link.message_bytes, 'boundaries',
             schedule.last_chunk)):
        if len(values) != count:
            raise ValueError(f'{name} has {len(values)} entries for {count} '
                             f'{what}')
    now, waiting = _played(schedule, costs, link, events)
    if waiting:
        raise ScheduleError(
            f'schedule {schedule.name!r} comes to a deadlock: ' + ', '.join(
                f'rank {rank} waits for {action}'
                for rank, action in sorted(waiting)))
    return max(now)


def _played(schedule: Schedule, costs: Sequence[Costs], link: Link,
            events: list[Event] | None
            ) -> tuple[list[float], Iterable[tuple[int, Action]]]:
    """When each rank is through, and which ranks wait for what forever."""
    parts, left = list(map(_parts_of, costs)), list(map(iter,
                                                        schedule.actions))
    now = [0.0] * schedule.stages
    # By message, when it arrives, and who waits for it; by pair of ranks,
    # when the link is free.
    arrived: dict[tuple, float] = {}
    waiting: dict[tuple, tuple[int, Action]] = {}
    free: dict[tuple[int, int], float] = {}
    ready = list(range(schedule.stages))
    while ready:
        rank = ready.pop()
        for action in left[rank]:
            kind, micro_batch, chunk = action
            if kind in _RECEIVES:
                message = _RECEIVES[kind], action.boundary, micro_batch
                if message not in arrived:
                    waiting[message] = rank, action
                    break
                now[rank] = max(now[rank], arrived.pop(message))
            elif kind in _SENDS:
                message = _SENDS[kind], action.boundary, micro_batch
                pair = rank, (rank + 2 * message[0] - 1) % len(now)
                free[pair] = (
                    max(now[rank], free.get(pair, 0.0))
                    + link.message_bytes[action.boundary] / link.bandwidth)
                there = arrived[message] = free[pair] + link.latency
                if not link.overlapped:
                    _work(now, events, rank, action, 'send',
                          there - now[rank])
                if message in waiting:  # where a rank stopped, it has it now
                    other, _ = waiting.pop(message)
                    now[other] = max(now[other], arrived.pop(message))
                    ready.append(other)
            else:
                for name, seconds in parts[chunk][kind]:
                    _work(now, events, rank, action, name, seconds)
    return now, waiting.values()


def _work(now: list[float], events: list[Event] | None, rank: int,
          action: Action, name: str, seconds: float) -> None:
    start = now[rank]
    now[rank] = start + seconds
    if events is not None:
        events.append(Event(rank, name, start, now[rank],
                            action.micro_batch, action.chunk))


def _parts_of(cost: Costs) -> dict[Kind, list[tuple[str, float]]]:
    """Names and seconds of the parts of each kind of computation."""
    again = [('recompute', cost.recompute)] * bool(cost.recompute)
    return {
        Kind.FORWARD: [('forward', cost.forward)],
        Kind.BACKWARD: [*again, ('backward', cost.backward_input
                                 + cost.backward_weight)],
        Kind.BACKWARD_INPUT: [*again, ('backward', cost.backward_input)],
        Kind.BACKWARD_WEIGHT: [('backward_weight', cost.backward_weight)]}

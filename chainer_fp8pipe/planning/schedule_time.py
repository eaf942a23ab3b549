"""How long a pipeline's step takes: a schedule and the seconds of its parts.

"The paper" is Takisawa, Yazaki, Ishihata: "Proposing an Implementation Method
for Pipeline Parallelism Distributed Deep Learning".
"""
# Stages share neither cores nor links here: what ranks lose by sharing is
# measured where they run, not predicted (see planning.step).  Then no
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..pipeline.schedules import Action, Kind, Schedule, ScheduleError
from ..report.events import Event, idle_share

_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


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
             link: Link | None = None,
             sizes: Sequence[float] | None = None) -> Timeline:
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
        sizes: Size of each micro-batch, where ``costs`` and
            ``link.message_bytes`` are for the size 1; default: all 1.

    Raises:
        ScheduleError: The ranks wait for each other forever.
        ValueError: The number of costs is not that of chunks, of sizes not
            that of micro-batches, or of bytes not that of boundaries.
    """
    events: list[Event] = []
    seconds = _run(schedule, costs, link, sizes, events)
    return Timeline(tuple(events), seconds, idle_share(events))


def step_time(schedule: Schedule, costs: Sequence[Costs],
              link: Link | None = None) -> float:
    """The seconds of :func:`simulate` alone, with the same arguments."""
    return _run(schedule, costs, link, None, None)


def _run(schedule: Schedule, costs: Sequence[Costs], link: Link | None,
         sizes: Sequence[float] | None, events: list[Event] | None) -> float:
    if link is None:
        link = Link(0.0, math.inf, [0.0] * schedule.last_chunk)
    sizes = [1.0] * schedule.micro_batches if sizes is None else sizes
    for name, values, what, count in (
            ('costs', costs, 'chunks', schedule.last_chunk + 1),
            ('link.message_bytes', link.message_bytes, 'boundaries',
             schedule.last_chunk),
            ('sizes', sizes, 'micro-batches', schedule.micro_batches)):
        if len(values) != count:
            raise ValueError(f'{name} has {len(values)} entries for {count} '
                             f'{what}')
    run = _Run(schedule, costs, link, sizes, events)
    ready = list(range(schedule.stages))
    while ready:
        run.go_on(ready.pop(), ready)
    if run.waiting:
        raise ScheduleError(
            f'schedule {schedule.name!r} comes to a deadlock: ' + ', '.join(
                f'rank {rank} waits for {action}'
                for rank, action in sorted(run.waiting.values())))
    return max(run.now)


class _Run:
    """Ranks on their way through a step.

    Attributes:
        now: Of each rank, when all that it did so far was through.
        waiting: By message, the rank that waits for it and the action.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], link: Link,
                 sizes: Sequence[float], events: list[Event] | None) -> None:
        self.now = [0.0] * schedule.stages
        self.waiting: dict[tuple, tuple[int, Action]] = {}
        self._parts = [_parts_of(cost) for cost in costs]
        self._link, self._sizes, self._events = link, sizes, events
        self._on_link = [size / link.bandwidth
                         for size in link.message_bytes]
        self._free: dict[tuple[int, int], float] = {}
        self._arrived: dict[tuple, float] = {}
        self._left = [iter(actions) for actions in schedule.actions]

    def go_on(self, rank: int, ready: list[int]) -> None:
        """Has a rank go as far as it can; adds others that can go on."""
        for action in self._left[rank]:
            kind, micro_batch, chunk = action
            if kind in _RECEIVES:
                key = (kind is Kind.RECEIVE_ACTIVATION, action.boundary,
                       micro_batch)
                if key not in self._arrived:
                    self.waiting[key] = rank, action
                    return
                self.now[rank] = max(self.now[rank], self._arrived.pop(key))
            elif kind in _SENDS:
                self._send(rank, action, ready)
            else:
                for name, seconds in self._parts[chunk][kind]:
                    self._busy(rank, name, seconds * self._sizes[micro_batch],
                               micro_batch, chunk)

    def _send(self, rank: int, action: Action, ready: list[int]) -> None:
        kind, micro_batch, chunk = action
        forward = kind is Kind.SEND_ACTIVATION
        key = forward, action.boundary, micro_batch
        pair = rank, (rank + (1 if forward else -1)) % len(self.now)
        self._free[pair] = (
            max(self.now[rank], self._free.get(pair, 0.0))
            + self._on_link[action.boundary] * self._sizes[micro_batch])
        there = self._arrived[key] = self._free[pair] + self._link.latency
        if not self._link.overlapped:
            self._busy(rank, 'send', there - self.now[rank], micro_batch,
                       chunk)
        if key in self.waiting:     # where a rank stopped, it has this now
            other, _ = self.waiting.pop(key)
            self.now[other] = max(self.now[other], self._arrived.pop(key))
            ready.append(other)

    def _busy(self, rank: int, name: str, seconds: float, micro_batch: int,
              chunk: int) -> None:
        start = self.now[rank]
        self.now[rank] = start + seconds
        if self._events is not None:
            self._events.append(Event(rank, name, start, self.now[rank],
                                      micro_batch, chunk))


def _parts_of(cost: Costs) -> dict[Kind, list[tuple[str, float]]]:
    """Names and seconds of the parts of each kind of computation."""
    again = [('recompute', cost.recompute)] * bool(cost.recompute)
    return {
        Kind.FORWARD: [('forward', cost.forward)],
        Kind.BACKWARD: [*again, ('backward', cost.backward_input
                                 + cost.backward_weight)],
        Kind.BACKWARD_INPUT: [*again, ('backward', cost.backward_input)],
        Kind.BACKWARD_WEIGHT: [('backward_weight', cost.backward_weight)]}

"""Predicts the time of a step from a schedule and the times of its parts.

Each rank does its actions in their order, as soon as the last one is through
and, for a receive, the message is there.

"The paper" is Takisawa, Yazaki, Ishihata: "Proposing an Implementation Method
for Pipeline Parallelism Distributed Deep Learning".
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...pipeline.schedules.actions import Action, Kind, Schedule, ScheduleError
from ...report.events import Event, idle_share

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


@dataclass(frozen=True)
class Link:
    """How messages go from a rank to another one (the paper's equation 1).

    A message of n bytes takes ``latency + n / bandwidth``.  From one rank to
    another they go one after the other; the two directions do not disturb
    each other.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes per second.
        message_bytes: Bytes of one micro-batch at each boundary between
            chunks (``stages * chunks - 1`` of them), the same for the
            activation and for its gradient.
        overlapped: The sender computes on while a message is under way, and
            the next one follows before it has arrived.  If not, the sender
            is busy until it has arrived.
    """

    latency: float
    bandwidth: float
    message_bytes: Sequence[float]
    overlapped: bool = True


@dataclass(frozen=True)
class Timeline:
    """A step as it was simulated.

    Attributes:
        events: What each rank did, in seconds from the start of the step.
            Waiting, and sending where it is overlapped, is no event.
        step_time: Seconds until the last rank is through, without update.
        idle_share: Share of all ranks' time in which they do not compute.
    """

    events: tuple[Event, ...]
    step_time: float
    idle_share: float


def simulate(schedule: Schedule, costs: Sequence[Costs],
             link: Link | None = None,
             sizes: Sequence[float] | None = None) -> Timeline:
    """Runs a schedule on a clock.

    With equal stages and a link that is not overlapped, ``gpipe`` takes what
    the paper says: with m micro-batches, d stages, and t_comp the time of the
    whole batch on one rank, ::

        t_pipe = (m + d - 1) * t_comp / (m * d)             (equation 2)
        T_pipe = t_pipe + (m + d - 2) * t_comm              (equation 3)

    where t_comm is the time of one micro-batch's activation and gradient to
    cross one boundary.

    Args:
        schedule: One that :func:`~.schedule_checker.check` has no objection
            to.
        costs: One per chunk of the whole model.
        link: Between ranks; None if messages take no time.
        sizes: Size of each micro-batch, in units of that for which ``costs``
            and ``link.message_bytes`` hold; all 1 by default.

    Raises:
        ScheduleError: The ranks wait for each other forever.
        ValueError: A wrong number of costs, sizes or bytes.
    """
    sizes = [1.0] * schedule.micro_batches if sizes is None else sizes
    _same_length('costs', costs, 'chunks', schedule.last_chunk + 1)
    _same_length('sizes', sizes, 'micro-batches', schedule.micro_batches)
    if link is not None:
        _same_length('link.message_bytes', link.message_bytes, 'boundaries',
                     schedule.last_chunk)
    run = _Run(schedule, costs, link, sizes)
    while not all([run.advance(rank) for rank in range(schedule.stages)]):
        if not run.progress:
            raise ScheduleError(run.deadlock())
        run.progress = False
    return Timeline(tuple(run.events), max(run.clocks),
                    idle_share(run.events))


class _Run:
    """The state of a simulation."""

    def __init__(self, schedule: Schedule, costs: Sequence[Costs],
                 link: Link | None, sizes: Sequence[float]) -> None:
        self.schedule, self.costs, self.link = schedule, costs, link
        self.sizes = sizes
        self.events: list[Event] = []
        self.clocks = [0.0] * schedule.stages
        self.progress = False
        self._positions = [0] * schedule.stages
        # When a message arrives, by kind of receive, boundary, micro-batch.
        self._arrivals: dict[tuple[Kind, int, int], float] = {}
        # When the wire between two ranks is free again.
        self._free: dict[tuple[int, int], float] = {}

    def advance(self, rank: int) -> bool:
        """Does what ``rank`` can do now; true if it is through."""
        actions = self.schedule.actions[rank]
        while self._positions[rank] < len(actions):
            action = actions[self._positions[rank]]
            if action.kind in _RECEIVES:
                arrival = self._arrivals.get(
                    (action.kind, action.boundary, action.micro_batch))
                if arrival is None:
                    return False
                self.clocks[rank] = max(self.clocks[rank], arrival)
            elif action.kind in _SENDS:
                self._send(rank, action)
            else:
                self._compute(rank, action)
            self._positions[rank] += 1
            self.progress = True
        return True

    def deadlock(self) -> str:
        """A sentence that names who waits for what."""
        waits = [f'rank {rank} waits for {actions[position]}'
                 for rank, (actions, position) in enumerate(zip(
                     self.schedule.actions, self._positions, strict=True))
                 if position < len(actions)]
        return (f'schedule {self.schedule.name!r} comes to a deadlock: '
                + ', '.join(waits))

    def _compute(self, rank: int, action: Action) -> None:
        cost = self.costs[action.chunk]
        if action.kind is Kind.FORWARD:
            self._spend(rank, 'forward', cost.forward, action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            self._spend(rank, 'backward_weight', cost.backward_weight, action)
        else:
            whole = action.kind is Kind.BACKWARD
            if cost.recompute:
                self._spend(rank, 'recompute', cost.recompute, action)
            self._spend(rank, 'backward', cost.backward_input
                        + whole * cost.backward_weight, action)

    def _spend(self, rank: int, name: str, seconds: float,
               action: Action) -> None:
        start = self.clocks[rank]
        end = start + seconds * self.sizes[action.micro_batch]
        self.clocks[rank] = end
        self.events.append(Event(rank, name, start, end, action.micro_batch,
                                 action.chunk))

    def _send(self, rank: int, action: Action) -> None:
        forward = action.kind is Kind.SEND_ACTIVATION
        target = (rank + (1 if forward else -1)) % self.schedule.stages
        start = arrival = self.clocks[rank]
        if self.link is not None:
            start = max(start, self._free.get((rank, target), 0.0))
            on_wire = (self.link.message_bytes[action.boundary]
                       * self.sizes[action.micro_batch]
                       / self.link.bandwidth)
            arrival = start + self.link.latency + on_wire
            self._free[rank, target] = start + on_wire
            if not self.link.overlapped:
                self.clocks[rank] = arrival
                self.events.append(Event(rank, 'send', start, arrival,
                                         action.micro_batch, action.chunk))
        kind = (Kind.RECEIVE_ACTIVATION if forward
                else Kind.RECEIVE_GRADIENT)
        self._arrivals[kind, action.boundary, action.micro_batch] = arrival


def _same_length(name: str, values: Sequence[object], what: str,
                 count: int) -> None:
    if len(values) != count:
        raise ValueError(f'{name} has {len(values)} entries for {count} '
                         f'{what}')

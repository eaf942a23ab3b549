"""Pipelines in simulated time: a step from a schedule and its parts' times.

Each stage is a program of the engine: a rank does the actions of its stage in
their order, each when the one before is through and, for a receive, the
message is there.

"The paper" is Takisawa, Yazaki, Ishihata: "Proposing an Implementation Method
for Pipeline Parallelism Distributed Deep Learning".
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...pipeline.schedules import Action, Kind, Schedule, ScheduleError
from ...report.events import Event, idle_share
from ..cluster import Cluster
from ..deadlock import Deadlock
from ..engine import Compute, Engine, EngineAction, Program, Receive, Send

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
    """A link between two ranks (the paper's equation 1).

    A message of n bytes takes ``latency + n / bandwidth``.  In each direction
    messages go one after the other; both directions go at a time.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes per second.
        message_bytes: Bytes of one micro-batch at each boundary between
            chunks (``stages * chunks - 1`` of them), the same for the
            activation and for its gradient.
        overlapped: The sender computes on while a message is under way, and
            the next message follows before the first has arrived.  If not,
            the sender is busy until the message has arrived.
    """

    latency: float
    bandwidth: float
    message_bytes: Sequence[float]
    overlapped: bool = True


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

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
        schedule: One that passes :func:`~.schedule_checker.check`.
        costs: One per chunk of the whole model.
        link: Between ranks; None if messages take no time.
        sizes: Size of each micro-batch, where ``costs`` and
            ``link.message_bytes`` are for the size 1; default: all 1.

    Raises:
        ScheduleError: The ranks wait for each other forever.
        ValueError: The number of costs is not that of chunks, of sizes not
            that of micro-batches, or of bytes not that of boundaries.
    """
    if link is None:
        link = Link(0.0, math.inf, [0.0] * schedule.last_chunk)
    engine = Engine(Cluster.pairs(schedule.stages, link.bandwidth,
                                  link.latency))
    programs = add_pipeline(engine, schedule, costs, link.message_bytes,
                            sizes=sizes, overlapped=link.overlapped)
    step_time = _run(engine, schedule, programs)
    events = [Event(rank, label[0], start, end, *label[1:])
              for rank, label, start, end in engine.spans]
    return Timeline(tuple(events), step_time, idle_share(events))


def step_time(schedule: Schedule, costs: Sequence[Costs], link: Link
              ) -> float:
    """The seconds of :func:`simulate`, found in a tenth of the time.

    Ranks that share nothing need no clock: each goes on until it waits for a
    message that has not been sent.

    Args:
        schedule: As for :func:`simulate`.
        costs: One per chunk of the whole model.
        link: Between ranks.

    Raises:
        ScheduleError: The ranks wait for each other forever.
        ValueError: As :func:`simulate`.
    """
    _check_lengths(schedule, costs, link.message_bytes)
    run = _Unclocked(schedule, costs, link)
    if not run.is_through():
        simulate(schedule, costs, link)         # says who waits for whom
    return max(run.now)


class _Unclocked:
    """A step of ranks that disturb each other in no way.

    Attributes:
        now: Of each rank, when all that it did so far was through.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], link: Link
                 ) -> None:
        self.now = [0.0] * schedule.stages
        self._seconds = [{kind: sum(seconds for _, seconds in parts)
                          for kind, parts in _passes(cost).items()}
                         for cost in costs]
        self._link = link
        self._on_link = [size / link.bandwidth
                         for size in link.message_bytes]
        self._free: dict[tuple[int, int], float] = {}
        self._arrived: dict[tuple[bool, int, int], float] = {}
        self._waiting: dict[tuple[bool, int, int], int] = {}
        self._left = [iter(actions) for actions in schedule.actions]

    def is_through(self) -> bool:
        """Has all ranks go as far as they can; says if to the end."""
        ready = list(range(len(self.now)))
        while ready:
            self._go_on(ready.pop(), ready)
        return not self._waiting

    def _go_on(self, rank: int, ready: list[int]) -> None:
        now, stages = self.now[rank], len(self.now)
        for action in self._left[rank]:
            kind, micro_batch, chunk = action
            if kind in _RECEIVES:
                key = (kind is Kind.RECEIVE_ACTIVATION, action.boundary,
                       micro_batch)
                if key not in self._arrived:
                    self._waiting[key] = rank
                    break
                now = max(now, self._arrived.pop(key))
            elif kind in _SENDS:
                forward = kind is Kind.SEND_ACTIVATION
                key = forward, action.boundary, micro_batch
                pair = rank, (rank + (1 if forward else -1)) % stages
                free = max(now, self._free.get(pair, 0.0)
                           ) + self._on_link[action.boundary]
                self._free[pair] = free
                there = self._arrived[key] = free + self._link.latency
                if not self._link.overlapped:
                    now = there
                if key in self._waiting:
                    # Where the rank stopped, it has its message now.
                    other = self._waiting.pop(key)
                    self.now[other] = max(self.now[other],
                                          self._arrived.pop(key))
                    ready.append(other)
            else:
                now += self._seconds[chunk][kind]
        self.now[rank] = now


def add_pipeline(engine: Engine, schedule: Schedule, costs: Sequence[Costs],
                 message_bytes: Sequence[float], *,
                 ranks: Sequence[int] | None = None,
                 sizes: Sequence[float] | None = None,
                 overlapped: bool = True) -> list[Program]:
    """Gives ranks of an engine the programs of a pipeline.

    Args:
        engine: Before it runs.
        schedule: Of the pipeline.
        costs: One per chunk of the whole model.
        message_bytes: Of one micro-batch at each boundary between chunks.
        ranks: The engine's rank of each stage; default: equal.
        sizes: Of each micro-batch; default: all 1.
        overlapped: Stages compute on while their messages are under way;
            if not, a stage that sends waits until the message has arrived.

    Returns:
        The program of each stage.

    Raises:
        ValueError: The number of costs is not that of chunks, of sizes not
            that of micro-batches, or of bytes not that of boundaries.
    """
    sizes = [1.0] * schedule.micro_batches if sizes is None else sizes
    _check_lengths(schedule, costs, message_bytes)
    _same_length('sizes', sizes, 'micro-batches', schedule.micro_batches)
    ranks = range(schedule.stages) if ranks is None else ranks
    pipeline = object()         # tells its messages from all others
    passes = [_passes(cost) for cost in costs]

    def program(stage: int, actions: Sequence[Action]
                ) -> Iterator[EngineAction]:
        after, before = ranks[(stage + 1) % len(ranks)], ranks[stage - 1]
        for action in actions:
            kind, micro_batch, chunk = action
            size = sizes[micro_batch]
            if kind in _SENDS:
                forward = kind is Kind.SEND_ACTIVATION
                boundary = action.boundary
                yield Send(after if forward else before,
                           message_bytes[boundary] * size,
                           (pipeline, forward, boundary, micro_batch),
                           not overlapped, ('send', micro_batch, chunk))
            elif kind in _RECEIVES:
                forward = kind is Kind.RECEIVE_ACTIVATION
                yield Receive((pipeline, forward, action.boundary,
                               micro_batch), action)
            else:
                for name, seconds in passes[chunk][kind]:
                    yield Compute(seconds * size, (name, micro_batch, chunk))

    return [engine.add(rank, program(stage, actions))
            for stage, (rank, actions) in enumerate(zip(
                ranks, schedule.actions, strict=True))]


def _run(engine: Engine, schedule: Schedule, programs: Sequence[Program]
         ) -> float:
    """Runs an engine; returns when the last program is through."""
    try:
        engine.run()
    except Deadlock as error:
        raise stuck(schedule, error) from None
    return max(program.ended for program in programs)


def stuck(schedule: Schedule, error: Deadlock) -> ScheduleError:
    """The error about a schedule whose ranks wait for each other."""
    return ScheduleError(error.said(f'schedule {schedule.name!r}',
                                    'waits for'))


def _passes(cost: Costs) -> dict[Kind, list[tuple[str, float]]]:
    """Names and seconds of the parts of each kind of computation."""
    again = [('recompute', cost.recompute)] * bool(cost.recompute)
    return {
        Kind.FORWARD: [('forward', cost.forward)],
        Kind.BACKWARD: [*again, ('backward', cost.backward_input
                                 + cost.backward_weight)],
        Kind.BACKWARD_INPUT: [*again, ('backward', cost.backward_input)],
        Kind.BACKWARD_WEIGHT: [('backward_weight', cost.backward_weight)]}


def _check_lengths(schedule: Schedule, costs: Sequence[Costs],
                   message_bytes: Sequence[float]) -> None:
    _same_length('costs', costs, 'chunks', schedule.last_chunk + 1)
    _same_length('link.message_bytes', message_bytes, 'boundaries',
                 schedule.last_chunk)


def _same_length(name: str, values: Sequence[object], what: str,
                 count: int) -> None:
    if len(values) != count:
        raise ValueError(f'{name} has {len(values)} entries for {count} '
                         f'{what}')

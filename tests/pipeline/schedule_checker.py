"""Proves that a schedule can be carried out, and counts what it needs."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from chainer_fp8pipe.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
)
from chainer_fp8pipe.planning.schedule_time import UNIT, simulate

_FORWARD_ONLY = (Kind.RECEIVE_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION)
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class ScheduleReport:
    """What a schedule needs.

    Attributes:
        length: Of the step, if forward, the input half and the weight half
            of backward take one unit each in every chunk, and messages none.
        idle_share: Share of all ranks' time in which they wait then.
        peak_live: For each rank, of how many pairs of micro-batch and chunk
            activations are kept at most: from forward until backward, or its
            weight half, is through.  1 for evaluation.
    """

    length: float
    idle_share: float
    peak_live: tuple[int, ...]


def check(schedule: Schedule) -> ScheduleReport:
    """Proves that all ranks' actions together are complete, and end.

    Each chunk takes each micro-batch forward and backward once, in the order
    of their numbers, after receiving its inputs.  A schedule that only goes
    forward is one for evaluation and keeps no activations.

    Sends never block; a rank that receives waits for the message; messages of
    one boundary and direction do not overtake each other.

    Raises:
        ScheduleError: Something is missing, twice, in the wrong place or
            wrong order, or the ranks wait for each other forever.  The
            message names the rank and the action.
    """
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(
            f'schedule {schedule.name!r} has actions for '
            f'{len(schedule.actions)} ranks but {schedule.stages} stages')
    trained = any(action.kind not in _FORWARD_ONLY
                  for actions in schedule.actions for action in actions)
    for rank, actions in enumerate(schedule.actions):
        _check_complete(schedule, rank, trained)
        _check_numbers(rank, actions)
        _check_needs(schedule, rank)
    _check_messages(schedule)
    timeline = simulate(schedule, [UNIT] * (schedule.last_chunk + 1))
    return ScheduleReport(timeline.step_time, timeline.idle_share, tuple(
        _peak_live(actions) if trained else 1
        for actions in schedule.actions))


def _check_complete(schedule: Schedule, rank: int, trained: bool) -> None:
    """Checks that the rank has all its actions once, and no others."""
    there = Counter(schedule.actions[rank])
    wanted = dict.fromkeys(_wanted(schedule, rank, trained, there))
    for action, times in there.items():
        if action not in wanted:
            raise ScheduleError(f'rank {rank}: {action} does not belong here')
        if times > 1:
            raise ScheduleError(f'rank {rank}: {action} is there {times} '
                                'times')
    for action in wanted:
        if action not in there:
            raise ScheduleError(f'rank {rank}: {action} is missing')


def _wanted(schedule: Schedule, rank: int, trained: bool,
            there: Counter[Action]) -> Iterator[Action]:
    last, stages = schedule.last_chunk, schedule.stages
    for chunk in range(rank, last + 1, stages):
        before, after = stages > 1 and chunk > 0, stages > 1 and chunk < last
        always = [Kind.RECEIVE_ACTIVATION] * before + [Kind.FORWARD] + [
            Kind.SEND_ACTIVATION] * after
        if trained:
            always += ([Kind.RECEIVE_GRADIENT] * after
                       + [Kind.SEND_GRADIENT] * before)
        for micro_batch in range(schedule.micro_batches):
            for kind in always:
                yield Action(kind, micro_batch, chunk)
            whole, *halves = (Action(kind, micro_batch, chunk)
                              for kind in _BACKWARDS)
            if trained:
                in_halves = whole not in there and any(
                    half in there for half in halves)
                yield from halves if in_halves else [whole]


def _check_numbers(rank: int, actions: tuple[Action, ...]) -> None:
    """Checks that chunks take the micro-batches in the order 0, 1, 2, ..."""
    for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT),
                  (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)):
        following: Counter[int] = Counter()
        for action in actions:
            if action.kind in kinds:
                if action.micro_batch != following[action.chunk]:
                    raise ScheduleError(
                        f'rank {rank}: {action} comes before that of '
                        f'micro-batch {following[action.chunk]}')
                following[action.chunk] += 1


def _check_needs(schedule: Schedule, rank: int) -> None:
    """Checks that each action comes after those that it builds on."""
    actions = schedule.actions[rank]
    positions = {action: place for place, action in enumerate(actions)}
    for place, action in enumerate(actions):
        for need in _needs(schedule, action):
            if need not in positions:       # a backward pass in one piece
                need = need._replace(kind=Kind.BACKWARD)
            if positions[need] > place:
                raise ScheduleError(f'rank {rank}: {action} comes before '
                                    f'{need}, which it needs')


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The actions of the same rank that this one builds on."""
    kind, _, chunk = action
    if kind is Kind.SEND_ACTIVATION:
        yield action._replace(kind=Kind.FORWARD)
    if kind in (Kind.SEND_GRADIENT, Kind.BACKWARD_WEIGHT):
        yield action._replace(kind=Kind.BACKWARD_INPUT)
    if kind is Kind.FORWARD and chunk > 0:
        yield (action._replace(kind=Kind.RECEIVE_ACTIVATION)
               if schedule.stages > 1 else action._replace(chunk=chunk - 1))
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        yield action._replace(kind=Kind.FORWARD)
        if chunk < schedule.last_chunk:
            yield (action._replace(kind=Kind.RECEIVE_GRADIENT)
                   if schedule.stages > 1 else
                   Action(Kind.BACKWARD_INPUT, action.micro_batch, chunk + 1))


def _check_messages(schedule: Schedule) -> None:
    """Checks that a boundary's messages are awaited in the order of sends."""
    streams = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            streams[action.kind, action.boundary].append((rank, action))
    for boundary in range(schedule.last_chunk):
        for sends, receives in (
                (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION),
                (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)):
            for (source, sent), (target, received) in zip(
                    streams[sends, boundary], streams[receives, boundary],
                    strict=True):
                if sent.micro_batch != received.micro_batch:
                    raise ScheduleError(
                        f'rank {target}: {received} is where rank {source} '
                        f'has {sent}')


def _peak_live(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        live += action.kind is Kind.FORWARD
        peak = max(peak, live)
        live -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return peak

"""What ranks waited for in an update: which rank, and what that did."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from .events import WAITING, Event, parted, sends_of

_EXCHANGE = 'exchange'


def explain_waits(events: Iterable[Event], stages: Sequence[int] = ()
                  ) -> list[Event]:
    """Parts waiting from work, and says what was waited for.

    A ``'receive'`` becomes ``'wait'`` until its message was sent.  Of an
    ``'exchange'`` the time until the last rank has come to it becomes
    ``'wait'``: the ranks of a group come to their exchanges in one order, and
    none can end before all have come.  Where that does not hold, as with
    exchanges that updates need not wait for, they stay whole.

    Args:
        events: Of all ranks in one update, on one clock, in any order.
        stages: The pipeline stage of each rank, the ranks of which exchange
            with each other; () where all ranks do.

    Returns:
        The events by their start.  ``about`` of a wait says in words what
        was waited for, such as ``'rank 2: backward'``, and ``values`` has the
        rank's number as ``'rank'``.
    """
    events = sorted(events, key=lambda event: (event.start, event.end))
    busy = _busy(events)
    until: dict[Event, tuple[float, int]] = {
        receive: (send.start, send.rank)
        for receive, send in sends_of(events).items()}
    until.update(_last_to_come(events, stages))

    def waiting(event: Event, end: float) -> Event:
        _, rank = until[event]
        return event._replace(
            name=WAITING, end=end, bytes=0,
            about=_reason(busy.get(rank, []), rank, event.start, end),
            values=(('rank', float(rank)),))
    return parted(events, {event: time for event, (time, _)
                           in until.items()}, waiting)


def _busy(events: list[Event]) -> dict[int, list[Event]]:
    """By rank, what its main thread does that others may wait for."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if not event.lane and event.end > event.start:
            found.setdefault(event.rank, []).append(event)
    return found


def _last_to_come(events: list[Event], stages: Sequence[int]
                  ) -> dict[Event, tuple[float, int]]:
    """For each exchange, when the last rank came to it, and which one."""
    groups: dict[int, dict[int, list[Event]]] = {}
    for event in events:
        if event.name == _EXCHANGE and not event.lane:
            group = stages[event.rank] if event.rank < len(stages) else 0
            groups.setdefault(group, {}).setdefault(event.rank, []
                                                    ).append(event)
    found = {}
    for ranks in groups.values():
        if len({len(exchanges) for exchanges in ranks.values()}) != 1:
            continue
        for same in zip(*ranks.values(), strict=True):
            last = max(same, key=lambda event: event.start)
            if last.start <= min(event.end for event in same):
                found.update({event: (last.start, last.rank)
                              for event in same})
    return found


def _reason(busy: list[Event], rank: int, start: float, end: float) -> str:
    """What a rank did most from ``start`` to ``end``."""
    seconds: dict[str, float] = {}
    for event in busy:
        shared = min(event.end, end) - max(event.start, start)
        if shared > 0:
            name = event.name + (
                '' if event.micro_batch is None
                else f' of micro-batch {event.micro_batch}')
            seconds[name] = seconds.get(name, 0.0) + shared
    passed = end - start
    idle = passed - sum(seconds.values())
    if not seconds or idle > max(seconds.values()):
        return f'rank {rank}: nothing that was recorded'
    return f'rank {rank}: {max(seconds, key=lambda name: seconds[name])}'

"""What the ranks do when, and what they wait for."""
# Times pass as events from those who measure (stream.py) to pictures, Chrome
# traces and pages of reports.
#
# Waits follow from events: an exchange waits until its last rank has come to
# it.  Ranks that compute the same chunks are replicas, whose n-th exchanges
# belong together.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

#: Names of the events in which a rank computes.
COMPUTATION = ('forward', 'recompute', 'backward', 'backward_weight',
               'update')

#: Name of the events in which a rank does nothing but wait.
WAITING = 'wait'

#: Lanes of what goes on beside a rank's main thread: the thread that
#: exchanges gradients, and buckets on their way.
EXCHANGE, BUCKETS = LANES = 'exchange thread', 'buckets'

#: Rank, number of the lane (0: main thread), row in the lane.
_Place = tuple[int, int, int]


class Event(NamedTuple):
    """What a rank did from when to when.

    Attributes:
        rank: The rank.
        name: One of :data:`COMPUTATION`, :data:`WAITING`, ``'send'``,
            ``'receive'``, ``'exchange'``, ``'encode'``, ``'decode'``,
            ``'input'``, ``'bucket'`` (a bucket of gradients travels) or
            ``'compression'`` (a codec's state).  ``backward_weight`` is the
            weight half of a backward pass where that runs on its own,
            ``backward`` then the input half.
        start: In seconds, on one clock for all ranks.
        end: In seconds.
        micro_batch: Its number, if the event is about one.
        chunk: Its number in the whole model, if the event is about one.
        iteration: The number of the update, if known.
        lane: ``''`` for the main thread, or one of :data:`LANES`.
        bytes: Handed to MPI meanwhile; of a bucket, those of its wire.
        about: The tensors of a bucket or of a codec's state.
        values: Names and numbers, such as a codec's.
    """

    rank: int
    name: str
    start: float
    end: float
    micro_batch: int | None = None
    chunk: int | None = None
    iteration: int | None = None
    lane: str = ''
    bytes: int = 0
    about: str = ''
    values: tuple[tuple[str, float], ...] = ()


def idle_share(events: Iterable[Event]) -> float:
    """The share of all ranks' time in which they do not compute.

    The time is that from the first event's start to the last event's end,
    both of main threads.  Communication counts as idle, as long as a rank
    does nothing else.

    Args:
        events: Of all ranks; events of computation do not overlap on a rank.

    Returns:
        Between 0 and 1; 0 where nothing took any time.
    """
    events = [event for event in events if not event.lane]
    if not events:
        return 0.0
    span = (max(event.end for event in events)
            - min(event.start for event in events))
    busy = sum(event.end - event.start for event in events
               if event.name in COMPUTATION)
    ranks = len({event.rank for event in events})
    return max(0.0, 1.0 - busy / (span * ranks)) if span else 0.0


def part_waits(events: Iterable[Event]) -> list[Event]:
    """Parts waiting from exchanging.

    Of an ``'exchange'`` the time until the last rank has come to it becomes
    ``'wait'``, and ``about`` names that rank.  Nothing is said of exchanges
    that ranks do not make in one order, or beside the backward pass.

    Args:
        events: Of all ranks, on one clock, in any order.

    Returns:
        The events by their start.
    """
    events = sorted(events, key=_times)
    own: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if not event.lane:
            own[event.rank].append(event)
    causes, parts = _last_to_come(own), []
    for event in events:
        cause = causes.get(id(event), event)
        until = min(cause.start, event.end)
        # What is done inside of the exchange before, such as encoding, is no
        # waiting.
        since = max([event.start, *(
            one.end for one in own[event.rank]
            if one is not event and event.start <= one.start < until)]
            ) if event.start < until else until
        if until <= since:      # also if that goes on until then
            parts.append(event)
            continue
        parts += [one for one in (
            event._replace(end=since),
            event._replace(name=WAITING, start=since, end=until, bytes=0,
                           values=(), about=f'rank {cause.rank}'),
            event._replace(start=until)) if one.end > one.start]
    return sorted(parts, key=_times)


def _times(event: Event) -> tuple[float, float]:
    return event.start, event.end


def _last_to_come(own: dict[int, list[Event]]) -> dict[int, Event]:
    """By id of an exchange that of the last rank, without which none can end.

    Ranks that compute the same chunks exchange with each other.
    """
    groups: dict[frozenset[int | None], list[list[Event]]] = defaultdict(list)
    for events in own.values():
        groups[frozenset(event.chunk for event in events
                         if event.name in COMPUTATION) - {None}].append(
            [event for event in events if event.name == 'exchange'])
    last: dict[int, Event] = {}
    for group in groups.values():
        if len({len(found) for found in group}) == 1:
            for same in zip(*group, strict=True):
                cause = max(same, key=lambda event: event.start)
                if cause.start <= min(event.end for event in same):
                    last |= dict.fromkeys(map(id, same), cause)
    return last


def in_rows(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Gives each bucket the first row that no other one is in meanwhile."""
    found: list[tuple[Event, int]] = []
    ends: dict[int, list[float]] = defaultdict(list)    # of a rank's rows
    for event in sorted(events, key=_times):
        row = 0
        if event.lane == BUCKETS:
            rows = ends[event.rank]
            row = next((number for number, end in enumerate(rows)
                        if end <= event.start), len(rows))
            rows[row:row + 1] = [event.end]
        found.append((event, row))
    return found


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events as Chrome trace: a row per rank, and one per lane beside.

    Write it with :func:`json.dump` and open it at ``chrome://tracing`` or in
    Perfetto.  Buckets that travel at the same time have rows of their own.

    Args:
        events: In any order; waits are parted by :func:`part_waits`.

    Returns:
        The "JSON object format" of the Trace Event Format: times in
        microseconds from the first event on, rounded to nanoseconds.
    """
    events = part_waits(events)
    origin = events[0].start if events else 0.0
    rows: list[dict[str, Any]] = [
        {'ph': 'M', 'pid': 0, 'name': 'process_name',
         'args': {'name': 'pipeline'}}]
    placed = [(event, (event.lane and 1 + LANES.index(event.lane) or 0, row))
              for event, row in in_rows(events)]
    # A rank's main thread has the rank as its number, its others come behind.
    ranks = 1 + max((event.rank for event in events), default=0)
    numbers: dict[tuple[int, int, int], int] = {}
    for rank, lane, row in sorted({(event.rank, *place)
                                   for event, place in placed}):
        number = numbers[rank, lane, row] = rank if not lane else (
            ranks + len(numbers))
        name = f'rank {rank}' + (f': {LANES[lane - 1]}' if lane else '') + (
            f' {row}' if row else '')
        rows += [{'ph': 'M', 'pid': 0, 'tid': number, 'name': 'thread_name',
                  'args': {'name': name}},
                 {'ph': 'M', 'pid': 0, 'tid': number,
                  'name': 'thread_sort_index',
                  'args': {'sort_index': len(numbers)}}]
    for event, place in placed:
        # Both ends are rounded, so that events that meet do not overlap.
        start, end = (round((time - origin) * 1e6, 3)
                      for time in (event.start, event.end))
        details = event._asdict()
        details |= dict(details.pop('values'))
        for name in 'name', 'start', 'end':
            del details[name]
        rows.append({
            'ph': 'X', 'pid': 0,
            'tid': numbers[event.rank, place[0], place[1]],
            'name': event.name + ('' if event.micro_batch is None
                                  else f' {event.micro_batch}'),
            'cat': event.name, 'ts': start, 'dur': round(end - start, 3),
            'args': {name: value for name, value in details.items()
                     if value not in (None, '')
                     and (name != 'bytes' or value)}})
    return {'traceEvents': rows, 'displayTimeUnit': 'ms'}

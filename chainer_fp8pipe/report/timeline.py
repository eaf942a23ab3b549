"""What ranks do when: waits, idle time, a Chrome trace, and a picture."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from . import svg
from .quantities import seconds, share
from .stream import BUCKETS, COMPUTATION, EXCHANGE, Event

#: Of events by name, in the order of the legend: label and colour.
_LOOKS = {
    'input': ('input', '#f0e342'),
    'forward': ('forward', '#3366ab'),
    'recompute': ('forward again', '#73add9'),
    'backward': ('backward', '#de701f'),
    'backward_weight': ('backward, weight half', '#f5b359'),
    'update': ('update', '#218738'),
    'send': ('send and receive', '#9e2973'),
    'receive': ('send and receive', '#9e2973'),
    'exchange': ('exchange', '#d978bd'),
    'encode': ('encode', '#0d8c99'),
    'decode': ('decode', '#73bfb3'),
    'bucket': ('bucket in flight', '#595959'),
    'between': ('between updates', '#bfb380'),
    'wait': ('waiting', '#cfcfcf'),
}


def look_of(name: str) -> tuple[str, str]:
    """Label and colour of events; those without a look of their own: grey."""
    return _LOOKS.get(name, (name, '#737373'))


def idle_share(events: Iterable[Event]) -> float:
    """The share of all ranks' time in which they do not compute, 0 to 1.

    The time is that from the first event's start to the last event's end,
    both of main threads.  Communication counts as idle, as long as a rank
    does nothing else.
    """
    events = [event for event in events if not event.lane]
    span = (max((event.end for event in events), default=0.0)
            - min((event.start for event in events), default=0.0))
    busy = sum(event.end - event.start for event in events
               if event.name in COMPUTATION)
    ranks = len({event.rank for event in events})
    return max(0.0, 1.0 - busy / (span * ranks)) if span else 0.0


def part_waits(events: Iterable[Event]) -> list[Event]:
    """Parts waiting from exchanging.

    Of an ``'exchange'`` the time until the last rank has come to it becomes
    ``'wait'``, and ``about`` names that rank.  Ranks that compute the same
    chunks are replicas, whose n-th exchanges belong together.  Nothing is
    said of exchanges that they do not make in one order, or beside the
    backward pass.

    Args:
        events: Of all ranks, on one clock, in any order.

    Returns:
        The events by their start.
    """
    events = list(events)
    own: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=_times):
        if not event.lane:
            own[event.rank].append(event)
    groups: dict[frozenset[int | None], list[list[Event]]] = defaultdict(list)
    for its in own.values():
        groups[frozenset(event.chunk for event in its
                         if event.name in COMPUTATION) - {None}].append(
            [event for event in its if event.name == 'exchange'])
    parts: dict[int, list[Event]] = {}
    for group in groups.values():
        same_number = len({len(its) for its in group}) == 1
        for same in zip(*group, strict=True) if same_number else ():
            last = max(same, key=lambda event: event.start)
            if last.start > min(event.end for event in same):
                continue
            for event in same:
                # What is done inside of the exchange before, such as
                # encoding, is no waiting.
                since = max([event.start, *(
                    one.end for one in own[event.rank] if one is not event
                    and event.start <= one.start < last.start)])
                if since >= last.start:
                    continue
                parts[id(event)] = [one for one in (
                    event._replace(end=since),
                    event._replace(name='wait', start=since, end=last.start,
                                   bytes=0, values=(),
                                   about=f'rank {last.rank}'),
                    event._replace(start=last.start)) if one.end > one.start]
    return sorted((one for event in events
                   for one in parts.get(id(event), [event])), key=_times)


def _times(event: Event) -> tuple[float, float]:
    return event.start, event.end


def _placed(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Each event with its row of a rank.

    0 is the main thread, 1 the one that exchanges.  A bucket gets the first
    row from 2 on that no other one is in meanwhile.
    """
    found: list[tuple[Event, int]] = []
    ends: dict[int, list[float]] = defaultdict(list)
    for event in part_waits(events):
        row = int(event.lane == EXCHANGE)
        if event.lane == BUCKETS:
            rows = ends[event.rank]
            free = next((number for number, end in enumerate(rows)
                         if end <= event.start), len(rows))
            rows[free:free + 1] = [event.end]
            row = 2 + free
        found.append((event, row))
    return found


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events as Chrome trace: ranks as processes, lanes as threads.

    Write it with :func:`json.dump` and open it in Perfetto.

    Args:
        events: In any order; waits are parted by :func:`part_waits`.

    Returns:
        The "JSON object format" of the Trace Event Format: times in
        microseconds from the first event on, rounded to nanoseconds.
    """
    placed = _placed(events)
    origin = min((event.start for event, _ in placed), default=0.0)
    lines: list[dict[str, Any]] = []
    for rank, row in sorted({(event.rank, row) for event, row in placed}):
        name = ('main', EXCHANGE)[row] if row < 2 else f'{BUCKETS} {row - 2}'
        lines += [{'ph': 'M', 'pid': rank, 'tid': row, 'name': what,
                   'args': {'name': text}} for what, text in (
            ('process_name', f'rank {rank}'), ('thread_name', name))]
    for event, row in placed:
        # Both ends are rounded, so that events that meet do not overlap.
        start, end = (round((time - origin) * 1e6, 3)
                      for time in (event.start, event.end))
        details = {'micro_batch': event.micro_batch, 'chunk': event.chunk,
                   'iteration': event.iteration, 'bytes': event.bytes or None,
                   'about': event.about or None, **dict(event.values)}
        number = '' if event.micro_batch is None else f' {event.micro_batch}'
        lines.append({
            'ph': 'X', 'pid': event.rank, 'tid': row,
            'name': event.name + number, 'cat': event.name, 'ts': start,
            'dur': round(end - start, 3), 'args': {
                name: value for name, value in details.items()
                if value is not None}})
    return {'traceEvents': lines, 'displayTimeUnit': 'ms'}


def draw_timeline(title: str, events: Iterable[Event]) -> str:
    """A row for each rank, as SVG; '' if no event takes time.

    Shades tell the chunks of a rank apart, the first one being the darkest.
    """
    placed = [(event, row) for event, row in _placed(events)
              if event.end > event.start]
    ranks = sorted({event.rank for event, _ in placed})
    origin = min((event.start for event, _ in placed), default=0.0)
    # Of a rank: the main thread's height, and how many rows of buckets.
    main = 0.64 if any(row for _, row in placed) else 1.0
    rows: dict[int, int] = defaultdict(int)
    chunks: dict[int, set[int]] = defaultdict(set)
    for event, row in placed:
        rows[event.rank] = max(rows[event.rank], row - 1)
        if event.chunk is not None:
            chunks[event.rank].add(event.chunk)
    boxes, used = [], {}
    for event, row in placed:
        label, colour = used[event.name] = look_of(event.name)
        words = f'rank {event.rank}: {label}' + ''.join(
            f', {what} {number}' for what, number in (
                ('chunk', event.chunk), ('micro-batch', event.micro_batch))
            if number is not None) + f', {seconds(event.end - event.start)}'
        if event.about:
            words += f', {"for " * (event.name == "wait")}{event.about}'
        if event.name in COMPUTATION and event.chunk is not None:
            its = sorted(chunks[event.rank])
            colour = _lighter(colour, 0.55 * its.index(event.chunk)
                              / max(1, len(its) - 1))
        high = 0.18 / max(1, rows[event.rank])
        top, height = ((0.0, main), (0.68, 0.12))[row] if row < 2 else (
            0.82 + (row - 2) * high, high)
        boxes.append(svg.Box(
            ranks.index(event.rank) + top, height,
            1e3 * (event.start - origin), 1e3 * (event.end - origin), colour,
            words))
    boxes.sort(key=lambda box: box.right - box.left, reverse=True)
    return svg.boxes(title, [f'rank {rank}' for rank in ranks], boxes, dict(
        used[name] for name in (*_LOOKS, *used) if name in used))


def _lighter(colour: str, white: float) -> str:
    parts = (int(colour[place:place + 2], 16) for place in (1, 3, 5))
    return '#' + ''.join(f'{round(part + white * (255 - part)):02x}'
                         for part in parts)


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file, with the share of idle time in its title."""
    events = list(events)
    return svg.as_file(draw_timeline(
        f'{title} (ranks idle {share(round(idle_share(events), 3))})', events))

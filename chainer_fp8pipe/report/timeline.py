"""What ranks do when: idle time, a Chrome trace, and a picture."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import svg
from .quantities import seconds, share
from .stream import COMPUTATION, Event

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
    'between': ('between updates', '#bfb380'),
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
    events = [event for event in events if not event.beside]
    span = (max((event.end for event in events), default=0.0)
            - min((event.start for event in events), default=0.0))
    busy = sum(event.end - event.start for event in events
               if event.name in COMPUTATION)
    ranks = len({event.rank for event in events})
    return max(0.0, 1.0 - busy / (span * ranks)) if span else 0.0


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events, in any order, as Chrome trace: ranks as processes.

    Write it with :func:`json.dump` and open it in Perfetto.  It has the "JSON
    object format" of the Trace Event Format: times in microseconds from the
    first event on, rounded to nanoseconds.
    """
    events = _outer_first(events)
    origin = min((event.start for event in events), default=0.0)
    lines: list[dict[str, Any]] = [
        {'ph': 'M', 'pid': rank, 'tid': int(beside), 'name': what,
         'args': {'name': text}}
        for rank, beside in sorted({(one.rank, one.beside) for one in events})
        for what, text in (
            ('process_name', f'rank {rank}'),
            ('thread_name', 'exchange thread' if beside else 'main'))]
    for event in events:
        # Both ends are rounded, so that events that meet do not overlap.
        start, end = (round((time - origin) * 1e6, 3)
                      for time in (event.start, event.end))
        number = '' if event.micro_batch is None else f' {event.micro_batch}'
        lines.append({
            'ph': 'X', 'pid': event.rank, 'tid': int(event.beside),
            'name': event.name + number, 'cat': event.name, 'ts': start,
            'dur': round(end - start, 3), 'args': {
                name: value for name in ('micro_batch', 'chunk', 'bytes')
                if (value := getattr(event, name)) is not None}})
    return {'traceEvents': lines, 'displayTimeUnit': 'ms'}


def draw_timeline(title: str, events: Iterable[Event]) -> str:
    """A row for each rank, as SVG; '' if no event takes time.

    Inner events are in front.  Of a rank whose thread exchanges beside its
    main one, that has a lower row.
    """
    events = [event for event in _outer_first(events)
              if event.end > event.start]
    threads = sorted({(event.rank, event.beside) for event in events})
    origin = min((event.start for event in events), default=0.0)
    boxes = [svg.Box(
        threads.index((event.rank, event.beside)),
        1e3 * (event.start - origin), 1e3 * (event.end - origin),
        look_of(event.name)[1], f'rank {event.rank}: {look_of(event.name)[0]}'
        + ''.join(f', {what} {number}' for what, number in (
            ('chunk', event.chunk), ('micro-batch', event.micro_batch))
            if number is not None) + f', {seconds(event.end - event.start)}')
        for event in events]
    used = {event.name for event in events}
    return svg.boxes(title, [
        ('beside', 0.4) if beside else (f'rank {rank}', 1.0)
        for rank, beside in threads], boxes, dict(
            look_of(name) for name in dict.fromkeys((*_LOOKS, *sorted(used)))
            if name in used))


def _outer_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.start, -event.end))


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file, with the share of idle time in its title."""
    events = list(events)
    return svg.as_file(draw_timeline(
        f'{title} (ranks idle {share(round(idle_share(events), 3))})', events))

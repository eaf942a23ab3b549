"""Draws events of ranks over time, as Chrome trace and as picture."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import svg
from .quantities import seconds
from .stream import Event


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
    return svg.boxes(title, [
        'beside' if beside else f'rank {rank}' for rank, beside in threads], [
        svg.Box(
            threads.index((event.rank, event.beside)),
            1e3 * (event.start - origin), 1e3 * (event.end - origin),
            event.name, ', '.join((f'rank {event.rank}: {event.name}', *(
                f'{what} {number}' for what, number in (
                    ('chunk', event.chunk), ('micro-batch', event.micro_batch))
                if number is not None), seconds(event.end - event.start))))
        for event in events])


def _outer_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.start, -event.end))


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file."""
    return svg.as_file(draw_timeline(title, events))

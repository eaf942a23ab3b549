"""Figures as SVG, with title, axis and legend: lines, and timelines of ranks.

Texts take the page's colour, so that a page may be dark.  A timeline is also
written as Chrome trace.
"""
from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .quantities import number, seconds
from .stream import Event

#: Edges of what is drawn, and the height of a row, in pixels.
_WIDE, _LEFT, _RIGHT, _TOP, _LOW, _ROW = 860, 84, 844, 34, 246, 34
#: The colour-blind tell them apart (Okabe and Ito, "Color Universal Design",
#: 2008).
_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')
#: Colours of events and phases, in the order of the legend.
_EVENTS = {
    'input': '#f0e342', 'forward': '#3366ab', 'recompute': '#73add9',
    'backward': '#de701f', 'backward_weight': '#f5b359', 'update': '#218738',
    'send': '#9e2973', 'receive': '#c9579e', 'exchange': '#d978bd',
    'encode': '#0d8c99', 'decode': '#73bfb3', 'other': '#737373',
    'between': '#bfb380'}


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]]
          ) -> str:
    """A line for each name, through its updates and values that are finite.

    '' where there are no two points.
    """
    points = [point for line in series.values() for point in line
              if math.isfinite(point[1])]
    if len(points) < 2:
        return ''
    left, right = min(points)[0], max(points)[0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    right += right == left

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_RIGHT - _LEFT)

    def y_of(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_LOW - _TOP)
    body = [*(_grid(_LEFT, y_of(y), _RIGHT, y_of(y)) + _text(
                _LEFT - 6, y_of(y) + 4, number(y, 3), 'end')
              for y in _ticks(low, high)),
            *(_text(x_of(x), _LOW + 18, number(x, 6), 'middle')
              for x in _ticks(left, right))]
    looks = dict(zip(series, itertools.cycle(_COLOURS)))
    for name, line in series.items():
        path = ' '.join(f'{x_of(x):.1f},{y_of(y):.1f}'
                        for x, y in line if math.isfinite(y))
        body.append(f'<polyline points="{path}" fill="none" stroke='
                    f'"{looks[name]}" stroke-width="2">'
                    f'<title>{escaped(name)}</title></polyline>')
    return _svg(title, body, _LOW, 'update', looks)


def timeline(title: str, events: Iterable[Event]) -> str:
    """A row for each rank; '' if no event takes time.

    Inner events are in front.  Of a rank whose thread exchanges beside its
    main one, that has a lower row.  The pointer shows what an event is.
    """
    found = [one for one in _outer_first(events) if one.end > one.start]
    if not found:
        return ''
    rows = sorted({(one.rank, one.beside) for one in found})
    origin, end = found[0].start, max(one.end for one in found)
    scale, bottom = (_RIGHT - _LEFT) / (end - origin), _TOP + _ROW * len(rows)
    body = [_text(_LEFT - 6, _TOP + _ROW * (row + 0.5) + 4,
                  'beside' if beside else f'rank {rank}', 'end')
            for row, (rank, beside) in enumerate(rows)]
    for one in found:
        words = [f'rank {one.rank}: {one.name}', *(
            f'{what} {place}' for what, place in (
                ('chunk', one.chunk), ('micro-batch', one.micro_batch))
            if place is not None), seconds(one.end - one.start)]
        top = _TOP + _ROW * (rows.index((one.rank, one.beside)) + 0.1)
        body.append(f'<rect x="{_LEFT + scale * (one.start - origin):.2f}" '
                    f'y="{top:.1f}" '
                    f'width="{scale * (one.end - one.start):.2f}" '
                    f'height="{0.8 * _ROW:.1f}" '
                    f'fill="{_EVENTS.get(one.name, _EVENTS["other"])}">'
                    f'<title>{escaped(", ".join(words))}</title></rect>')
    for x in _ticks(0.0, 1e3 * (end - origin)):
        place = _LEFT + scale * x / 1e3
        body += [_grid(place, bottom, place, bottom + 5),
                 _text(place, bottom + 18, number(x, 4), 'middle')]
    used = {one.name for one in found}
    return _svg(title, body, bottom, 'ms', {
        name: colour for name, colour in _EVENTS.items() if name in used})


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file of its own, on white."""
    return timeline(title, events).replace(
        '<svg ', '<svg xmlns="http://www.w3.org/2000/svg" '
        'style="background:white;font:12px sans-serif" ', 1) + '\n'


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events, in any order, as Chrome trace: ranks as processes.

    Write it with :func:`json.dump` and open it in Perfetto.  It has the "JSON
    object format" of the Trace Event Format: times in microseconds from the
    first event on, rounded to nanoseconds.
    """
    events = _outer_first(events)
    origin = min((event.start for event in events), default=0.0)
    found: list[dict[str, Any]] = [
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
        found.append({
            'ph': 'X', 'pid': event.rank, 'tid': int(event.beside),
            'name': event.name, 'ts': start, 'dur': round(end - start, 3),
            'args': {name: value for name in ('micro_batch', 'chunk', 'bytes')
                     if (value := getattr(event, name)) is not None}})
    return {'traceEvents': found, 'displayTimeUnit': 'ms'}


def _outer_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.start, -event.end))


def escaped(text: str) -> str:
    """Text as HTML and SVG have it."""
    # A path that is no UTF-8 has lone surrogates, which no page can hold.
    return html.escape(text.encode(errors='replace').decode())


def _svg(title: str, body: Iterable[str], bottom: float, unit: str,
         looks: Mapping[str, str]) -> str:
    """A figure, with the axis's unit and the legend below its bottom."""
    x, y = float(_LEFT), bottom + 36.0
    key = [_text(_LEFT, 18, title), _text(_RIGHT, y, unit, 'end')]
    for name, colour in looks.items():
        width = 30 + 6.6 * len(name)        # of a letter, about
        if x > _LEFT and x + width > _RIGHT - 60:
            x, y = float(_LEFT), y + 20
        key += [f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" '
                f'fill="{colour}"/>', _text(x + 18, y, name)]
        x += width
    return (f'<svg role="img" aria-label="{escaped(title)}" '
            f'viewBox="0 0 {_WIDE} {math.ceil(y) + 12}">'
            f'{"".join([*body, *key])}</svg>')


def _text(x: float, y: float, words: str, anchor: str = 'start') -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{escaped(words)}</text>')


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            'stroke="#888" stroke-opacity="0.5"/>')


def _ticks(low: float, high: float) -> list[float]:
    """Some six round numbers from ``low`` to ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 6))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [step * n for n in range(math.ceil(low / step - 1e-9),
                                    math.floor(high / step + 1e-9) + 1)]

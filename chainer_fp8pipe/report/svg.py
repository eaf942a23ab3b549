"""Figures as SVG, with title, axis and legend: lines, and boxes in rows.

Texts take the page's colour, so that a page may be dark.
"""
from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .quantities import number

#: Edges of what is drawn, and the height of a row, in pixels.
_WIDE, _LEFT, _RIGHT, _TOP, _LOW, _ROW = 860, 84, 844, 34, 246, 34
#: The colour-blind tell them apart (Okabe and Ito, "Color Universal Design",
#: 2008).
_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')
#: Values on a logarithmic axis spread by more than this.
_LOGARITHMIC = 20.0


class Box(NamedTuple):
    """A box in a row; ends in milliseconds.  The pointer shows its words."""

    row: int
    left: float
    right: float
    colour: str
    words: str


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]],
          marks: Iterable[float] = ()) -> str:
    """A line for each name; '' where no two points are finite.

    Args:
        title: What is drawn.
        series: By name, updates and values; those that are not finite are
            left out.
        marks: Updates at which a training was started again.
    """
    points = [point for line in series.values() for point in line
              if math.isfinite(point[1])]
    if len(points) < 2:
        return ''
    left, right = min(points)[0], max(points)[0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    is_log = 0 < _LOGARITHMIC * low < high
    if is_log:
        low, high = math.log10(low), math.log10(high)
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    right += right == left

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_RIGHT - _LEFT)

    def y_of(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_LOW - _TOP)
    body = [*(_grid(_LEFT, y_of(y), _RIGHT, y_of(y)) + _text(
                _LEFT - 6, y_of(y) + 4, number(10 ** y if is_log else y, 3),
                'end') for y in _ticks(low, high)),
            *(_text(x_of(x), _LOW + 18, number(x, 6), 'middle')
              for x in _ticks(left, right)),
            *(_grid(x_of(x), _TOP, x_of(x), _LOW, '3 4')
              for x in marks if left <= x <= right)]
    looks = dict(zip(series, itertools.cycle(_COLOURS)))
    for name, line in series.items():
        path = ' '.join(
            f'{x_of(x):.1f},{y_of(math.log10(y) if is_log else y):.1f}'
            for x, y in line if math.isfinite(y))
        body.append(f'<polyline points="{path}" fill="none" stroke='
                    f'"{looks[name]}" stroke-width="2">'
                    f'<title>{escaped(name)}</title></polyline>')
    return _svg(title, body, _LOW, 'update', looks)


def boxes(title: str, rows: Sequence[tuple[str, float]],
          found: Sequence[Box], looks: Mapping[str, str]) -> str:
    """Boxes in rows, later ones in front; '' without any.

    Args:
        title: What is drawn.
        rows: Name and height, of which 1 is usual.
        found: The boxes.
        looks: The legend: colours by name.
    """
    end = max((box.right for box in found), default=0.0)
    if not end:
        return ''
    scale = (_RIGHT - _LEFT) / end
    tops = [*itertools.accumulate(
        (_ROW * height for _, height in rows), initial=_TOP)]
    body = [_text(_LEFT - 6, (top + below) / 2 + 4, name, 'end')
            for (name, _), (top, below) in zip(
                rows, itertools.pairwise(tops), strict=True)]
    for box in found:
        high = tops[box.row + 1] - tops[box.row]
        body.append(
            f'<rect x="{_LEFT + scale * box.left:.2f}" '
            f'y="{tops[box.row] + 0.1 * high:.1f}" '
            f'width="{scale * (box.right - box.left):.2f}" '
            f'height="{0.8 * high:.1f}" fill="{box.colour}">'
            f'<title>{escaped(box.words)}</title></rect>')
    for x in _ticks(0.0, end):
        place = _LEFT + scale * x
        body += [_grid(place, tops[-1], place, tops[-1] + 5),
                 _text(place, tops[-1] + 18, number(x, 4), 'middle')]
    return _svg(title, body, tops[-1], 'ms', looks)


def as_file(figure: str) -> str:
    """A figure as a file of its own, on white."""
    return figure.replace('<svg ', '<svg xmlns="http://www.w3.org/2000/svg" '
                          'style="background:white;font:12px sans-serif" ',
                          1) + '\n'


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


def _grid(x1: float, y1: float, x2: float, y2: float, dashes: str = 'none'
          ) -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="#888" stroke-opacity="0.5" stroke-dasharray="{dashes}"'
            '/>')


def _ticks(low: float, high: float) -> list[float]:
    """Some six round numbers from ``low`` to ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 6))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [step * n for n in range(math.ceil(low / step - 1e-9),
                                    math.floor(high / step + 1e-9) + 1)]

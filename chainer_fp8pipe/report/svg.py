"""Figures as SVG: lines, and boxes in rows.

All functions return text: an ``svg`` element, with its legend in it, which
stands in a page as it is and becomes a file by :func:`as_file`.  Texts take
the page's colour, so that a page may be dark.
"""
from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .quantities import number

#: Width, that of row names, and the height of a line of text, in pixels.
WIDE, _LEFT, _LINE = 860, 84, 20
_RIGHT, _TOP, _HIGH, _ROW = 16, 8, 220, 34
#: Pixels of a letter, about; for legends.
_LETTER = 6.6
#: Points of a line: more than pixels are seen by nobody.
_MOST_POINTS = 800

#: The colour-blind tell them apart (Okabe and Ito, "Color Universal Design",
#: 2008).
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')

#: Values on a logarithmic axis spread by more than this.
_LOGARITHMIC = 20.0


class Box(NamedTuple):
    """A box in a row.

    Attributes:
        row: Its number, from the top.
        top: Where it begins in the row, 0 to 1.
        height: Of the row's.
        left: On the axis.
        right: Likewise.
        colour: As SVG has it.
        words: What the pointer shows.
    """

    row: int
    top: float
    height: float
    left: float
    right: float
    colour: str
    words: str


def lines(title: str, unit: str,
          series: Mapping[str, Sequence[tuple[float, float]]],
          marks: Iterable[float] = (), x_label: str = 'update') -> str:
    """A line for each name; '' where no two points are finite.

    Args:
        title: What is drawn, for those who cannot see it.
        unit: Of the values; '' for none.
        series: By name, points by their first numbers.  Lines have gaps where
            values are not finite.
        marks: Places of vertical lines: a training was started again.
        x_label: What the first numbers are.
    """
    points = [point for line in series.values() for point in line
              if math.isfinite(point[1])]
    if len(points) < 2:
        return ''
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    values = [y for _, y in points]
    is_log = 0 < _LOGARITHMIC * min(values) < max(values)
    change = math.log10 if is_log else float
    low, high = change(min(values)), change(max(values))
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    right += right == left

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (WIDE - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _TOP + (high - change(y)) / (high - low) * (_HIGH - _TOP)
    levels = ([10.0 ** n for n in range(math.ceil(low),
                                        math.floor(high) + 1)]
              if is_log else _ticks(low, high))
    if is_log and len(levels) < 2:
        levels = [min(values), max(values)]
    body = [*(_grid(_LEFT, y_of(y), WIDE - _RIGHT, y_of(y))
              + _text(_LEFT - 6, y_of(y) + 4, number(y, 3), 'end')
              for y in levels),
            *(_text(x_of(x), _HIGH + 18, number(x, 6), 'middle')
              for x in _ticks(left, right)),
            *(_grid(x_of(x), _TOP, x_of(x), _HIGH, '3 4', 'started again')
              for x in marks if left <= x <= right)]
    looks = {}
    for order, (name, line) in enumerate(series.items()):
        looks[name] = colour = COLOURS[order % len(COLOURS)]
        for part in _whole_parts(line):
            path = ' '.join(f'{x_of(x):.1f},{y_of(y):.1f}' for x, y in part)
            body.append(f'<polyline points="{path}" fill="none" stroke='
                        f'"{colour}" stroke-width="2">'
                        f'<title>{escaped(name)}</title></polyline>')
    axis = f'{x_label}' + f'; {unit}' * bool(unit)
    body.append(_text(WIDE - _RIGHT, _HIGH + 36, axis, 'end'))
    key, high_key = _legend(looks, _HIGH + 36)
    return _svg(title, [*body, *key], high_key + 12)


def boxes(title: str, unit: str, rows: Sequence[str], found: Sequence[Box],
          looks: Mapping[str, str]) -> str:
    """Boxes in rows; '' without any.

    Args:
        title: What is drawn, for those who cannot see it.
        unit: Of the axis.
        rows: Names, from the top.
        found: The boxes, later ones in front.
        looks: The legend: colours by name.
    """
    end = max((box.right for box in found), default=0.0)
    if not end:
        return ''
    bottom = _ROW * len(rows)
    scale = (WIDE - _LEFT - _RIGHT) / end
    body = [_text(_LEFT - 6, _ROW * (n + 0.5) + 4, name, 'end')
            for n, name in enumerate(rows)]
    body += [f'<rect x="{_LEFT + scale * box.left:.2f}" '
             f'width="{scale * (box.right - box.left):.2f}" '
             f'y="{_ROW * (box.row + 0.1 + 0.8 * box.top):.1f}" '
             f'height="{0.8 * _ROW * box.height:.1f}" fill="{box.colour}">'
             f'<title>{escaped(box.words)}</title></rect>'
             for box in found]
    for x in _ticks(0.0, end):
        place = _LEFT + scale * x
        body += [_grid(place, bottom, place, bottom + 5),
                 _text(place, bottom + 18, number(x, 4), 'middle')]
    body.append(_text(WIDE - _RIGHT, bottom + 36, unit, 'end'))
    key, high = _legend(looks, bottom + 36)
    return _svg(title, [*body, *key], high + 12)


def as_file(figure: str, title: str = '') -> str:
    """A figure as a file of its own, on white, with a title above."""
    head, body = figure.split('>', 1)
    high = int(head.rsplit(' ', 1)[-1].rstrip('"')) + 30 * bool(title)
    shift = 30 * bool(title)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" '
            f'height="{high}" viewBox="0 0 {WIDE} {high}" fill="#111" '
            'font-family="sans-serif" font-size="12">'
            f'<title>{escaped(title)}</title>'
            f'<rect width="{WIDE}" height="{high}" fill="white"/>'
            + _text(WIDE / 2, 20, title, 'middle') * bool(title)
            + f'<g transform="translate(0 {shift})">'
            + body.removesuffix('</svg>') + '</g></svg>\n')


# --- parts of figures --------------------------------------------------------

def escaped(text: str) -> str:
    """Text as HTML and SVG have it."""
    # A path that is no UTF-8 has lone surrogates, which no page can hold.
    return html.escape(text.encode(errors='replace').decode())


def _svg(title: str, body: Iterable[str], high: float) -> str:
    return (f'<svg role="img" aria-label="{escaped(title)}" '
            f'viewBox="0 0 {WIDE} {math.ceil(high)}">{"".join(body)}</svg>')


def _text(x: float, y: float, words: str, anchor: str = 'start') -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{escaped(words)}</text>')


def _grid(x1: float, y1: float, x2: float, y2: float, dashes: str = '',
          words: str = '') -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            'stroke="#888" stroke-opacity="0.5"'
            + f' stroke-dasharray="{dashes}"' * bool(dashes)
            + (f'><title>{words}</title></line>' if words else '/>'))


def _legend(looks: Mapping[str, str], y: float) -> tuple[list[str], float]:
    """Its elements, in lines from ``y`` on, and where it ends."""
    found, x = [], float(_LEFT)
    most = WIDE - _RIGHT - 160      # the axis's name is beside it
    for name, colour in looks.items():
        width = 30 + _LETTER * len(name)
        if x > _LEFT and x + width > most:
            x, y = float(_LEFT), y + _LINE
        found += [f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" '
                  f'fill="{colour}"/>', _text(x + 18, y, name)]
        x += width
    return found, y


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most so many and one."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(k for k in (1, 2, 5, 10)
                 if (high - low) / (step * k) <= count)
    return [step * n for n in range(math.ceil(low / step - 1e-9),
                                    math.floor(high / step + 1e-9) + 1)]


def _whole_parts(line: Sequence[tuple[float, float]]
                 ) -> list[list[tuple[float, float]]]:
    """Finite points in a row, thinned to what can be seen."""
    every = max(1, len(line) // _MOST_POINTS)
    parts: list[list[tuple[float, float]]] = [[]]
    for place, point in enumerate(line):
        if not math.isfinite(point[1]):
            parts.append([])
        elif not place % every or place == len(line) - 1:
            parts[-1].append(point)
    return [part for part in parts if part]

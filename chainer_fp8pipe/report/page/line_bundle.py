"""Many lines, of which one can be told apart: per rank, or per tensor."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..quantities import number
from .base_figure import base_figure, plain
from .sections import (
    LINE_COLOURS,
    Choice,
    Drawing,
    LegendEntry,
    thinned,
)

#: Points of a line: update and value; the start comes first, as a line has
#: a gap where the job was started again.
Points = Sequence[tuple[int, int, float]]

#: A line has at most so many points.
_MOST_POINTS = 400


def line_bundle(name: str, title: str, lines: Mapping[str, Points],
                logarithmic: bool = False, unit: str = '',
                choice: str = '') -> Drawing:
    """A figure against updates.

    Args:
        name: Of the drawing.
        title: Of the drawing.
        lines: By name.
        logarithmic: Values up to 0 are then gaps.
        unit: Of the values.
        choice: What a list above the figure chooses; '' for no list.
    """
    from bokeh.models import ColumnDataSource, HoverTool
    logarithmic &= _has_positive(lines)
    plot = base_figure('updates', unit or None, 280,
                       y_axis_type='log' if logarithmic else 'linear')
    few = len(lines) <= len(LINE_COLOURS)
    colours = [LINE_COLOURS[order if few else 0]
               for order in range(len(lines))]
    across, up = [], []
    for points in lines.values():
        xs, ys = _with_gaps(points, logarithmic)
        across.append(xs)
        up.append(ys)
    source = ColumnDataSource({
        'xs': across, 'ys': up, 'title': [plain(line) for line in lines],
        'colour': colours, 'width': [2.0] * len(lines),
        'alpha': [1.0 if few else 0.35] * len(lines)})
    drawn = plot.multi_line('xs', 'ys', line_color='colour',
                            line_width='width', line_alpha='alpha',
                            source=source, name='lines')
    plot.add_tools(HoverTool(
        renderers=[drawn], line_policy='nearest', visible=False, tooltips=[
            ('', '@title'), ('update', '$data_x{0}'), ('value', '$data_y')]))
    rows = [(line, str(point[1]), number(point[2]))
            for line, points in lines.items() for point in points]
    return Drawing(
        name, title, plot, thinned(('line', 'update', unit or 'value'), rows),
        [LegendEntry(line, colour)
         for line, colour in zip(lines, colours, strict=True)] if few else [],
        (Choice('line', choice, (('', 'all'), *(
            (line, line) for line in lines))),)
        if choice and len(lines) > 1 else ())


def _has_positive(lines: Mapping[str, Points]) -> bool:
    return any(point[2] > 0 and math.isfinite(point[2])
               for points in lines.values() for point in points)


def _with_gaps(points: Points, logarithmic: bool
               ) -> tuple[list[float], list[float]]:
    xs: list[float] = []
    ys: list[float] = []
    step = -(-len(points) // _MOST_POINTS)
    before = None
    for start, iteration, value in points[::-1][::step or 1][::-1]:
        if before not in (None, start):
            xs.append(math.nan)
            ys.append(math.nan)
        before = start
        is_shown = math.isfinite(value) and (value > 0 or not logarithmic)
        xs.append(iteration)
        ys.append(float(f'{value:.5g}') if is_shown else math.nan)
    if len(xs) == 1:            # a line of one point would not be seen
        xs, ys = [xs[0] - 0.5, xs[0] + 0.5], ys * 2
    return xs, ys

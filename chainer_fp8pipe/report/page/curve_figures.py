"""Is it learning: what was reported, against updates, epochs or time."""
from __future__ import annotations

import math
from typing import Any

from ..quantities import number
from ..records.run_record import RunRecord
from .base_figure import base_figure, plain
from .sections import (
    LINE_COLOURS,
    Choice,
    Drawing,
    LegendEntry,
    PageSection,
    label,
    thinned,
)

#: A line has at most so many points; more are not seen, and make files large.
_MOST_POINTS = 4000

_AXES = (('iteration', 'updates'), ('epoch', 'epochs'),
         ('seconds', 'seconds of training'))

#: Run, name, points of iteration, epoch, seconds and value.
_Curve = tuple[str, str, list[tuple[float, float, float, float]]]


def curve_section(runs: dict[str, RunRecord]) -> PageSection:
    """A figure for each quantity, with a line per run and place.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('learning', 'Is it learning?')
    quantities: dict[str, list[_Curve]] = {}
    for run, record in runs.items():
        for name in sorted({name for point in record.curves
                            for name in point.values}):
            points = [(float(point.iteration), point.epoch, point.seconds,
                       float(point.values[name]))
                      for point in record.curves if name in point.values]
            quantities.setdefault(name.rsplit('/', 1)[-1], []).append(
                (run, name, points))
    if not quantities:
        section.sentences.append('No losses or metrics were reported.')
    for order, (quantity, curves) in enumerate(sorted(
            quantities.items(), key=lambda item: (
                item[0] != 'loss', item[0] != 'accuracy', item[0]))):
        section.drawings.append(_drawing(f'curve-{order}', quantity, curves,
                                         runs))
        bad = sum(not math.isfinite(point[3])
                  for _, _, points in curves for point in points)
        if bad:
            section.sentences.append(f'{bad} values of {quantity} are not '
                                     'finite; their lines have gaps there.')
    return section


def _drawing(name: str, quantity: str, curves: list[_Curve],
             runs: dict[str, RunRecord]) -> Drawing:
    plot = base_figure(_AXES[0][1], None, 300)
    legend = []
    several = len(runs) > 1
    names = sorted({curve[1] for curve in curves})
    letters = list(runs)
    for order, (run, where, points) in enumerate(curves):
        colour = LINE_COLOURS[(letters.index(run) if several else order)
                              % len(LINE_COLOURS)]
        dash = names.index(where) > 0 if several else (
            order >= len(LINE_COLOURS))
        line = f'{name}-{order}'
        _draw(plot, line, label(run, where), points, colour, dash)
        legend.append(LegendEntry(label(run, where), colour, dash, line))
    _mark_starts(plot, runs)
    rows = [(label(run, where), f'{point[0]:.0f}', f'{point[1]:.2f}',
             f'{point[2]:.1f}', number(point[3]))
            for run, where, points in curves for point in points]
    return Drawing(
        name, quantity, plot, thinned(
            ('line', 'update', 'epoch', 'seconds', quantity), rows),
        legend, (Choice('axis', 'against', _AXES),) if name == 'curve-0'
        else ())


def _draw(plot: Any, line: str, title: str,
          points: list[tuple[float, float, float, float]], colour: str,
          dash: bool) -> None:
    import numpy
    from bokeh.models import ColumnDataSource, HoverTool
    points = _fewer(points)
    columns = numpy.array(points, 'd').reshape(-1, 4).T
    columns[~numpy.isfinite(columns)] = numpy.nan
    source = ColumnDataSource({
        name: column for name, column in zip(
            ('iteration', 'epoch', 'seconds', 'value'), columns,
            strict=True)})
    style = {'color': colour, 'name': line, 'source': source}
    drawn = [plot.line('iteration', 'value', line_width=2, line_dash=(
        'dashed' if dash else 'solid'), **style)]
    if len(points) <= 60:
        # A line of a single point would not be seen.
        drawn.append(plot.scatter('iteration', 'value', size=5, **style))
    source.data['title'] = [plain(title)] * len(points)
    plot.add_tools(HoverTool(renderers=drawn[:1], tooltips=[
        ('', '@title'), ('update', '@iteration'), ('epoch', '@epoch{0.00}'),
        ('seconds', '@seconds{0.0}'), ('value', '@value')],
        visible=False))


def _fewer(points: list[tuple[float, float, float, float]]
           ) -> list[tuple[float, float, float, float]]:
    """The lowest and the highest of each part, in their order."""
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-2 * len(points) // _MOST_POINTS)
    chosen = []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        chosen += sorted({min(part, key=lambda place: points[place][3]),
                          max(part, key=lambda place: points[place][3])})
    return [points[place] for place in chosen]


def _mark_starts(plot: Any, runs: dict[str, RunRecord]) -> None:
    """A dotted line where a start went on."""
    from bokeh.models import Span
    for record in runs.values():
        for start in record.starts:
            point = next((point for point in record.curves
                          if point.start == start.number), None)
            if start.iteration and point:
                # The script moves it when the axis changes.
                plot.add_layout(Span(
                    location=start.iteration, dimension='height',
                    line_dash='dotted', line_color='#8c8c8c',
                    name='start', tags=[{
                        'iteration': start.iteration, 'epoch': point.epoch,
                        'seconds': point.seconds}]))

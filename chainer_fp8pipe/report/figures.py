"""Figures of a page, drawn with Bokeh, and the tables of their numbers."""
# There are two kinds of figures: lines over updates, and boxes (bars, squares
# of links, timelines).  Each is one or two glyphs of Bokeh's with a column per
# property, so that a hundred tensors, or ten thousand events, are no more
# objects than one.  Bokeh draws, zooms, moves and tells what is under the
# pointer; the page's own script hides lines and swaps what is shown.  An
# earlier page drew its timeline itself, which took 700 lines to merge boxes
# smaller than a pixel.  A page holds fewer events in place of that.
#
# Canvas, and not WebGL: browsers give a page some sixteen contexts of it.
# Colours of lines are told apart by the colour-blind, on white and on black
# (Okabe and Ito 2008, without black and yellow); the script colours axes, as
# the browser is dark or light.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from .quantities import number

#: A table has at most so many rows, a line so many points.
_MOST_ROWS, _MOST_POINTS = 200, 4000
#: Lines with more points have a smooth line before the pale one.
_MANY_POINTS = 60

GREY = '#8c8c8c'
LINE_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00',
                '#56b4e9', GREY)

#: Bokeh reads text that begins so as mathematics, for which it would load a
#: script; the zero-width space keeps it from that.
_MATHEMATICS, _SPACE = ('$$', '\\[', '\\('), '\u200b'

_COLUMNS = ('left', 'right', 'top', 'bottom', 'colour', 'what', 'alpha',
            'hatch')

#: Update, value; of curves also epoch and seconds.
Points = Sequence[tuple[float, ...]]


class Table(NamedTuple):
    """Rows of text under the header's; evenly chosen ones if they are many."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ''

    def shown(self) -> Sequence[tuple[str, ...]]:
        """The rows that a page has."""
        if len(self.rows) <= _MOST_ROWS:
            return self.rows
        step = (len(self.rows) - 1) / (_MOST_ROWS - 1)
        return [self.rows[round(step * row)] for row in range(_MOST_ROWS)]


@dataclass
class Drawing:
    """A figure with what belongs to it.

    Attributes:
        title: Above it.
        plot: Bokeh's figure.
        tables: What it shows in numbers, for each of its choices.
        legend: Label, colour, and whether it is dashed.
        hides: Whether a click on the legend hides a line.
        choices: What it can show is called so.
        shown: For each choice, the columns of the figure's boxes.
        has_axes: Whether one can choose what it is drawn against.
        wide: Whether it has the page's whole width.
        has_lines: Whether it shows lines, not boxes.
        name: On the page.
    """

    title: str
    plot: Any
    tables: Sequence[Sequence[Table]]
    legend: Sequence[tuple[str, str, bool]] = ()
    hides: bool = False
    choices: Sequence[str] = ()
    shown: Sequence[Mapping[str, Any]] = ()
    has_axes: bool = False
    wide: bool = False
    has_lines: bool = False
    name: str = ''


def _figure(x_label: str, y_label: str, height: int, tools: str,
            **options: Any) -> Any:
    """Without grounds, as wide as there is room; ``height`` in pixels."""
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure
    plot = figure(height=height, sizing_mode='stretch_width', tools=tools,
                  x_axis_label=x_label, y_axis_label=y_label or None,
                  background_fill_color=None, border_fill_color=None,
                  outline_line_color=None, min_border_right=12,
                  output_backend='canvas', **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.axis.axis_label_text_font_style = 'normal'
    plot.axis.minor_tick_line_color = None
    plot.axis.major_tick_in = 0     # or ticks would lie on boxes
    for axis in plot.axis:
        if isinstance(axis.formatter, BasicTickFormatter):
            axis.formatter.update(power_limit_low=-3, power_limit_high=6)
    return plot


def _tell(plot: Any, renderer: Any, *tooltips: tuple[str, str],
          **options: Any) -> None:
    """Says what is under the pointer."""
    from bokeh.models import HoverTool
    plot.add_tools(HoverTool(renderers=[renderer], visible=False,
                             tooltips=[*tooltips], **options))


def draw_lines(title: str, unit: str, lines: Mapping[str, Points],
               went_on: Sequence[Mapping[str, float]],
               styles: Mapping[str, tuple[str, bool]] | None = None
               ) -> Drawing:
    """Lines against updates; curves also against epochs or time.

    The axis is logarithmic if all values are above 0 and some are 20 times as
    large as others.

    Args:
        title: Of the figure.
        unit: Of the values.
        lines: By name, its points.
        went_on: Where runs were started again, by column.
        styles: By name, the colour, and whether the line is dashed.
    """
    from bokeh.models import Span
    from bokeh.palettes import viridis
    few = len(lines) <= len(LINE_COLOURS)
    if styles is None:
        palette = LINE_COLOURS if few else viridis(len(lines))
        styles = {name: (colour, False) for name, colour in zip(
            lines, palette, strict=False)}
    arrays = {name: numpy.array(points, float)
              for name, points in lines.items()}
    columns = [*('iteration', 'value', 'epoch', 'seconds')[
        :next(iter(arrays.values())).shape[1]]]
    values = numpy.concatenate([array[:, 1] for array in arrays.values()])
    values = values[numpy.isfinite(values)]
    is_log = len(values) and 0 < 20 * values.min() < values.max()
    plot = _figure('updates', unit, 300, 'xpan,xbox_zoom,reset,save',
                   y_axis_type='log' if is_log else 'linear')
    _add_lines(plot, columns, arrays, styles, 1.0 if few else 0.6)
    for place in went_on:       # the script moves it when the axis changes
        plot.add_layout(Span(
            location=place['iteration'], dimension='height', name='start',
            line_dash='dotted', line_color=GREY, tags=[dict(place)]))
    names = [*lines]
    ends = ([(name, *styles[name]) for name in names] if few or
            len(set(styles.values())) <= len(LINE_COLOURS) else
            [(names[place] + ' (colours go from first to last)' * (not place),
              *styles[names[place]])
             for place in (0, len(names) // 2, len(names) - 1)])
    return Drawing(title, plot, [[Table(
        ('line', 'update', unit or 'value', *columns[2:]),
        [(name, f'{point[0]:.0f}', number(point[1]),
          *(f'{one:.2f}' for one in point[2:]))
         for name, points in lines.items() for point in points])]],
        ends, hides=len(ends) == len(names), has_lines=True)


def _add_lines(plot: Any, columns: Sequence[str],
               arrays: Mapping[str, numpy.ndarray],
               styles: Mapping[str, tuple[str, bool]], alpha: float) -> None:
    """Lines with dots if points are few, else pale with a smooth one."""
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource
    paths: dict[str, list[Any]] = defaultdict(list)
    dots: dict[str, list[Any]] = defaultdict(list)

    def shown(properties: dict[str, list[Any]]) -> dict[str, Any]:
        # The script hides lines by this filter.
        return {'source': ColumnDataSource(dict(properties)),
                'view': CDSView(filter=BooleanFilter(
                    booleans=[True] * len(properties['title'])))}
    for name, array in arrays.items():
        colour, is_dashed = styles[name]
        points = _fewer(array)
        points[~numpy.isfinite(points)] = numpy.nan
        drawn = [(points, alpha)]
        if len(points) > _MANY_POINTS:
            smooth = points.copy()
            smooth[:, 1] = _smooth(points[:, 1])
            drawn = [(points, 0.3), (smooth, alpha)]
        look = {'title': name, 'colour': colour, 'alpha': alpha,
                'dash': 'dashed' if is_dashed else 'solid'}
        for line, strength in drawn:
            for key, value in {**look, 'alpha': strength, **dict(zip(
                    columns, line.T.tolist(), strict=True))}.items():
                paths[key].append(value)
        if len(drawn) == 1:     # a line of a single point would not be seen
            for key, value in look.items():
                dots[key] += [value] * len(points)
            for key, column in zip(columns, points.T.tolist(), strict=True):
                dots[key] += column
    lines = plot.multi_line(
        'iteration', 'value', line_color='colour', line_alpha='alpha',
        line_dash='dash', line_width=2, **shown(paths))
    _tell(plot, lines, ('', '@title'), ('at', '$data_x'),
          ('value', '$data_y'), line_policy='nearest')
    if dots:
        plot.scatter('iteration', 'value', size=5, color='colour',
                     alpha='alpha', **shown(dots))


def _fewer(points: numpy.ndarray) -> numpy.ndarray:
    """The lowest and the highest of each part, in their order."""
    if len(points) <= _MOST_POINTS:
        return points.copy()
    parts = numpy.array_split(numpy.arange(len(points)), _MOST_POINTS // 2)
    return points[sorted({int(part[find(points[part, 1])]) for part in parts
                          for find in (numpy.argmin, numpy.argmax)})]


def _smooth(values: numpy.ndarray) -> numpy.ndarray:
    """Means of a fortieth of all values around each; NaN counts for none."""
    window = numpy.ones(max(3, len(values) // 40))
    there = numpy.isfinite(values)
    count = numpy.convolve(there, window, 'same')
    whole = numpy.convolve(numpy.where(there, values, 0.0), window, 'same')
    return numpy.where(count > 0, whole / numpy.maximum(count, 1), numpy.nan)


def box_columns(boxes: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """The columns of boxes, each of which has its properties in order.

    They are ``left, right, top, bottom, colour, what`` (what it is, in
    words), and may go on with ``alpha`` (default: 1) and ``hatch`` (none).
    """
    return dict(zip(_COLUMNS, map(list, zip(*(
        (*box, 1.0, ' ')[:len(_COLUMNS)] for box in boxes), strict=True)),
        strict=True))


def draw_boxes(title: str, x_label: str, rows: Sequence[str],
               columns: Mapping[str, Any], tables: Sequence[Sequence[Table]],
               legend: Sequence[tuple[str, str]], height: int,
               x_names: Sequence[str] = (), zooms: bool = False,
               **options: Any) -> Drawing:
    """Boxes in named rows, the first of which is on top.

    Args:
        title: Of the figure.
        x_label: Of what goes to the right.
        rows: Names; row 2 goes from 1.5 to 2.5.
        columns: Of the boxes, as :func:`box_columns` gives them.
        tables: For each choice.
        legend: Labels and colours.
        height: Of a row, in pixels; less where rows are many.
        x_names: Names of columns, if there are any.
        zooms: Whether one looks at parts of it.
        options: Of the drawing.
    """
    from bokeh.models import (
        ColumnDataSource,
        FixedTicker,
        Range1d,
        WheelZoomTool,
    )
    end = max(columns['right'])
    x_range = (Range1d(-0.5, len(x_names) - 0.5) if x_names else
               Range1d(0, end, bounds=(0, end)) if zooms else
               Range1d(0, 1.05 * end or 1.0))
    height = min(max(1000 // len(rows), 13), height)
    plot = _figure(x_label, '', 90 + height * len(rows),
                   'xpan,xbox_zoom,reset' if zooms else 'reset,save',
                   x_range=x_range, y_range=Range1d(len(rows) - 0.5, -0.5),
                   min_border_left=64)
    plot.ygrid.visible = False
    # Names of rows may leave little room.
    plot.xaxis.ticker.desired_num_ticks = 4
    for axis, names in (plot.yaxis, rows), (plot.xaxis, x_names):
        if names:
            axis.ticker = FixedTicker(ticks=[*range(len(names))])
            axis.major_label_overrides = {
                place: _SPACE * name.startswith(_MATHEMATICS) + name
                for place, name in enumerate(names)}
    if zooms:
        # With Ctrl, as the page could not be scrolled otherwise; fingers that
        # spread on a touch pad count as that.
        wheel = WheelZoomTool(dimensions='width', modifiers={'ctrl': True})
        plot.add_tools(wheel)
        plot.toolbar.active_scroll = wheel
    drawn = plot.quad(
        'left', 'right', 'top', 'bottom', fill_color='colour',
        fill_alpha='alpha', hatch_pattern='hatch', hatch_color='white',
        line_color=None, name='boxes', source=ColumnDataSource(columns))
    _tell(plot, drawn, ('', '@what'))
    return Drawing(title, plot, tables, [(*one, False) for one in legend],
                   **options)


def draw_bars(title: str, unit: str, names: Sequence[str],
              kinds: Mapping[str, Mapping[str, float]], table: Table
              ) -> Drawing:
    """For each name a bar of each kind, one above the other."""
    high = 0.8 / len(kinds)
    colours = dict(zip(kinds, LINE_COLOURS, strict=False))
    return draw_boxes(title, unit, names, box_columns(
        (0.0, bars.get(name, 0.0), top, top + 0.9 * high, colours[kind],
         f'{name}, {kind}: {number(bars.get(name, 0.0))} {unit}')
        for place, (kind, bars) in enumerate(kinds.items())
        for row, name in enumerate(names)
        for top in [row - 0.4 + place * high]), [[table]],
        [*colours.items()], 44)

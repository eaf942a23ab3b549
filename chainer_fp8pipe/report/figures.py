"""Figures of a page, drawn with Bokeh, and the tables of their numbers."""
# Figures are lines over updates, or boxes (bars, timelines).  Each is a few
# glyphs of Bokeh's with a column per property: ten thousand events are no more
# objects than one.  Bokeh draws, zooms and says what is under the pointer; the
# page's script hides lines and swaps data.
#
# Canvas, and not WebGL: browsers give a page some sixteen contexts of it.
# The colour-blind tell colours of lines apart, on white and on black (Okabe
# and Ito 2008, without black and yellow).
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from .quantities import number

#: A table has at most so many rows.
_MOST_ROWS = 200
#: Lines with more points have a smooth line before the pale one.
_MANY_POINTS = 60

GREY = '#8c8c8c'
LINE_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00',
                '#56b4e9', GREY)

#: In legends: the lines at restarts.
STARTED = 'started again'

#: Bokeh reads text that begins so as mathematics, for which it would load a
#: script; the zero-width space keeps it from that.
_MATHEMATICS, _SPACE = ('$$', '\\[', '\\('), '\u200b'

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
        tables: Its numbers, for each of its choices.
        legend: Label, colour, and whether it is dashed.
        choices: By name, columns of boxes that it can show.
        has_axes: Whether the page offers other horizontal axes.
        wide: Whether it has the page's whole width.
        has_lines: Whether it shows lines, which a click on the legend hides.
    """

    title: str
    plot: Any
    tables: Sequence[Sequence[Table]]
    legend: Sequence[tuple[str, str, bool]] = ()
    choices: Mapping[str, Mapping[str, Any]] | None = None
    has_axes: bool = False
    wide: bool = False
    has_lines: bool = False


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What is one glyph for Bokeh: a list for each property of some rows."""
    rows = [*rows]
    return {name: [row[name] for row in rows] for name in rows[0]}


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
            axis.formatter.use_scientific = False
    return plot


def _tell(plot: Any, renderer: Any, *tooltips: tuple[str, str],
          **options: Any) -> None:
    """Says what is under the pointer."""
    from bokeh.models import HoverTool
    plot.add_tools(HoverTool(renderers=[renderer], visible=False,
                             tooltips=[*tooltips], **options))


# --- lines -------------------------------------------------------------------

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
    from bokeh.models import BasicTickFormatter, FixedTicker, Span
    if styles is None:      # all that are left have one colour
        colours = [*LINE_COLOURS[:-1], *[GREY] * len(lines)]
        styles = {name: (colour, False) for name, colour in zip(
            lines, colours, strict=False)}
    arrays = {name: numpy.array(points, float)
              for name, points in lines.items()}
    values = numpy.concatenate([array[:, 1] for array in arrays.values()])
    values = values[numpy.isfinite(values)]
    is_log = len(values) and 0 < 20 * values.min() < values.max()
    plot = _figure('updates', unit, 300, 'xpan,xbox_zoom,reset,save',
                   y_axis_type='log' if is_log else 'linear')
    if len(values) and not values.any():    # none is less than nothing
        plot.y_range.start = 0
    for place in went_on:       # the script moves it when the axis changes
        plot.add_layout(Span(
            location=place['iteration'], dimension='height', name='start',
            line_dash='dotted', line_color=GREY, tags=[dict(place)]))
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in lines:
        groups.setdefault(styles[name], []).append(name)
    labels = {style: f'{names[0]} and {len(names) - 1} more'
              if len(names) > 1 else names[0]
              for style, names in groups.items()}
    if is_log:      # Bokeh's own ticks leave half of an axis without any
        low, high = numpy.floor(numpy.log10([values.min(), values.max()]))
        plot.yaxis.formatter = BasicTickFormatter(use_scientific=False)
        plot.yaxis.ticker = FixedTicker(ticks=[
            step * 10.0 ** power for power in range(int(low), int(high) + 1)
            for step in ((1, 2, 5) if high - low < 3 else (1,))])
    # A mean of times would follow a single update that took long.
    _add_lines(plot, arrays, styles, labels,
               numpy.nanmedian if unit else numpy.nanmean)
    legend = [(label, *style) for style, label in labels.items()]
    if went_on:
        legend.append((STARTED, GREY, True))
    more = ('epoch', 'seconds')[:next(iter(arrays.values())).shape[1] - 2]
    return Drawing(title, plot, [[Table(
        ('line', 'update', unit or 'value', *more),
        [(name, f'{point[0]:.0f}', number(point[1]),
          *(f'{one:.2f}' for one in point[2:]))
         for name, points in lines.items() for point in points])]],
        legend, has_lines=True)


def _add_lines(plot: Any, arrays: Mapping[str, numpy.ndarray],
               styles: Mapping[str, tuple[str, bool]],
               labels: Mapping[tuple[str, bool], str],
               middle: Callable) -> None:
    """Lines with dots if points are few, else pale with a smooth one."""
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource
    pale: list[dict[str, Any]] = []
    paths: list[dict[str, Any]] = []
    dots: list[dict[str, Any]] = []
    for name, array in arrays.items():
        colour, is_dashed = styles[name]
        points = numpy.where(numpy.isfinite(array), array, numpy.nan)
        keys = ('iteration', 'value', 'epoch', 'seconds')[:points.shape[1]]
        line = {'title': name, 'colour': colour, 'alpha': 1.0,
                'label': labels[styles[name]],
                'dash': 'dashed' if is_dashed else 'solid',
                **dict(zip(keys, points.T.tolist(), strict=True))}
        if len(points) > _MANY_POINTS:
            pale.append({**line, 'alpha': 0.25 if len(arrays) < 4 else 0.12})
            paths.append({**line, 'value': _smooth(
                points[:, 1], middle).tolist()})
        else:       # a line of a single point would not be seen
            paths.append(line)
            dots += [{**line, **dict(zip(keys, point, strict=True))}
                     for point in points.tolist()]

    def shown(rows: list[dict[str, Any]]) -> dict[str, Any]:
        # The script hides lines by this filter.
        return {'source': ColumnDataSource(columns_of(rows)),
                'view': CDSView(filter=BooleanFilter(
                    booleans=[True] * len(rows)))}
    drawn = plot.multi_line(
        'iteration', 'value', line_color='colour', line_alpha='alpha',
        line_dash='dash', line_width=2, **shown(pale + paths))
    _tell(plot, drawn, ('', '@title'), ('at', '$data_x'),
          ('value', '$data_y'), line_policy='nearest')
    if dots:
        plot.scatter('iteration', 'value', size=5, color='colour',
                     alpha='alpha', **shown(dots))


def _smooth(values: numpy.ndarray, middle: Callable) -> numpy.ndarray:
    """The middle of a fortieth of all values around each, without NaN."""
    width = max(3, len(values) // 40) | 1
    around = numpy.lib.stride_tricks.sliding_window_view(numpy.pad(
        values, width // 2, constant_values=numpy.nan), width)
    found = numpy.full(len(values), numpy.nan)
    some = numpy.isfinite(around).any(axis=1)
    found[some] = middle(around[some], axis=1)
    return found


# --- boxes -------------------------------------------------------------------

def box(left: float, right: float, top: float, bottom: float, colour: str,
        what: str, alpha: float = 1.0, hatch: str = ' ') -> dict[str, Any]:
    """A box, as :func:`columns_of` takes it; ``what`` it is, in words."""
    return {'left': left, 'right': right, 'top': top, 'bottom': bottom,
            'colour': colour, 'what': what, 'alpha': alpha, 'hatch': hatch}


def draw_boxes(title: str, x_label: str, rows: Sequence[str],
               boxes: Iterable[Mapping[str, Any]],
               tables: Sequence[Sequence[Table]],
               legend: Sequence[tuple[str, str]], height: int,
               zooms: bool = False, **options: Any) -> Drawing:
    """Boxes in named rows, the first of which is on top.

    Args:
        title: Of the figure.
        x_label: Of what goes to the right.
        rows: Names; row 2 goes from 1.5 to 2.5.
        boxes: Each a :func:`box`.
        tables: For each choice.
        legend: Labels and colours.
        height: Of a row, in pixels; less where rows are many.
        zooms: Whether one looks at parts of it.
        options: Of the drawing.
    """
    from bokeh.models import (
        ColumnDataSource,
        FixedTicker,
        Range1d,
        WheelZoomTool,
    )
    columns = columns_of(boxes)
    end = max(columns['right'])
    x_range = (Range1d(0, end, bounds=(0, end)) if zooms else
               Range1d(0, 1.05 * end or 1.0))
    height = min(max(1000 // len(rows), 13), height)
    plot = _figure(x_label, '', 90 + height * len(rows),
                   'xpan,xbox_zoom,reset' if zooms else 'reset,save',
                   x_range=x_range, y_range=Range1d(len(rows) - 0.5, -0.5),
                   min_border_left=64)
    plot.ygrid.visible = False
    # Names of rows may leave little room.
    plot.xaxis.ticker.desired_num_ticks = 4
    plot.yaxis.ticker = FixedTicker(ticks=[*range(len(rows))])
    plot.yaxis.major_label_overrides = {
        place: _SPACE * name.startswith(_MATHEMATICS) + name
        for place, name in enumerate(rows)}
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


def draw_bars(title: str, unit: str, bars: Mapping[str, Mapping[str, float]],
              say: Callable[[float], str], table: Table) -> Drawing:
    """For each name a bar of each kind, one above the other.

    Args:
        title: Of the figure.
        unit: Of the axis: ``'ms'`` or ``'kB'``.
        bars: By kind, by name: seconds or bytes.
        say: A value in words.
        table: Of the figure.
    """
    scale = {'ms': 1e3, 'kB': 1e-3}[unit]
    names = [*dict.fromkeys(name for values in bars.values()
                            for name in values)]
    colours = dict(zip(bars, LINE_COLOURS, strict=False))
    high = 0.8 / len(bars)
    return draw_boxes(title, unit, names, (
        box(0.0, scale * values.get(name, 0.0), top, top + 0.9 * high,
            colours[kind], f'{name}, {kind}: {say(values.get(name, 0.0))}')
        for place, (kind, values) in enumerate(bars.items())
        for row, name in enumerate(names)
        for top in [row - 0.4 + place * high]), [[table]],
        [*colours.items()], 44)

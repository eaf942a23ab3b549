"""The figures of a report's page, drawn with Bokeh, and their numbers."""
# Each figure is a model of Bokeh's that the page embeds, and tables that say
# the same in numbers, for screen readers and for those without JavaScript.
#
# Bokeh draws, zooms, moves and tells what is under the pointer; the page's
# own script only colours axes for dark pages, hides lines and swaps what is
# shown.  An earlier page drew its timeline itself, which took 700 lines to
# merge boxes that are smaller than a pixel.  A page now holds fewer events in
# place of that (page.MOST_EVENTS): canvases draw some ten thousand boxes
# without delay, and updates of interest have fewer.
#
# Canvas, and not WebGL: browsers give a page some sixteen contexts of it.
# Colours of lines are told apart by the colour-blind, on white and on black
# (Okabe and Ito 2008, without black and yellow).
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from .events import BUCKETS, EXCHANGE, WAITING, Event, in_rows
from .looks import Look, Looks, look_of_name
from .quantities import number, seconds, share, size

LINE_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00',
                '#56b4e9', '#8c8c8c')

#: A table on the page has at most so many rows, a line so many points.
MOST_ROWS, _MOST_POINTS = 200, 4000

#: Curves with more points have a smooth line before the pale points.
_MANY_POINTS = 60

#: Bokeh reads text that begins so as mathematics, for which it would load a
#: script; the zero-width space keeps it from that.
_MATHEMATICS, _SPACE = ('$$', '\\[', '\\('), '\u200b'

_WAIT = '#8c8c8c'

#: Where a rank's row has its lanes: from the middle down, and how high.
_WHOLE = (-0.4, 0.8)
_LANES = ((-0.45, 0.56), (0.13, 0.12), (0.27, 0.18))

#: Columns of a curve against which it can be drawn.
AXES = {'iteration': 'updates', 'epoch': 'epochs',
        'seconds': 'seconds of training'}

#: Points of a line: update and value; the start comes first, as a line has
#: a gap where the job was started again.
Points = Sequence[tuple[int, int, float]]


class Table(NamedTuple):
    """Rows of text under the header's; ``remark`` says what is left out."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ''
    remark: str = ''


class Drawing(NamedTuple):
    """A figure with what belongs to it.

    Attributes:
        title: Above it.
        model: Bokeh's.
        tables: What it shows in numbers, for each of its choices.
        legend: Label, colour, whether it is dashed, and the name of the line
            that a click hides ('': none).
        choices: What it can show is called so.
        shown: For each choice, the columns of the figure's source, and its
            span.
        has_axes: Whether a list of :data:`AXES` stands above it.
        wide: Whether it has the page's whole width.
    """

    title: str
    model: Any
    tables: Sequence[Sequence[Table]]
    legend: Sequence[tuple[str, str, bool, str]] = ()
    choices: Sequence[str] = ()
    shown: Sequence[Mapping[str, Any]] = ()
    has_axes: bool = False
    wide: bool = False


def thinned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
            ) -> Table:
    """A table of evenly chosen rows, if there are more than a page takes."""
    if len(rows) <= MOST_ROWS:
        return Table(header, rows)
    step = (len(rows) - 1) / (MOST_ROWS - 1)
    return Table(header, [rows[round(step * row)] for row in range(MOST_ROWS)],
                 remark=f'{MOST_ROWS} of {len(rows):,} rows, evenly chosen.')


def plain(text: str) -> str:
    """Text that Bokeh shows as it is."""
    return text if not text.startswith(_MATHEMATICS) else _SPACE + text


def css(colour: tuple[float, float, float]) -> str:
    """A colour as ``#rrggbb``."""
    return '#' + ''.join(f'{round(255 * part):02x}' for part in colour)


def empty_figure(x_label: str, y_label: str | None, height: int,
                 tools: str = 'xpan,xbox_zoom,reset,save', **options: Any
                 ) -> Any:
    """Without grounds, as wide as there is room; ``height`` in pixels."""
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure
    plot = figure(height=height, sizing_mode='stretch_width', tools=tools,
                  x_axis_label=x_label, y_axis_label=y_label,
                  background_fill_color=None, border_fill_color=None,
                  outline_line_color=None, min_border_right=12,
                  output_backend='canvas', **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        if isinstance(axis.formatter, BasicTickFormatter):
            axis.formatter.update(power_limit_low=-3, power_limit_high=6)
    return plot


def _tell(plot: Any, renderers: list[Any], *tooltips: tuple[str, str],
          **options: Any) -> None:
    """Says what is under the pointer."""
    from bokeh.models import HoverTool
    plot.add_tools(HoverTool(renderers=renderers, visible=False,
                             tooltips=[*tooltips], **options))


# --- lines -------------------------------------------------------------------

def curves(title: str, unit: str, lines: Mapping[str, numpy.ndarray],
           styles: Mapping[str, tuple[str, bool]],
           went_on: Sequence[Mapping[str, float]] = ()) -> Drawing:
    """Lines against updates, epochs or time.

    Args:
        title: Of the figure.
        unit: Of the values.
        lines: By name, float64[points, 4]: the columns of :data:`AXES`, and
            the value.
        styles: By name, the colour, and whether the line is dashed.
        went_on: Where the run was started again, by column.
    """
    from bokeh.models import ColumnDataSource, Span
    values = numpy.concatenate([line[:, 3] for line in lines.values()])
    values = values[numpy.isfinite(values)]
    wide = len(values) and values.min() > 0 and (
        values.max() > 20 * values.min())
    plot = empty_figure(AXES['iteration'], unit or None, 300,
                        y_axis_type='log' if wide else 'linear')
    legend, rows = [], []
    for name, points in lines.items():
        colour, dash = styles[name]
        columns = _fewer(points).T.copy()
        columns[~numpy.isfinite(columns)] = numpy.nan
        many = columns.shape[1] > _MANY_POINTS
        source = ColumnDataSource({
            **dict(zip((*AXES, 'value'), columns, strict=True)),
            'smooth': _smooth(columns[3]) if many else columns[3],
            'title': [plain(name)] * columns.shape[1]})
        style = {'color': colour, 'name': name, 'source': source}
        drawn = plot.line('iteration', 'value', line_width=1.5,
                          alpha=0.3 if many else 1.0, line_dash=(
                              'dashed' if dash else 'solid'), **style)
        if many:
            plot.line('iteration', 'smooth', line_width=2, line_dash=(
                'dashed' if dash else 'solid'), **style)
        else:       # a line of a single point would not be seen
            plot.scatter('iteration', 'value', size=5, **style)
        _tell(plot, [drawn], ('', '@title'), ('update', '@iteration'),
              ('epoch', '@epoch{0.00}'), ('seconds', '@seconds{0.0}'),
              ('value', '@value'))
        legend.append((name, colour, dash, name))
        rows += [(name, f'{point[0]:.0f}', f'{point[1]:.2f}',
                  f'{point[2]:.1f}', number(point[3]))
                 for point in points.tolist()]
    for place in went_on:       # the script moves it when the axis changes
        plot.add_layout(Span(
            location=place['iteration'], dimension='height', name='start',
            line_dash='dotted', line_color='#8c8c8c', tags=[dict(place)]))
    return Drawing(title, plot, [[thinned(
        ('line', 'update', 'epoch', 'seconds', unit or 'value'), rows)]],
        legend)


def _fewer(points: numpy.ndarray) -> numpy.ndarray:
    """The lowest and the highest of each part, in their order."""
    if len(points) <= _MOST_POINTS:
        return points
    parts = numpy.array_split(numpy.arange(len(points)), _MOST_POINTS // 2)
    return points[sorted({int(part[find(points[part, 3])]) for part in parts
                          for find in (numpy.argmin, numpy.argmax)})]


def _smooth(values: numpy.ndarray) -> numpy.ndarray:
    """Means of a fortieth of all values around each; NaN counts for none."""
    window = numpy.ones(max(3, len(values) // 40))
    there = numpy.isfinite(values)
    count = numpy.convolve(there, window, 'same')
    whole = numpy.convolve(numpy.where(there, values, 0.0), window, 'same')
    return numpy.where(count > 0, whole / numpy.maximum(count, 1), numpy.nan)


def line_bundle(title: str, lines: Mapping[str, Points],
                logarithmic: bool = False, unit: str = '') -> Drawing:
    """Many lines against updates: per rank, or per tensor.

    The line under the pointer stands out.  Values up to 0 are gaps on a
    logarithmic axis.
    """
    from bokeh.models import ColumnDataSource
    from bokeh.palettes import viridis
    logarithmic &= any(0 < value < math.inf for points in lines.values()
                       for *_, value in points)
    plot = empty_figure('updates', unit or None, 280,
                        y_axis_type='log' if logarithmic else 'linear')
    few = len(lines) <= len(LINE_COLOURS)
    colours = LINE_COLOURS[:len(lines)] if few else viridis(len(lines))
    found = [_with_gaps(points, logarithmic) for points in lines.values()]
    source = ColumnDataSource({
        'xs': [xs for xs, _ in found], 'ys': [ys for _, ys in found],
        'title': [plain(name) for name in lines], 'colour': [*colours]})
    drawn = plot.multi_line(
        'xs', 'ys', line_color='colour', line_width=2, source=source,
        line_alpha=1.0 if few else 0.6, hover_line_color='#d55e00',
        hover_line_alpha=1.0, name='lines')
    _tell(plot, [drawn], ('', '@title'), ('update', '$data_x{0}'),
          ('value', '$data_y'), line_policy='nearest')
    names = [*lines]
    shown = range(len(names)) if few else (0, len(names) // 2, len(names) - 1)
    return Drawing(title, plot, [[thinned(
        ('line', 'update', unit or 'value'), [
            (line, str(point[1]), number(point[2]))
            for line, points in lines.items() for point in points])]],
        [(names[place] + ('' if few else ' (colours go from first to last)'
                          if not place else ''), colours[place], False, '')
         for place in shown])


def _with_gaps(points: Points, logarithmic: bool
               ) -> tuple[list[float], list[float]]:
    xs: list[float] = []
    ys: list[float] = []
    before = None
    for start, iteration, value in points[-_MOST_POINTS:]:
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


# --- bars --------------------------------------------------------------------

def _bars_figure(unit: str, names: Sequence[str], pixels: int = 0) -> Any:
    """A row for each name; the more, the lower each is."""
    each = pixels or min(max(1000 // max(len(names), 1), 13), 24)
    plot = empty_figure(unit, None, 80 + len(names) * each,
                        tools='reset,save',
                        y_range=[plain(name) for name in names[::-1]])
    plot.x_range.start = 0
    plot.ygrid.visible = False
    return plot


def phase_bars(title: str, bars: Mapping[str, Mapping[str, float]],
               order: Sequence[str]) -> Drawing:
    """A bar per rank, a part per phase, in seconds."""
    from bokeh.models import ColumnDataSource
    known = [*order, *sorted({phase for bar in bars.values()
                              for phase in bar} - {*order})]
    phases = [phase for phase in known
              if any(bar.get(phase) for bar in bars.values())]
    plot = _bars_figure('ms', [*bars])
    source = ColumnDataSource({'rank': [plain(name) for name in bars], **{
        phase: [1e3 * bar.get(phase, 0.0) for bar in bars.values()]
        for phase in phases}})
    looks = [look_of_name(phase) for phase in phases]
    drawn = plot.hbar_stack(
        phases, y='rank', height=0.75, source=source, name=phases,
        color=[css(look.colour) for look in looks])
    rows = []
    for phase, look, bar in zip(phases, looks, drawn, strict=True):
        _tell(plot, [bar], ('', f'@rank: {look.label}'),
              ('ms', f'@{{{phase}}}{{0.000}}'))
    for name, parts in bars.items():
        whole = sum(parts.values())
        rows.append((name, seconds(whole), *(
            f'{seconds(parts.get(phase, 0.0))} '
            f'({share(parts.get(phase, 0.0) / whole) if whole else "-"})'
            for phase in phases)))
    return Drawing(title, plot, [[Table(('rank', 'all', *phases), rows)]],
                   [(look.label, css(look.colour), False, '')
                    for look in looks], wide=True)


def paired_bars(title: str, names: Sequence[str],
                kinds: Mapping[str, Sequence[float]], unit: str, table: Table
                ) -> Drawing:
    """For each name two bars, one above the other."""
    plot = _bars_figure(unit, names, 44)
    legend = []
    for (kind, lengths), colour, place in zip(
            kinds.items(), LINE_COLOURS, (0.19, -0.19), strict=False):
        plot.hbar(y=[(plain(name), place) for name in names], right=[*lengths],
                  height=0.36, color=colour, name=kind)
        legend.append((kind, colour, False, ''))
    return Drawing(title, plot, [[table]], legend)


def quartile_bars(title: str, rows: Mapping[str, tuple[float, float, float]],
                  table: Table) -> Drawing:
    """Medians as bars and quartiles as lines, in seconds."""
    names = [plain(name) for name in rows]
    low, median, high = (1e3 * numpy.array([*rows.values()])).T
    plot = _bars_figure('ms', [*rows])
    plot.hbar(y=names, right=median, height=0.5, color=LINE_COLOURS[5],
              name='medians')
    plot.segment(x0=low, y0=names, x1=high, y1=names, line_width=3,
                 line_color=LINE_COLOURS[1], name='quartiles')
    return Drawing(title, plot, [[table]],
                   [('median', LINE_COLOURS[5], False, ''),
                    ('quartiles', LINE_COLOURS[1], False, '')])


def link_square(title: str, pairs: Mapping[tuple[int, int],
                                           tuple[float, float, bool]],
                table: Table) -> Drawing:
    """A square for each pair of ranks: the darker, the slower.

    Args:
        title: Of the figure.
        pairs: By source and target: bytes per second, seconds, and whether
            the link is inside a host; compared with those of its kind.
        table: The same in numbers.
    """
    from bokeh.models import ColumnDataSource, FixedTicker
    from bokeh.palettes import cividis
    ranks = sorted({rank for pair in pairs for rank in pair})
    places = {rank: place for place, rank in enumerate(ranks)}
    usual = {kind: numpy.median([speed for speed, _, is_local
                                 in pairs.values() if is_local == kind])
             for kind in {is_local for *_, is_local in pairs.values()}}
    # Light from the usual bandwidth on, dark at a quarter of it.
    shades, parts = cividis(256), [
        min(max((speed / usual[is_local] - 0.25) / 0.75, 0.0), 1.0)
        for speed, _, is_local in pairs.values()]
    last = len(ranks) - 0.5
    plot = empty_figure(
        'to rank', 'from rank', 90 + max(160, min(26 * len(ranks), 800)),
        tools='reset,save', x_range=(-0.5, last), y_range=(last, -0.5))
    plot.grid.visible = False
    named = range(0, len(ranks), -(-len(ranks) // 16))
    plot.axis.ticker = FixedTicker(ticks=[*named])
    plot.axis.major_label_overrides = {place: str(ranks[place])
                                       for place in named}
    drawn = plot.rect('x', 'y', 0.94, 0.94, name='links', line_color=None,
                      fill_color='colour', source=ColumnDataSource({
                          'x': [places[target] for _, target in pairs],
                          'y': [places[source] for source, _ in pairs],
                          'what': [f'rank {source} to rank {target}'
                                   for source, target in pairs],
                          'speed': [f'{size(speed)}/s, {seconds(latency)}'
                                    for speed, latency, _ in pairs.values()],
                          'colour': [shades[round(255 * part)]
                                     for part in parts]}))
    _tell(plot, [drawn], ('', '@what'), ('', '@speed'))
    return Drawing(title, plot, [[table]],
                   [('as fast as usual', shades[255], False, ''),
                    ('a quarter of that', shades[0], False, '')])


# --- timelines ---------------------------------------------------------------

def timelines(title: str, updates: Mapping[str, Sequence[Event]]) -> Drawing:
    """What all ranks do when, in one of several updates.

    Args:
        title: Of the figure.
        updates: By what each is called, the one to show first before the
            others: events that take time, with causes of waits.
    """
    from bokeh.models import (
        ColumnDataSource,
        FixedTicker,
        Range1d,
        WheelZoomTool,
    )
    legend: dict[Look, str] = {}
    shown = [_boxes(events, legend) for events in updates.values()]
    ranks = sorted({event.rank for events in updates.values()
                    for event in events})
    height = min(max(1000 // (ranks[-1] + 1), 14), 52)
    span = shown[0]['span']
    plot = empty_figure(
        'ms from the start of the update', None,
        90 + height * (ranks[-1] + 1), tools='xpan,xbox_zoom,reset',
        active_drag='xpan', min_border_left=64,
        x_range=Range1d(0, span, bounds=(0, span)),
        y_range=Range1d(ranks[-1] + 0.5, -0.5))
    # With Ctrl, as the page could not be scrolled otherwise; fingers that
    # spread on a touch pad count as that.
    wheel = WheelZoomTool(dimensions='width', modifiers={'ctrl': True})
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    plot.ygrid.visible = False
    plot.yaxis.ticker = FixedTicker(ticks=ranks)
    plot.yaxis.major_label_overrides = {rank: f'rank {rank}'
                                        for rank in ranks}
    drawn = plot.quad(
        'left', 'right', 'top', 'bottom', fill_color='colour',
        fill_alpha='alpha', hatch_pattern='hatch', hatch_color='white',
        line_color=None, name='events',
        source=ColumnDataSource(shown[0]['columns']))
    _tell(plot, [drawn], ('', '@what'))
    return Drawing(
        title, plot, [[_sums(events), _longest(events)]
                      for events in updates.values()],
        [(look.label, colour, False, '')
         for look, colour in sorted(legend.items())],
        [*updates], shown, wide=True)


def _boxes(events: Sequence[Event], legend: dict[Look, str]
           ) -> dict[str, Any]:
    """Columns of a timeline's boxes, and its span in ms; adds to a legend."""
    origin = min(event.start for event in events)
    looks, placed = Looks(events), in_rows(events)
    rows = _rows({place for _, place in placed})
    found = [(event, looks.of(event), rows[place])
             for event, place in placed]
    for event, look, _ in found:
        # Grey that is pale is seen on white and on black.
        legend[look] = _WAIT if event.name == WAITING else css(look.colour)
    return {'span': 1e3 * (max(event.end for event in events) - origin),
            'columns': {
        'left': [round(1e3 * (event.start - origin), 4)
                 for event, *_ in found],
        'right': [round(1e3 * (event.end - origin), 4)
                  for event, *_ in found],
        'top': [top for *_, (top, _) in found],
        'bottom': [bottom for *_, (_, bottom) in found],
        'colour': [legend[look] for _, look, _ in found],
        'alpha': [0.3 if event.name == WAITING else 1.0
                  for event, *_ in found],
        'hatch': [look.hatch[:1] or ' ' for _, look, _ in found],
        'what': [plain(_what(event, look.label))
                 for event, look, _ in found]}}


def _rows(places: set[tuple[int, int, int]]
          ) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Upper and lower edge of each row."""
    lanes = any(lane for _, lane, _ in places)
    buckets = 1 + max((row for _, lane, row in places if lane == 2),
                      default=0)
    found = {}
    for rank, lane, row in places:
        top, height = _LANES[lane] if lanes else _WHOLE
        if lane == 2:
            height /= buckets
            top += row * height
        found[rank, lane, row] = (rank + top, rank + top + 0.92 * height)
    return found


def _what(event: Event, label: str) -> str:
    """In words: who, what, how long, and what was waited for."""
    who = f'rank {event.rank}' + (f', {event.lane}' if event.lane else '')
    lasted = seconds(event.end - event.start)
    if event.name == WAITING:
        return f'{who} waited {lasted}' + (
            f' for {event.about}' if event.about else '')
    parts = [f'{who}: {label}, {lasted}']
    if event.micro_batch is not None:
        parts.append(f'micro-batch {event.micro_batch}')
    if event.bytes:
        parts.append(size(event.bytes))
    return ', '.join([*parts, event.about] if event.about else parts)


def _sums(events: Sequence[Event]) -> Table:
    sums: dict[str, dict[Look, float]] = {}
    lanes = {'': 0, EXCHANGE: 1, BUCKETS: 2}
    for event in sorted(events, key=lambda one: (one.rank, lanes[one.lane])):
        who = f'rank {event.rank}' + (f', {event.lane}' if event.lane else '')
        row, look = sums.setdefault(who, {}), look_of_name(event.name)
        row[look] = row.get(look, 0.0) + event.end - event.start
    looks = sorted({look for row in sums.values() for look in row})
    return Table(
        ('rank', *(look.label for look in looks)),
        [(who, *(seconds(row.get(look, 0.0)) for look in looks))
         for who, row in sums.items()],
        'Time of each rank; what is inside of something else counts twice')


def _longest(events: Sequence[Event]) -> Table:
    origin = min(event.start for event in events)
    found = sorted(events, key=lambda event: event.start - event.end)[:50]
    return Table(('what', 'from'), [
        (_what(event, look_of_name(event.name).label),
         seconds(event.start - origin)) for event in found],
        'The longest events')

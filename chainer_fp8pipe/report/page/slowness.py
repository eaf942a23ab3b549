"""Which rank or link is slow, with the figures that say so."""
from __future__ import annotations

from statistics import median
from typing import Any

from ..diagnosis import diagnose
from ..quantities import number, seconds, size
from ..records.run_record import LinkReading, RunRecord
from .base_figure import bars_height, base_figure, css
from .sections import (
    LINE_COLOURS,
    MOST_ROWS,
    Drawing,
    PageSection,
    Table,
    label,
    said_of,
)

#: Of ranks, along a side of the square of links.
_MOST_NAMES = 16

#: Bandwidth, latency, whether inside a host.
_Speed = tuple[float, float, bool]

_LOW, _HIGH = (0.99, 0.90, 0.55), (0.10, 0.25, 0.45)


def slowness_section(runs: dict[str, RunRecord]) -> PageSection:
    """What the diagnosis says, each rank's own work, and the links.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('slow', 'Which rank or link is slow?')
    for run, record in runs.items():
        section.sentences += [said_of(run, finding.text)
                              for finding in diagnose(record)]
    if not section.sentences:
        section.sentences.append(
            'No rank and no link stands out.' if any(
                record.intervals for record in runs.values())
            else 'No times of updates were recorded.')
    if any(record.intervals for record in runs.values()):
        section.drawings.append(_own_work(runs))
    for run, record in runs.items():
        if record.links:
            section.drawings.append(_links(run, record))
    section.tables += [
        (label(run, 'Clocks'), _clocks(record))
        for run, record in runs.items() if record.clocks]
    return section


def _own_work(runs: dict[str, RunRecord]) -> Drawing:
    """Medians and quartiles of a rank's own work in the last interval."""
    rows = []
    for run, record in runs.items():
        last = {item.rank: item for item in record.intervals}
        rows += [(label(run, f'rank {rank}'), last[rank].own,
                  last[rank].step) for rank in sorted(last)]
    names = [row[0] for row in rows]
    plot = base_figure('ms', None, bars_height(len(rows)), tools='reset,save',
                       y_range=names[::-1])
    plot.x_range.start = 0
    plot.hbar(y=names, left=[0.0] * len(rows),
              right=[1e3 * row[1].median for row in rows], height=0.5,
              color=LINE_COLOURS[5], name='medians')
    plot.segment(x0=[1e3 * row[1].low for row in rows], y0=names,
                 x1=[1e3 * row[1].high for row in rows], y1=names,
                 line_width=3, line_color=LINE_COLOURS[1], name='quartiles')
    return Drawing(
        'own-work', 'A rank\'s own work in an update (bar: median; line: '
        'quartiles), last interval', plot, Table(
            ('rank', 'lower quartile', 'median', 'upper quartile', 'longest',
             'whole update, median'),
            [(name, *map(seconds, (own.low, own.median, own.high, own.most,
                                   step.median)))
             for name, own, step in rows]))


def _links(run: str, record: RunRecord) -> Drawing:
    """A square per pair of ranks: the darker, the slower."""
    readings: dict[tuple[int, int], list[LinkReading]] = {}
    for link in record.links:
        readings.setdefault((link.source, link.target), []).append(link)
    pairs = {pair: (median(link.bandwidth for link in found),
                    median(link.latency for link in found),
                    found[-1].is_local)
             for pair, found in sorted(readings.items())}
    slowest = sorted(pairs.items(), key=lambda item: item[1][0])[:MOST_ROWS]
    return Drawing(
        f'links-{run or "0"}', label(
            run, 'Links; the darker, the slower among those of its kind, '
            'inside hosts or between them'), _square(pairs), Table(
            ('from rank', 'to rank', 'bandwidth, median', 'latency, median',
             'where'),
            [(str(source), str(target), size(bandwidth) + '/s',
              seconds(latency), 'one host' if is_local else 'two hosts')
             for (source, target), (bandwidth, latency, is_local)
             in slowest], '' if len(slowest) == len(pairs)
            else f'The slowest {len(slowest)} of {len(pairs):,}.'))


def _square(pairs: dict[tuple[int, int], _Speed]) -> Any:
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool
    ranks = sorted({rank for pair in pairs for rank in pair})
    places = {rank: place for place, rank in enumerate(ranks)}
    columns = ColumnDataSource({
        'source': [source for source, _ in pairs],
        'target': [target for _, target in pairs],
        'x': [places[target] for _, target in pairs],
        'y': [places[source] for source, _ in pairs],
        'bandwidth': [size(speed[0]) + '/s' for speed in pairs.values()],
        'latency': [seconds(speed[1]) for speed in pairs.values()],
        'colour': _colours([(speed[0], speed[2])
                            for speed in pairs.values()])})
    last = len(ranks) - 0.5
    plot = base_figure(
        'to rank', 'from rank', 90 + max(160, min(26 * len(ranks), 800)),
        tools='reset,save', x_range=(-0.5, last), y_range=(last, -0.5))
    plot.grid.visible = False
    # There is no room for the numbers of hundreds of ranks.
    named = range(0, len(ranks), -(-len(ranks) // _MOST_NAMES))
    plot.axis.ticker = FixedTicker(ticks=[*named])
    plot.axis.major_label_overrides = {place: str(ranks[place])
                                       for place in named}
    drawn = plot.rect('x', 'y', 0.94, 0.94, source=columns,
                      fill_color='colour', line_color=None, name='links')
    plot.add_tools(HoverTool(renderers=[drawn], visible=False, tooltips=[
        ('', 'rank @source to rank @target'), ('bandwidth', '@bandwidth'),
        ('latency', '@latency')]))
    return plot


def _colours(links: list[tuple[float, bool]]) -> list[str]:
    usual_of = {kind: median(bandwidth for bandwidth, is_local in links
                             if is_local == kind)
                for kind in {is_local for _, is_local in links}}
    found = []
    for bandwidth, is_local in links:
        usual = usual_of[is_local]
        # 1 from the usual bandwidth on, 0 at a quarter of it.
        part = min(max((bandwidth / usual - 0.25) / 0.75, 0.0), 1.0)
        red, green, blue = (high + part * (low - high)
                            for low, high in zip(_LOW, _HIGH, strict=True))
        found.append(css((red, green, blue)))
    return found


def _clocks(record: RunRecord) -> Table:
    last = {(item.start, item.rank): item for item in record.clocks}
    return Table(
        ('start', 'rank', 'ahead of rank 0\'s', 'right to', 'drift'),
        [(str(start), str(rank), f'{number(item.offset)} s',
          seconds(item.error), seconds(item.drift))
         for (start, rank), item in sorted(last.items())])

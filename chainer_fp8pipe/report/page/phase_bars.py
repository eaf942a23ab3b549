"""Where the time goes on the whole: a bar per rank, a part per phase."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..looks import look_of_name
from ..quantities import seconds, share
from ..records.run_record import PHASES, RankInterval, RunRecord
from .base_figure import bars_height, base_figure, css
from .sections import Drawing, LegendEntry, PageSection, Table, label


def phase_section(runs: dict[str, RunRecord]) -> PageSection:
    """Mean seconds of an update by phase.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('phases', 'Where does the time go?')
    main = _bars(runs, lambda interval: interval.phases)
    if not main:
        section.sentences.append('No times of updates were recorded.')
        return section
    section.drawings.append(_drawing(
        'phases', 'Mean time of an update by rank', main))
    hidden = _bars(runs, lambda interval: interval.hidden)
    if any(any(bar.values()) for bar in hidden.values()):
        section.drawings.append(_drawing(
            'hidden', 'Done beside, in the thread that exchanges', hidden))
    return section


def mean_phases(intervals: list[RankInterval],
                phases: Callable[[RankInterval], Mapping[str, float]]
                ) -> dict[str, float]:
    """Means over all updates of intervals, by phase."""
    count = sum(interval.last - interval.first + 1 for interval in intervals)
    found: dict[str, float] = {}
    for interval in intervals:
        weight = (interval.last - interval.first + 1) / count
        for name, value in phases(interval).items():
            found[name] = found.get(name, 0.0) + weight * value
    return found


def _bars(runs: dict[str, RunRecord],
          phases: Callable[[RankInterval], Mapping[str, float]]
          ) -> dict[str, dict[str, float]]:
    """By what the bar is called: seconds by phase."""
    return {label(run, f'rank {rank}'): mean_phases(
        [interval for interval in record.intervals if interval.rank == rank],
        phases)
        for run, record in runs.items()
        for rank in sorted({interval.rank for interval in record.intervals})}


def _drawing(name: str, title: str, bars: dict[str, dict[str, float]]
             ) -> Drawing:
    from bokeh.models import ColumnDataSource, HoverTool
    known = [*PHASES, *sorted({phase for bar in bars.values()
                               for phase in bar} - {*PHASES})]
    phases = [phase for phase in known
              if any(bar.get(phase) for bar in bars.values())]
    ranks = list(bars)
    plot = base_figure('ms', None, bars_height(len(ranks)),
                       tools='reset,save', y_range=ranks[::-1])
    plot.x_range.start = 0
    plot.ygrid.visible = False
    columns: dict[str, Any] = {'rank': ranks}
    for phase in phases:
        columns[phase] = [1e3 * bar.get(phase, 0.0) for bar in bars.values()]
    drawn = plot.hbar_stack(
        phases, y='rank', height=0.75, source=ColumnDataSource(columns),
        color=[css(look_of_name(phase).colour) for phase in phases],
        name=phases)
    for phase, bar in zip(phases, drawn, strict=True):
        plot.add_tools(HoverTool(renderers=[bar], visible=False, tooltips=[
            ('', f'@rank: {look_of_name(phase).label}'),
            ('ms', f'@{{{phase}}}{{0.000}}')]))
    rows = []
    for rank, bar in bars.items():
        whole = sum(bar.values())
        rows.append((rank, seconds(whole), *(
            f'{seconds(bar.get(phase, 0.0))} '
            f'({share(bar.get(phase, 0.0) / whole) if whole else "-"})'
            for phase in phases)))
    return Drawing(
        name, title, plot, Table(('rank', 'all', *phases), rows), wide=True,
        legend=[LegendEntry(look_of_name(phase).label,
                            css(look_of_name(phase).colour))
                for phase in phases])

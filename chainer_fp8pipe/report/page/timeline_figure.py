"""Where the time goes in one update: what all ranks do when."""
from __future__ import annotations

from typing import Any

from ..diagnosis import explain_waits
from ..records.run_record import FIRST, SLOW, RecordedUpdate, RunRecord
from .base_figure import base_figure
from .packed_events import PackedEvents
from .sections import Choice, Drawing, PageSection, Table, label

#: A page holds the events of so many; later regular updates are left out.
MOST_EVENTS = 200_000

_WHY = {FIRST: 'one of the first', SLOW: 'a slow one'}


def timeline_section(runs: dict[str, RunRecord]) -> PageSection:
    """The timeline of chosen updates.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('timeline', 'What does each rank do when?')
    packed = PackedEvents()
    updates: list[tuple[str, RecordedUpdate, dict[str, Any]]] = []
    left_out = 0
    room = MOST_EVENTS
    for run, update in _by_interest(runs):
        # Marks of codecs take no time.
        stages = runs[run].stages(update.start)
        events = [event for event in explain_waits(update.events, stages)
                  if event.end > event.start]
        if not events:
            continue
        if updates and len(events) > room:
            left_out += 1
            continue
        room -= len(events)
        updates.append((run, update, packed.add(_title(run, update),
                                                events)))
    left_out += sum(record.left_out for record in runs.values())
    if not updates:
        section.sentences.append('No events of an update were kept.')
        return section
    if left_out:
        section.sentences.append(f'The events of {left_out} more updates are '
                                 'left out, to keep the page small.')
    updates.sort(key=lambda item: (item[0], item[1].start,
                                   item[1].iteration))
    section.drawings.append(_drawing(packed, [item[2] for item in updates]))
    return section


def _by_interest(runs: dict[str, RunRecord]
                 ) -> list[tuple[str, RecordedUpdate]]:
    """Slow updates first, then those of all runs in turn."""
    return sorted(((run, update) for run, record in runs.items()
                   for update in record.updates),
                  key=lambda item: (item[1].why != SLOW, item[1].start,
                                    item[1].iteration))


def _title(run: str, update: RecordedUpdate) -> str:
    why = _WHY.get(update.why)
    return label(run, f'update {update.iteration}') + (
        f' ({why})' if why else '') + (
        f', start {update.start}' if update.start else '')


def _drawing(packed: PackedEvents, updates: list[dict[str, Any]]) -> Drawing:
    data = {'updates': updates, 'looks': packed.looks, 'texts': packed.texts}
    return Drawing(
        'timeline', 'Timeline of all ranks', _empty_timeline(),
        Table((), []), data=data, kind='timeline', wide=True, choices=(
            Choice('update', 'update', tuple(
                (str(number), update['label'])
                for number, update in enumerate(updates))),))


def _empty_timeline() -> Any:
    """Sources and axes; the page's script fills them with what is in view."""
    from bokeh.models import (
        ColumnDataSource,
        FixedTicker,
        Range1d,
        WheelZoomTool,
    )
    plot = base_figure('ms from the start of the update', None, 400,
                       tools='xpan,xbox_zoom,reset', active_drag='xpan',
                       x_range=Range1d(0, 1), y_range=Range1d(0.5, -0.5),
                       min_border_left=64)
    # With Ctrl, as the page could not be scrolled otherwise; fingers that
    # spread on a touch pad count as that.
    wheel = WheelZoomTool(dimensions='width', modifiers={'ctrl': True})
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    plot.ygrid.visible = False
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.ticker = FixedTicker(ticks=[])
    sides = {name: name for name in ('left', 'right', 'top', 'bottom')}

    def source(*more: str) -> Any:
        return ColumnDataSource({name: [] for name in (*sides, *more)})

    plot.quad(**sides, source=source('colour'), name='boxes',
              fill_color='colour', line_color=None)
    plot.quad(**sides, source=source(), name='waits', fill_color=None,
              line_color='#8c8c8c')
    plot.quad(**sides, source=source('hatch'), name='hatched',
              fill_color=None, line_color=None, hatch_pattern='hatch',
              hatch_color='white', hatch_scale=8)
    plot.text('x', 'y', 'text', name='numbers', text_align='center',
              text_baseline='middle', text_font_size='11px',
              text_color='colour', source=ColumnDataSource(
                  {name: [] for name in ('x', 'y', 'text', 'colour')}))
    plot.quad(**sides, source=source(), name='chosen', fill_color=None,
              line_color='#e00000', line_width=3)
    return plot

"""What crosses the network, and what a plan had predicted."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy

from ..diagnosis import link_share
from ..quantities import seconds, share, size
from ..records.run_record import PlannedStep, RunRecord, SentBytes
from .base_figure import base_figure, plain
from .sections import (
    LINE_COLOURS,
    Drawing,
    LegendEntry,
    PageSection,
    Table,
    label,
    said_of,
)


class _Sent(NamedTuple):
    """What went by one codec on one level, per rank and update."""

    name: str
    bytes: float
    most: float
    uncompressed: float


def byte_section(runs: dict[str, RunRecord]) -> PageSection:
    """Bytes of an update, the share of the link, predicted and measured.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('bytes', 'What crosses the network?')
    sent = [row for run, record in runs.items()
            for row in _sent(run, record)]
    if sent:
        section.drawings.append(_drawing(sent))
    else:
        section.sentences.append('No bytes were recorded.')
    for run, record in runs.items():
        section.sentences += _link_share(run, record)
        for plan in record.plans:
            section.drawings.append(_planned(run, plan))
            if plan.bytes is not None:
                section.sentences.append(_planned_bytes(run, record, plan))
    return section


def _sent(run: str, record: RunRecord) -> list[_Sent]:
    by_kind: dict[tuple[str, str], list[SentBytes]] = defaultdict(list)
    for item in record.sent:
        by_kind[item.codec, item.level].append(item)
    found = []
    for (codec, level), items in by_kind.items():
        weights = [item.updates for item in items]
        found.append(_Sent(
            label(run, f'{codec}, {level}'),
            _mean([item.bytes for item in items], weights),
            max(item.bytes for item in items),
            _mean([item.uncompressed for item in items], weights)))
    return found


def _mean(values: list[int], weights: list[int]) -> float:
    return float(numpy.average(values, weights=weights))


def _drawing(sent: list[_Sent]) -> Drawing:
    plot, legend = _paired_bars(
        [plain(row.name) for row in sent],
        {'sent': [row.bytes / 1e3 for row in sent],
         'in float32': [row.uncompressed / 1e3 for row in sent]},
        (LINE_COLOURS[0], LINE_COLOURS[6]), 'kB', 46)
    return Drawing(
        'bytes', 'Bytes that a rank sends in an update, mean', plot, Table(
            ('codec, level', 'sent', 'most of a rank', 'in float32', 'of it'),
            [(row.name, size(row.bytes), size(row.most),
              size(row.uncompressed), share(row.bytes / row.uncompressed)
              if row.uncompressed else '-') for row in sent]), legend)


def _link_share(run: str, record: RunRecord) -> list[str]:
    """What part of a link between hosts the last start uses."""
    needed = [link_share(record, start.number)
              for start in record.starts[-1:]]
    return [said_of(run, 'Between hosts the busiest rank sends '
                    f'{share(part)} of what a link carries, on average.')
            for part in needed if part is not None]


def _paired_bars(names: list[str], kinds: Mapping[str, list[float]],
                 colours: Sequence[str], unit: str, row: int
                 ) -> tuple[Any, list[LegendEntry]]:
    """A figure with two bars for each name, one above the other.

    Args:
        names: From above.
        kinds: The lengths of the upper and of the lower bars, by kind.
        colours: Of the kinds.
        unit: Of the lengths.
        row: Pixels for each name.

    Returns:
        Also its legend.
    """
    plot = base_figure(unit, None, 90 + row * len(names), tools='reset,save',
                       y_range=names[::-1])
    plot.x_range.start = 0
    for (kind, lengths), colour, place in zip(
            kinds.items(), colours, (0.19, -0.19), strict=True):
        plot.hbar(y=[(name, place) for name in names], right=lengths,
                  height=0.36, color=colour, name=kind)
    return plot, [LegendEntry(kind, colour)
                  for kind, colour in zip(kinds, colours, strict=True)]


def _planned(run: str, plan: PlannedStep) -> Drawing:
    parts = [*plan.parts, *(set(plan.measured) - set(plan.parts))]
    kinds = {'predicted': plan.parts, 'measured': plan.measured}
    plot, legend = _paired_bars(
        [plain(part) for part in parts],
        {kind: [1e3 * values.get(part, 0.0) for part in parts]
         for kind, values in kinds.items()}, LINE_COLOURS[:2], 'ms', 40)
    rows = [(part, *(seconds(values[part]) if part in values else '-'
                     for values in kinds.values())) for part in parts]
    rows.append(('all', f'{seconds(plan.seconds)} ± {share(plan.spread)}',
                 seconds(sum(plan.measured.values())) if plan.measured
                 else '-'))
    return Drawing(
        f'plan-{run or "0"}-{plan.start}', label(
            run, f'Plan of start {plan.start}: {plan.description}'), plot,
        Table(('part of an update', *kinds), rows), legend)


def _planned_bytes(run: str, record: RunRecord, plan: PlannedStep) -> str:
    measured = [item.bytes for item in record.intervals
                if item.start == plan.start]
    return said_of(run, f'Start {plan.start}: the plan predicts '
                 f'{size(plan.bytes or 0)} per rank and update' + (
                     f'; sent were {size(fmean(measured))}, mean of all '
                     'ranks.' if measured else '.'))

"""What crosses the network, and what a plan had predicted."""
from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import NamedTuple

from ..records.run_record import PlannedStep, RunRecord
from .base_figure import base_figure, plain
from .quantities import seconds, share, size
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
    updates: dict[tuple[str, str], dict[tuple[int, int, int], list[int]]] = (
        defaultdict(lambda: defaultdict(lambda: [0, 0])))
    for item in record.sent:
        entry = updates[item.codec, item.level][
            item.start, item.iteration, item.rank]
        entry[0] += item.bytes
        entry[1] += item.uncompressed
    return [_Sent(label(run, f'{codec}, {level}'),
                  fmean(entry[0] for entry in found.values()),
                  max(entry[0] for entry in found.values()),
                  fmean(entry[1] for entry in found.values()))
            for (codec, level), found in updates.items()]


def _drawing(sent: list[_Sent]) -> Drawing:
    names = [plain(row.name) for row in sent]
    plot = base_figure('kB', None, 90 + 46 * len(sent), tools='reset,save',
                       y_range=names[::-1])
    plot.x_range.start = 0
    kinds = ('sent', 'in float32')
    for number, kind in enumerate(kinds):
        plot.hbar(y=[(name, -0.19 + 0.38 * (1 - number)) for name in names],
                  right=[(row.uncompressed if number else row.bytes) / 1e3
                         for row in sent], height=0.36,
                  color=LINE_COLOURS[6 * number], name=kind)
    return Drawing(
        'bytes', 'Bytes that a rank sends in an update, mean', plot, Table(
            ('codec, level', 'sent', 'most of a rank', 'in float32', 'of it'),
            [(row.name, size(row.bytes), size(row.most),
              size(row.uncompressed), share(row.bytes / row.uncompressed)
              if row.uncompressed else '-') for row in sent]),
        [LegendEntry(kind, LINE_COLOURS[6 * number])
         for number, kind in enumerate(kinds)])


def _link_share(run: str, record: RunRecord) -> list[str]:
    """What part of the slowest kind of link the updates use."""
    between = [link.bandwidth for link in record.links if not link.is_local]
    speeds = between or [link.bandwidth for link in record.links]
    intervals = [item for item in record.intervals if item.step.mean > 0]
    if not speeds or not any(item.bytes + item.stage_bytes
                             for item in intervals):
        return []
    most = max(intervals, key=lambda item: (
        item.bytes + item.stage_bytes) / item.step.mean)
    rate = (most.bytes + most.stage_bytes) / most.step.mean
    kind = 'between hosts' if between else 'inside the host'
    return [said_of(run, f'Rank {most.rank} sends the most, {size(rate)}/s on '
                  f'average: {share(rate / median(speeds))} of what a link '
                  f'{kind} carries ({size(median(speeds))}/s, median).')]


def _planned(run: str, plan: PlannedStep) -> Drawing:
    parts = [*plan.parts, *(set(plan.measured) - set(plan.parts))]
    names = [plain(part) for part in parts]
    plot = base_figure('ms', None, 90 + 40 * len(parts), tools='reset,save',
                       y_range=names[::-1])
    plot.x_range.start = 0
    kinds = ('predicted', 'measured')
    for number, values in enumerate((plan.parts, plan.measured)):
        plot.hbar(y=[(name, -0.19 + 0.38 * (1 - number)) for name in names],
                  right=[1e3 * values.get(part, 0.0) for part in parts],
                  height=0.36, color=LINE_COLOURS[number],
                  name=kinds[number])
    whole = sum(plan.measured.values())
    rows = [(part, *(seconds(values[part]) if part in values else '-'
                     for values in (plan.parts, plan.measured)))
            for part in parts]
    rows.append(('all', f'{seconds(plan.seconds)} ± {share(plan.spread)}',
                 seconds(whole) if plan.measured else '-'))
    return Drawing(
        f'plan-{run or "0"}-{plan.start}', label(
            run, f'Plan of start {plan.start}: {plan.description}'), plot,
        Table(('part of an update', *kinds), rows),
        [LegendEntry(kind, LINE_COLOURS[number])
         for number, kind in enumerate(kinds)])


def _planned_bytes(run: str, record: RunRecord, plan: PlannedStep) -> str:
    measured = [item.bytes for item in record.intervals
                if item.start == plan.start]
    return said_of(run, f'Start {plan.start}: the plan predicts '
                 f'{size(plan.bytes or 0)} per rank and update' + (
                     f'; sent were {size(fmean(measured))}, mean of all '
                     'ranks.' if measured else '.'))

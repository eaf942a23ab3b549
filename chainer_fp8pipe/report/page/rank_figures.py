"""Which rank waits for data, and how much memory each one takes."""
from __future__ import annotations

from ..diagnosis import INPUT_SHARE
from ..quantities import seconds, share, size
from ..records.run_record import RunRecord
from .line_bundle import Points, line_bundle
from .phase_bars import mean_phases
from .sections import PageSection, Table, label


def input_section(runs: dict[str, RunRecord]) -> PageSection:
    """How long ranks wait for batches.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('input', 'Do ranks wait for their data?')
    lines: dict[str, Points] = {}
    rows = []
    for run, record in runs.items():
        for rank in sorted({item.rank for item in record.intervals}):
            mine = [item for item in record.intervals if item.rank == rank]
            waited = mean_phases(mine, lambda item: item.phases).get('input')
            if waited is None:
                continue
            name = label(run, f'rank {rank}')
            step = mean_phases(mine, lambda item: {'step': item.step.mean})
            lines[name] = [(item.start, item.last,
                            1e3 * item.phases.get('input', 0.0))
                           for item in mine]
            rows.append((name, seconds(waited), share(
                waited / step['step']) if step['step'] else '-', waited,
                step['step']))
    if not lines:
        section.sentences.append('No times of reading batches were recorded.')
        return section
    worst = max(rows, key=lambda row: row[3])
    part = worst[3] / worst[4] if worst[4] else 0.0
    section.sentences.append(
        f'{"Yes" if part > INPUT_SHARE else "No"}. The longest on average: '
        f'{worst[0]}, {worst[1]} of an update ({worst[2]}).')
    section.drawings.append(line_bundle(
        'input', 'Mean time for a batch', lines, unit='ms', choice='rank'))
    section.tables.append(('Mean of all updates', Table(
        ('rank', 'waits for a batch', 'of the update'),
        [row[:3] for row in rows])))
    return section


def memory_section(runs: dict[str, RunRecord]) -> PageSection:
    """Memory of each rank.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('memory', 'How much memory does each rank take?')
    process: dict[str, Points] = {}
    gpu: dict[str, Points] = {}
    rows = []
    for run, record in runs.items():
        for rank in sorted({item.rank for item in record.memory}):
            mine = [item for item in record.memory if item.rank == rank]
            name = label(run, f'rank {rank}')
            process[name] = [(item.start, item.iteration,
                              item.resident / 1e6) for item in mine]
            held = [item.gpu_held for item in mine
                    if item.gpu_held is not None]
            if held:
                gpu[name] = [(item.start, item.iteration,
                              (item.gpu_used or 0) / 1e6) for item in mine]
            peak = max(item.peak for item in mine)
            rows.append((name, size(mine[0].resident),
                         size(mine[-1].resident), size(peak),
                         size(max(held)) if held else '-', peak))
    if not rows:
        section.sentences.append('No memory was recorded.')
        return section
    worst = max(rows, key=lambda row: row[5])
    section.sentences.append(f'The most: {worst[3]}, of {worst[0]}.')
    section.drawings.append(line_bundle(
        'memory', 'Memory of the process', process, unit='MB',
        choice='rank'))
    if gpu:
        section.drawings.append(line_bundle(
            'gpu-memory', 'Arrays on the GPU', gpu, unit='MB',
            choice='rank'))
    section.tables.append(('By rank', Table(
        ('rank', 'at first', 'at last', 'most', 'most held on the GPU'),
        [row[:5] for row in rows])))
    return section

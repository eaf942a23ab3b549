"""Shows where a model is cut, and what each stage gets: table and picture."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from ..report.quantities import columns, size
from .partition_plan import PartitionPlan, values_in_words

# Light and dark enough to be told apart without seeing colours.
_TIME, _PARAMETERS, _MEMORY = '#3366ab', '#de701f', '#f5b359'
_CROSSING, _GREY = '#9e2973', '#666666'
# Inches: the names, a panel; title and limit, a row, a note.
_NAMES, _PANEL, _ENDS, _ROW, _NOTE = 2.3, 2.25, 1.3, 0.62, 0.18
_BAR = 0.45             # of a row
_LETTERS, _LETTERS_OF_A_LINE, _MOST_NOTES = 34, 92, 6


def table(part: Any) -> str:
    """A line per chunk: ranks, time, memory, and what is sent on.

    Args:
        part: The ``partition`` of a model that
            :func:`~chainer_fp8pipe.partition` has cut.
    """
    plan, predicted = part.plan, part.plan.predicted
    total = sum(predicted.busy) or 1.0
    rows = [['stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
             'first parameter']]
    for chunk, again in enumerate(plan.recompute):
        stage = chunk % plan.stages
        rows.append([
            plan.label(chunk),
            ' '.join(map(str, part.grid.placement.ranks[stage])),
            f'{100 * predicted.busy[chunk] / total:.0f} %'
            if predicted.busy else '',
            size(sum(map(part.parameter_bytes, part.used[chunk]))),
            size(predicted.memory[stage]) if predicted.memory else '',
            ''.join(values_in_words(values, 2)
                    for values in part.crossing[chunk:chunk + 1]),
            plan.first(chunk) + ' (again)' * again])
    notes = ['(again): keeps its inputs only, and runs forward twice'] * any(
        plan.recompute)
    return '\n'.join([
        plan.headline(part.title, part.grid.replicas), *columns(rows), *notes,
        *(f'{name} is on stages {" and ".join(map(str, ranks))}, which sum '
          'its gradient' for name, ranks in part.ties.items())])


def plot_plan(cut: Any, path: str | os.PathLike[str],
              memory: float | None = None) -> None:
    """Writes a picture of a cut: a row per stage, from the first to the last.

    A row has bars for the stage's share of the time, the bytes of its
    parameters, and the predicted memory of its rank.  Below it stand the
    values that cross to the next stage, in bytes per micro-batch.  A hatched
    stage runs its forward pass twice.  Parameters of several stages come last.

    Args:
        cut: A model that :func:`~chainer_fp8pipe.partition` has cut, or its
            ``model.partition``; or a :class:`.PartitionPlan`, which knows
            neither bytes of parameters nor names.
        path: A file that matplotlib can write, e.g. ``plan.png``.
        memory: The limit of each rank in bytes, drawn as a line; default:
            that given to :func:`~chainer_fp8pipe.partition`.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ImportError('a plan is drawn with matplotlib (pip install '
                          'matplotlib)') from reason
    part = getattr(cut, 'partition', cut)
    plan: PartitionPlan = getattr(part, 'plan', part)
    known = None if part is plan else part
    if memory is None and known is not None:
        memory = known.limit
    chunks = range(len(plan.recompute))
    panels, notes = [*_panels(plan, known)], [*_notes(plan, known)]
    figure = Figure(layout='constrained', figsize=(
        _NAMES + max(2, len(panels)) * _PANEL,
        _ENDS + len(chunks) * _ROW + len(notes) * _NOTE))
    figure.suptitle(plan.headline(known.title, known.grid.replicas)
                    if known else plan.headline(), x=0.01, ha='left',
                    fontsize=11)
    figure.supxlabel('\n'.join(notes), x=0.01, ha='left', fontsize=8,
                     color=_GREY)
    plots = figure.subplots(1, max(1, len(panels)), sharey=True,
                            squeeze=False, subplot_kw={'frameon': False})[0]
    for plot in plots:
        plot.set(xticks=[], xlim=(0, 1))
        plot.tick_params(length=0)
    for plot, panel in zip(plots, panels, strict=False):
        _draw(plot, panel, plan, memory if panel[1] is _MEMORY else None)
    plots[0].set_yticks(chunks, [_name(chunk, plan, known)
                                 for chunk in chunks], fontsize=8)
    plots[0].set_ylim(len(chunks) - 0.4, -0.5)      # the first one on top
    for chunk in chunks[:-1]:
        if text := _crossing(chunk, plan, known):
            plots[0].text(0, chunk + 0.5, f'↓ {text}', va='center',
                          fontsize=8, color=_CROSSING, in_layout=False)
    figure.savefig(path, dpi=150)


#: Title, colour, the value of each row or None, and how a value is said.
_Panel = tuple[str, str, list[Any], Callable[[float], str]]


def _panels(plan: PartitionPlan, part: Any) -> Iterator[_Panel]:
    """The columns of which anything is known."""
    chunks, predicted = range(len(plan.recompute)), plan.predicted
    if total := sum(predicted.busy):
        yield ('share of the time', _TIME,
               [busy / total for busy in predicted.busy],
               lambda share: f'{100 * share:.0f} %')
    if part:
        yield ('parameters', _PARAMETERS, [
            sum(map(part.parameter_bytes, part.used[chunk]))
            for chunk in chunks], size)
    if predicted.memory:        # a rank's memory stands at its first chunk
        yield ('memory, predicted', _MEMORY, [
            predicted.memory[chunk] if chunk < plan.stages else None
            for chunk in chunks], size)


def _draw(plot: Any, panel: _Panel, plan: PartitionPlan, limit: float | None
          ) -> None:
    title, colour, values, said = panel
    known = [value or 0.0 for value in values]
    bars = plot.barh(range(len(known)), known, _BAR, label=title, linewidth=0,
                     color=colour, edgecolor='white')
    plot.bar_label(
        bars, ['' if value is None else said(value) for value in values],
        padding=4, fontsize=8, zorder=4,
        bbox={'facecolor': 'white', 'linewidth': 0, 'pad': 0.5})
    plot.set_title(title, loc='left', fontsize=9, color=_GREY)
    plot.set_xlim(0, 1.7 * max(*known, limit or 1e-9))
    for row, (bar, again) in enumerate(zip(bars, plan.recompute,
                                           strict=True)):
        plot.vlines(0, row - _BAR / 2, row + _BAR / 2, color=_GREY)
        if again and colour is _TIME:
            bar.set_hatch(r'\\\\')
    if limit is not None:
        end = len(known) - 0.6
        plot.vlines(limit, -_BAR, end, color='black', linewidth=1,
                    linestyles='--', zorder=2)
        plot.text(limit, end, f'limit {size(limit)}', ha='center', va='top',
                  fontsize=8)


def _name(chunk: int, plan: PartitionPlan, part: Any) -> str:
    """What stands before a row."""
    ranks: Any = (part.grid.placement.ranks[chunk % plan.stages] if part
                  else ())
    said = (' '.join(map(str, ranks)) if len(ranks) < 4 else
            f'{ranks[0]} to {ranks[-1]}')
    first, half = plan.first(chunk), (_LETTERS - 1) // 2
    if len(first) > _LETTERS:
        first = first[:half] + '…' + first[-half:]
    return f'stage {plan.label(chunk)}' + (
        f'   rank{"s" * (len(ranks) > 1)} {said}' if ranks else ''
        ) + f'\n{first}'


def _crossing(chunk: int, plan: PartitionPlan, part: Any) -> str:
    """What stands below a row."""
    if not part:
        return ''.join(map(size, plan.predicted.crossing[chunk:chunk + 1]))
    text = values_in_words(part.crossing[chunk], 3)
    return text if len(text) < _LETTERS_OF_A_LINE else (
        text[:_LETTERS_OF_A_LINE - 1] + '…')


def _notes(plan: PartitionPlan, part: Any) -> Iterator[str]:
    """What signs mean, and which parameters are on several stages."""
    chunks = range(len(plan.recompute))
    if len(chunks) > 1:
        yield '↓ crosses to the next stage, per micro-batch'
    if any(plan.recompute):
        yield 'hatched: runs forward twice'
    ties = list(part.ties) if part else []
    for name in ties[:_MOST_NOTES]:
        yield f'{name} is on ' + ', '.join(
            f'stage {plan.label(chunk)}' for chunk in chunks
            if name in part.used[chunk])
    if len(ties) > _MOST_NOTES:
        yield f'and {len(ties) - _MOST_NOTES} more'

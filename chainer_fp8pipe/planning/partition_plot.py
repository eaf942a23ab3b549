"""Draws where a model is cut, and what each stage gets."""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from ..report.quantities import counted, size
from .partition_plan import PartitionPlan

# Light and dark enough to be told apart without seeing colours.
_TIME, _PARAMETERS, _MEMORY = '#3366ab', '#de701f', '#f5b359'
_CROSSING, _GREY = '#9e2973', '#666666'
# Inches: the margin; of the names, a panel, its longest bar; of the title, a
# row, a bar's height, a note.
_EDGE, _LEFT, _PANEL, _LONGEST = 0.15, 2.3, 2.25, 1.25
_TOP, _ROW, _BAR, _NOTE = 0.8, 0.62, 0.28, 0.18
_LETTERS, _LETTERS_OF_A_LINE, _MOST_NOTES = 34, 92, 6


def plot_plan(cut: Any, path: str | os.PathLike[str],
              memory: float | None = None) -> None:
    """Writes a picture of a cut: a row per stage, from the first to the last.

    A row has bars for the stage's share of the time, the bytes of its
    parameters, and the predicted memory of its rank.  Below a row stand the
    values that cross to the next stage, in bytes per micro-batch; below all
    rows, parameters that several stages have.  Hatched: a stage that runs its
    forward pass twice.

    Args:
        cut: A model that :func:`~chainer_fp8pipe.partition` has cut, or its
            ``model.partition``; or a :class:`.PartitionPlan`, for which
            bytes of parameters, and names of values and of parameters that
            several stages have, are left out.
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
    panels, notes = list(_panels(plan, known)), list(_notes(plan, known))
    bottom = _TOP + _ROW * len(plan.recompute)
    width = _LEFT + max(2, len(panels)) * _PANEL
    height = bottom + 0.35 + _NOTE * len(notes)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))    # in inches from the upper left
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis('off')
    write = functools.partial(axes.text, va='center', fontsize=8)
    write(_EDGE, 0.22, _title(plan, known), fontsize=11)
    for number, panel in enumerate(panels):
        limit = memory if panel[1] is _MEMORY else None
        _draw(axes, write, _LEFT + number * _PANEL, panel, plan, limit)
    for chunk in range(len(plan.recompute)):
        _name(write, chunk, plan, known)
    for number, note in enumerate(notes):
        write(_EDGE, bottom + 0.35 + _NOTE * number, note, color=_GREY)
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


def _middle(chunk: int) -> float:
    return _TOP + _ROW * (chunk + 0.5)


def _draw(axes: Any, write: Callable[..., Any], left: float, panel: _Panel,
          plan: PartitionPlan, limit: float | None) -> None:
    title, colour, values, said = panel
    known = [value or 0.0 for value in values]
    scale = _LONGEST / (max(*known, limit or 0.0) or 1.0)
    write(left, _TOP - 0.08, title, color=_GREY, fontsize=9)
    rows = [_middle(chunk) for chunk in range(len(values))]
    bars = axes.barh(rows, [value * scale for value in known], _BAR, left=left,
                     label=title, linewidth=0, color=colour, edgecolor='white')
    for bar, row, value, again in zip(bars, rows, values, plan.recompute,
                                      strict=True):
        axes.vlines(left, row - _BAR / 2, row + _BAR / 2, color=_GREY)
        if again and colour is _TIME:
            bar.set_hatch(r'\\\\')
        if value is not None:
            write(left + value * scale + 0.06, row, said(value), zorder=4,
                  bbox={'facecolor': 'white', 'linewidth': 0, 'pad': 0.5})
    if limit is not None:
        end = rows[-1] + _ROW / 2
        axes.vlines(left + limit * scale, _TOP, end, color='black',
                    linewidth=1, linestyles='--', zorder=2)
        write(left + limit * scale, end + 0.1, f'limit {size(limit)}',
              ha='center')


def _name(write: Callable[..., Any], chunk: int, plan: PartitionPlan,
          part: Any) -> None:
    """Writes the names of a row, and what crosses below the row."""
    row, homes = _middle(chunk), plan.homes()
    write(_EDGE, row - 0.06, _stage(plan, chunk), fontsize=10, weight='bold')
    if part:
        ranks = part.grid.placement.ranks[chunk % plan.stages]
        said = (' '.join(map(str, ranks)) if len(ranks) < 4 else
                f'{ranks[0]} to {ranks[-1]}')
        write(0.95, row - 0.06, f'rank{"s" * (len(ranks) > 1)} {said}',
              fontsize=9)
    first = next((group[0] for group in plan.order
                  if homes[group[0]] == chunk), '')
    half = (_LETTERS - 1) // 2
    write(_EDGE, row + 0.11, first if len(first) <= _LETTERS else (
        first[:half] + '…' + first[-half:]), fontsize=7, color=_GREY)
    if chunk + 1 == len(plan.recompute):
        return
    text = ''
    if part:
        values = part.crossing[chunk]
        text = size(sum(value.nbytes for _, value in values)) + (
            ': ' + ', '.join(f'{name} {"x".join(map(str, value.shape or ()))}'
                             for name, value in values[:3])) * bool(values)
        text += f' and {len(values) - 3} more' * (len(values) > 3)
    elif plan.predicted.crossing:
        text = size(plan.predicted.crossing[chunk])
    if len(text) > _LETTERS_OF_A_LINE:
        text = text[:_LETTERS_OF_A_LINE - 1] + '…'
    if text:
        write(_LEFT, row + _ROW / 2, '↓ ' + text, color=_CROSSING, zorder=3)


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
            _stage(plan, chunk) for chunk in chunks
            if name in part.used[chunk])
    if len(ties) > _MOST_NOTES:
        yield f'and {len(ties) - _MOST_NOTES} more'


def _stage(plan: PartitionPlan, chunk: int) -> str:
    return f'stage {chunk % plan.stages}' + (
        f'.{chunk // plan.stages}' if plan.chunks > 1 else '')


def _title(plan: PartitionPlan, part: Any) -> str:
    busy, seconds = plan.predicted.busy, plan.predicted.seconds
    text = counted(plan.stages, 'stage')
    if part is not None:
        text = f'{part.title}: {text}'
        if part.grid.replicas > 1:
            text += f' x {part.grid.replicas} replicas'
    text += (f', {plan.schedule} with '
             f'{counted(plan.micro_batches, "micro-batch")}')
    if any(busy):
        text += f', balance {sum(busy) / len(busy) / max(busy):.2f}'
    return text + f', {1e3 * seconds:.3g} ms a step predicted' * bool(seconds)

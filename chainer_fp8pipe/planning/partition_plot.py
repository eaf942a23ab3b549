"""Draws where a model is cut, and what each stage gets."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .partition_plan import PartitionPlan
from .sizes import counted, said_bytes

# Light and dark enough to be told apart without seeing colours.
_TIME, _PARAMETERS, _MEMORY = '#3366ab', '#de701f', '#f5b359'
_CROSSING, _GREY = '#9e2973', '#666666'
# Inches: of the names, a panel, between panels; of the title, a row, a note.
_LEFT, _PANEL, _BETWEEN = 2.3, 2.0, 0.25
_TOP, _ROW, _BOTTOM, _NOTE = 0.8, 0.62, 0.3, 0.18
_ROOM = 1.6                 # of the longest bar, for its value
_LONGEST, _LONGEST_LINE, _MOST_NOTES = 34, 92, 6


class _Panel(NamedTuple):
    """A column of bars, and how their values are said; None: no bar."""

    title: str
    colour: str
    values: list[float | None]
    said: Callable[[float], str]


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
    panels, notes = _panels(plan, known), _notes(plan, known)
    rows = len(plan.recompute)
    bottom = _BOTTOM + _NOTE * len(notes)
    width = _LEFT + max(2, len(panels)) * (_PANEL + _BETWEEN)
    height = _TOP + _ROW * rows + bottom
    figure = Figure(figsize=(width, height))
    figure.suptitle(_title(plan, known), x=0.15 / width, ha='left',
                    y=1 - 0.12 / height, va='top', fontsize=11)
    for number, note in enumerate(notes):
        figure.text(0.15 / width, (bottom - 0.4 - _NOTE * number) / height,
                    note, color=_GREY, fontsize=8)

    def axes_at(left: float, inches: float) -> Any:
        axes = figure.add_axes((left / width, bottom / height,
                                inches / width, _ROW * rows / height))
        axes.set_ylim(rows - 0.5, -0.5)         # the first on top
        axes.tick_params(bottom=False, left=False, labelbottom=False,
                         labelleft=False)
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        return axes
    for number, panel in enumerate(panels):
        _draw(axes_at(_LEFT + number * (_PANEL + _BETWEEN), _PANEL), panel,
              plan, memory)
    names = axes_at(0.0, _LEFT)
    names.set_xlim(0, _LEFT)
    for chunk in range(rows):
        _name(names, chunk, plan, known)
    figure.savefig(path, dpi=150)


def _panels(plan: PartitionPlan, part: Any) -> list[_Panel]:
    """The columns of which anything is known."""
    chunks, predicted = range(len(plan.recompute)), plan.predicted
    total = sum(predicted.busy)
    nothing: list[float | None] = [None for _ in chunks]
    found = [
        _Panel('share of the time', _TIME, [
            busy / total for busy in predicted.busy] if total else nothing,
            lambda share: f'{100 * share:.0f} %'),
        _Panel('parameters', _PARAMETERS, [
            sum(map(part.parameter_bytes, part.used[chunk]))
            for chunk in chunks] if part else nothing, said_bytes),
        # A rank's memory stands at its first chunk.
        _Panel('memory, predicted', _MEMORY, [
            predicted.memory[chunk] if chunk < plan.stages else None
            for chunk in chunks] if predicted.memory else nothing,
            said_bytes)]
    return [panel for panel in found if panel.values != nothing]


def _draw(axes: Any, panel: _Panel, plan: PartitionPlan,
          memory: float | None) -> None:
    limit = memory if panel.colour is _MEMORY else None
    known = [value or 0.0 for value in panel.values]
    axes.set_xlim(0, (max(*known, limit or 0.0) or 1.0) * _ROOM)
    bars = axes.barh(range(len(known)), known, 0.46, linewidth=0,
                     color=panel.colour, edgecolor='white')
    for bar, again in zip(bars, plan.recompute, strict=True):
        if again and panel.colour is _TIME:
            bar.set_hatch(r'\\\\')
    axes.bar_label(bars, ['' if value is None else panel.said(value)
                          for value in panel.values], padding=4, fontsize=8,
                   zorder=4, bbox={'facecolor': 'white', 'linewidth': 0,
                                   'pad': 0.5})
    # In pieces, so that what crosses can be read between them.
    axes.vlines([0] * len(known), *[[row + side for row in range(len(known))]
                                    for side in (-0.3, 0.3)], color=_GREY)
    axes.set_title(panel.title, loc='left', fontsize=9, color=_GREY, pad=4)
    if limit is not None:
        axes.axvline(limit, color='black', linewidth=1, linestyle='--',
                     zorder=2)
        axes.annotate(f'limit {said_bytes(limit)}', (limit, 0), (0, -3),
                      xycoords=('data', 'axes fraction'), ha='center',
                      va='top', textcoords='offset points', fontsize=8)


def _name(axes: Any, chunk: int, plan: PartitionPlan, part: Any) -> None:
    """Writes the names of a row, and what crosses below the row."""
    axes.text(0.15, chunk - 0.1, _stage(plan, chunk), va='center',
              fontsize=10, weight='bold')
    if part:
        ranks = part.grid.placement.ranks[chunk % plan.stages]
        axes.text(0.95, chunk - 0.1, _ranks(ranks), va='center', fontsize=9)
    homes = plan.homes()
    first = next((group[0] for group in plan.order
                  if homes[group[0]] == chunk), '')
    axes.text(0.15, chunk + 0.18, _shortened(first), va='center',
              fontsize=7, color=_GREY)
    if chunk + 1 == len(plan.recompute):
        return
    text = ''
    if part:
        values = part.crossing[chunk]
        text = said_bytes(sum(value.nbytes for _, value in values)) + (
            ': ' + ', '.join(f'{name} {"x".join(map(str, value.shape))}'
                             for name, value in values[:3])) * bool(values)
        text += f' and {len(values) - 3} more' * (len(values) > 3)
    elif plan.predicted.crossing:
        text = said_bytes(plan.predicted.crossing[chunk])
    if text:
        if len(text) > _LONGEST_LINE:
            text = text[:_LONGEST_LINE - 1] + '…'
        axes.text(_LEFT, chunk + 0.5, '↓ ' + text, va='center', fontsize=8,
                  color=_CROSSING, zorder=3)


def _notes(plan: PartitionPlan, part: Any) -> list[str]:
    """What signs mean, and which parameters are on several stages."""
    chunks = range(len(plan.recompute))
    found = ['↓ crosses to the next stage, per micro-batch'] * (
        len(chunks) > 1) + ['hatched: runs forward twice'] * any(
            plan.recompute)
    ties = list(part.ties) if part else []
    for name in ties[:_MOST_NOTES]:
        found.append(f'{name} is on ' + ', '.join(
            _stage(plan, chunk) for chunk in chunks
            if name in part.used[chunk]))
    if len(ties) > _MOST_NOTES:
        found.append(f'and {len(ties) - _MOST_NOTES} more')
    return found


def _stage(plan: PartitionPlan, chunk: int) -> str:
    return f'stage {chunk % plan.stages}' + (
        f'.{chunk // plan.stages}' if plan.chunks > 1 else '')


def _title(plan: PartitionPlan, part: Any) -> str:
    predicted = plan.predicted
    text = counted(plan.stages, 'stage')
    if part is not None:
        text = f'{part.title}: {text}'
        if part.grid.replicas > 1:
            text += f' x {part.grid.replicas} replicas'
    text += f', {plan.schedule} with '
    text += counted(plan.micro_batches, 'micro-batch')
    slowest = max(predicted.busy, default=0.0)
    if slowest:
        mean = sum(predicted.busy) / len(predicted.busy)
        text += f', balance {mean / slowest:.2f}'
    if predicted.seconds:
        text += f', {1e3 * predicted.seconds:.3g} ms a step predicted'
    return text


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 3:
        return f'ranks {ranks[0]} to {ranks[-1]}'
    return ('ranks ' if len(ranks) > 1 else 'rank ') + ' '.join(
        map(str, ranks))


def _shortened(name: str) -> str:
    """A path, without its middle if it is too long."""
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else (
        name[:half] + '…' + name[-half:])

"""Draws where a model is cut, and what each stage gets."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..sizes import counted, said_bytes
from .partition_plan import PartitionPlan

Colour = tuple[float, float, float]

# Light and dark enough to be told apart without seeing colours.
_TIME: Colour = (0.20, 0.40, 0.67)
_PARAMETERS: Colour = (0.87, 0.44, 0.12)
_MEMORY: Colour = (0.96, 0.70, 0.35)
_CROSSING: Colour = (0.62, 0.16, 0.45)
_GREY: Colour = (0.40, 0.40, 0.40)

# Inches.
_LEFT, _PANEL, _BETWEEN, _RIGHT, _TIE = 2.3, 2.0, 0.25, 0.25, 0.3
_TOP, _ROW, _BOTTOM = 0.8, 0.62, 0.45

_BAR = 0.46                 # of a row
_ROOM = 1.2                 # of the longest bar
_MOST_TIES = 4              # brackets side by side
_LONGEST, _LONGEST_LINE = 34, 96    # characters


class _Row(NamedTuple):
    """A chunk's texts and numbers; the picture omits None and ''."""

    name: str                   # of the chunk's stage
    ranks: str                  # of the stage
    first: str                  # first parameter
    again: bool                 # whether the forward pass runs twice
    crossing: str               # what goes to the next chunk
    share: float | None         # of the time of all chunks, 0 to 1
    parameters: float | None    # bytes
    memory: float | None        # bytes of the rank, for its first chunk


class _Panel(NamedTuple):
    """A column of bars: a field of the rows, and how its values are said."""

    title: str
    colour: Colour
    field: str
    said: Callable[[float], str]


_PANELS = (
    _Panel('share of the time', _TIME, 'share',
           lambda share: f'{100 * share:.0f} %'),
    _Panel('parameters', _PARAMETERS, 'parameters', said_bytes),
    _Panel('memory, predicted', _MEMORY, 'memory', said_bytes))

#: Parameters that several chunks have: the chunks, and the names.
_Tie = tuple[tuple[int, ...], list[str]]


def plot_plan(cut: Any, path: str | os.PathLike[str],
              memory: float | None = None) -> None:
    """Writes a picture of a cut: a row per stage, from the first to the last.

    A row has bars for the stage's share of the time, the bytes of its
    parameters, and the predicted memory of its rank.  Below a row stand the
    values that cross to the next stage, in bytes per micro-batch.  Brackets
    on the right join stages that have the same parameter.  Hatched: a stage
    that runs its forward pass twice.

    Args:
        cut: A model that :func:`~chainer_fp8pipe.partition` has cut, or its
            ``model.partition``; or a :class:`.PartitionPlan`, for which
            bytes of parameters, names of values and brackets are left out.
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
    picture = _Picture(plan, known, memory)
    figure = Figure(figsize=(picture.width, picture.height))
    picture.draw(figure)
    figure.savefig(path, dpi=150)


class _Picture:
    """A picture; its width and height are in inches."""

    def __init__(self, plan: PartitionPlan, part: Any, limit: float | None
                 ) -> None:
        self._title = _title(plan, part)
        self._rows = _rows(plan, part)
        self._ties = _ties(plan, part)
        self._limit = limit
        self._panels = [panel for panel in _PANELS if any(
            getattr(row, panel.field) is not None for row in self._rows)]
        # Of the brackets, right of room for two panels at least.
        self._beside = _LEFT + max(2, len(self._panels)) * (_PANEL + _BETWEEN)
        self.width = (self._beside + _RIGHT
                      + _TIE * min(len(self._ties), _MOST_TIES))
        self.height = _TOP + _ROW * len(self._rows) + _BOTTOM

    def draw(self, figure: Any) -> None:
        """Draws titles, rows, panels, brackets and notes."""
        figure.suptitle(self._title, x=0.15 / self.width, ha='left',
                        y=1 - 0.12 / self.height, va='top', fontsize=11)
        names = self._axes(figure, 0.0, _LEFT)
        names.axis('off')
        names.set_xlim(0, _LEFT)
        for number, row in enumerate(self._rows):
            _name(names, number, row)
        for place, panel in enumerate(self._panels):
            self._bars(self._axes(
                figure, _LEFT + place * (_PANEL + _BETWEEN), _PANEL), panel)
        room = self.width - self._beside
        beside = self._axes(figure, self._beside, room)
        beside.axis('off')
        beside.set_xlim(0, room)
        for place, (chunks, parameters) in enumerate(
                self._ties[:_MOST_TIES]):
            _bracket(beside, _TIE * place, chunks, parameters)
        self._explain(figure)

    def _axes(self, figure: Any, left: float, width: float) -> Any:
        """A column of the figure with a unit of height per row."""
        axes = figure.add_axes((
            left / self.width, _BOTTOM / self.height, width / self.width,
            _ROW * len(self._rows) / self.height))
        axes.set_ylim(len(self._rows) - 0.5, -0.5)      # the first on top
        return axes

    def _bars(self, axes: Any, panel: _Panel) -> None:
        values = [getattr(row, panel.field) for row in self._rows]
        known = [value or 0.0 for value in values]
        limit = self._limit if panel.colour is _MEMORY else None
        axes.set_xlim(0, (max(*known, limit or 0.0) or 1.0) * _ROOM)
        bars = axes.barh(range(len(known)), known, _BAR, linewidth=0,
                         color=panel.colour, edgecolor='white')
        for number, (bar, row, value) in enumerate(zip(
                bars, self._rows, values, strict=True)):
            if row.again and panel.colour is _TIME:
                bar.set_hatch(r'\\\\')
            if value is not None:
                _figure(axes, number, value, panel)
        # In pieces, so that what crosses can be read between them.
        axes.vlines([0] * len(known), *[[
            number + side for number in range(len(known))]
            for side in (-0.3, 0.3)], color=_GREY, linewidth=1)
        axes.set_title(panel.title, loc='left', fontsize=9,
                       color=_GREY, pad=4)
        if limit is not None:
            axes.axvline(limit, color='black', linewidth=1, linestyle='--',
                         zorder=2)
            axes.annotate(f'limit {said_bytes(limit)}', (limit, 0), (0, -3),
                          xycoords=('data', 'axes fraction'), ha='center',
                          va='top', textcoords='offset points', fontsize=8)
        axes.tick_params(bottom=False, left=False, labelbottom=False,
                         labelleft=False)
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)

    def _explain(self, figure: Any) -> None:
        notes = []
        if len(self._rows) > 1:
            notes.append(('↓ crosses to the next stage, per micro-batch',
                          _CROSSING))
        if any(row.again for row in self._rows):
            notes.append(('hatched: runs forward twice', _TIME))
        more = len(self._ties) - _MOST_TIES
        if more > 0:
            notes.append((f'{more} more brackets are left out', _GREY))
        left = 0.15
        for note, colour in notes:
            figure.text(left / self.width, 0.12 / self.height, note,
                        color=colour, fontsize=8)
            left += 0.072 * len(note)


def _name(axes: Any, number: int, row: _Row) -> None:
    """Writes the names of a row, and what crosses below the row."""
    axes.text(0.15, number - 0.1, row.name, va='center', fontsize=10,
              weight='bold')
    axes.text(0.95, number - 0.1, row.ranks, va='center', fontsize=9)
    axes.text(0.15, number + 0.18, _shortened(row.first, _LONGEST),
              va='center', fontsize=7, color=_GREY)
    if row.crossing:
        text = row.crossing
        if len(text) > _LONGEST_LINE:
            text = text[:_LONGEST_LINE - 1] + '…'
        axes.text(_LEFT, number + 0.5, '↓ ' + text, va='center', fontsize=8,
                  color=_CROSSING, zorder=3)


def _figure(axes: Any, number: int, value: float, panel: _Panel) -> None:
    """Writes a value beside the end of its bar, inside of a long bar."""
    inside = value > 0.35 * axes.get_xlim()[1]
    axes.annotate(
        panel.said(value), (value, number), (-4 if inside else 4, 0),
        va='center', ha='right' if inside else 'left', fontsize=8, zorder=4,
        textcoords='offset points', color=(
            'white' if inside and panel.colour is not _MEMORY else 'black'),
        bbox={'facecolor': panel.colour if inside else 'white',
              'linewidth': 0, 'pad': 0.5})


def _rows(plan: PartitionPlan, part: Any) -> list[_Row]:
    predicted, homes = plan.predicted, plan.homes()
    total = sum(predicted.busy)
    rows = []
    for chunk in range(len(plan.cuts) + 1):
        stage, turn = chunk % plan.stages, chunk // plan.stages
        rows.append(_Row(
            f'stage {stage}' + (f'.{turn}' if plan.chunks > 1 else ''),
            _ranks(part.grid.placement.ranks[stage]) if part else '',
            next((group[0] for group in plan.order
                  if homes[group[0]] == chunk), ''),
            plan.recompute[chunk],
            _crossing(plan, part, chunk),
            predicted.busy[chunk] / total if total else None,
            sum(map(part.parameter_bytes, part.used[chunk])) if part
            else None,
            predicted.memory[stage] if predicted.memory and not turn
            else None))
    return rows


def _crossing(plan: PartitionPlan, part: Any, chunk: int) -> str:
    """The bytes that go to the next chunk, and the first values' names."""
    if chunk == len(plan.cuts):
        return ''
    if part is None:
        sizes = plan.predicted.crossing[chunk:chunk + 1]
        return said_bytes(sizes[0]) if sizes else ''
    values = part.crossing[chunk]
    said = ', '.join(f'{name} {"x".join(map(str, value.shape))}'
                     for name, value in values[:3])
    more = f' and {len(values) - 3} more' if len(values) > 3 else ''
    return said_bytes(sum(value.nbytes for _, value in values)) + (
        f': {said}{more}' if said else '')


def _ties(plan: PartitionPlan, part: Any) -> list[_Tie]:
    """Parameters on several ranks, grouped by chunks."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in part.ties if part else ():
        chunks = tuple(chunk for chunk in range(len(plan.cuts) + 1)
                       if name in part.used[chunk])
        found.setdefault(chunks, []).append(name)
    return list(found.items())


def _bracket(axes: Any, left: float, chunks: tuple[int, ...],
             names: list[str]) -> None:
    """Draws a line with an arm to each row that has the parameters."""
    spine, arm = left + 0.1, 0.08
    ends = [min(chunks), max(chunks)]
    axes.plot([spine, spine], ends, color=_GREY, linewidth=1.2)
    for chunk in chunks:
        axes.plot([spine - arm, spine], [chunk, chunk], color=_GREY,
                  linewidth=1.2)
    name, *others = names
    more = f' and {len(others)} more' if others else ''
    room = int(9.5 * (ends[1] - ends[0] + 0.7))
    axes.text(spine + 0.03, sum(ends) / 2,
              _shortened(name, max(room - len(more), 8)) + more,
              rotation=90, va='center', ha='left', fontsize=7.5, color=_GREY)


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


def _shortened(name: str, most: int) -> str:
    """A path, without its middle if it is too long."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return name[:half] + '…' + name[-half:]

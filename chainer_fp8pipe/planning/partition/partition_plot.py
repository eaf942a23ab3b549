"""Draws where a model is cut, and what each stage gets."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..sizes import said_bytes
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
    """What is drawn for a chunk.

    Attributes:
        name: Of its stage.
        ranks: That have it; '' if that is unknown.
        first: Its first parameter.
        share: Of the time of all chunks, 0 to 1.
        again: Whether its forward pass runs twice.
        parameters: Bytes.
        memory: Bytes of its rank, for the rank's first chunk.
        crossing: What goes to the next chunk; '' after the last one.
    """

    name: str
    ranks: str
    first: str
    share: float | None
    again: bool
    parameters: float | None
    memory: float | None
    crossing: str


class _Tie(NamedTuple):
    """Parameters that the same chunks have."""

    chunks: tuple[int, ...]
    names: list[str]


class _Panel(NamedTuple):
    """A column of bars: a value for each row, or None, and how it is said."""

    title: str
    colour: Colour
    values: list[float | None]
    texts: list[str]


def plot_plan(cut: Any, path: str | os.PathLike[str],
              memory: float | None = None) -> None:
    """Writes a picture of a cut: a row per stage, from the first to the last.

    A row has bars for the stage's share of the time, for the bytes of its
    parameters, and for the memory that its rank is predicted to need.  Below
    a row stands what crosses to the next one, in bytes per micro-batch.
    Brackets on the right join stages that have the same parameter.  Hatched:
    a stage that runs its forward pass twice.

    Args:
        cut: A model that :func:`~chainer_fp8pipe.partition` has cut, or its
            ``model.partition``; or a :class:`.PartitionPlan`, which knows
            nothing of parameters' bytes, of names of what crosses, and of
            brackets.
        path: A file that matplotlib can write, e.g. ``plan.png``.
        memory: The limit of each rank in bytes, drawn as a line; default:
            what :func:`~chainer_fp8pipe.partition` was given.

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
    """The sizes of a picture, and what is drawn into its figure.

    Args:
        plan: What is drawn.
        part: A partition with the plan; None: only the plan is known.
        limit: Bytes of each rank; None: there is none.

    Attributes:
        width: Of the figure, in inches.
        height: Of the figure, in inches.
    """

    def __init__(self, plan: PartitionPlan, part: Any, limit: float | None
                ) -> None:
        self._title = _title(plan, part)
        self._rows = _rows(plan, part)
        self._ties = _ties(plan, part)
        self._limit = limit
        self._panels = self._filled()
        self.width = (_LEFT + max(2, len(self._panels)) * (_PANEL + _BETWEEN)
                      + _RIGHT + _TIE * min(len(self._ties), _MOST_TIES))
        self.height = _TOP + _ROW * len(self._rows) + _BOTTOM

    def draw(self, figure: Any) -> None:
        """Titles, rows, what crosses, and brackets."""
        figure.suptitle(self._title, x=0.15 / self.width, ha='left',
                        y=1 - 0.12 / self.height, va='top', fontsize=11)
        names = self._axes(figure, 0.0, _LEFT)
        names.axis('off')
        for number, row in enumerate(self._rows):
            self._name(names, number, row)
        for place, panel in enumerate(self._panels):
            self._bars(self._axes(
                figure, _LEFT + place * (_PANEL + _BETWEEN), _PANEL), panel)
        start = _LEFT + max(2, len(self._panels)) * (_PANEL + _BETWEEN)
        beside = self._axes(figure, start, self.width - start)
        beside.axis('off')
        beside.set_xlim(0, self.width - start)
        for place, tie in enumerate(self._ties[:_MOST_TIES]):
            _bracket(beside, _TIE * place, tie, len(self._rows))
        self._explain(figure)

    def _filled(self) -> list[_Panel]:
        """The columns of which something is known."""
        shares = [row.share for row in self._rows]
        sizes = [row.parameters for row in self._rows]
        needs = [row.memory for row in self._rows]
        panels = [
            _Panel('share of the time', _TIME, shares,
                   [f'{100 * (share or 0):.0f} %' for share in shares]),
            _Panel('parameters', _PARAMETERS, sizes,
                   [said_bytes(size or 0) for size in sizes]),
            _Panel('memory, predicted', _MEMORY, needs,
                   [said_bytes(need or 0) for need in needs])]
        return [panel for panel in panels
                if any(value is not None for value in panel.values)]

    def _axes(self, figure: Any, left: float, width: float) -> Any:
        """A column of the figure with a unit of height per row."""
        axes = figure.add_axes((
            left / self.width, _BOTTOM / self.height, width / self.width,
            _ROW * len(self._rows) / self.height))
        axes.set_ylim(len(self._rows) - 0.5, -0.5)      # the first on top
        return axes

    def _name(self, axes: Any, number: int, row: _Row) -> None:
        text = axes.text
        axes.set_xlim(0, _LEFT)
        text(0.15, number - 0.1, row.name, va='center', fontsize=10,
             weight='bold')
        text(0.95, number - 0.1, row.ranks, va='center', fontsize=9)
        text(0.15, number + 0.18, _shortened(row.first, _LONGEST),
             va='center', fontsize=7, color=_GREY)
        if row.crossing:
            text(_LEFT, number + 0.5,
                 '↓ ' + _cut_off(row.crossing, _LONGEST_LINE), va='center',
                 fontsize=8, color=_CROSSING, zorder=3)

    def _bars(self, axes: Any, panel: _Panel) -> None:
        known = [value or 0.0 for value in panel.values]
        limit = self._limit if panel.colour is _MEMORY else None
        longest = max(*known, limit or 0.0) or 1.0
        axes.set_xlim(0, longest * _ROOM)
        bars = axes.barh(range(len(known)), known, _BAR, linewidth=0,
                         color=panel.colour, edgecolor='white')
        for bar, row in zip(bars, self._rows, strict=True):
            if row.again and panel.colour is _TIME:
                bar.set_hatch(r'\\\\')
        for number, (value, text) in enumerate(zip(
                panel.values, panel.texts, strict=True)):
            if value is not None:
                _figure(axes, number, value, text, panel.colour)
        # In pieces, so that what crosses can be read between them.
        axes.vlines([0] * len(known), *[[
            number + side for number in range(len(known))]
            for side in (-0.3, 0.3)], color=_GREY, linewidth=1)
        axes.set_title(panel.title, loc='left', fontsize=9,
                       color=_GREY, pad=4)
        if limit is not None:
            self._draw_limit(axes, limit)
        axes.tick_params(bottom=False, left=False, labelbottom=False,
                         labelleft=False)
        axes.patch.set_visible(False)
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _draw_limit(self, axes: Any, limit: float) -> None:
        """A line with its bytes below."""
        axes.axvline(limit, color='black', linewidth=1, linestyle='--',
                     zorder=2)
        axes.annotate(f'limit {said_bytes(limit)}', (limit, 0), (0, -3),
                      xycoords=('data', 'axes fraction'), ha='center',
                      va='top', textcoords='offset points', fontsize=8)

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


def _figure(axes: Any, number: int, value: float, text: str,
            colour: Colour) -> None:
    """The figure of a bar: at its end, inside of it if it is long."""
    inside = value > 0.35 * axes.get_xlim()[1]
    axes.annotate(
        text, (value, number), (-4 if inside else 4, 0), va='center',
        ha='right' if inside else 'left', fontsize=8, zorder=4,
        textcoords='offset points', color=(
            'white' if inside and colour != _MEMORY else 'black'),
        bbox={'facecolor': colour if inside else 'white', 'linewidth': 0,
              'pad': 0.5})


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
            predicted.busy[chunk] / total if total else None,
            plan.recompute[chunk],
            sum(map(part.parameter_bytes, part.used[chunk])) if part
            else None,
            predicted.memory[stage] if predicted.memory and not turn
            else None,
            _crossing(plan, part, chunk)))
    return rows


def _crossing(plan: PartitionPlan, part: Any, chunk: int) -> str:
    """The bytes that go to the next chunk, and the names of the first."""
    if chunk == len(plan.cuts):
        return ''
    if part is None:
        sizes: Sequence[float] = plan.predicted.crossing[chunk:chunk + 1]
        return said_bytes(sizes[0]) if sizes else ''
    values = part.crossing[chunk]
    said = ', '.join(f'{name} {"x".join(map(str, value.shape))}'
                     for name, value in values[:3])
    more = f' and {len(values) - 3} more' if len(values) > 3 else ''
    return said_bytes(sum(value.nbytes for _, value in values)) + (
        f': {said}{more}' if said else '')


def _ties(plan: PartitionPlan, part: Any) -> list[_Tie]:
    """Parameters on several ranks, those on the same chunks together."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in part.ties if part else ():
        chunks = tuple(chunk for chunk in range(len(plan.cuts) + 1)
                       if name in part.used[chunk])
        found.setdefault(chunks, []).append(name)
    return [_Tie(chunks, names) for chunks, names in found.items()]


def _bracket(axes: Any, left: float, tie: _Tie, rows: int) -> None:
    """A line along the rows, with an arm to each that has the parameter."""
    spine, arm = left + 0.1, 0.08
    ends = [min(tie.chunks), max(tie.chunks)]
    axes.plot([spine, spine], ends, color=_GREY, linewidth=1.2)
    for chunk in tie.chunks:
        axes.plot([spine - arm, spine], [chunk, chunk], color=_GREY,
                  linewidth=1.2)
    name, *others = tie.names
    more = f' and {len(others)} more' if others else ''
    room = int(9.5 * (ends[1] - ends[0] + 0.7))
    axes.text(spine + 0.03, sum(ends) / 2,
              _shortened(name, max(room - len(more), 8)) + more,
              rotation=90, va='center', ha='left', fontsize=7.5, color=_GREY)


def _title(plan: PartitionPlan, part: Any) -> str:
    predicted = plan.predicted
    text = f'{plan.stages} stages'
    if part is not None:
        text = f'{part.title}: {text}'
        if part.grid.replicas > 1:
            text += f' x {part.grid.replicas} replicas'
    text += f', {plan.schedule} with {plan.micro_batches} micro-batches'
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
    """A path without the middle if it is too long."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return name[:half] + '…' + name[-half:]


def _cut_off(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most - 1] + '…'

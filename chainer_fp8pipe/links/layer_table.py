"""The table of a model's layers that ``print`` shows."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chainer

from .lazy import Lazy, built
from .shared_parameters import own_size

#: Groups of more rows than this show what repeats itself once.
_LONG = 12
_LONGEST_REPEATED = 8
_WIDTH = 50


class Row(NamedTuple):
    """One layer of the whole model."""

    number: int
    text: str
    parameters: int | None      # its own; None if not known


def describe(model: Any) -> str:
    """``'Net: layers 4 to 7 of 12'``."""
    name, bounds = type(model).__name__, model.bounds
    if (model.total, bounds) == (len(model), ((0, len(model)),)):
        return f'{name}: {_count(len(model), "layer")}'
    runs = ' and '.join(_run(*run) for run in bounds) or 'no layers'
    return f'{name}: {runs} of {model.total}'


def rows_of(model: Any, parameters: Sequence[int | None] | None = None
            ) -> tuple[Row, ...]:
    """A row for each layer of the whole model; builds nothing.

    ``parameters`` counts those of layers that have no shape yet.
    """
    rows = {row.number: row for row in model._part.rows} if model._part else {}
    seen: set[int] = set()
    for number, slot in model.numbered_slots():
        size = own_size(slot, seen)
        if size is None:
            size = (parameters[number] if parameters
                    else rows[number].parameters if number in rows else None)
        layer = built(slot) or slot
        rows[number] = Row(number, _text(layer), size)
    return tuple(rows[number] for number in sorted(rows))


def table(model: Any) -> str:
    """The whole table, without a line feed at the end."""
    rows = rows_of(model)
    lines = [f'{describe(model)}, {_total(rows)}']
    for title, group in _groups(model, rows):
        if title:
            lines.append(f'{title}, {_total(group)}')
        lines.extend(_lines(group))
    return '\n'.join(lines)


def _groups(model: Any, rows: tuple[Row, ...]
            ) -> list[tuple[str, tuple[Row, ...]]]:
    """Titles and rows by rank, or of layers here and elsewhere."""
    part = model._part
    if part is None:
        return [('', rows)]
    if part.layout:
        groups = []
        for chunk, (start, end) in enumerate(part.layout):
            stage = chunk % len(part.stages)
            title = part.stages[stage]
            if len(part.layout) > len(part.stages):
                title = f'chunk {chunk} on {title}'
            title = (f'=> {title} (here)' if stage == part.stage
                     else f'   {title}')
            groups.append((f'{title}: {_run(start, end)}', rows[start:end]))
        return groups
    edges = sorted({0, part.total, *(edge for run in part.bounds
                                     for edge in run)})
    starts = [start for start, _ in part.bounds]
    return [(('=> here: ' if start in starts else '   elsewhere: ')
             + _run(start, end), rows[start:end])
            for start, end in zip(edges, edges[1:], strict=False)]


def _lines(rows: tuple[Row, ...]) -> list[str]:
    lines: list[str] = []
    position = 0
    while position < len(rows):
        length, times = (_repetition(rows[position:])
                         if len(rows) > _LONG else (1, 1))
        lines.extend(f'{row.number:6d}  {row.text:<{_WIDTH}}'
                     f'{_number(row):>13}'.rstrip()
                     for row in rows[position:position + length])
        position += length * times
        if times > 1:
            lines.append(f'   ...  the same again, {times} times in all, '
                         f'to layer {rows[position - 1].number}')
    return lines


def _repetition(rows: tuple[Row, ...]) -> tuple[int, int]:
    """How many rows at the start repeat themselves, and how many times.

    (1, 1) if showing them once would not make the table shorter.
    """
    best = (1, 1)
    costs = [(row.text, row.parameters) for row in rows]
    for length in range(1, _LONGEST_REPEATED + 1):
        times = 1
        while costs[:length] == costs[length * times:length * (times + 1)]:
            times += 1
        if length * (times - 1) > max(1, best[0] * (best[1] - 1)):
            best = length, times
    return best


def _text(layer: Any) -> str:
    """A layer in a few words."""
    if isinstance(layer, Lazy):
        text = repr(layer)
    elif hasattr(layer, 'numbered_slots'):
        text = describe(layer)
    elif isinstance(layer, (chainer.Chain, chainer.ChainList)):
        text = type(layer).__name__
    elif isinstance(layer, chainer.Link):
        text = str(layer)
    elif isinstance(layer, functools.partial):
        arguments = [*map(repr, layer.args),
                     *(f'{key}={value!r}'
                       for key, value in layer.keywords.items())]
        text = f'{_text(layer.func)}({", ".join(arguments)})'
    else:
        text = getattr(layer, '__name__', type(layer).__name__)
    text = ' '.join(text.split())
    return text if len(text) <= _WIDTH else f'{text[:_WIDTH - 3]}...'


def _number(row: Row) -> str:
    if row.parameters is None:
        return '?'
    return f'{row.parameters:,}' if row.parameters else ''


def _total(rows: tuple[Row, ...]) -> str:
    known = sum(row.parameters or 0 for row in rows)
    if all(row.parameters is not None for row in rows):
        return _count(known, 'parameter')
    return (f'{_count(known, "parameter")} and more' if known else
            'parameters not counted yet')


def _run(start: int, end: int) -> str:
    return (f'layer {start}' if end == start + 1
            else f'layers {start} to {end - 1}')


def _count(number: int, noun: str) -> str:
    return f'{number:,} {noun}' + ('' if number == 1 else 's')

"""The table of a model's layers that ``print`` shows."""
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer

from ..chains.valueless_parameters import without_drawing

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
    what = (_count(len(model), 'layer') if not model.is_part else
            f'{" and ".join(_run(*run) for run in model.bounds)} '
            f'of {len(model)}')
    return f'{type(model).__name__}: {what}'


def table(model: Any) -> str:
    """The whole table, without a line feed at the end."""
    with without_drawing():
        rows = [Row(number, text_of(layer), size) for number, (layer, size)
                in enumerate(zip(model, model.sizes(), strict=True))]
    lines = [f'{describe(model)}, {_total(rows)}']
    for title, start, end in _groups(model):
        if title:
            lines.append(f'{title}: {_run(start, end)}, '
                         f'{_total(rows[start:end])}')
        lines.extend(_lines(rows[start:end]))
    return '\n'.join(lines)


def _groups(model: Any) -> Iterable[tuple[str, int, int]]:
    """Title, first and last-plus-one layer of each group of rows.

    One group for each chunk, if all are known, or for each run of layers.
    """
    if not model.is_part:
        yield '', 0, len(model)
    elif model.layout:
        stage, names = model.placement
        for chunk, (start, end) in enumerate(model.layout):
            title = names[chunk % len(names)]
            if len(model.layout) > len(names):
                title = f'chunk {chunk} on {title}'
            yield (f'=> {title} (here)' if chunk % len(names) == stage
                   else f'   {title}', start, end)
    else:
        edges = sorted({0, len(model), *(edge for run in model.bounds
                                         for edge in run)})
        for start, end in zip(edges, edges[1:], strict=False):
            yield ('=> here' if (start, end) in model.bounds
                   else '   elsewhere', start, end)


def _lines(rows: list[Row]) -> list[str]:
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


def _repetition(rows: list[Row]) -> tuple[int, int]:
    """How many rows at the start repeat themselves, and how many times.

    (1, 1) if showing them once would not make the table shorter.
    """
    best = (1, 1)
    costs = [row[1:] for row in rows]
    for length in range(1, _LONGEST_REPEATED + 1):
        times = 1
        while costs[:length] == costs[length * times:length * (times + 1)]:
            times += 1
        if length * (times - 1) > max(1, best[0] * (best[1] - 1)):
            best = length, times
    return best


def text_of(layer: Any) -> str:
    """A layer in a few words."""
    if hasattr(type(layer), 'text_in_tables'):
        text = layer.text_in_tables()
    elif hasattr(type(layer), 'numbered_layers'):
        text = describe(layer)
    elif isinstance(layer, (chainer.Chain, chainer.ChainList)):
        text = type(layer).__name__
    elif isinstance(layer, chainer.Link):
        text = str(layer)
    elif isinstance(layer, functools.partial):
        arguments = [*map(repr, layer.args),
                     *(f'{key}={value!r}'
                       for key, value in layer.keywords.items())]
        text = f'{text_of(layer.func)}({", ".join(arguments)})'
    else:
        text = getattr(layer, '__name__', type(layer).__name__)
    text = ' '.join(text.split())
    return text if len(text) <= _WIDTH else f'{text[:_WIDTH - 3]}...'


def _number(row: Row) -> str:
    if row.parameters is None:
        return '?'
    return f'{row.parameters:,}' if row.parameters else ''


def _total(rows: list[Row]) -> str:
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

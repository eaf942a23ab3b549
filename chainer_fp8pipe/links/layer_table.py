"""The table of a model's layers that ``print`` shows."""
from __future__ import annotations

import functools
from typing import Any

import chainer

from ..chains.deferred import without_drawing

_WIDTH = 50


def describe(model: Any) -> str:
    """``'Net: layers 4 to 7 of 12'``."""
    runs = ' and '.join(_run(*run) for run in model.bounds)
    return f'{type(model).__name__}: ' + (
        f'{runs} of {len(model)}' if model.is_part
        else f'{len(model)} layer{"s" * (len(model) != 1)}')


def table(model: Any) -> str:
    """Layers and their parameters, in order, with titles of chunks."""
    with without_drawing():
        texts, sizes = [text_of(layer) for layer in model], model.sizes()
    known = sum(size or 0 for size in sizes)
    lines = [f'{describe(model)}, {known:,} parameters'
             + ' and more' * (None in sizes)]
    stage, names = model.placement
    titles = {start: f'{names[chunk % len(names)]}'
              + ' (here)' * (chunk % len(names) == stage)
              + f': {_run(start, end)}'
              for chunk, (start, end) in enumerate(model.layout or ())}
    for number, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if number in titles:
            lines.append(titles[number])
        count = '?' if size is None else f'{size:,}' if size else ''
        lines.append(f'{number:6d}  {text:<{_WIDTH}}{count:>13}'.rstrip())
    return '\n'.join(lines)


def text_of(layer: Any) -> str:
    """A layer in a few words."""
    if isinstance(layer, functools.partial):
        bound = [*map(repr, layer.args), *(
            f'{key}={value!r}' for key, value in layer.keywords.items())]
        text = f'{text_of(layer.func)}({", ".join(bound)})'
    elif hasattr(type(layer), 'numbered_layers'):
        text = describe(layer)
    elif isinstance(layer, (chainer.Chain, chainer.ChainList)):
        text = type(layer).__name__
    elif isinstance(layer, chainer.Link):
        text = str(layer)
    else:
        text = getattr(layer, '__name__', type(layer).__name__)
    text = ' '.join(text.split())
    return text if len(text) <= _WIDTH else f'{text[:_WIDTH - 3]}...'


def _run(start: int, end: int) -> str:
    return (f'layer {start}' if end == start + 1
            else f'layers {start} to {end - 1}')

"""Where a list of layers is cut, and what no cut may go through."""
from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import chainer

from ..chains.placeholder import is_placeholder
from ..pipeline.layers import Layer, layer_name


def counts_of(balance: Any, chunks: int, layers: Sequence[Layer],
              sizes: Sequence[int | None]) -> list[int]:
    """The number of layers of each chunk.

    ``balance`` is ``'parameters'`` or ``'layers'``, which is divided evenly,
    or the numbers; ``chunks`` counts those of all ranks, and ``sizes`` has the
    parameters of each layer; None: not known.

    Raises:
        ValueError: There is no such measure, a size is needed that is not
            known, or the numbers do not fit.
    """
    if not isinstance(balance, str):
        counts = [operator.index(count) for count in balance]
        if len(counts) != chunks or min(counts) < 1 or (
                sum(counts) != len(layers)):
            raise ValueError(
                f'balance={counts} does not fit: it must be {chunks} numbers '
                'of layers, one for each chunk, all 1 or more and '
                f'{len(layers)} together')
        return counts
    if balance == 'layers':
        return even_parts([1] * len(layers), chunks)
    if balance != 'parameters':
        raise ValueError(
            f"unknown balance {balance!r}; valid are 'parameters', 'layers' "
            'and a list of the number of layers of each chunk')
    for layer, size in zip(layers, sizes, strict=True):
        if size is None:
            raise ValueError(
                f'{layer_name(*layer)} learns the shape of its parameters '
                "from its first input; give it all sizes, or pass "
                "balance='layers' or a list to stage")
    return even_parts([size or 0 for size in sizes], chunks)


def even_parts(costs: Sequence[int], parts: int) -> list[int]:
    """How many consecutive layers each part gets; at least one.

    The sum of squares of the parts' costs is as small as it can be, and of
    all such cuts that of the numbers of layers.
    """
    sums = [0, *itertools.accumulate(costs)]
    # By how many layers the parts so far have: the least squares of sums,
    # squares of counts, and the counts.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for _ in range(parts):
        best = {end: min(
            (cost + (sums[end] - sums[start]) ** 2,
             square + (end - start) ** 2, [*counts, end - start])
            for start, (cost, square, counts) in best.items() if start < end)
            for end in range(min(best) + 1, len(sums))}
    return best[len(costs)][2]


def check_cut(layers: Sequence[Layer], owner: Mapping[int, int]) -> None:
    """Raises ValueError if two owners' layers have one parameter or array.

    ``owner`` has the rank of each layer, by number.
    """
    first: dict[int, Layer] = {}
    for layer in layers:
        for thing in held(layer[1]):
            other = first.setdefault(id(thing), layer)
            if owner[other[0]] != owner[layer[0]]:
                name = getattr(thing, 'name', None) or ''
                raise ValueError(
                    f'{layer_name(*other)} and {layer_name(*layer)} share the '
                    + f'{type(thing).__name__} {name}'.rstrip()
                    + '; cut so that both are on one rank, or give one its '
                    'own parameters')


def held(value: Any) -> Iterator[Any]:
    """Links, parameters and their arrays that a layer holds.

    Methods count for their objects, and bound arguments; not closures.
    """
    if isinstance(value, chainer.Link):
        yield from value.links()
        for parameter in value.params():
            yield parameter
            array = parameter._data[0]
            if array is not None and not is_placeholder(array):
                yield array
    elif isinstance(value, types.MethodType):
        # A layer may be a method of the model.
        if not hasattr(type(value.__self__), 'pieces'):
            yield from held(value.__self__)
    elif isinstance(value, functools.partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from held(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from held(item)

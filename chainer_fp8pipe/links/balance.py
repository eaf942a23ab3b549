"""How many layers each chunk of a model gets: by number, size or as told."""
from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from ..pipeline.layers import layer_name

_BALANCES = ('parameters', 'layers')


def check_balance(balance: str | Sequence[int], chunks: int, layers: int
                  ) -> str | list[int]:
    """The measure's name, or the number of layers of each chunk.

    Raises:
        ValueError: There is no such measure, or the numbers do not fit.
    """
    if isinstance(balance, str):
        if balance not in _BALANCES:
            raise ValueError(
                f'unknown balance {balance!r}; valid are '
                f'{", ".join(map(repr, _BALANCES))} and a list of the number '
                'of layers of each chunk')
        return balance
    counts = [operator.index(count) for count in balance]
    if len(counts) != chunks or min(counts) < 1 or sum(counts) != layers:
        raise ValueError(
            f'balance={counts} does not fit: it must be {chunks} numbers of '
            f'layers, one for each chunk, all 1 or more and {layers} together')
    return counts


def chunk_counts(balance: str | list[int], chunks: int,
                 layers: Sequence[tuple[int, object]],
                 sizes: Sequence[int | None]) -> list[int]:
    """The number of layers of each chunk.

    Args:
        balance: What :func:`check_balance` has returned.
        chunks: Of all ranks.
        layers: Numbers and layers of the whole model.
        sizes: Parameters of each layer; None: not known.

    Raises:
        ValueError: A size is needed that is not known.
    """
    if not isinstance(balance, str):
        return balance
    if balance == 'layers':
        return even_parts([1] * len(sizes), chunks)
    for (number, layer), size in zip(layers, sizes, strict=True):
        if size is None:
            raise ValueError(
                f'{layer_name(number, layer)} learns the shape of its '
                'parameters from its first input; give it all sizes, or pass '
                "balance='layers' or a list to stage")
    return even_parts([size or 0 for size in sizes], chunks)


def even_parts(costs: Sequence[int], parts: int) -> list[int]:
    """How many consecutive layers each part gets; at least one.

    The sum of squares of the parts' costs is as small as it can be, and of
    all such cuts that of the numbers of layers.

    Args:
        costs: Of each layer; not negative.
        parts: How many parts, at most as many as layers.

    Returns:
        Numbers of layers, which sum to ``len(costs)``.
    """
    sums = [0, *itertools.accumulate(costs)]
    # For so many parts as there were rounds, by the end of the last one: the
    # least squares of sums, squares of counts, and where that part starts.
    rounds = [{0: (0, 0, 0)}]
    for _ in range(parts):
        before = rounds[-1]
        rounds.append({end: min(
            (cost + (sums[end] - sums[start]) ** 2,
             count + (end - start) ** 2, start)
            for start, (cost, count, _) in before.items() if start < end)
            for end in range(min(before) + 1, len(sums))})
    ends = [len(costs)]
    for best in reversed(rounds[1:]):
        ends.insert(0, best[ends[0]][2])
    return [end - start for start, end in itertools.pairwise(ends)]

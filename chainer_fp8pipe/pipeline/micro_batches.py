"""The bounds of micro-batches, and the option ``recompute``."""
from __future__ import annotations

import itertools
from typing import Any

from .block import Arrays

#: Names for ``recompute``; each gives the chunks by the number of the last.
RECOMPUTE = {
    'no stage': lambda last: frozenset(),
    'every stage': lambda last: frozenset(range(last + 1)),
    'every stage but the last': lambda last: frozenset(range(last)),
}


def recomputed(recompute: Any, last: int) -> frozenset[int]:
    """The chunks that keep their inputs only.

    Args:
        recompute: A key of :data:`RECOMPUTE`; True and False mean the second
            and the first.  Or a tuple with a bool per chunk.
        last: The number of the last chunk.

    Raises:
        ValueError: ``recompute`` is something else.
    """
    if isinstance(recompute, tuple) and len(recompute) == last + 1:
        return frozenset(chunk for chunk, again in enumerate(recompute)
                         if again)
    if isinstance(recompute, bool):
        recompute = 'every stage' if recompute else 'no stage'
    if recompute not in RECOMPUTE:
        known = ', '.join(map(repr, RECOMPUTE))
        raise ValueError(f'recompute must be True, False or one of {known}, '
                         f'not {recompute!r}')
    return RECOMPUTE[recompute](last)


def bounds(samples: int, micro_batches: int) -> list[tuple[int, int]]:
    """First and last-plus-one sample of every micro-batch.

    Sizes differ by one at most, the longer ones first.
    """
    short, longer = divmod(samples, micro_batches)
    starts = [number * short + min(number, longer)
              for number in range(micro_batches + 1)]
    return list(itertools.pairwise(starts))


def concatenated(parts: list[Arrays], sizes: list[int], xp: Any) -> Arrays:
    """The outputs of all micro-batches, one after the other.

    Raises:
        ValueError: An output has not a row for each sample, or the
            micro-batches have different numbers of outputs.
    """
    for arrays, size in zip(parts, sizes, strict=True):
        for array in arrays:
            if array.shape[:1] != (size,):
                raise ValueError(
                    f'an output has shape {array.shape} for a micro-batch of '
                    f'{size}; it must have a row for each sample')
    return tuple(xp.concatenate(column)
                 for column in zip(*parts, strict=True))

"""A batch cut into micro-batches, and options that say where."""
from __future__ import annotations

from typing import Any

#: What ``recompute`` may be, and which chunks it means, by the number of the
#: last chunk.
RECOMPUTE = {
    'no stage': lambda last: frozenset(),
    'every stage': lambda last: frozenset(range(last + 1)),
    'every stage but the last': lambda last: frozenset(range(last)),
}


def recomputed(recompute: Any, last: int) -> frozenset[int]:
    """The chunks that keep their inputs only.

    Args:
        recompute: A key of :data:`RECOMPUTE`; True and False mean the second
            and the first.  Or a tuple that says of each chunk whether it
            does.
        last: The number of the last chunk.

    Raises:
        ValueError: It is something else.
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
    found, start = [], 0
    for number in range(micro_batches):
        end = start + short + (number < longer)
        found.append((start, end))
        start = end
    return found

"""Cuts a row of layers into parts of nearly equal cost."""
from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from fractions import Fraction


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """How many consecutive layers each part gets.

    The largest sum of costs over the parts is as small as it can be.  Of
    all cuts with that largest sum, the one with the smallest sum of squares
    of all parts' sums is taken, and of these the one with the smallest sum
    of squares of the counts, so that parts are as even as possible.  Sums
    are exact: the same costs give the same cut on every machine.

    Args:
        costs: Of each layer; not negative, of any unit.
        parts: How many parts; each gets one layer at least.

    Returns:
        Numbers of layers, which sum to ``len(costs)``.

    Raises:
        ValueError: There are fewer layers than parts, no part, or a cost is
            negative or not finite.
    """
    if parts < 1:
        raise ValueError(f'there must be 1 part or more, not {parts}')
    if len(costs) < parts:
        raise ValueError(f'{len(costs)} layers cannot be cut into {parts} '
                         'parts of one layer or more')
    sums = [0, *itertools.accumulate(_whole_numbers(costs))]
    return _evenest(sums, parts, _smallest_bound(sums, parts))


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs times a number that makes them all integers."""
    fractions = []
    for layer, cost in enumerate(costs):
        try:
            exact = (int(cost) if isinstance(cost, numbers.Integral)
                     else float(cost))
            fractions.append(Fraction(exact))
        except (OverflowError, ValueError):     # infinite or not a number
            fractions.append(Fraction(-1))
        if fractions[-1] < 0:
            raise ValueError(f'the cost of layer {layer} is {cost}; it must '
                             'be finite and not negative')
    # Denominators of floating-point numbers are powers of two.
    scale = max(fraction.denominator for fraction in fractions)
    return [int(fraction * scale) for fraction in fractions]


def _smallest_bound(sums: list[int], parts: int) -> int:
    """The least possible largest sum, by halving the range it lies in."""
    low, high = 0, sums[-1]
    while low < high:
        bound = (low + high) // 2
        if _parts_needed(sums, bound) <= parts:
            high = bound
        else:
            low = bound + 1
    return low


def _parts_needed(sums: list[int], bound: int) -> int:
    """The number of parts if none may cost more than ``bound``."""
    needed, start = 1, 0
    for end in range(1, len(sums)):
        if sums[end] - sums[end - 1] > bound:
            return len(sums)            # one layer alone costs more
        if sums[end] - sums[start] > bound:
            needed, start = needed + 1, end - 1
    return needed


def _evenest(sums: list[int], parts: int, bound: int) -> list[int]:
    """The counts with the least squares, by dynamic programming.

    After n rounds ``best[end]`` is the least (squares of sums, squares of
    counts, counts) of n parts of the layers before ``end``.
    """
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(parts):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (cost, count, counts) in best.items():
            for end in range(start + 1, len(sums)):
                part = sums[end] - sums[start]
                if part > bound:
                    break
                candidate = (cost + part ** 2, count + (end - start) ** 2,
                             (*counts, end - start))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return list(best[len(sums) - 1][2])

"""In which order buckets are sent while backward passes go on."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..allreduce.executor import PARTS
from ..exchange.buckets import Bucket


class Slice(NamedTuple):
    """A part of a bucket.

    Attributes:
        bucket: The bucket's number.
        until: Where the part ends, in parts of
            :data:`~chainer_fp8pipe.allreduce.executor.PARTS`; it begins
            where the bucket's last one ended.
    """

    bucket: int
    until: int = PARTS


def finished_first(buckets: Sequence[Bucket], finals: Mapping[str, float]
                   ) -> list[Slice]:
    """Buckets in the order in which a backward pass finishes them.

    Args:
        buckets: Whose order is wanted.
        finals: When gradients became final, in seconds, by the parameter's
            name.

    Returns:
        Whole buckets; last come those that were never complete.
    """
    ready = _ready(buckets, finals)
    return [Slice(number) for number in sorted(
        range(len(buckets)), key=lambda number: (ready[number], number))]


def needed_first(buckets: Sequence[Bucket], finals: Mapping[str, float],
                 seconds: Sequence[float], chunks: Sequence[int]
                 ) -> list[Slice]:
    """The order in which the next forward pass waits least.

    A forward pass needs first what the backward pass finishes last.  So at
    any time the bucket travels, of those that are final, that became so
    last, and one that is on its way stops for it (the priorities of
    Jayarajan et al., "Priority-based Parameter Propagation for Distributed
    DNN Training", 2019), though not in the middle of a chunk.  When this will
    be, is reckoned here: ranks must not decide it by themselves, as each
    would decide in its own way.

    Args:
        buckets: Whose order is wanted.
        finals: As for :func:`finished_first`.
        seconds: How long each bucket travels.
        chunks: In how many chunks, at least 1 each.

    Returns:
        Slices; buckets that were never complete come last, as they are.
    """
    ready = _ready(buckets, finals)
    events = sorted((ready[number], number) for number in range(len(buckets))
                    if ready[number] < math.inf)
    sent = [0] * len(buckets)
    final: list[int] = []           # not yet sent; the last one is urgent
    slices: list[Slice] = []
    now: float = 0
    while events or final:
        while events and (events[0][0] <= now or not final):
            time, number = events.pop(0)
            now = max(now, time)
            final.append(number)
        number = final[-1]
        parts = min(chunks[number], PARTS)
        sent[number] += 1
        now += seconds[number] / parts
        if sent[number] == parts:
            final.pop()
        # So that a product with the number of chunks is rounded to these.
        _append(slices, Slice(number, -(-PARTS * sent[number] // parts)))
    return slices + [Slice(number) for number in range(len(buckets))
                     if ready[number] == math.inf]


def _append(slices: list[Slice], part: Slice) -> None:
    """A slice more, or a longer one in the last one's place."""
    if slices and slices[-1].bucket == part.bucket:
        slices.pop()
    slices.append(part)


def _ready(buckets: Sequence[Bucket], finals: Mapping[str, float]
           ) -> list[float]:
    """When each bucket was complete; infinity if never."""
    return [max(finals.get(name, math.inf) for name in names)
            for names in buckets]

"""Which gradients travel together, and in which order."""
# A bucket is what one message exchange is for: small parameters share one, a
# large one has its own.  All ranks must send the same buckets in the same
# order, or they wait for each other for ever; so buckets follow from names
# and sizes alone.
from __future__ import annotations

import re
from collections.abc import Mapping

BucketNames = tuple[str, ...]        # names of parameters


def divide(sizes: Mapping[str, int], limit: int) -> tuple[BucketNames, ...]:
    """Groups parameters into buckets, those of the last layers first.

    Backward passes finish gradients of the last layers first, so these can
    travel first.  A name is all that is known of a parameter's layer, which
    is all of it but its last part: layers are put in the order in which
    people count, ``/l10`` after ``/l2``, and that is reversed.  What is small
    waits for the large one below: by itself, it would take all ranks'
    attention when they have that to compute.

    Args:
        sizes: Elements by the parameter's name; at least 1.
        limit: Bytes of float32 in a bucket.  Small parameters may exceed it,
            by a sixteenth together, and so may one that is larger by itself.
            0: all in one bucket.

    Returns:
        The buckets, in the order in which they are sent.
    """
    # The largest of a layer first, so that small ones come into its bucket.
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    names.sort(key=lambda name: _counted(name.rpartition('/')[0]),
               reverse=True)
    buckets: list[list[str]] = []
    small = limit // 16
    filled = 0      # bytes of the last bucket, limit at most for a parameter
    for name in names:
        size = 4 * sizes[name]
        if not buckets or limit and filled > small and (
                filled + size > limit + small):
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += min(size, limit)
    return tuple(map(tuple, buckets))


def _counted(name: str) -> tuple[list[tuple[str, int]], str]:
    """A key that sorts numbers inside of names by their value."""
    parts = re.findall(r'(\D*)(\d*)', name)
    return [(text, int(number or -1)) for text, number in parts], name

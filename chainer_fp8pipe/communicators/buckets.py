"""Which gradients travel together."""
from __future__ import annotations

import re
from collections.abc import Mapping

Bucket = tuple[str, ...]        # names of parameters


def divide(sizes: Mapping[str, int], limit: int) -> tuple[Bucket, ...]:
    """Groups parameters into buckets, those of the last layers first.

    Backward passes finish gradients of the last layers first, so these can
    travel first.  A name is all that is known of a parameter's layer: names
    are put in the order in which people count, ``/l10`` after ``/l2``, and
    that is reversed.

    Args:
        sizes: Elements by the parameter's name; at least 1.
        limit: Bytes of float32 in a bucket, at most; a parameter that is
            larger has a bucket of its own.  0: all in one bucket.

    Returns:
        The buckets, in the order in which they are sent.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name in sorted(sizes, key=_counted, reverse=True):
        size = 4 * sizes[name]
        if not buckets or limit and filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return tuple(map(tuple, buckets))


def _counted(name: str) -> tuple[list[tuple[str, int]], str]:
    """A key that sorts numbers inside of names by their value."""
    parts = re.findall(r'(\D*)(\d*)', name)
    return [(text, int(number or -1)) for text, number in parts], name

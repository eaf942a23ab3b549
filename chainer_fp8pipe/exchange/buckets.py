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
    travel first.  A name is all that is known of a parameter's layer: names
    are put in the order in which people count, ``/l10`` after ``/l2``, and
    that is reversed.  A layer's parameters go together: a bucket that has one
    of the layer below, too, must wait for that.  Only what is small waits
    for a large layer: by itself, it would take all ranks' attention when
    they have that to compute.  (So a small layer that backward comes to late,
    or never, though its name is the last, holds up the one below.)

    Args:
        sizes: Elements by the parameter's name; at least 1.
        limit: Bytes of float32 in a bucket.  Small parameters may exceed it,
            by a sixteenth together, and so may one that is larger by itself.
            0: all in one bucket.

    Returns:
        The buckets, in the order in which they are sent.
    """
    buckets: list[list[str]] = []
    small = limit // 16
    filled = 0      # bytes of the last bucket, limit at most for a parameter
    for layer in _layers(sizes):
        # The largest first, so that small ones come into its bucket.
        names = sorted(layer, key=lambda name: (-sizes[name], name))
        whole = 4 * sum(sizes[name] for name in names)
        if not buckets or limit and filled > small and filled + whole > limit:
            buckets.append([])
            filled = 0
        for name in names:
            size = 4 * sizes[name]
            if limit and filled > small and filled + size > limit + small:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += min(size, limit)
    return tuple(map(tuple, buckets))


def _layers(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names by layer, which is all of a name but its last part."""
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(name.rpartition('/')[0], []).append(name)
    return [layers[layer]
            for layer in sorted(layers, key=_counted, reverse=True)]


def _counted(name: str) -> tuple[list[tuple[str, int]], str]:
    """A key that sorts numbers inside of names by their value."""
    parts = re.findall(r'(\D*)(\d*)', name)
    return [(text, int(number or -1)) for text, number in parts], name

"""Which gradients travel together, and in which order and when."""
# A bucket is what one message exchange is for: small parameters share one, a
# large one has its own.  All ranks must send the same buckets in the same
# order, or they wait for each other for ever; so buckets follow from names
# and sizes alone, and the order from times that all ranks have averaged.
#
# Two moments decide what overlap earns.  When is a gradient final?  In the
# last of the backward passes before an all-reduce, which Passes predicts from
# the updates before; a wrong guess is noticed, and what was sent is void.
# When is a bucket complete?  That is measured once, and buckets are sent in
# this order.
from __future__ import annotations

import collections
import math
import re
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

BucketNames = tuple[str, ...]        # names of parameters
#: Updates whose number of passes counts.
_KEPT = 10


class Division(NamedTuple):
    """A model's parameters in buckets.

    Attributes:
        sizes: Elements by the parameter's name.
        buckets: See :func:`divide`.
    """

    sizes: Mapping[str, int]
    buckets: tuple[BucketNames, ...]


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


# --- the order in which buckets are sent ---

def send_order(buckets: Sequence[BucketNames], finals: Mapping[str, float]
               ) -> list[int]:
    """Numbers of buckets in the order in which backward finishes them.

    Args:
        buckets: Whose order is wanted.
        finals: When gradients became final, in seconds, by the parameter's
            name; infinity: never.

    Returns:
        All numbers; buckets that were never complete come last.
    """
    return sorted(range(len(buckets)), key=lambda number: max(
        finals.get(name, math.inf) for name in buckets[number]))


# --- when gradients are final ---

class Passes:
    """What one model's backward passes teach about the next ones.

    Between two means of its gradients there may be several passes, whose
    gradients add up; or the loss of a generator goes through a
    discriminator, whose own pass is still to come.  Gradients become final
    only in the last pass.

    Attributes:
        finals: When gradients became final in the last pass, by name, in
            seconds of a clock of this rank.
    """

    def __init__(self) -> None:
        # These three describe the passes since the last mean.
        self._counts: collections.Counter[Hashable] = collections.Counter()
        self._last: Hashable = None
        self.finals: dict[str, float] = {}      # in the last one
        # The others describe the updates before it.
        self._usual: Hashable = None
        self._recent: collections.deque[int] = collections.deque(maxlen=_KEPT)
        self._models: int | None = None
        self._complete = False

    def begin(self, kind: Hashable, models: int) -> bool:
        """A pass begins; returns whether it should be the last.

        Args:
            kind: Passes of the same kind cannot be told apart.
            models: How many models were watched so far; with another one,
                kinds have another meaning.
        """
        self.finals = {}
        if models != self._models:
            if self._models is not None:
                self._usual = None
                self._complete = False
            self._models = models
        self._counts[kind] += 1
        self._last = kind
        return kind == self._usual and (
            self._counts[kind] >= max(self._recent))

    def note(self, name: str) -> None:
        """A gradient is final."""
        self.finals[name] = time.perf_counter()

    def averaged(self) -> None:
        """The gradients have been averaged."""
        if self._complete and self._last is not None:
            if self._last != self._usual:
                self._recent.clear()
            self._usual = self._last
            # An update with fewer passes than usual is no new rule.
            self._recent.append(self._counts[self._last])
        self._counts.clear()
        self._last = None
        self._complete = True

"""Which gradients travel together, and in which order and when."""
# A bucket is what one message exchange is for: small parameters share one, a
# large one has its own.  All ranks must send the same buckets in the same
# order, or they wait for each other for ever; so buckets follow from names
# and sizes alone, and the order from times that all ranks have averaged.
#
# Three moments decide what overlap earns.  When is a gradient final?  In the
# last of the backward passes before an all-reduce, which Passes predicts from
# the updates before; a wrong guess is noticed, and is an error in words, never
# a wrong sum.  When is a bucket complete?  That is measured, as it depends on
# the exchange beside it.  When is its mean wanted?  By
# the next forward pass, which begins where backward ends: so the bucket that
# is final last is the most urgent one, and interrupts what is on its way
# (send_order).  Buckets are cut into slices for that, 64 at most.
#
# Measured at 4 hosts and 500 Mbit/s, ms for a training step: blocking 155.2,
# overlap=True 146.8, next_forward 133.8; without the urgent order
# 144.4.  Ranks that decided the order by themselves would save a sum of some
# numbers every few updates, and would decide differently.
from __future__ import annotations

import collections
import math
import re
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence

from ..allreduce.engine import PARTS

BucketNames = tuple[str, ...]        # names of parameters
#: A part of a bucket: the bucket's number, and where the part ends, in parts
#: of PARTS; it begins where the bucket's last one ended.
Slice = tuple[int, int]

#: Updates with early buckets before their times are used for a new order; the
#: next time after twice as many, and so on.
FIRST = 5
#: Updates whose times count, the last ones.
KEPT = 20


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

def send_order(buckets: Sequence[BucketNames], finals: Mapping[str, float],
               seconds: Sequence[float] = (), chunks: Sequence[int] = ()
               ) -> list[Slice]:
    """The order in which the next forward pass waits least.

    A forward pass needs first what the backward pass finishes last.  So of
    the final buckets the last one travels first, and interrupts a bucket that
    is on its way, between two chunks (the priorities of Jayarajan et al.,
    "Priority-based Parameter Propagation for Distributed DNN Training",
    2019).

    Args:
        buckets: Whose order is wanted.
        finals: When gradients became final, in seconds, by the parameter's
            name.
        seconds: How long each bucket travels; (): the next pass waits for
            all, so that whole buckets travel as backward finishes them.
        chunks: In how many chunks each travels, at least 1.

    Returns:
        Slices; buckets that were never complete come last, as they are.
    """
    ready = [max(finals.get(name, math.inf) for name in names)
             for names in buckets]
    events = sorted((moment, number) for number, moment in enumerate(ready)
                    if moment < math.inf)
    never = [(number, PARTS) for number, moment in enumerate(ready)
             if moment == math.inf]
    if not seconds:
        return [(number, PARTS) for _, number in events] + never
    sent = [0] * len(buckets)
    final: list[int] = []           # not yet sent; the last one is urgent
    slices: list[Slice] = []
    now: float = 0
    while events or final:
        while events and (events[0][0] <= now or not final):
            moment, number = events.pop(0)
            now = max(now, moment)
            final.append(number)
        number = final[-1]
        parts = min(chunks[number], PARTS)
        sent[number] += 1
        now += seconds[number] / parts
        if sent[number] == parts:
            final.pop()
        if slices and slices[-1][0] == number:
            slices.pop()            # one longer slice in its place
        # Rounded up, so that compiled code finds the same number of chunks.
        slices.append((number, -(-PARTS * sent[number] // parts)))
    return slices + never


# --- when gradients are final ---

class Passes:
    """What one model's backward passes teach about the next ones.

    Between two means of its gradients there may be several passes, whose
    gradients add up; or the loss of a generator goes through a
    discriminator, whose own pass is still to come.  Gradients become final
    only in the last pass.

    A pass takes longer beside an exchange than without one, by an amount that
    depends on the order of buckets.  With times that are too short, the wire
    stands idle until a bucket is complete; so the times are measured, and the
    order chosen, more than once.
    """

    def __init__(self) -> None:
        # These three describe the passes since the last mean.
        self._counts: collections.Counter[Hashable] = collections.Counter()
        self._last: Hashable = None
        self._finals: dict[str, float] = {}     # in the last one
        # The others describe the updates before it.
        self._usual: Hashable = None
        self._often = 0
        self._models: int | None = None
        self._complete = False
        self._kept: collections.deque[Mapping[str, float]] = (
            collections.deque(maxlen=KEPT))
        self._updates, self._next = 0, FIRST

    def begin(self, kind: Hashable, models: int) -> bool:
        """A pass begins; returns whether it should be the last.

        Args:
            kind: Passes of the same kind cannot be told apart.
            models: How many models were watched so far; with another one,
                kinds have another meaning.
        """
        self._finals = {}
        if models != self._models:
            if self._models is not None:
                self._usual = None
                self._complete = False
            self._models = models
        self._counts[kind] += 1
        self._last = kind
        return kind == self._usual and self._counts[kind] >= self._often

    def note(self, name: str) -> None:
        """A gradient is final."""
        self._finals[name] = time.perf_counter()

    def averaged(self) -> None:
        """The gradients have been averaged."""
        if self._complete and self._last is not None:
            often = self._counts[self._last]
            if self._last == self._usual:
                # An update with fewer passes than usual is no new rule.
                often = max(often, self._often)
            self._usual, self._often = self._last, often
        self._counts.clear()
        self._last = None
        self._complete = True

    def keep(self, early: bool) -> bool:
        """Remembers the times of the last pass before a mean.

        Args:
            early: Buckets were sent while the pass went on.

        Returns:
            Whether to choose a new order: after each update without early
            buckets, and after :data:`FIRST`, twice, four times, ... as many
            with early buckets.
        """
        if not early or not self._updates:
            self._kept.clear()
        first = min(self._finals.values(), default=0.0)
        self._kept.append({name: moment - first
                           for name, moment in self._finals.items()})
        if not early:
            self._updates, self._next = 0, FIRST
            return True
        self._updates += 1
        if self._updates < self._next:
            return False
        self._next *= 2
        return True

    def usual(self, names: Sequence[str]) -> list[float]:
        """Medians, in seconds after the first gradient; infinity: never."""
        return [statistics.median_high(times.get(name, math.inf)
                                       for times in self._kept)
                for name in names]

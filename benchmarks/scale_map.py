"""Which kind of training is fastest where, for ``planning_scale``."""
from __future__ import annotations

from typing import Any, NamedTuple

from scale_steps import Kind

RING = Kind('float32', 'ring', 1)


class Cell(NamedTuple):
    """The fastest kind of one model on one cluster.

    Attributes:
        model: Its name.
        ranks: How many.
        gigabits: Of a link, per second.
        kind: The simplest of the fastest ones.
        seconds: Of its step.
        over_ring: Seconds of a float32 ring, over these; of the best
            pipelines that use one where a whole model has no room.
        gains: Seconds of the best kind with another codec, algorithm or cut,
            over these; None where there is no other.
        switch: Seconds where the switch sums, with the best codec, under
            these; None: no room.
    """

    model: str
    ranks: int
    gigabits: float
    kind: Kind
    seconds: float
    over_ring: float
    gains: dict[str, float | None]
    switch: float | None

    @property
    def cut(self):
        """Stages x replicas."""
        return f'{self.kind.stages}x{self.ranks // self.kind.stages}'


def cell(steps, model, ranks, gigabits, tolerance):
    """The cell of a model, ranks and a rate."""
    rate = gigabits * 1.25e8
    found = {kind: seconds for kind in steps.kinds(model, ranks)
             if (seconds := steps.seconds(model, ranks, rate, kind))}
    kind = winner(found, tolerance)
    switch = min((seconds for codec in steps.codecs
                  if (seconds := steps.with_switch(model, ranks, rate,
                                                   codec))), default=None)
    return Cell(model.name, ranks, gigabits, kind, found[kind],
                ring_seconds(found) / found[kind], gains(found, kind),
                switch and found[kind] / switch)


def winner(found, tolerance):
    """The first kind that is within a tolerance of the fastest.

    Args:
        found: Seconds by kind, the simplest kind first.
        tolerance: Share of the seconds.
    """
    limit = min(found.values()) * (1 + tolerance)
    return next(kind for kind, seconds in found.items() if seconds <= limit)


def gains(found, kind):
    """By how much a kind is faster than the best that differs.

    Returns:
        For codec, algorithm and cut: the seconds of the fastest kind that is
        of another one, over the kind's own.  Cuts are two: replicas only, and
        stages.
    """
    def of(name: str, other: Kind) -> Any:
        return other.stages > 1 if name == 'cut' else getattr(other, name)

    result: dict[str, float | None] = {}
    for name in ('codec', 'algorithm', 'cut'):
        others = [seconds for other, seconds in found.items()
                  if of(name, other) != of(name, kind)]
        result[name] = min(others) / found[kind] if others else None
    return result


def ring_seconds(found):
    """Seconds of a float32 ring of replicas, or of the best pipelines'."""
    if RING in found:
        return found[RING]
    return min((seconds for kind, seconds in found.items()
                if kind[:2] == RING[:2]), default=min(found.values()))

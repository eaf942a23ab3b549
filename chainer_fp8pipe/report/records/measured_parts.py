"""The parts of a step that plans predict, as they were measured."""
from __future__ import annotations

from collections.abc import Iterable

from .run_record import RankInterval

#: By part, as plans name them, the phases that it is made of.
PHASES_OF_PARTS = {
    'forward and backward': ('forward', 'recompute', 'backward',
                             'backward_weight'),
    'waiting for stages': ('send', 'receive'),
    'exchange': ('encode', 'exchange', 'decode'),
    'update': ('update',),
    'other': ('input', 'other', 'between')}


def measured_parts(intervals: Iterable[RankInterval]) -> dict[str, float]:
    """Seconds of a step by part, in the newest interval; {} without one.

    Args:
        intervals: Of all ranks in one start; the rank that takes longest
            counts.
    """
    found = list(intervals)
    if not found:
        return {}
    newest = max(interval.last for interval in found)
    slowest = max((interval for interval in found if interval.last == newest),
                  key=lambda interval: interval.step.median)
    parts = {part: sum(slowest.phases.get(name, 0.0) for name in phases)
             for part, phases in PHASES_OF_PARTS.items()}
    return {part: seconds for part, seconds in parts.items() if seconds}

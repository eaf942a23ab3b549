"""How long computations take that all ranks of a job do at once."""
from __future__ import annotations

import statistics
from collections import Counter

from .job_profile import JobProfile


def slowest(profile: JobProfile) -> float:
    """How many times as long as the median the rank takes that comes last."""
    return max(profile.speeds, default=1.0) * profile.straggling


def together(profile: JobProfile, seconds: float) -> float:
    """Seconds until the last rank has done what takes so many alone."""
    cores = profile.cores
    return seconds * slowest(profile) * max(
        cores.slowdown(pool, cores.pools.count(pool))
        for pool in set(cores.pools))


def per_rank(profile: JobProfile) -> float:
    """Seconds of the processor that a rank gets per second, on average.

    While all ranks compute, which none does faster than alone.
    """
    cores = profile.cores
    return statistics.fmean(
        1 / max(cores.single, cores.slowdown(pool, size))
        for pool, size in Counter(cores.pools).items()
        for _ in range(size))

"""A step of several pipelines whose ranks share cores.

Ranks that share cores are the slower the more of them compute at a time: a
schedule with idle ranks loses less by that than one without.
"""
from __future__ import annotations

from collections.abc import Sequence

from ...pipeline.schedules.actions import Schedule
from ..cluster import Cluster
from ..cores import Cores
from ..deadlock import Deadlock
from ..engine import Engine
from .simulator import Costs, Link, add_pipeline


def shared_step(schedule: Schedule, costs: Sequence[Costs], link: Link,
                ranks: Sequence[Sequence[int]], cores: Cores) -> float:
    """Seconds of a step of all replicas, without exchange and update.

    Args:
        schedule: Of each pipeline.
        costs: Processor time, one per chunk of the whole model.
        link: From each rank to each other one.
        ranks: ``ranks[stage][replica]`` is the rank there.
        cores: Of the ranks.

    Raises:
        ValueError: The ranks wait for each other forever.
    """
    engine = Engine(Cluster.pairs(len(cores.pools), link.bandwidth,
                                  link.latency), cores)
    programs = [program for column in zip(*ranks, strict=True)
                for program in add_pipeline(
                    engine, schedule, costs, link.message_bytes,
                    ranks=column, overlapped=link.overlapped)]
    try:
        engine.run()
    except Deadlock:
        raise ValueError(
            'the ranks of this schedule wait for each other') from None
    return max(program.ended for program in programs)

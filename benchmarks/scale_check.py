"""Estimates of exchanges beside their simulations, for ``planning_scale``."""
from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

from chainer_fp8pipe.allreduce.plan import (
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
)
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.demand import (
    aggregator_demand,
    compose_demand,
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.prediction import estimate
from chainer_fp8pipe.planning.allreduce.simulation import simulate
from chainer_fp8pipe.planning.cluster import Cluster

#: Actions of all ranks, of which a simulation of some seconds has so many.
MOST = 100_000


def _two_level(edge):
    return (compose(direct(edge), direct(edge),
                    lambda member, group: edge * group + member, True),)


#: Plans and demands by the edge of a square of ranks.
PAIRS: dict[str, Any] = {
    'direct': (lambda edge: (direct(edge ** 2),),
               lambda edge: (direct_demand(edge ** 2),)),
    'ring': (lambda edge: (ring(edge ** 2),),
             lambda edge: (ring_demand(edge ** 2),)),
    'torus2d': (lambda edge: torus2d(edge, edge),
                lambda edge: torus2d_demand(edge, edge)),
    'torus2d, wired': (lambda edge: torus2d(edge, edge),
                       lambda edge: torus2d_demand(edge, edge)),
    'two-level': (_two_level, lambda edge: (compose_demand(
        direct_demand(edge), direct_demand(edge), True),)),
    'aggregator': (lambda edge: (aggregator(edge ** 2 - edge, edge),),
                   lambda edge: (aggregator_demand(edge ** 2 - edge, edge),)),
}


class Case(NamedTuple):
    """An exchange, and the estimate over the simulation of its seconds."""

    algorithm: str
    ranks: int
    codec: str
    gigabits: float
    latency: float
    elements: int
    frame_bytes: int
    simulated: float
    ratio: float


def cases(codecs, count, seed=0):
    """So many random exchanges of up to 64 ranks.

    Args:
        codecs: Costs by name.
        count: How many.
        seed: Of the random numbers.
    """
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        case = _case(rng, codecs)
        if case:
            found.append(case)
    return found


def _case(rng, codecs):
    """A random exchange; None if its simulation would take too long."""
    algorithm = rng.choice([*PAIRS])
    edge = rng.choice([2, 3, 4, 5, 6, 8])
    codec = rng.choice([*codecs])
    gigabits = rng.choice([0.1, 1, 10, 25, 100, 400])
    latency = rng.choice([1e-6, 1e-5, 1e-4])
    elements = rng.choice([10_000, 100_000, 1_000_000, 25_000_000])
    frame = rng.choice([24 << 10, 256 << 10, 2 << 20])
    plans, demands = (make(edge) for make in PAIRS[algorithm])
    costs: CodecCosts = codecs[codec]
    chunks = elements * costs.wire_bytes / plans[0].blocks / frame
    actions = sum(len(plan.actions(rank)) for plan in plans
                  for rank in range(plan.ranks))
    if max(chunks / len(plans), 1) * actions > MOST:
        return None
    cluster = Cluster(
        range(edge ** 2), gigabits * 1.25e8, latency, message_cost=1e-6,
        torus=(edge, edge) if algorithm.endswith('wired') else None)
    framing = {'frame_bytes': frame, 'frames_in_flight': 8}
    simulated = simulate(plans, cluster, costs, elements, **framing).seconds
    return Case(algorithm, edge ** 2, codec, gigabits, latency, elements,
                frame, simulated,
                estimate(demands, cluster, costs, elements,
                         **framing).seconds / simulated)


def summary(found):
    """By algorithm, and of all: number, median, least, most, beyond 10 %."""
    rows = []
    for name in (*dict.fromkeys(case.algorithm for case in found), 'all'):
        ratios = [case.ratio for case in found
                  if name in (case.algorithm, 'all')]
        rows.append((name, len(ratios), statistics.median(ratios),
                     min(ratios), max(ratios),
                     sum(abs(ratio - 1) > 0.1 for ratio in ratios)))
    return rows

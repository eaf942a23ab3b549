"""Some replicas in place of all: large jobs repeat themselves.

Where hosts are alike and replicas do the same, what happens on one host
happens on all of them at the same time.  So a simulation needs the programs of
the first hosts only: a message that one of these sends to another host stands
for the one that it gets from elsewhere at that moment.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...allreduce.plan import Opcode, Plan
from ...mpi.placement import divisors
from ..cluster import Cluster, Hop
from ..cores import Cores
from .job_profile import JobProfile

#: Ranks of jobs in which no host is taken to be as slow as another one.
_FEW = 16


@dataclasses.dataclass(frozen=True)
class FoldedCluster(Cluster):
    """A cluster whose hosts stand for others that are like them.

    Attributes:
        stands_in: For each host, the one in whose place a message arrives.
    """

    stands_in: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def route(self, source: int, target: int) -> tuple[Hop, ...]:
        """The links from a rank that has programs to any rank."""
        ports: dict[Any, Any] = {
            ('in', host): ('in', other)
            for host, other in self.stands_in.items()}
        return tuple(hop._replace(link=ports.get(hop.link, hop.link))
                     for hop in super().route(source, target))


class Fold(NamedTuple):
    """The replicas that are simulated.

    Attributes:
        period: How many: replica r does what replica ``r % period`` does.
        cluster: The links of these.
        cores: Their cores.
        speeds: For each rank, how many times as long as the median it takes;
            of those that do the same, the slowest counts.
    """

    period: int
    cluster: Cluster
    cores: Cores
    speeds: tuple[float, ...]


def fold(profile: JobProfile, grid: Sequence[Sequence[int]],
         plans: Sequence[Sequence[Plan]] = ()) -> Fold:
    """The fewest replicas that stand for all.

    Jobs of few ranks whose cores or speeds differ are simulated whole.

    Args:
        profile: Of the job.
        grid: ``grid[stage][replica]`` is the rank there.
        plans: For each stage, those of its replicas' exchange.
    """
    replicas = len(grid[0])
    speeds = profile.speeds or (1.0,) * profile.ranks
    whole = Fold(replicas, profile.network.cluster(), profile.cores, speeds)
    differ = len({*profile.cores.full}) > 1 or len({*speeds}) > 1
    if differ and profile.ranks <= _FEW or profile.network.torus:
        return whole
    for period in divisors(replicas)[:-1]:
        hosts = _images(profile.network.hosts, grid, period)
        pools = _images(profile.cores.pools, grid, period)
        if hosts and pools and _apart(profile, grid, period) and all(
                _repeats(plan, period) for of in plans for plan in of):
            return _folded(profile, grid, period, hosts, speeds)
    return whole


def _images(of: Sequence[int], grid: Sequence[Sequence[int]], period: int
            ) -> dict[int, int]:
    """Which number of a host or pool stands for which; {}: they differ.

    Args:
        of: For each rank, the number of its host or pool.
        grid: The ranks by stage and replica.
        period: Replicas that stand for all.
    """
    found: dict[int, int] = {}
    after: dict[int, int] = {}
    for row in grid:
        for replica, rank in enumerate(row):
            following = row[(replica + period) % len(row)]
            if after.setdefault(of[rank], of[following]) != of[following]:
                return {}
            found.setdefault(of[rank], of[row[replica % period]])
    return found if len(set(after.values())) == len(after) else {}


def _apart(profile: JobProfile, grid: Sequence[Sequence[int]], period: int
           ) -> bool:
    """Whether others that are like these ranks have ports of their own."""
    hosts = profile.network.hosts
    if len(set(hosts)) == 1:
        return True
    mine = {hosts[rank] for row in grid for rank in row[:period]}
    return mine.isdisjoint(
        hosts[rank] for row in grid for rank in row[period:])


def _shape(plan: Plan, rank: int) -> tuple[tuple[Opcode, int, int], ...]:
    """What a rank does, with peers counted from itself."""
    return tuple(
        (kind, peer if kind is Opcode.ENCODE else (peer - rank) % plan.ranks,
         stop - start) for kind, peer, start, stop in plan.actions(rank))


def _repeats(plan: Plan, period: int) -> bool:
    """Whether each rank does what the one ``period`` before it does."""
    first = [_shape(plan, rank) for rank in range(period)]
    return all(_shape(plan, rank) == first[rank % period]
               for rank in range(period, plan.ranks))


def _folded(profile: JobProfile, grid: Sequence[Sequence[int]], period: int,
            hosts: Mapping[int, int], speeds: Sequence[float]) -> Fold:
    network, cores = profile.network, profile.cores
    cluster = network.cluster()
    fields = {field.name: getattr(cluster, field.name)
              for field in dataclasses.fields(cluster)}
    # What all hosts share carries the messages of those not simulated, too.
    fields['trunk'] *= period / len(grid[0])
    nobody = max(cores.pools) + 1       # of ranks that have no programs
    pools, slowest = [nobody] * profile.ranks, list(speeds)
    full = [*(cores.full or (1.0,) * nobody), 1.0]
    for row in grid:
        for replica, rank in enumerate(row):
            mine = row[replica % period]
            pool = pools[mine] = cores.pools[mine]
            slowest[mine] = max(slowest[mine], speeds[rank])
            full[pool] = max(full[pool], full[cores.pools[rank]])
    return Fold(period, FoldedCluster(**fields, stands_in=hosts),
                Cores(tuple(pools), cores.single, tuple(full)),
                tuple(slowest))

"""The exchange of gradients of a configuration: plans, costs, programs."""
from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...allreduce.plan import LEVELS, Plan, torus2d, two_level
from ...mpi.placement import torus_shape
from ..allreduce.codec_costs import StepCosts
from ..allreduce.simulation import add_exchange
from ..cluster import Cluster
from ..cores import Cores
from ..engine import Engine
from .codec_choice import (
    BUCKET_BYTES,
    FRAME_BYTES,
    FRAMES_IN_FLIGHT,
    codec_costs,
    seconds_beside,
)
from .configuration import Configuration
from .folding import fold
from .job_profile import JobProfile

#: Chunks of the two short exchanges from which long ones are extrapolated:
#: after the first ones, which fill the pipe, and use up what links pass at
#: once, each chunk takes as long as the one before.
_SHORT, _LONGER = 24, 48
#: Messages that one simulation may have.
_MESSAGES = 40_000


class ExchangeTime(NamedTuple):
    """How long an exchange takes.

    Attributes:
        seconds: Until the last rank has its means.
        link: Seconds of these for which the busiest link is busy.
        rank: Seconds of these for which the busiest rank is busy.
    """

    seconds: float
    link: float
    rank: float


@functools.lru_cache(256)
def plans_of(algorithm: str, options: tuple[tuple[str, Any], ...],
             hosts: tuple[int, ...]) -> tuple[Plan, ...]:
    """The plans of an all-reduce, as communicators make them.

    Args:
        algorithm: Of the communicator.
        options: Further options of the communicator, as items.
        hosts: For each rank of the group, the number of its host.

    Raises:
        ValueError: The algorithm does not fit these ranks.
    """
    given, count = dict(options), len(hosts)
    nodes = [[rank for rank in range(count) if hosts[rank] == host]
             for host in dict.fromkeys(hosts)]
    sizes = {len(node) for node in nodes}
    if algorithm == 'torus2d':
        each = len(nodes[0]) if len(sizes) == 1 else 0
        rows, columns = given.get('shape') or torus_shape(count, each)
        if rows * columns != count:
            raise ValueError(f'a torus of {rows}x{columns} has no {count} '
                             'ranks')
        if 1 in (rows, columns):
            return (LEVELS['ring'](count),)
        return torus2d(rows, columns, [rank for node in nodes
                                       for rank in node])
    level = LEVELS[algorithm]
    levels = given.get('two_level', 'auto')
    if levels != 'no' and len(sizes) == 1 and len(nodes) > 1 and (
            sizes != {1}):
        return (two_level('direct', level(len(nodes)), nodes),)
    return (level(count),)


class Exchange:
    """The all-reduce of a configuration on a profile's links.

    Args:
        profile: What was measured.
        configuration: Names codec, algorithm and options.
    """

    def __init__(self, profile: JobProfile, configuration: Configuration
                 ) -> None:
        self._configuration = configuration
        self._profile = profile
        self.codec = codec_costs(
            profile.codecs[configuration.codec], configuration.codec,
            configuration.algorithm,
            configuration.options.get('partial_sums', 'auto'))
        self._options = tuple(sorted(configuration.options.items()))
        self._known: dict[Any, ExchangeTime] = {}

    def plans(self, ranks: Sequence[int]) -> tuple[Plan, ...]:
        """The plans of a group of ranks."""
        hosts = self._profile.network.hosts
        return plans_of(self._configuration.algorithm, self._options,
                        tuple(hosts[rank] for rank in ranks))

    def by_hosts(self) -> list[int]:
        """All ranks; host by host where this changes nothing but numbers."""
        hosts, given = self._profile.network.hosts, self._options
        ranks, sizes = range(len(hosts)), Counter(hosts)
        if (len(set(sizes.values())) > 1 or len(sizes) in (1, len(hosts))
                or {'shape', 'two_level'} & {name for name, _ in given}):
            return list(ranks)
        # Plans of two levels are made of nodes, in this order.
        order = list(sizes)
        return sorted(ranks, key=lambda rank: order.index(hosts[rank]))

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame on the wire."""
        return self._configuration.options.get('frame_bytes', FRAME_BYTES)

    def add(self, engine: Engine, cluster: Cluster, ranks: Sequence[int],
            elements: int, after: Any, on: Sequence[int] | None = None,
            chunks: int = 64, period: int | None = None) -> list[Any]:
        """Adds the exchange of a group to an engine; the programs.

        Frames are joined so that there are few, which cost as much as they
        would one by one.

        Args:
            engine: Before it runs.
            cluster: Of the engine.
            ranks: Of the group.
            elements: Of the gradients.
            after: As for :func:`.add_exchange`.
            on: The engine's ranks, if others than ``ranks``.
            chunks: At most so many.
            period: As for :func:`.add_exchange`.
        """
        plans = self.plans(ranks)
        frame = self.codec.frame(self.frame_bytes)
        most = max(1, elements // (len(plans) * plans[0].blocks))
        joined = max(1.0, most / frame / chunks)
        costs = StepCosts(_dearer(cluster, joined), self.codec)
        return add_exchange(
            engine, plans, costs, elements,
            frame_bytes=(frame * joined + 1) * self.codec.wire_bytes,
            frames_in_flight=FRAMES_IN_FLIGHT,
            ranks=ranks if on is None else on, after=after, period=period)

    def seconds(self, ranks: Sequence[int], elements: int) -> ExchangeTime:
        """How long an exchange takes that nothing else disturbs.

        Long ones are extrapolated from two short ones.
        """
        plans = self.plans(ranks)
        frame = self.codec.frame(self.frame_bytes)
        # Elements of a chunk of all plans.
        whole = frame * plans[0].blocks * len(plans)
        messages = sum(len(plan.actions(rank)) for plan in plans
                       for rank in range(plan.ranks)) / 2
        longer = int(min(max(_MESSAGES / max(messages, 1),
                             2 * FRAMES_IN_FLIGHT + 2), _LONGER))
        short = longer // 2
        if elements <= longer * whole:
            return self._simulated(tuple(ranks), elements)
        first, second = (self._simulated(tuple(ranks), count * whole)
                         for count in (short, longer))
        more = (elements / whole - longer) / (longer - short)
        return ExchangeTime(*(
            two + (two - one) * more
            for one, two in zip(first, second, strict=True)))

    def seconds_beside(self, stages: int) -> float:
        """Agreement, waking up, and Python for each tensor and bucket.

        Args:
            stages: Over which the model's parameters are spread.
        """
        model = self._profile.model
        return seconds_beside(
            self._profile.codecs[self._configuration.codec],
            len(model.parameters) // stages,
            max(1, 4 * model.elements // stages // BUCKET_BYTES))

    def _simulated(self, ranks: tuple[int, ...], elements: int
                   ) -> ExchangeTime:
        if (ranks, elements) not in self._known:
            plans = self.plans(ranks)
            folded = fold(self._profile, [ranks], [plans])
            engine = Engine(folded.cluster, folded.cores)
            add_exchange(
                engine, plans, StepCosts(folded.cluster, self.codec),
                elements, frame_bytes=self.frame_bytes,
                frames_in_flight=FRAMES_IN_FLIGHT, ranks=ranks,
                period=folded.period)
            engine.run()
            self._known[ranks, elements] = ExchangeTime(
                engine.seconds, engine.link_seconds, engine.rank_seconds)
        return self._known[ranks, elements]


class Exchanges:
    """The exchanges of a job, the same one for equal communicators.

    Args:
        profile: What was measured.
    """

    def __init__(self, profile: JobProfile) -> None:
        self._profile = profile
        self._known: dict[Any, Exchange] = {}

    def of(self, configuration: Configuration) -> Exchange:
        """That of a configuration."""
        key = (configuration.codec, configuration.algorithm,
               tuple(sorted(configuration.options.items())))
        if key not in self._known:
            self._known[key] = Exchange(self._profile, configuration)
        return self._known[key]


def _dearer(cluster: Cluster, factor: float) -> Cluster:
    """A message that stands for several costs as much as these."""
    return dataclasses.replace(
        cluster, message_cost=cluster.message_cost * factor)


def doubled(cluster: Cluster, cores: Cores) -> tuple[Cluster, Cores]:
    """Each rank with a second one on the same cores: its exchange's thread.

    Rank r's thread is rank ``count + r``.
    """
    full = cores.full or (1.0,) * (max(cores.pools) + 1)
    return (dataclasses.replace(cluster, hosts=(*cluster.hosts,
                                                *cluster.hosts)),
            Cores((*cores.pools, *cores.pools), cores.single,
                  tuple(2 * each for each in full)))

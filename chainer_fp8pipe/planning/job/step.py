"""How long an update takes, by a formula; it ranks the ways to run a job."""
# What makes a real update slow is mostly what no model of messages sees:
# reading the data, a thread that competes for the interpreter, other load,
# caches.  A simulation of every message on every link chose the same ways as
# this formula (of 93 jobs within 2 % in 91 %, and the best of the formula's
# first five in 98 %; of 39 jobs that were measured in all), was wrong by as
# much where it mattered (2 to 90 times), and took 2,300 lines.  So the formula
# ranks, the first ways are run on copies of the real thing, and the choice is
# what was measured there (planner.trials).
#
# What goes into the formula is measured as it is used: passes of the model in
# training; how much longer they take where all ranks compute at once, which
# has shared cores, slow ranks and stragglers in it; means of gradients by real
# communicators of the very ranks that would form them, at two sizes, all
# groups at a time; links between the ranks that would be neighbours.
#
# Replicas do passes, exchange, update, one after the other.  With overlap, the
# last layers' gradients are ready first, and are exchanged one after the other
# while others are computed: the exchange ends at
#     max over calls k of (t_k + what is exchanged from call k on),
# but no earlier than the rank has had the processor for both.  With
# overlap='next_forward' steps follow each other, and a call's parameters must
# have made their way once around within a step: computed, exchanged, updated,
# needed again.
#
# A pipeline's step is that of its schedule where stages have cores of their
# own (planning.schedule_time); where they share cores, it is no shorter than
# all their work at the speed that was measured with all ranks at work, and
# half of what a stage alone would wait for others is added to that.
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...mpi.placement import place
from ..partition.cuts import CutProblem, chunk_costs
from ..partition.partition_plan import PartitionPlan, ends_of
from ..schedule_time import Costs, Link, step_time
from .job_plan import Configuration
from .model_costs import ModelCosts, ModelFigures

#: Seconds in which Python packs and unpacks a message between stages, and in
#: which a stage passes by a call of another stage.
_PACKING, _GHOST = 5e-5, 8e-6
#: Seconds of an update that the exchange's thread, and waiting in the next
#: forward pass, cost besides.
_THREAD = {False: 0.0, True: 3e-4, 'next_forward': 6e-4}
#: Of the time that a stage alone would wait, what cores that it shares with
#: others do not fill.
_UNFILLED = 0.5
#: Bytes of an element on the wire, by the communicator's name.
WIRE_BYTES = {'fp8': 1, 'int4': 17 / 32, 'int5': 21 / 32, 'float16': 2,
              'float32': 4}


class ExchangeFigures(NamedTuple):
    """A mean of gradients, until the last rank has it.

    Attributes:
        replicas: Ranks that it was measured with.
        fixed: Seconds of the mean of nothing.
        element: Seconds of each element.
        processor: Of these, seconds in which a rank encodes, adds, decodes.
    """

    replicas: int
    fixed: float
    element: float
    processor: float = 0.0

    def of(self, elements: float) -> float:
        """Seconds of a mean of so many elements."""
        return self.fixed + self.element * elements

    def on_paper(self, codec: str, replicas: int, rate: float | None = None
                 ) -> ExchangeFigures:
        """The mean of another number of ranks, each on a host of its own.

        Every rank sends and receives 2 (r - 1) / r elements for each element
        of its gradients, whatever the algorithm; agreement takes
        log2(r) rounds.

        Args:
            codec: Name of the communicator.
            replicas: How many ranks, r.
            rate: Bytes per second of a host's link, in each direction; None:
                what was measured.
        """
        def sent(ranks: int) -> float:
            return 2 * (ranks - 1) / ranks
        if replicas == 1 or self.replicas == 1:
            return self._replace(replicas=replicas)
        wire = max(self.element - self.processor, 0.0)
        wire *= sent(replicas) / sent(self.replicas)
        if rate is not None:
            wire = sent(replicas) * WIRE_BYTES[codec] / rate
        rounds = math.log2(replicas) / math.log2(self.replicas)
        return ExchangeFigures(replicas, self.fixed * rounds,
                               self.processor + wire, self.processor)


class LinkFigures(NamedTuple):
    """The slowest link between neighbouring stages.

    Attributes:
        latency: Seconds of a short message.
        rate: Bytes per second.
    """

    latency: float = 0.0
    rate: float = math.inf


@dataclass(frozen=True)
class JobProfile:
    """All that was measured of a job.

    Attributes:
        model: The model.
        hosts: For each rank, the number of its host.
        pools: For each rank, the number of the pool of cores it runs on.
        slowdown: For each rank, how many times as long a pass takes where
            all ranks compute at once as on the first rank alone.
        speeds: For each rank, the same by the processor's time, so that
            ranks which share cores are no reason.
        exchanges: By the number of stages, the codec and the algorithm.
        links: By the number of stages.
        spare: Whether each rank has a core for its exchange's thread.
        reading: Seconds in which the data of an update are read and
            converted, and the model is not computed.
        overhead: Bytes of each rank beyond the interpreter's, whatever the
            rank computes.
        remarks: What users should know.
    """

    model: ModelFigures
    hosts: tuple[int, ...]
    pools: tuple[int, ...]
    slowdown: tuple[float, ...]
    speeds: tuple[float, ...]
    exchanges: Mapping[tuple[int, str, str], ExchangeFigures]
    links: Mapping[int, LinkFigures] = dataclasses.field(default_factory=dict)
    spare: bool = False
    reading: float = 0.0
    overhead: float = 16e6
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.hosts)

    @property
    def slowest(self) -> float:
        """How many times as long the last rank takes, of all at once."""
        return max(self.slowdown)

    def exchange(self, way: Configuration) -> ExchangeFigures:
        """Of a configuration; of a like one, where it was not measured."""
        key = way.stages, way.codec, way.algorithm
        if key in self.exchanges:
            return self.exchanges[key]
        like = [one for (_, codec, algorithm), one in self.exchanges.items()
                if codec == way.codec and algorithm in (way.algorithm,
                                                        'direct')]
        if not like:
            raise ValueError(f'{way.codec} {way.algorithm} was not measured')
        return min(like, key=lambda one: abs(one.replicas - way.replicas)
                   ).on_paper(way.codec, way.replicas)

    def for_ranks(self, count: int) -> JobProfile:
        """The profile of a job with another number of ranks.

        Hosts go on as they began: as many ranks on each, and as many cores.
        """
        if count == self.ranks:
            return self
        each = max(self.hosts.count(host) for host in set(self.hosts))
        alone = len(set(self.hosts)) == 1       # one host has them all
        share = count / self.ranks if alone else 1.0
        hosts = tuple(0 if alone else rank // each for rank in range(count))
        local = [pool for pool, host in zip(self.pools, self.hosts,
                                            strict=True)
                 if host == self.hosts[0]]
        pools = tuple(host * len(local) + local[rank % len(local)]
                      for rank, host in enumerate(hosts))
        like = [rank % self.ranks for rank in range(count)]
        crowded = max(share, 1.0)
        return dataclasses.replace(
            self, hosts=hosts, pools=pools, exchanges={
                (count // one.replicas if count % one.replicas == 0 else 0,
                 codec, algorithm): one._replace(element=one.element
                                                 * crowded)
                for (_, codec, algorithm), one in self.exchanges.items()},
            slowdown=tuple(self.slowdown[rank] * crowded for rank in like),
            speeds=tuple(self.speeds[rank] for rank in like))

    def on_hosts(self, count: int, rate: float) -> JobProfile:
        """The profile of a job with a rank on each of so many hosts.

        Each rank has cores of its own and is as fast as the first one.

        Args:
            count: Of hosts.
            rate: Bytes per second of a host's link, in each direction.
        """
        each, alike = tuple(range(count)), (1.0,) * count
        return dataclasses.replace(
            self, hosts=each, pools=each, slowdown=alike, speeds=alike,
            links={}, exchanges={
                (1, codec, algorithm): one.on_paper(codec, count, rate)
                for (_, codec, algorithm), one in self.exchanges.items()})


class StepPrediction(NamedTuple):
    """How long a step takes, and of what.

    Attributes:
        seconds: Of a whole update.
        parts: Seconds by name, which add up to the whole: ``forward and
            backward`` (of the busiest rank), ``waiting for stages``,
            ``exchange`` (what of it nothing hides), ``update``, ``other``.
    """

    seconds: float
    parts: Mapping[str, float]


class StepModel:
    """Predicts updates of one job.

    Args:
        profile: What was measured.
        batch: Samples of an update, of all replicas together.

    Attributes:
        costs: Of the model.
    """

    def __init__(self, profile: JobProfile, batch: int) -> None:
        self.profile, self.batch = profile, batch
        self.costs = ModelCosts(profile.model)

    def predict(self, way: Configuration) -> StepPrediction:
        """An update in a way to run the job.

        Raises:
            ValueError: The way does not fit the ranks.
        """
        if way.stages * way.replicas != self.profile.ranks:
            raise ValueError(f'{way} is for {way.stages * way.replicas} '
                             f'ranks, the profile for {self.profile.ranks}')
        parts = self._replicas(way) if way.cut is None else self._pipeline(
            way, way.cut)
        parts['other'] = self.profile.reading
        parts = {name: float(seconds) for name, seconds in parts.items()}
        return StepPrediction(sum(parts.values()), parts)

    # --- replicas ------------------------------------------------------------

    def _replicas(self, way: Configuration) -> dict[str, float]:
        profile, slowest = self.profile, self.profile.slowest
        costs = self.costs.plain(self.batch / way.replicas)
        parts = {'forward and backward': costs.seconds * slowest,
                 'update': profile.model.update * slowest, 'exchange': 0.0}
        if way.replicas > 1:
            figures = profile.exchange(way)
            parts['exchange'] = _THREAD[way.overlap] + (
                self._not_hidden(way, figures) if way.overlap
                else figures.of(profile.model.elements))
        return parts

    def _not_hidden(self, way: Configuration, figures: ExchangeFigures
                    ) -> float:
        """Seconds of an exchange that passes do not hide."""
        model, slowest = self.profile.model, self.profile.slowest
        costs = self.costs.plain(self.batch / way.replicas)
        elements, own = model.elements, self._elements_of_calls()
        passes, update = costs.seconds * slowest, model.update * slowest
        # On one host there is no wire that would go on by itself.
        alone = len(set(self.profile.hosts)) == 1
        busy = passes + (not self.profile.spare) * (
            figures.of(elements) if alone else elements * figures.processor)
        # Of each call: when its backward pass is through, and what is
        # exchanged from then on.
        after = costs.backward[::-1].cumsum()[::-1]     # of it and later ones
        forward = costs.forward.cumsum()
        if way.overlap is True:
            sent = 0.0
            ends = [busy]
            for number in range(len(own)):      # the last one to be through
                sent += own[number]
                ends.append((forward[-1] + after[number]) * slowest
                            + figures.fixed + sent * figures.element)
            return max(ends) - passes
        around = [
            (forward[-1] - forward[number] + costs.forward[number]
             + after[number]) * slowest + update + figures.fixed
            + own[number] * figures.element
            for number in range(len(own)) if own[number]]
        return max([busy + update, figures.of(elements), *around]
                   ) - passes - update

    def _elements_of_calls(self) -> list[int]:
        """Elements of the parameters that each call is the first to use."""
        model, known = self.profile.model, set[str]()
        found = []
        for call in model.calls:
            new = {name for name in call.parameters
                   if name in model.parameters} - known
            known |= new
            found.append(model.elements_of(new))
        return found

    # --- pipelines -----------------------------------------------------------

    def _pipeline(self, way: Configuration, cut: PartitionPlan
                  ) -> dict[str, float]:
        profile = self.profile
        grid = place(profile.hosts, way.stages).ranks
        costs, crossing = self._chunks(way, cut)
        # Each as long as on the slowest of the stage's ranks, were it alone.
        speeds = [max(profile.speeds[rank] for rank in row) for row in grid]
        own = [Costs(*(speeds[chunk % way.stages] * seconds
                       for seconds in cost))
               for chunk, cost in enumerate(costs)]
        link = profile.links.get(way.stages) or _usual_link(profile)
        alone = step_time(CutProblem(
            way.stages, way.micro_batches, cut.schedule, cut.chunks).steps(),
            own, Link(link.latency, link.rate, crossing))
        work = [way.micro_batches * sum(
            sum(own[chunk]) for chunk in range(stage, len(own), way.stages))
            for stage in range(way.stages)]
        busy = max(work)
        shared = self._of_pools(grid, work)
        whole = alone
        if shared > busy:
            whole = max(alone, shared + _UNFILLED * (alone - busy))
        elements = self.elements_of_stages(cut)
        update = self._of_pools(grid, [
            profile.model.update * of / max(profile.model.elements, 1)
            for of in elements])
        exchange = 0.0
        if way.replicas > 1:
            exchange = profile.exchange(way).of(max(elements))
        return {'forward and backward': busy,
                'waiting for stages': max(whole - busy, 0.0),
                'exchange': exchange, 'update': update}

    def _chunks(self, way: Configuration, cut: PartitionPlan
                ) -> tuple[list[Costs], list[float]]:
        """Seconds of each chunk for a micro-batch, and bytes that cross.

        Messages, and passing by the calls of other stages, are in them; what
        a micro-batch takes besides, each rank pays once.
        """
        model = self.profile.model
        intervals = self.costs.intervals(
            self.batch / way.replicas / way.micro_batches)
        ends = ends_of(cut.cuts, intervals.starts)
        ghosts = _GHOST * len(model.calls) * (1 - 1 / len(ends))
        found = []
        for chunk, cost in enumerate(chunk_costs(
                intervals, ends, cut.recompute,
                cut.schedule == 'zero_bubble')):
            packing = _PACKING * ((chunk > 0) + (chunk + 1 < len(ends)))
            found.append(cost._replace(
                forward=(cost.forward + ghosts + packing
                         + model.micro_batch / cut.chunks),
                backward_input=cost.backward_input + packing))
        return found, [float(intervals.crossing[end]) for end in ends[:-1]]

    def elements_of_stages(self, cut: PartitionPlan) -> list[int]:
        """Elements of the parameters of each stage."""
        names: list[list[str]] = [[] for _ in range(cut.stages)]
        for name, chunk in cut.homes().items():
            names[chunk % cut.stages].append(name)
        return [self.profile.model.elements_of(of) for of in names]

    def _of_pools(self, grid: Sequence[Sequence[int]],
                  work: Sequence[float]) -> float:
        """Seconds until all ranks have done their work, sharing cores.

        Args:
            grid: ``grid[stage][replica]`` is the rank there.
            work: Seconds of each stage's ranks, alone.
        """
        pools, slowdown = self.profile.pools, self.profile.slowdown
        total: dict[int, float] = defaultdict(float)
        for row, seconds in zip(grid, work, strict=True):
            for rank in row:
                total[pools[rank]] += seconds * slowdown[rank] / max(
                    self.profile.speeds[rank], 1e-9) / pools.count(
                        pools[rank])
        return max([*total.values(), *work])


def _usual_link(profile: JobProfile) -> LinkFigures:
    """Where no pipeline of so many stages was measured: the slowest link."""
    return min(profile.links.values(), key=lambda one: one.rate,
               default=LinkFigures())

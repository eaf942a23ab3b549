"""Predicts a training step: pipelines, exchange and overlap on one engine."""
from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...mpi.placement import place
from ..cores import Cores
from ..engine import (
    Compute,
    Engine,
    EngineAction,
    Program,
    Receive,
    Send,
    Signal,
)
from ..partition.cuts import CutProblem, chunk_costs
from ..partition.partition_plan import ends_of
from ..schedules.simulator import Costs, add_pipeline
from .codec_choice import BUCKET_BYTES, seconds_beside
from .configuration import Configuration
from .exchanges import Exchange, ExchangeTime, doubled
from .folding import fold
from .job_profile import Figure, JobProfile
from .model_costs import ModelCosts, Pass

#: Steps that are simulated where one step's exchange goes on in the next: the
#: second waits for all of the first's, and so do all that follow.
_STEPS = 2
#: Of an exchange's figures, which shorter ones have given, the part that is
#: sure.
_SURE = 0.98
#: Bytes of a frame of a batch that stages hand on; frames in a simulation.
_FRAME_BYTES, _FRAMES = 1 << 16, 16
#: Seconds in which Python packs and unpacks a message between stages.
_PACKING = 5e-5


class StepPrediction(NamedTuple):
    """How long a step takes, and of what.

    Attributes:
        seconds: Of a whole update, and the spread of what was measured.
        parts: Seconds by name, which add up to the whole: ``forward and
            backward`` (of the busiest rank), ``waiting for stages``,
            ``exchange`` (what of it nothing hides), ``update``, ``other``.
    """

    seconds: Figure
    parts: Mapping[str, float]


class StepModel:
    """Predicts steps of one job.

    Args:
        profile: What was measured.
        batch: Samples of an update, of all replicas together.
    """

    def __init__(self, profile: JobProfile, batch: int) -> None:
        self.profile, self.batch = profile, batch
        self.costs = ModelCosts(profile.model)
        # All wait for the rank that comes last.
        self._slowest = (max(profile.speeds, default=1.0)
                         * profile.straggling)
        self._known: dict[Any, tuple[float, float]] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._updates: dict[Any, float] = {}
        self._shared: dict[Any, float] = {}

    def predict(self, configuration: Configuration) -> StepPrediction:
        """The step of a configuration.

        Raises:
            ValueError: The configuration does not fit the ranks.
        """
        ranks = configuration.stages * configuration.replicas
        if ranks != self.profile.ranks:
            raise ValueError(f'{configuration} is for {ranks} ranks, the '
                             f'profile for {self.profile.ranks}')
        if configuration.stages > 1:
            parts = self._pipeline(configuration)
        elif configuration.overlap and configuration.replicas > 1:
            parts = self._overlapped(configuration)
        else:
            parts = self._in_a_row(configuration)
        return StepPrediction(
            Figure(sum(parts.values()), self._spread(configuration, parts)),
            parts)

    def least_seconds(self, configuration: Configuration) -> float:
        """Seconds that the step does not fall below, found quickly.

        Of replicas without overlap, passes and update alone; with overlap,
        what the busiest link, and a rank with its exchange's thread, need.
        Of a pipeline, all but the exchange.
        """
        model = self.profile.model
        beside = (0.0 if configuration.replicas == 1
                  else self._beside_exchange(configuration))
        if configuration.cut is not None:
            return self.seconds_of_passes(configuration) + beside + sum(
                self._after_pipeline(configuration).values())
        computes = (self.costs.plain(self.batch / configuration.replicas
                                     ).seconds
                    + model.update.value + model.rest.value)
        least = self._together(computes)
        if configuration.overlap and configuration.replicas > 1:
            time = self._exchange_time(configuration)
            # A rank and its thread both compute, at half of this speed.
            _, cores = doubled(self.profile.network.cluster(),
                               self.profile.cores)
            shared = max(cores.slowdown(pool, size) / 2
                         for pool, size in Counter(cores.pools).items())
            least = max(least, _SURE * time.link,
                        shared * (computes + _SURE * time.rank))
        return least + beside

    # --- replicas only -------------------------------------------------------

    def _in_a_row(self, configuration: Configuration) -> dict[str, float]:
        """Passes, exchange and update, one after the other."""
        model = self.profile.model
        samples = self.batch / configuration.replicas
        passes = self.costs.plain(samples)
        return {
            'forward and backward': self._together(passes.seconds),
            'exchange': self._exchange(configuration),
            'update': self._together(model.update.value),
            'other': self._together(model.rest.value)}

    def _exchange(self, configuration: Configuration) -> float:
        if configuration.replicas == 1:
            return 0.0
        return (self._exchange_time(configuration).seconds
                + self._beside_exchange(configuration))

    def _exchange_time(self, configuration: Configuration) -> ExchangeTime:
        """Of all gradients, while no rank computes."""
        exchange = self.exchange(configuration)
        return exchange.seconds(exchange.by_hosts(),
                                self.profile.model.elements)

    def exchange(self, configuration: Configuration) -> Exchange:
        """The configuration's; the same for equal communicators."""
        key = (configuration.codec, configuration.algorithm,
               tuple(sorted(configuration.options.items())))
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.profile, configuration)
        return self._exchanges[key]

    def _beside_exchange(self, configuration: Configuration) -> float:
        """Agreement, waking up, and Python for each tensor and bucket."""
        model, stages = self.profile.model, configuration.stages
        return seconds_beside(
            self.profile.codecs[configuration.codec],
            len(model.parameters) // stages,
            max(1, 4 * model.elements // stages // BUCKET_BYTES))

    def _overlapped(self, configuration: Configuration) -> dict[str, float]:
        """Buckets leave while the backward pass goes on."""
        passes = self.costs.plain(self.batch / configuration.replicas)
        defers = configuration.overlap == 'next_forward'
        run = _OverlapRun(self, configuration, passes, defers)
        seconds = run.seconds + self._beside_exchange(configuration)
        model = self.profile.model
        parts = {'forward and backward': self._together(passes.seconds),
                 'update': self._together(model.update.value),
                 'other': self._together(model.rest.value)}
        parts['exchange'] = max(seconds - sum(parts.values()), 0.0)
        return parts

    # --- pipelines -----------------------------------------------------------

    def _pipeline(self, configuration: Configuration) -> dict[str, float]:
        computed, passes = self._passes(configuration)
        grid = place(self.profile.network.hosts, configuration.stages).ranks
        whole, _ = (self._pipeline_run(configuration, grid, True)
                    if configuration.replicas > 1 else (computed, passes))
        exchange = whole - computed
        if configuration.replicas > 1:
            exchange += self._beside_exchange(configuration)
        return {'forward and backward': passes,
                'waiting for stages': max(computed - passes, 0.0),
                'exchange': exchange, **self._after_pipeline(configuration)}

    def _after_pipeline(self, configuration: Configuration
                        ) -> dict[str, float]:
        model = self.profile.model
        return {'update': self._pipelines_update(configuration),
                'other': (self._together(model.rest.value + model.step.value)
                          + self._sharing(configuration))}

    def _sharing(self, configuration: Configuration) -> float:
        """Seconds in which a batch comes from the first stage to all.

        Each stage hands frames on to the next one
        (:mod:`~chainer_fp8pipe.mpi.broadcast`).
        """
        profile, stages = self.profile, configuration.stages
        size = (profile.model.sample_bytes * self.batch
                / configuration.replicas)
        key = stages, configuration.replicas
        if key not in self._shared and size:
            grid = place(profile.network.hosts, stages).ranks
            folded = fold(profile, grid)
            engine = Engine(folded.cluster, folded.cores)
            frames = min(_FRAMES, -(-int(size) // _FRAME_BYTES))

            def hand_on(column: Sequence[int], stage: int
                        ) -> Iterator[EngineAction]:
                for frame in range(frames):
                    if stage:
                        yield Receive((column[stage], frame))
                    if stage + 1 < stages:
                        after = column[stage + 1]
                        yield Send(after, size / frames, (after, frame))
            for column in list(zip(*grid, strict=True))[:folded.period]:
                for stage, rank in enumerate(column):
                    engine.add(rank, hand_on(column, stage))
            engine.run()
            self._shared[key] = engine.seconds
        return self._shared.get(key, 0.0)

    def _pipelines_update(self, configuration: Configuration) -> float:
        """Seconds until all stages have updated their parameters.

        Those with fewer leave the cores to the others.
        """
        profile = self.profile
        elements = self.stage_elements(configuration)
        key = tuple(elements), configuration.replicas
        if key not in self._updates:
            grid = place(profile.network.hosts, configuration.stages).ranks
            folded = fold(profile, grid)
            engine = Engine(folded.cluster, folded.cores)
            each = (profile.model.update.value * self._slowest
                    / max(profile.model.elements, 1))
            added = [engine.add(rank, [Compute(each * of)])
                     for row, of in zip(grid, elements, strict=True)
                     for rank in row[:folded.period]]
            engine.run()
            self._updates[key] = max(program.ended for program in added)
        return self._updates[key]

    def seconds_of_passes(self, configuration: Configuration) -> float:
        """Seconds of a pipeline's passes, without exchange and update."""
        return self._passes(configuration)[0]

    def _passes(self, configuration: Configuration) -> tuple[float, float]:
        cut, replicas = configuration.cut, configuration.replicas
        assert cut is not None
        key = (cut.cuts, cut.recompute, cut.schedule, cut.stages,
               cut.micro_batches, replicas)
        if key not in self._known:      # the same for all codecs
            self._known[key] = self._pipeline_run(configuration, place(
                self.profile.network.hosts, configuration.stages).ranks,
                False)
        return self._known[key]

    def least_of_passes(self, stages: int, replicas: int, micro_batches: int,
                        chunks: int) -> float:
        """Seconds that no pipeline's passes fall below, wherever it is cut.

        All cores compute all the time, each a fair share.
        """
        model, parts = self.profile.model, stages * chunks
        intervals = self.costs.intervals(
            self.batch / (replicas * micro_batches))
        ghosts = model.ghost.value * len(model.calls) * (1 - 1 / parts)
        ends_meet = 2 * (parts - 1) / parts
        fixed = (ghosts + model.micro_batch.value / chunks
                 + 2 * _PACKING * ends_meet)
        work = float(intervals.forward[-1] + intervals.backward[-1])
        return (self.profile.straggling * micro_batches
                * (work / stages + chunks * fixed) / self._per_rank())

    def _per_rank(self) -> float:
        """Seconds of the processor that a rank gets per second, on average.

        While all ranks compute, which none does faster than alone.
        """
        cores = self.profile.cores
        return statistics.fmean(
            1 / max(cores.single, cores.slowdown(pool, size))
            for pool, size in Counter(cores.pools).items()
            for _ in range(size))

    def _pipeline_run(self, configuration: Configuration,
                      grid: Sequence[Sequence[int]], exchanges: bool
                      ) -> tuple[float, float]:
        """Seconds of all, and those for which the busiest rank computes."""
        cut, profile = configuration.cut, self.profile
        assert cut is not None
        samples = self.batch / (configuration.replicas
                                * configuration.micro_batches)
        intervals = self.costs.intervals(samples)
        ends = ends_of(cut.cuts, intervals.starts)
        costs = self._with_ghosts(chunk_costs(
            intervals, ends, cut.recompute, cut.schedule == 'zero_bubble'),
            ends, cut.chunks)
        crossing = [float(intervals.crossing[end]) for end in ends[:-1]]
        schedule = CutProblem(cut.stages, cut.micro_batches, cut.schedule,
                              cut.chunks).steps()
        exchange = self.exchange(configuration) if exchanges else None
        folded = fold(profile, grid, [exchange.plans(row) for row in grid]
                      if exchange else ())
        engine = Engine(folded.cluster, folded.cores)
        programs: dict[int, Program] = {}
        for column in list(zip(*grid, strict=True))[:folded.period]:
            programs.update(zip(column, add_pipeline(
                engine, schedule, costs, crossing, ranks=column),
                strict=True))
        added = list(programs.values())
        if exchange:
            for row, elements in zip(grid, self.stage_elements(configuration),
                                     strict=True):
                if elements:
                    added += exchange.add(
                        engine, folded.cluster, row, elements,
                        [programs[rank] for rank in row[:folded.period]],
                        period=folded.period)
        engine.run()
        busy: dict[int, float] = defaultdict(float)
        for span in engine.spans:       # as long as shared cores make it
            busy[span.rank] += span.end - span.start
        return max(program.ended for program in added), max(busy.values())

    def stage_elements(self, configuration: Configuration) -> list[int]:
        """Elements of the parameters of each stage."""
        cut = configuration.cut
        if cut is None:
            return [self.profile.model.elements]
        names: list[list[str]] = [[] for _ in range(cut.stages)]
        for name, chunk in cut.homes().items():
            names[chunk % cut.stages].append(name)
        return [self.profile.model.elements_of(of) for of in names]

    def _with_ghosts(self, costs: Sequence[Costs], ends: Sequence[int],
                     chunks: int) -> list[Costs]:
        """Adds messages, and passing by the calls of other stages.

        What a micro-batch adds, each rank pays once, whatever its chunks.
        """
        calls = len(self.profile.model.calls)
        ghosts = self.profile.model.ghost.value * calls * (
            1 - 1 / len(ends))
        found = []
        for chunk, cost in enumerate(costs):
            ends_meet = (chunk > 0) + (chunk + 1 < len(ends))
            whole = cost._replace(
                forward=(cost.forward + ghosts + _PACKING * ends_meet
                         + self.profile.model.micro_batch.value / chunks),
                backward_input=cost.backward_input + _PACKING * ends_meet)
            found.append(Costs(*(seconds * self.profile.straggling
                                 for seconds in whole)))
        return found

    # --- cores and spread ----------------------------------------------------

    def _together(self, seconds: float) -> float:
        """Seconds of a computation that all ranks do at once."""
        cores = self.profile.cores
        return seconds * self._slowest * max(
            cores.slowdown(pool, cores.pools.count(pool))
            for pool in set(cores.pools))

    def _spread(self, configuration: Configuration,
                parts: Mapping[str, float]) -> float:
        """Relative spread of the whole: parts vary independently."""
        profile = self.profile
        network = profile.network
        wire = (network.rate if network.between_hosts
                else network.local_rate).spread
        codec = (profile.codecs[configuration.codec].update.spread
                 if configuration.codec in profile.codecs else 0.0)
        spreads = {'exchange': max(wire, 0.0), 'other': codec,
                   'update': profile.model.update.spread,
                   'forward and backward': profile.model.spread,
                   'waiting for stages': profile.model.spread}
        total = sum(parts.values())
        return math.sqrt(sum((seconds * spreads[name]) ** 2 for name, seconds
                             in parts.items())) / total if total else 0.0


class _OverlapRun:
    """Steps whose buckets travel beside the passes, on one engine.

    Rank r computes; rank ``count + r``, on the same cores, is the thread that
    exchanges.
    """

    def __init__(self, model: StepModel, configuration: Configuration,
                 passes: Pass, defers: bool) -> None:
        profile = model.profile
        self._count, self._defers = profile.ranks, defers
        self._figures = profile.model
        self._sizes = [self._figures.elements_of(names)
                       for names in self._figures.buckets]
        self._passes = passes
        self._after = profile.model.update.value + profile.model.rest.value
        exchange = model.exchange(configuration)
        everybody = exchange.by_hosts()
        folded = fold(profile, [everybody], [exchange.plans(everybody)])
        cluster, cores = doubled(folded.cluster, folded.cores)
        self._engine = Engine(cluster, cores)
        self._segments()
        self._steps = _STEPS if defers else 1
        self._ends: dict[int, list[float]] = {}
        self._lanes: dict[int, int] = {}        # of each bucket
        ranks = everybody[:folded.period]
        mains = [self._engine.add(rank, self._computes(
            rank, folded.speeds[rank] * profile.straggling))
            for rank in ranks]
        order = self._order(exchange, cores)
        chunks = max(4, 96 // max(len(order), 1))
        for step in range(self._steps):
            for place_, bucket in enumerate(order):
                before = (step, order[place_ - 1]) if place_ else (
                    (step - 1, order[-1]) if step else None)
                starts = [self._engine.add(self._count + rank, self._start(
                    rank, step, bucket, before)) for rank in ranks]
                lanes = exchange.add(
                    self._engine, cluster, everybody, self._sizes[bucket],
                    starts, [self._count + rank for rank in everybody],
                    chunks, folded.period)
                for lane in lanes:
                    self._engine.add(lane.rank, self._end(
                        lane.rank - self._count, step, bucket), lane)
                self._lanes[bucket] = len(lanes) // len(ranks)
        self._engine.run()
        self.seconds = self._steady(mains)

    def _steady(self, mains: Sequence[Program]) -> float:
        if not self._defers:
            return max(main.ended for main in mains)
        first, *_, last = (max(ends) for ends in zip(
            *self._ends.values(), strict=True))
        return (last - first) / (self._steps - 1)

    def _segments(self) -> None:
        """When buckets are needed in forward, and final in backward."""
        place_of = {name: number for number, names
                    in enumerate(self._figures.buckets) for name in names}
        first: dict[int, int] = {}
        for number, call in enumerate(self._figures.calls):
            for name in call.parameters:
                if name in place_of:
                    first.setdefault(place_of[name], number)
        count = len(self._figures.calls)
        # A bucket is final when its first call's backward pass is through.
        self._needed = {bucket: first.get(bucket, 0)
                        for bucket in range(len(self._sizes))}
        self._forward = [0.0, *self._passes.forward.cumsum()]
        self._backward = [0.0, *self._passes.backward[::-1].cumsum()]
        self._final = {bucket: count - number for bucket, number
                       in self._needed.items()}

    def _order(self, exchange: Exchange, cores: Cores) -> list[int]:
        """Buckets in the order in which they are sent."""
        by_end = sorted(self._final, key=lambda one: (
            self._backward[self._final[one]], one))
        if not self._defers:
            return by_end
        # Of the final ones, that which forward needs first.
        total = sum(self._sizes)
        whole = exchange.seconds(exchange.by_hosts(), total).seconds
        slow = max(cores.slowdown(pool, cores.pools.count(pool) // 2)
                   for pool in set(cores.pools))
        order: list[int] = []
        waiting: list[int] = []
        now = 0.0
        while by_end or waiting:
            while by_end and (not waiting or self._backward[
                    self._final[by_end[0]]] * slow <= now):
                now = max(now, self._backward[self._final[by_end[0]]] * slow)
                waiting.append(by_end.pop(0))
            bucket = waiting.pop()
            order.append(bucket)
            now += whole * self._sizes[bucket] / total
        return order

    def _computes(self, rank: int, speed: float) -> Iterator[EngineAction]:
        """A rank's steps."""
        ends = self._ends.setdefault(rank, [])
        for step in range(self._steps):
            at = 0
            if self._defers and step:
                for bucket in sorted(self._needed,
                                     key=self._needed.__getitem__):
                    yield from self._until(self._forward, at,
                                           self._needed[bucket], speed)
                    at = self._needed[bucket]
                    yield from self._arrived(rank, step - 1, bucket)
            yield from self._until(self._forward, at,
                                   len(self._forward) - 1, speed)
            at = 0
            for bucket in sorted(self._final, key=self._final.__getitem__):
                yield from self._until(self._backward, at,
                                       self._final[bucket], speed)
                at = self._final[bucket]
                yield Signal(('ready', rank, step, bucket))
            yield from self._until(self._backward, at,
                                   len(self._backward) - 1, speed)
            if not self._defers:
                for bucket in self._final:
                    yield from self._arrived(rank, step, bucket)
            yield Compute(self._after * speed)
            ends.append(self._engine.seconds)

    def _until(self, sums: Sequence[float], start: int, stop: int,
               speed: float) -> Iterator[EngineAction]:
        if sums[stop] > sums[start]:
            yield Compute((sums[stop] - sums[start]) * speed)

    def _arrived(self, rank: int, step: int, bucket: int
                 ) -> Iterator[EngineAction]:
        for _ in range(self._lanes[bucket]):
            yield Receive(('done', rank, step, bucket))

    def _start(self, rank: int, step: int, bucket: int,
               before: tuple[int, int] | None) -> Iterator[EngineAction]:
        yield Receive(('ready', rank, step, bucket))
        if before:
            yield Receive(('tail', rank, *before))

    def _end(self, rank: int, step: int, bucket: int
             ) -> Iterator[EngineAction]:
        yield Signal(('done', rank, step, bucket))
        yield Signal(('tail', rank, step, bucket))

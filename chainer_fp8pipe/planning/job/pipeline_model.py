"""Predicts steps of pipelines: passes, hand-over of the batch, update."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...mpi.handing_on import LEAST_FRAME_BYTES
from ...mpi.placement import place
from ..engine import (
    Compute,
    Engine,
    EngineAction,
    Program,
    Receive,
    Send,
)
from ..partition.cuts import CutProblem, chunk_costs
from ..partition.partition_plan import PartitionPlan, ends_of
from ..schedules.simulator import Costs, add_pipeline
from .all_at_once import per_rank, slowest, together
from .configuration import Configuration
from .exchanges import Exchange, Exchanges
from .folding import Fold, fold
from .job_profile import JobProfile
from .model_costs import ModelCosts

#: Frames of a batch that stages hand on in a simulation.
_FRAMES = 16
#: Seconds in which Python packs and unpacks a message between stages.
_PACKING = 5e-5

#: ``grid[stage][replica]`` is the rank there.
Grid = Sequence[Sequence[int]]


class PassTime(NamedTuple):
    """How long a pipeline's passes take.

    Attributes:
        whole: Seconds until the last rank is through.
        busy: Seconds of these for which the busiest rank computes.
    """

    whole: float
    busy: float


class PipelineModel:
    """Predicts steps of one job's pipelines.

    Args:
        profile: What was measured.
        batch: Samples of an update, of all replicas together.
        costs: Of the model.
        exchanges: Of the job's configurations.
    """

    def __init__(self, profile: JobProfile, batch: int, costs: ModelCosts,
                 exchanges: Exchanges) -> None:
        self._profile, self._batch = profile, batch
        self._costs, self._exchanges = costs, exchanges
        self._known: dict[Any, PassTime] = {}
        self._updates: dict[Any, float] = {}
        self._shared: dict[Any, float] = {}

    def parts(self, configuration: Configuration) -> dict[str, float]:
        """Seconds of a step by name, as of :class:`.StepPrediction`.

        Args:
            configuration: With a cut.
        """
        whole, busy = self._passes(configuration)
        exchange = 0.0
        if configuration.replicas > 1:
            exchange = (self._simulated(configuration, True).whole - whole
                        + self._exchanges.of(configuration).seconds_beside(
                            configuration.stages))
        return {'forward and backward': busy,
                'waiting for stages': max(whole - busy, 0.0),
                'exchange': exchange, **self._after(configuration)}

    def least_seconds(self, configuration: Configuration) -> float:
        """Seconds of all but the exchange."""
        return (self.seconds_of_passes(configuration)
                + sum(self._after(configuration).values()))

    def seconds_of_passes(self, configuration: Configuration) -> float:
        """Seconds of passes, without exchange and update."""
        return self._passes(configuration).whole

    def least_of_passes(self, stages: int, replicas: int, micro_batches: int,
                        chunks: int) -> float:
        """Seconds that no pipeline's passes fall below, wherever it is cut.

        All cores compute all the time, each a fair share.
        """
        model, parts = self._profile.model, stages * chunks
        intervals = self._costs.intervals(
            self._batch / (replicas * micro_batches))
        ghosts = model.ghost.value * len(model.calls) * (1 - 1 / parts)
        ends_meet = 2 * (parts - 1) / parts
        fixed = (ghosts + model.micro_batch.value / chunks
                 + 2 * _PACKING * ends_meet)
        work = float(intervals.forward[-1] + intervals.backward[-1])
        return (self._profile.straggling * micro_batches
                * (work / stages + chunks * fixed) / per_rank(self._profile))

    # --- passes and exchange -------------------------------------------------

    def _passes(self, configuration: Configuration) -> PassTime:
        """Without the exchange of replicas."""
        cut = _cut(configuration)
        key = (cut.cuts, cut.recompute, cut.schedule, cut.stages,
               cut.micro_batches, configuration.replicas)
        if key not in self._known:      # the same for all codecs
            self._known[key] = self._simulated(configuration, False)
        return self._known[key]

    def _simulated(self, configuration: Configuration, exchanges: bool
                   ) -> PassTime:
        """Passes, and the exchange of replicas where wanted."""
        grid = self._grid(configuration)
        exchange = self._exchanges.of(configuration) if exchanges else None
        folded = fold(self._profile, grid,
                      [exchange.plans(row) for row in grid]
                      if exchange else ())
        engine = Engine(folded.cluster, folded.cores)
        programs = self._add_passes(engine, configuration, grid,
                                    folded.period)
        added = list(programs.values())
        if exchange:
            added += self._add_exchange(engine, exchange, configuration, grid,
                                        folded, programs)
        engine.run()
        busy: dict[int, float] = defaultdict(float)
        for span in engine.spans:       # as long as shared cores make it
            busy[span.rank] += span.end - span.start
        return PassTime(max(program.ended for program in added),
                        max(busy.values()))

    def _add_passes(self, engine: Engine, configuration: Configuration,
                    grid: Grid, period: int) -> dict[int, Program]:
        """Adds the schedules of the first replicas; the programs by rank."""
        cut = _cut(configuration)
        intervals = self._costs.intervals(self._batch / (
            configuration.replicas * configuration.micro_batches))
        ends = ends_of(cut.cuts, intervals.starts)
        costs = self._with_ghosts(chunk_costs(
            intervals, ends, cut.recompute, cut.schedule == 'zero_bubble'),
            ends, cut.chunks)
        crossing = [float(intervals.crossing[end]) for end in ends[:-1]]
        schedule = CutProblem(cut.stages, cut.micro_batches, cut.schedule,
                              cut.chunks).steps()
        programs: dict[int, Program] = {}
        for column in _columns(grid, period):
            programs.update(zip(column, add_pipeline(
                engine, schedule, costs, crossing, ranks=column),
                strict=True))
        return programs

    def _add_exchange(self, engine: Engine, exchange: Exchange,
                      configuration: Configuration, grid: Grid, folded: Fold,
                      programs: dict[int, Program]) -> list[Program]:
        """Adds the exchange of each stage, which begins after its passes."""
        added: list[Program] = []
        for row, elements in zip(grid, self._stage_elements(configuration),
                                 strict=True):
            if elements:
                added += exchange.add(
                    engine, folded.cluster, row, elements,
                    [programs[rank] for rank in row[:folded.period]],
                    period=folded.period)
        return added

    def _with_ghosts(self, costs: Sequence[Costs], ends: Sequence[int],
                     chunks: int) -> list[Costs]:
        """Adds messages, and passing by the calls of other stages.

        What a micro-batch adds, each rank pays once, whatever its chunks.
        """
        model = self._profile.model
        ghosts = model.ghost.value * len(model.calls) * (1 - 1 / len(ends))
        found = []
        for chunk, cost in enumerate(costs):
            ends_meet = (chunk > 0) + (chunk + 1 < len(ends))
            whole = cost._replace(
                forward=(cost.forward + ghosts + _PACKING * ends_meet
                         + model.micro_batch.value / chunks),
                backward_input=cost.backward_input + _PACKING * ends_meet)
            found.append(Costs(*(seconds * self._profile.straggling
                                 for seconds in whole)))
        return found

    # --- beside passes and exchange ------------------------------------------

    def _after(self, configuration: Configuration) -> dict[str, float]:
        model = self._profile.model
        return {'update': self._update(configuration),
                'other': (together(self._profile,
                                   model.rest.value + model.step.value)
                          + self._sharing(configuration))}

    def _sharing(self, configuration: Configuration) -> float:
        """Seconds in which a batch comes from the first stage to all.

        Each stage hands frames on to the next one
        (:mod:`~chainer_fp8pipe.mpi.broadcast`).
        """
        size = (self._profile.model.sample_bytes * self._batch
                / configuration.replicas)
        key = configuration.stages, configuration.replicas
        if key not in self._shared and size:
            grid = self._grid(configuration)
            folded = fold(self._profile, grid)
            engine = Engine(folded.cluster, folded.cores)
            for column in _columns(grid, folded.period):
                for stage, rank in enumerate(column):
                    engine.add(rank, _hand_on(column, stage, size))
            engine.run()
            self._shared[key] = engine.seconds
        return self._shared.get(key, 0.0)

    def _update(self, configuration: Configuration) -> float:
        """Seconds until all stages have updated their parameters.

        Those with fewer leave the cores to the others.
        """
        profile = self._profile
        elements = self._stage_elements(configuration)
        key = tuple(elements), configuration.replicas
        if key not in self._updates:
            grid = self._grid(configuration)
            folded = fold(profile, grid)
            engine = Engine(folded.cluster, folded.cores)
            each = (profile.model.update.value * slowest(profile)
                    / max(profile.model.elements, 1))
            added = [engine.add(rank, [Compute(each * of)])
                     for row, of in zip(grid, elements, strict=True)
                     for rank in row[:folded.period]]
            engine.run()
            self._updates[key] = max(program.ended for program in added)
        return self._updates[key]

    # --- the configuration's ranks and parameters ----------------------------

    def _grid(self, configuration: Configuration) -> Grid:
        return place(self._profile.network.hosts, configuration.stages).ranks

    def _stage_elements(self, configuration: Configuration) -> list[int]:
        """Elements of the parameters of each stage."""
        cut = _cut(configuration)
        names: list[list[str]] = [[] for _ in range(cut.stages)]
        for name, chunk in cut.homes().items():
            names[chunk % cut.stages].append(name)
        return [self._profile.model.elements_of(of) for of in names]


def _cut(configuration: Configuration) -> PartitionPlan:
    assert configuration.cut is not None
    return configuration.cut


def _columns(grid: Grid, period: int) -> list[tuple[int, ...]]:
    """The ranks of each of the first replicas, by stage."""
    return list(zip(*grid, strict=True))[:period]


def _hand_on(column: Sequence[int], stage: int, size: float
             ) -> Iterator[EngineAction]:
    """What a stage does with a batch of so many bytes."""
    frames = min(_FRAMES, -(-int(size) // LEAST_FRAME_BYTES))
    for frame in range(frames):
        if stage:
            yield Receive((column[stage], frame))
        if stage + 1 < len(column):
            after = column[stage + 1]
            yield Send(after, size / frames, (after, frame))

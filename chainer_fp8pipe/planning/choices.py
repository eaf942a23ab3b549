"""All ways to run a job, ranked by the formula, and the plan that is made."""
# Every factorisation of the ranks is looked at, and for each of them every
# number of micro-batches, schedule, codec, algorithm and overlap.  The order
# is fixed, so that the same profile gives the same ranking.  A cut does not
# depend on the exchange, so cuts are searched for first, and only the best of
# a factorisation are looked at with every exchange; among 60 random jobs the
# best of all was missed by 1.1 % at most.
from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..mpi.placement import divisors
from .cuts import CutProblem, DoesNotFit, search
from .job_plan import USUAL_CODECS, Alternative, Configuration, JobPlan, Trial
from .partition_plan import PartitionPlan
from .schedule_time import Link
from .sizes import said_bytes
from .step import PACKING, JobProfile, exchange_bytes, predict, rank_memory

_SCHEDULES = '1f1b', 'gpipe', 'zero_bubble', 'interleaved'
_CHUNKS = {'interleaved': 2}
_OVERLAPS: tuple[Any, ...] = False, True, 'next_forward'
#: Cuts of a factorisation that are looked at with replicas' exchanges.
_CUTS = 3
#: Micro-batches of a pipeline, as multiples of its stages, and with how many a
#: cut is searched for.
_MULTIPLES, _ENOUGH = (1, 2, 4, 8), 2
#: A rank that takes so many times as long as others is named; these differ by
#: chance.
_SLOW = 1.5
#: Ways that are tried, and others that are shown.
TRIED, _SHOWN = 5, 6


class Wanted(NamedTuple):
    """What a user asks for.

    Attributes:
        batch: Samples of an update, of all replicas together.
        memory: Bytes that a rank may use beyond the interpreter; None: no
            limit.
        codecs: Names of communicators that may be chosen.
        stages: Numbers of stages that may be chosen; (): all.
    """

    batch: int
    memory: float | None = None
    codecs: tuple[Any, ...] = USUAL_CODECS
    stages: tuple[int, ...] = ()


class Candidate(NamedTuple):
    """A way to run the job with its prediction.

    Attributes:
        way: The way.
        parts: Seconds by name, which add up to an update's.
        memory: Bytes of each stage's ranks.
    """

    way: Configuration
    parts: Mapping[str, float]
    memory: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of an update."""
        return sum(self.parts.values())

    @property
    def kind(self) -> tuple:
        """What tells this way from others that are worth a trial."""
        way = self.way
        return (way.stages, way.codec if way.replicas > 1 else '',
                way.overlap)


def algorithms(replicas: int) -> tuple[Any, ...]:
    """Those that differ for so many replicas.

    Two ranks send the same in a ring and directly; a prime number makes no
    torus.
    """
    return ('direct', *['ring'] * (replicas > 2),
            *['torus2d'] * (len(divisors(replicas)) > 2))


class Choices:
    """All ways to run a job.

    Args:
        profile: What was measured.
        wanted: What the user asks for.

    Attributes:
        profile, wanted: As given.
        candidates: All that fit, the fastest first.

    Raises:
        DoesNotFit: None fits; the message says why, and by how much.
    """

    def __init__(self, profile: JobProfile, wanted: Wanted) -> None:
        self.profile, self.wanted = profile, wanted
        # By stages, of the way that needs least: its bytes, and what is wrong.
        self._impossible: dict[int, tuple[float, str]] = {}
        found: list[Candidate] = []
        for stages in divisors(profile.ranks):
            if not wanted.stages or stages in wanted.stages:
                found += (self._pipelines(stages) if stages > 1
                          else self._replicas())
        self.candidates = sorted(found, key=lambda one: one.seconds)
        if not found:
            raise DoesNotFit('no way to run this job fits: ' + '; '.join(
                f'{self._layout(stages)}: {reason}'
                for stages, (_, reason) in self._impossible.items()))

    def promising(self) -> list[Candidate]:
        """The ways to try.

        The fastest, each with another layout, codec or overlap; and the
        simplest one, plain replicas in float32, where it is possible.
        """
        found = self._of_kinds()
        plain = [one for one in found
                 if one.way.stages == 1 and one.way.is_exact
                 and not one.way.overlap]
        tried = found[:TRIED]
        return tried + [one for one in plain[:1] if one not in tried]

    def plan(self, way: Configuration, trials: Sequence[Trial] = (),
             remarks: Sequence[str] = ()) -> JobPlan:
        """The plan of a way.

        Args:
            way: One of the candidates', or one that was tried.
            trials: What ways took; if this one is among them, the plan's
                seconds are those of its trial.
            remarks: For the user.
        """
        profile, wanted = self.profile, self.wanted
        known = next((one for one in self.candidates if one.way == way),
                     Candidate(way, {}, ()))
        parts, seconds, spread = dict(known.parts), known.seconds, 0.0
        for trial in trials:
            if trial.way == str(way):
                parts = {name: part * trial.seconds / max(seconds, 1e-12)
                         for name, part in parts.items()}
                seconds, spread = trial.seconds, trial.spread
        return JobPlan(
            way, profile.ranks, wanted.batch,
            {name: one.shape
             for name, one in profile.model.parameters.items()},
            wanted.memory, seconds, spread, parts, known.memory,
            tuple(self._others([str(way), *(one.way for one in trials)])),
            (*profile.remarks, *self._slow_ranks(), *remarks),
            len(self.candidates), tuple(sorted(
                trials, key=lambda one: one.seconds)))

    def _others(self, known: Sequence[str]) -> Iterator[Alternative]:
        """The fastest of other kinds, and one impossible of each layout."""
        others = [one for one in self._of_kinds()
                  if str(one.way) not in known]
        for one in others[:_SHOWN]:
            yield Alternative(str(one.way), one.seconds)
        possible = {one.way.stages for one in self.candidates}
        for stages, (_, reason) in self._impossible.items():
            if stages not in possible:
                yield Alternative(self._layout(stages), None, reason)

    def _of_kinds(self) -> list[Candidate]:
        found: dict[tuple, Candidate] = {}
        for one in self.candidates:
            found.setdefault(one.kind, one)
        return list(found.values())

    def _refuse(self, stages: int, reason: str, needed: float = 0.0) -> None:
        """Notes why there is no way with so many stages."""
        if needed <= self._impossible.get(stages, (math.inf,))[0]:
            self._impossible[stages] = needed, reason

    def _layout(self, stages: int) -> str:
        replicas = self.profile.ranks // stages
        if stages == 1:
            return f'{replicas} replicas'
        return f'{stages} stages' + f', {replicas} replicas each' * (
            replicas > 1)

    def _slow_ranks(self) -> list[str]:
        slowdown = self.profile.slowdown
        usual = statistics.median_low(slowdown)     # of two, the faster
        return [f'rank {rank} takes {one / usual:.1f} times as long as '
                'others for the same computation; every step waits for it'
                for rank, one in enumerate(slowdown) if one > _SLOW * usual]

    # --- ways ----------------------------------------------------------------

    def _replicas(self) -> Iterator[Candidate]:
        count, batch = self.profile.ranks, self.wanted.batch
        if batch < count:
            self._refuse(1, f'a batch of {batch} has no sample for each of '
                         f'{count} ranks')
            return
        for way in self._exchanged(Configuration(count)):
            for overlap in _OVERLAPS if count > 1 else (False,):
                yield from self._predicted(dataclasses.replace(
                    way, overlap=overlap))

    def _pipelines(self, stages: int) -> Iterator[Candidate]:
        """The candidates with so many stages."""
        replicas = self.profile.ranks // stages
        share = self.wanted.batch // replicas
        if share < 1:
            self._refuse(stages, f'a batch of {self.wanted.batch} has no '
                         f'sample for each of {replicas} pipelines')
            return
        numbers = [stages * multiple for multiple in _MULTIPLES
                   if stages * multiple <= share] or [share]
        found: list[tuple[float, Configuration]] = []
        for micro_batches, schedule in itertools.product(numbers,
                                                         _SCHEDULES):
            if schedule == 'gpipe' and micro_batches > _ENOUGH * stages:
                continue
            try:
                way = Configuration(replicas, stages, micro_batches, self.cut(
                    stages, replicas, micro_batches, schedule))
                parts = predict(self.profile, self.wanted.batch, way
                                if replicas == 1 else dataclasses.replace(
                                    way, codec=self.wanted.codecs[0]))
                found.append((sum(parts.values()) - parts['exchange'], way))
            except ValueError as error:
                if stages not in self._impossible:
                    self._refuse(stages, self._why_no_cut(error, replicas))
        found.sort(key=lambda one: one[0])
        for _, way in found[:_CUTS]:
            for exchanged in self._exchanged(way):
                yield from self._predicted(exchanged)

    def _exchanged(self, way: Configuration) -> Iterator[Configuration]:
        """A way with all codecs and algorithms."""
        if way.replicas == 1:
            yield way
            return
        for codec, algorithm in itertools.product(
                self.wanted.codecs, algorithms(way.replicas)):
            yield dataclasses.replace(way, codec=codec, algorithm=algorithm)

    def cut(self, stages: int, replicas: int, micro_batches: int,
            schedule: str) -> PartitionPlan:
        """The best cut into so many stages.

        Raises:
            DoesNotFit: There is none under the memory limit.
            ValueError: The model cannot be cut so often.
        """
        model = self.profile.model
        link = self.profile.links.get(stages, Link())
        limit = self.wanted.memory
        if limit is not None:
            limit -= self._least_exchange(replicas)
            if limit <= 0:
                raise DoesNotFit('no byte is left for the model')
        # More micro-batches change neither which cut is best nor how many are
        # live, except with gpipe, which has no more.
        found = search(
            model.intervals(self.wanted.batch / replicas / micro_batches),
            CutProblem(stages, min(micro_batches, _ENOUGH * stages), schedule,
                       _CHUNKS.get(schedule, 1), limit,
                       2.0 + model.optimizer_arrays, 'auto', link._replace(
                           latency=link.latency + PACKING),
                       self.profile.overhead))
        return dataclasses.replace(found, micro_batches=micro_batches)

    def _least_exchange(self, replicas: int) -> float:
        """Bytes that the exchange of a stage's replicas takes at least."""
        stages = self.profile.ranks // replicas
        return min(exchange_bytes(
            Configuration(replicas, codec=codec),
            self.profile.model.elements / stages)
            for codec in self.wanted.codecs)

    def _why_no_cut(self, error: ValueError, replicas: int) -> str:
        said = str(error).partition('. What')[0]
        if replicas == 1 or not isinstance(error, DoesNotFit):
            return said
        return (f'{said}, beside '
                f'{said_bytes(self._least_exchange(replicas), up=True)} that '
                'the exchange of replicas takes')

    def _predicted(self, way: Configuration) -> Iterator[Candidate]:
        """The way with its prediction, if it fits."""
        memory = rank_memory(self.profile, self.wanted.batch, way)
        limit = self.wanted.memory
        if limit is not None and max(memory) > limit:
            self._refuse(way.stages, (
                f'needs {said_bytes(max(memory), up=True)} on the fullest '
                f'rank, {said_bytes(max(memory) - limit, up=True)} too much'),
                max(memory))
        else:
            yield Candidate(way, predict(
                self.profile, self.wanted.batch, way), memory)

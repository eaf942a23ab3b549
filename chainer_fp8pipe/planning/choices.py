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
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..allreduce.plan import ALGORITHMS
from ..mpi.placement import divisors
from ..report.quantities import size
from .cuts import CutProblem, DoesNotFit, search
from .job_plan import USUAL_CODECS, Configuration, JobPlan, Timing, layout
from .partition_plan import PartitionPlan
from .schedule_time import Link
from .step import PACKING, JobProfile, exchange_bytes, predict, rank_memory

_SCHEDULES = '1f1b', 'gpipe', 'zero_bubble', 'interleaved'
_CHUNKS = {'interleaved': 2}
_OVERLAPS = False, True
#: Cuts of a factorisation that are looked at with replicas' exchanges.
_CUTS = 3
#: Micro-batches of a pipeline, and the most with which a cut is searched for,
#: as multiples of its stages.
_MULTIPLES, _ENOUGH = (1, 2, 4, 8), 2
#: A rank that takes so many times as long as others is named; less is chance.
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


def algorithms(replicas: int) -> tuple[Any, ...]:
    """Those that differ for so many replicas.

    Two ranks send the same in a ring and directly; a prime number makes no
    torus.
    """
    return tuple(row.name for row in ALGORITHMS.values()
                 if row.differs(replicas))


class Choices:
    """All ways to run a job.

    Args:
        profile: What was measured.
        wanted: What the user asks for.

    Attributes:
        profile, wanted: As given.
        candidates: All that fit, the fastest first.
        kinds: Of these the fastest with each layout, codec and overlap.

    Raises:
        DoesNotFit: None fits; the message says why, and by how much.
    """

    def __init__(self, profile: JobProfile, wanted: Wanted) -> None:
        self.profile, self.wanted = profile, wanted
        # Why there is no way with so many stages, by the bytes that each
        # way would need.
        self._reasons: dict[int, list[tuple[float, str]]] = {}
        found = [Candidate(way, predict(profile, wanted.batch, way), memory)
                 for way in self._ways()
                 if (memory := self._memory(way)) is not None]
        if not found:
            raise DoesNotFit('no way to run this job fits: ' + '; '.join(
                f'{self._layout(stages)}: {reason}'
                for stages, reason in self._impossible().items()))
        self.candidates = sorted(found, key=lambda one: one.seconds)
        kinds: dict[tuple, Candidate] = {}
        for one in self.candidates:
            way = one.way
            kinds.setdefault((way.stages, way.codec if way.replicas > 1
                              else '', way.overlap), one)
        self.kinds = list(kinds.values())

    def promising(self) -> list[Configuration]:
        """The ways to try.

        The fastest, each with another layout, codec or overlap; and where
        they are possible the simplest one, plain replicas in float32, and
        ChainerMN's naive, of which nothing is predicted.
        """
        ranks, found = self.profile.ranks, [one.way for one in self.kinds]
        tried = found[:TRIED]
        tried += [way for way in found if way.stages == 1 and way.is_exact
                  and not way.overlap and way not in tried][:1]
        naive = Configuration(ranks, codec='naive')
        return tried + [naive] * (
            ranks > 1 and any(way.stages == 1 for way in tried)
            and self._memory(naive) is not None)

    def plan(self, way: Configuration, trials: Sequence[Timing] = (),
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
            tuple(self._others({str(way), *(one.way for one in trials)})),
            (*self._remarks(), *remarks),
            len(self.candidates), tuple(sorted(
                trials, key=lambda one: one.seconds)))

    def _others(self, known: set[str]) -> Iterator[Timing]:
        """The fastest of other kinds, and one impossible of each layout."""
        others = [one for one in self.kinds if str(one.way) not in known]
        for one in others[:_SHOWN]:
            yield Timing(str(one.way), one.seconds)
        possible = {one.way.stages for one in self.candidates}
        for stages, reason in self._impossible().items():
            if stages not in possible:
                yield Timing(self._layout(stages), reason=reason)

    def _impossible(self) -> dict[int, str]:
        """By stages, what is wrong with the way that needs least."""
        return {stages: min(reasons, key=lambda one: one[0])[1]
                for stages, reasons in self._reasons.items()}

    def _layout(self, stages: int) -> str:
        return layout(stages, self.profile.ranks // stages)

    def _remarks(self) -> Iterator[str]:
        """Yields what slows this job, or keeps it from a pipeline."""
        if undivided := self.profile.model.undivided:
            yield f'no pipeline, as the model cannot be cut: {undivided}'
        slowdown = self.profile.slowdown
        usual = statistics.median_low(slowdown)     # of two, the faster
        for rank, one in enumerate(slowdown):
            if one > _SLOW * usual:
                yield (f'rank {rank} takes {one / usual:.1f} times as long as '
                       'others for the same computation; every step waits for '
                       'it')

    # --- ways ----------------------------------------------------------------

    def _ways(self) -> Iterator[Configuration]:
        """All, whether there is memory for them or not."""
        for stages in divisors(self.profile.ranks):
            if self.wanted.stages and stages not in self.wanted.stages:
                continue
            replicas = self.profile.ranks // stages
            if self.wanted.batch < replicas:
                self._refuse(stages, f'a batch of {self.wanted.batch} has no '
                             f'sample for each of {replicas} '
                             + ('ranks' if stages == 1 else 'pipelines'))
            elif stages > 1:
                yield from self._pipelines(stages, replicas)
            else:
                for way in self._exchanged(Configuration(replicas)):
                    for overlap in _OVERLAPS if replicas > 1 else (False,):
                        yield dataclasses.replace(way, overlap=overlap)

    def _pipelines(self, stages: int, replicas: int
                   ) -> Iterator[Configuration]:
        """The best cuts, with all exchanges."""
        batch = self.wanted.batch
        numbers = [stages * multiple for multiple in _MULTIPLES
                   if stages * multiple <= batch // replicas
                   ] or [batch // replicas]
        found: list[tuple[float, Configuration]] = []
        for micro_batches, schedule in itertools.product(numbers,
                                                         _SCHEDULES):
            if schedule == 'gpipe' and micro_batches > _ENOUGH * stages:
                continue
            try:
                way = Configuration(replicas, stages, micro_batches, self.cut(
                    stages, replicas, micro_batches, schedule),
                    self.wanted.codecs[0])
            except ValueError as error:
                self._refuse(stages, str(error).partition('. What')[0])
                continue
            parts = predict(self.profile, batch, way)
            found.append((sum(parts.values()) - parts['exchange'], way))
        found.sort(key=lambda one: one[0])
        for _, way in found[:_CUTS]:
            yield from self._exchanged(way)

    def _exchanged(self, way: Configuration) -> Iterator[Configuration]:
        """A way with all codecs and algorithms."""
        if way.replicas == 1:
            yield dataclasses.replace(way, codec='float32')
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
        exchange = min(exchange_bytes(Configuration(replicas, codec=codec),
                                      model.elements / stages)
                       for codec in self.wanted.codecs)
        # More micro-batches change neither which cut is best nor how many are
        # live, except with gpipe, which has no more.
        found = search(
            model.intervals(self.wanted.batch / replicas / micro_batches),
            CutProblem(stages, min(micro_batches, _ENOUGH * stages), schedule,
                       _CHUNKS.get(schedule, 1), self.wanted.memory,
                       2.0 + model.optimizer_arrays, 'auto', link._replace(
                           latency=link.latency + PACKING),
                       self.profile.overhead + exchange))
        return dataclasses.replace(found, micro_batches=micro_batches)

    def _memory(self, way: Configuration) -> tuple[float, ...] | None:
        """Bytes of each stage's ranks; None: too many."""
        found = rank_memory(self.profile, self.wanted.batch, way)
        most, limit = max(found), self.wanted.memory
        if limit is None or most <= limit:
            return found
        self._refuse(way.stages, (
            f'needs {size(most, up=True)} on the fullest rank, '
            f'{size(most - limit, up=True)} too much'), most)
        return None

    def _refuse(self, stages: int, reason: str, needed: float = 0.0) -> None:
        self._reasons.setdefault(stages, []).append((needed, reason))

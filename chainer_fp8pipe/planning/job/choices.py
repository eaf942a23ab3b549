"""Searches all ways to run a job for the fastest that fits.

Every factorisation of the ranks is tried, and for each of them every number
of micro-batches, schedule, recomputation, codec, algorithm and overlap.  A
lower bound that takes no simulation (the busiest rank computes, the busiest
link carries) comes first: what cannot beat the best of its kind is not
simulated.  The order is fixed, so that the same profile gives the same
choice.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...mpi.placement import divisors
from ..partition.cuts import Cut, CutProblem, DoesNotFit, Wire, best_cut
from ..partition.partition_plan import PartitionPlan
from ..sizes import said_bytes
from .configuration import USUAL_CODECS, Configuration, simplicity
from .job_profile import JobProfile
from .rank_memory import MemoryModel
from .step import StepModel, StepPrediction

_SCHEDULES = '1f1b', 'gpipe', 'zero_bubble', 'interleaved'
_CHUNKS = {'interleaved': 2}
_ALGORITHMS = 'direct', 'ring', 'torus2d'
_OVERLAPS: tuple[bool | str, ...] = False, True, 'next_forward'
#: Cuts of a factorisation that are tried with replicas' exchanges.
_CUTS = 3
#: What may be faster than the best of its kind by less than this share is not
#: simulated, unless it may be the fastest of all.
_NEAR = 0.02
#: Micro-batches of a pipeline, as multiples of its stages, and with how many a
#: cut is searched for.
_MULTIPLES, _ENOUGH = (1, 2, 4, 8), 2


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
    codecs: tuple[str, ...] = USUAL_CODECS
    stages: tuple[int, ...] = ()


class Candidate(NamedTuple):
    """A configuration with its prediction.

    Attributes:
        configuration: The way to run the job.
        step: Seconds, and what they consist of.
        memory: Bytes of each stage's ranks.
        reason: Why the configuration is impossible; '': it is not.
    """

    configuration: Configuration
    step: StepPrediction | None
    memory: tuple[float, ...] = ()
    reason: str = ''

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinity: impossible."""
        return self.step.seconds.value if self.step else math.inf


class Choices:
    """All configurations of a job that were looked at.

    Args:
        profile: What was measured.
        wanted: What the user asks for.

    Attributes:
        candidates: The fastest first; of each kind at least one that is not
            slower than the best by more than a small share.
        looked_at: How many configurations there are.
        simulated: How many of these were simulated.
    """

    def __init__(self, profile: JobProfile, wanted: Wanted) -> None:
        self.profile, self.wanted = profile, wanted
        self.model = StepModel(profile, wanted.batch)
        self.memory = MemoryModel(profile, self.model.costs)
        self.looked_at = self.simulated = 0
        self._known: dict[str, float] = {}  # the fewest seconds of each kind
        found: list[Candidate] = []
        for stages in divisors(profile.ranks):
            if not wanted.stages or stages in wanted.stages:
                found += (self._pipelines(stages) if stages > 1
                          else self._replicas_only())
        self.candidates = sorted(found, key=lambda one: one.seconds)

    @property
    def best(self) -> Candidate:
        """The fastest; of those that are no faster within the spread, the
        simplest.

        Raises:
            DoesNotFit: None is possible; the message says why.
        """
        if self.candidates and self.candidates[0].step:
            return min(self.equal_to(self.candidates[0]),
                       key=lambda one: simplicity(one.configuration))
        # Of each layout, that which needs least.
        least: dict[int, Candidate] = {}
        for one in sorted(self.candidates, key=lambda one: max(
                one.memory, default=0.0)):
            least.setdefault(one.configuration.stages, one)
        raise DoesNotFit('no way to run this job fits: ' + '; '.join(
            f'{one.configuration}: {one.reason}' for one in least.values()))

    def equal_to(self, best: Candidate) -> list[Candidate]:
        """The candidates that a candidate is not known to be faster than."""
        assert best.step is not None
        return [one for one in self.candidates
                if one.step and one.seconds <= best.seconds * (1 + max(
                    best.step.seconds.spread, one.step.seconds.spread))]

    # --- replicas only -------------------------------------------------------

    def _replicas_only(self) -> list[Candidate]:
        count, batch = self.profile.ranks, self.wanted.batch
        if batch < count:
            return [_impossible(Configuration(count), f'a batch of {batch} '
                                f'has no sample for each of {count} ranks')]
        found = self._tried([
            Configuration(count, codec=codec, algorithm=algorithm)
            for codec, algorithm in self._ways(count)])
        possible = [one for one in found if one.step]
        if count == 1 or not possible:
            return found
        # Overlap hides the same share of an exchange whatever its codec is:
        # of each codec, the fastest algorithms are tried with overlap.
        for codec in dict.fromkeys(one.configuration.codec
                                   for one in possible):
            best = min((one for one in possible
                        if one.configuration.codec == codec),
                       key=lambda one: one.seconds)
            found += self._tried([
                dataclasses.replace(best.configuration, overlap=overlap)
                for overlap in _OVERLAPS[1:]])
        return found

    def _ways(self, replicas: int) -> Iterator[tuple[str, str]]:
        """Codecs with the algorithms that differ for so many replicas."""
        if replicas == 1:
            yield self.wanted.codecs[0], 'direct'
            return
        for codec, algorithm in itertools.product(self.wanted.codecs,
                                                  _ALGORITHMS):
            # Two ranks send the same in a ring and directly; a prime number
            # makes no torus.
            if algorithm == 'direct' or (
                    algorithm == 'ring' and replicas > 2) or (
                    algorithm == 'torus2d' and len(divisors(replicas)) > 2):
                yield codec, algorithm

    # --- pipelines -----------------------------------------------------------

    def _pipelines(self, stages: int) -> list[Candidate]:
        """The candidates with so many stages."""
        replicas = self.profile.ranks // stages
        cuts, reasons = self._cuts(stages, replicas)
        if not cuts:
            return [_impossible(Configuration(replicas, stages, stages),
                                reasons[0] if reasons else 'no cut')]
        plain = Configuration(replicas, stages, cuts[0].micro_batches,
                              cuts[0])
        found = self._tried([
            dataclasses.replace(plain, codec=codec, algorithm=algorithm)
            for codec, algorithm in self._ways(replicas)])
        best = min(found, key=lambda one: one.seconds, default=None)
        return found + self._tried([
            dataclasses.replace(best.configuration if best else plain,
                                cut=cut, micro_batches=cut.micro_batches)
            for cut in cuts[1:]])

    def _cuts(self, stages: int, replicas: int
              ) -> tuple[list[PartitionPlan], list[str]]:
        """The cuts with the shortest steps, without exchanges."""
        found: list[tuple[float, int, PartitionPlan]] = []
        reasons: list[str] = []
        share = self.wanted.batch // replicas
        ways = [
            (self.model.pipelines.least_of_passes(
                stages, replicas, stages * multiple,
                _CHUNKS.get(schedule, 1)), stages * multiple, schedule)
            for multiple, schedule in itertools.product(
                _MULTIPLES, _SCHEDULES)
            if stages * multiple <= share and (
                schedule != 'gpipe' or multiple <= 2)]
        # Without replicas, the seconds of passes say which cut is best.
        enough = _CUTS if replicas > 1 else 1
        for least, micro_batches, schedule in sorted(ways):
            if len(found) >= enough and least > sorted(found)[enough - 1][0]:
                self.looked_at += 1
                continue
            try:
                plan, seconds = self.cut(stages, replicas, micro_batches,
                                          schedule)
            except ValueError as error:
                reasons.append(self._why_no_cut(error, replicas))
            else:
                found.append((seconds, len(found), plan))
        if not found and not reasons:
            reasons.append(f'{share} samples of a pipeline make no '
                           f'{stages} micro-batches')
        found.sort()
        return [plan for _, _, plan in found[:_CUTS]], reasons

    def cut(self, stages: int, replicas: int, micro_batches: int,
             schedule: str) -> tuple[PartitionPlan, float]:
        """The best cut, and the seconds of its step as it is simulated."""
        self.looked_at += 1
        samples = self.wanted.batch / replicas / micro_batches
        intervals = self.model.costs.intervals(samples)
        # More micro-batches change neither which cut is best nor how many are
        # live, except with gpipe, which has no more.
        task = CutProblem(
            stages, min(micro_batches, _ENOUGH * stages), schedule,
            _CHUNKS.get(schedule, 1), self._limit(replicas),
            2.0 + self.profile.model.optimizer_arrays, 'auto',
            self._wire(stages), self.profile.overhead)
        cut: Cut = best_cut(intervals, task)
        plan = PartitionPlan(
            self.profile.model.order,
            tuple(intervals.starts[end] for end in cut.ends[:-1]), stages,
            cut.recompute, micro_batches, schedule, cut.predicted)
        self.simulated += 1
        seconds = self.model.pipelines.seconds_of_passes(
            Configuration(replicas, stages, micro_batches, plan))
        return dataclasses.replace(plan, predicted=dataclasses.replace(
            cut.predicted, seconds=seconds)), seconds

    def _limit(self, replicas: int) -> float | None:
        """Bytes for the model; what an exchange needs is not there.

        Raises:
            DoesNotFit: Nothing is left.
        """
        if self.wanted.memory is None:
            return None
        limit = self.wanted.memory - self._of_exchange(replicas)
        if limit <= 0:
            raise DoesNotFit('no byte is left for the model')
        return limit

    def _of_exchange(self, replicas: int) -> float:
        """Bytes that the exchange of a stage's replicas takes at least."""
        return 0.0 if replicas == 1 else self.memory.least_exchange(
            self.wanted.codecs, replicas)

    def _why_no_cut(self, error: ValueError, replicas: int) -> str:
        said = str(error).partition('. What')[0]
        if replicas == 1 or not isinstance(error, DoesNotFit):
            return said
        return (f'{said}, beside '
                f'{said_bytes(self._of_exchange(replicas), up=True)} that '
                'the exchange of replicas takes')

    def _wire(self, stages: int) -> Wire:
        network = self.profile.network
        inside = all(count % stages == 0
                     for count in Counter(network.hosts).values())
        if network.between_hosts and not inside:
            return Wire(network.latency.value + 5e-5, network.rate.value)
        return Wire(network.local_latency.value + 5e-5,
                    network.local_rate.value)

    # --- one candidate -------------------------------------------------------

    def _tried(self, configurations: Sequence[Configuration]
               ) -> list[Candidate]:
        """Those of the configurations that may be the best of a kind."""
        found = []
        for one in configurations:
            self.looked_at += 1
            candidate = self._checked(one)
            if candidate is not None:
                found.append(candidate)
        return found

    def _checked(self, configuration: Configuration) -> Candidate | None:
        """Predicts memory first, and the step only where it fits.

        None: the step is known to be too slow.
        """
        memory = self.memory.bytes_of(configuration, self.wanted.batch)
        limit = self.wanted.memory
        if limit is not None and max(memory) > limit:
            return Candidate(configuration, None, memory, (
                f'needs {said_bytes(max(memory), up=True)} on the fullest '
                f'rank, {said_bytes(max(memory) - limit, up=True)} too much'))
        try:
            if self._is_too_slow(configuration):
                return None
            self.simulated += 1
            found = Candidate(configuration,
                              self.model.predict(configuration), memory)
        except ValueError as error:
            return Candidate(configuration, None, memory, str(error))
        for kind in ('', *kinds_of(configuration)):
            self._known[kind] = min(self._known.get(kind, math.inf),
                                    found.seconds)
        return found

    def _is_too_slow(self, configuration: Configuration) -> bool:
        """Whether a configuration is known not to be the best of a kind.

        That is, neither the fastest of all nor faster by more than a small
        share than what is known of its kinds.
        """
        least = self.model.least_seconds(configuration)
        return least >= self._known.get('', math.inf) and all(
            least >= (1 - _NEAR) * self._known.get(kind, math.inf)
            for kind in kinds_of(configuration))


def _impossible(configuration: Configuration, reason: str) -> Candidate:
    return Candidate(configuration, None, (), reason)


def kinds_of(way: Configuration) -> list[str]:
    """What a configuration is: layout, codec, algorithm, schedule."""
    names = [f'{way.stages} x {way.replicas}']
    if way.replicas > 1:
        names += [way.codec, way.algorithm, f'overlap={way.overlap!r}']
    if way.cut is not None:
        names += [way.cut.schedule, f'{way.micro_batches} micro-batches']
    return names


def kinds(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """The best of each kind, see :func:`kinds_of`."""
    found: dict[str, Candidate] = {}
    for one in candidates:
        for name in kinds_of(one.configuration):
            if name not in found or one.seconds < found[name].seconds:
                found[name] = one
    return found

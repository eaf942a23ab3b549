"""Simulates steps of replicas whose exchange goes on beside their passes."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ..cluster import Cluster
from ..cores import Cores
from ..engine import (
    Compute,
    Engine,
    EngineAction,
    Program,
    Receive,
    Signal,
)
from .exchanges import Exchange, doubled
from .folding import fold
from .job_profile import JobProfile, ModelFigures
from .model_costs import Pass

#: Steps that are simulated where one step's exchange goes on in the next: the
#: second waits for all of the first's, and so do all that follow.
_STEPS = 2


class OverlapRun:
    """Steps whose buckets travel beside the passes, on one engine.

    Rank r computes; rank ``count + r``, on the same cores, is the thread that
    exchanges.

    Args:
        profile: What was measured.
        exchange: Of the buckets.
        passes: Of a rank's samples.
        defers: Whether the next forward pass waits for the buckets, not the
            end of the step.
    """

    def __init__(self, profile: JobProfile, exchange: Exchange, passes: Pass,
                 defers: bool) -> None:
        self._profile, self._exchange = profile, exchange
        self._count, self._defers = profile.ranks, defers
        model = profile.model
        self._sizes = [model.elements_of(names) for names in model.buckets]
        self._after = model.update.value + model.rest.value
        self._steps = _STEPS if defers else 1
        # When buckets are needed in forward, and final in backward: when
        # their first call's backward pass is through.
        self._needed = _first_calls(model)
        self._final = {bucket: len(model.calls) - number
                       for bucket, number in self._needed.items()}
        self._forward_sums = [0.0, *passes.forward.cumsum()]
        self._backward_sums = [0.0, *passes.backward[::-1].cumsum()]
        self._ends: dict[int, list[float]] = {}
        self._lanes: dict[int, int] = {}        # of each bucket

    def run(self) -> float:
        """Seconds of a step; call it once."""
        everybody = self._exchange.by_hosts()
        folded = fold(self._profile, [everybody],
                      [self._exchange.plans(everybody)])
        cluster, cores = doubled(folded.cluster, folded.cores)
        engine = Engine(cluster, cores)
        ranks = everybody[:folded.period]
        mains = [engine.add(rank, self._computes(
            engine, rank, folded.speeds[rank] * self._profile.straggling))
            for rank in ranks]
        self._add_buckets(engine, cluster, self._order(cores), everybody,
                          ranks)
        engine.run()
        return self._steady(mains)

    def _add_buckets(self, engine: Engine, cluster: Cluster,
                     order: Sequence[int], everybody: Sequence[int],
                     ranks: Sequence[int]) -> None:
        """Adds the threads' programs: one bucket after the other.

        Args:
            engine: Before it runs.
            cluster: Of the engine.
            order: Of the buckets.
            everybody: All ranks of the exchange.
            ranks: Those of them that are simulated.
        """
        chunks = max(4, 96 // max(len(order), 1))
        before: tuple[int, int] | None = None
        for step, bucket in itertools.product(range(self._steps), order):
            starts = [engine.add(self._count + rank, _start(
                rank, step, bucket, before)) for rank in ranks]
            lanes = self._exchange.add(
                engine, cluster, everybody, self._sizes[bucket], starts,
                [self._count + rank for rank in everybody], chunks,
                len(ranks))
            for lane in lanes:
                engine.add(lane.rank, _end(
                    lane.rank - self._count, step, bucket), lane)
            self._lanes[bucket] = len(lanes) // len(ranks)
            before = step, bucket

    def _steady(self, mains: Sequence[Program]) -> float:
        """Seconds of a step when all before it were like it."""
        if not self._defers:
            return max(main.ended for main in mains)
        first, *_, last = (max(ends) for ends in zip(
            *self._ends.values(), strict=True))
        return (last - first) / (self._steps - 1)

    def _order(self, cores: Cores) -> list[int]:
        """Buckets in the order in which they are sent."""
        by_end = sorted(self._final, key=lambda one: (
            self._backward_sums[self._final[one]], one))
        if not self._defers:
            return by_end
        # Of the final ones, that which forward needs first.
        total = sum(self._sizes)
        whole = self._exchange.seconds(self._exchange.by_hosts(),
                                       total).seconds
        slow = max(cores.slowdown(pool, cores.pools.count(pool) // 2)
                   for pool in set(cores.pools))
        final = {bucket: self._backward_sums[number] * slow
                 for bucket, number in self._final.items()}
        order: list[int] = []
        waiting: list[int] = []
        now = 0.0
        while by_end or waiting:
            while by_end and (not waiting or final[by_end[0]] <= now):
                now = max(now, final[by_end[0]])
                waiting.append(by_end.pop(0))
            bucket = waiting.pop()
            order.append(bucket)
            now += whole * self._sizes[bucket] / total
        return order

    # --- a rank's steps ------------------------------------------------------

    def _computes(self, engine: Engine, rank: int, speed: float
                  ) -> Iterator[EngineAction]:
        """All steps of a rank.

        Args:
            engine: That runs them.
            rank: Which one.
            speed: How many times as long as the median the rank takes.
        """
        ends = self._ends.setdefault(rank, [])
        for step in range(self._steps):
            yield from self._forward(rank, step, speed)
            yield from self._backward(rank, step, speed)
            if not self._defers:
                for bucket in self._final:
                    yield from self._arrived(rank, step, bucket)
            yield Compute(self._after * speed)
            ends.append(engine.seconds)

    def _forward(self, rank: int, step: int, speed: float
                 ) -> Iterator[EngineAction]:
        """Forward; where it defers, after waiting for the step before."""
        at = 0
        if self._defers and step:
            for bucket, number in _by_number(self._needed):
                yield from _until(self._forward_sums, at, number, speed)
                at = number
                yield from self._arrived(rank, step - 1, bucket)
        yield from _until(self._forward_sums, at,
                          len(self._forward_sums) - 1, speed)

    def _backward(self, rank: int, step: int, speed: float
                  ) -> Iterator[EngineAction]:
        """Backward, telling the thread which buckets are final."""
        at = 0
        for bucket, number in _by_number(self._final):
            yield from _until(self._backward_sums, at, number, speed)
            at = number
            yield Signal(('ready', rank, step, bucket))
        yield from _until(self._backward_sums, at,
                          len(self._backward_sums) - 1, speed)

    def _arrived(self, rank: int, step: int, bucket: int
                 ) -> Iterator[EngineAction]:
        for _ in range(self._lanes[bucket]):
            yield Receive(('done', rank, step, bucket))


def _first_calls(model: ModelFigures) -> dict[int, int]:
    """For each bucket, the number of the first call that reads of it."""
    place_of = {name: number for number, names in enumerate(model.buckets)
                for name in names}
    first: dict[int, int] = {}
    for number, call in enumerate(model.calls):
        for name in call.parameters:
            if name in place_of:
                first.setdefault(place_of[name], number)
    return {bucket: first.get(bucket, 0)
            for bucket in range(len(model.buckets))}


def _by_number(of: Mapping[int, int]) -> list[tuple[int, int]]:
    """Buckets in the order of their calls, with these."""
    return sorted(of.items(), key=lambda item: item[1])


def _until(sums: Sequence[float], start: int, stop: int, speed: float
           ) -> Iterator[EngineAction]:
    """Computes some of the calls whose sums are given."""
    if sums[stop] > sums[start]:
        yield Compute((sums[stop] - sums[start]) * speed)


def _start(rank: int, step: int, bucket: int,
           before: tuple[int, int] | None) -> Iterator[EngineAction]:
    """Waits for a bucket, and until the one before it has left."""
    yield Receive(('ready', rank, step, bucket))
    if before:
        yield Receive(('tail', rank, *before))


def _end(rank: int, step: int, bucket: int) -> Iterator[EngineAction]:
    """Tells the rank and the next bucket that this one is there."""
    yield Signal(('done', rank, step, bucket))
    yield Signal(('tail', rank, step, bucket))

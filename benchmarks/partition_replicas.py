"""Whether stages with different numbers of replicas would be faster.

A plan gives every stage as many replicas.  Here the best of these
layouts is compared with the best of all: any number of stages, any number of
replicas of each, as many ranks together.  Nothing is run but the calls, alone,
for their times; both kinds are searched and simulated in the same way:

* Stage s has r[s] ranks.  Micro-batch i is done by its rank i mod r[s], so a
  rank has 1 / r[s] of the stage's work, and of its traffic.
* A rank does a backward pass that is ready before a forward pass, and holds no
  more micro-batches than keep the later stages busy: that is 1F1B where all
  stages have as many replicas.
* A message takes the wire's latency and its bytes over the bandwidth, and
  leaves when those before it on the same rank have left.
* After the last backward pass, replicas of a stage average gradients: 2 (r -
  1) / r of the stage's parameters go over the wire of each rank.  A step is
  through when the last stage is.
* With a limit of memory, stages that would not fit run forward twice.
* Every rank has a core of its own, as fast as the one that was timed.
* The cut minimises the slowest stage's compute, traffic and exchange by the
  planner's tables, and is tried beside the planner's own, which knows no
  exchange.  What a cut would cost the Python of other stages is not counted.
"""
from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from chainer_fp8pipe.chains.ghost import GhostError
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.chains.tracing.trace import Tracer
from chainer_fp8pipe.mpi.measured.link_speed import measure_links
from chainer_fp8pipe.planning.partition.cuts import (
    CutProblem,
    Wire,
    least_memory,
)
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import order_of

import chainer
import numpy
from models import MODELS
from partition_plans import traced
from partition_sizes import LARGE, made, part
from pipeline_ranks import quiet_barrier

#: Seconds in which Python packs and unpacks a message, as for ``partition``.
_PACKING = 5e-5
#: Of 1 Gbit/s, so much is payload on the shaped links of benchmarks/network.
_GIGABIT = Wire(1e-4 + _PACKING, .955 * 1e9 / 8)
#: How much slower than the best the slowest stage of a tried cut may be.
_SLACKS = 1.0, 1.05
_PARTS = 4
#: The models of partition_sizes; a small encoder is among the others.
LARGE_NAMES = {f'large {name}': name for name in LARGE}


@dataclass(frozen=True)
class Setting:
    """Where a model is trained.

    Attributes:
        name: For the table.
        wire: Between any two ranks.
        gradient_bytes: Of an element between replicas.
        memory: What a rank may use, of what one rank with the whole model
            would; None: no limit.
    """

    name: str
    wire: Wire
    gradient_bytes: float
    memory: float | None = None


class Layout(NamedTuple):
    """Replicas of each stage, where the stages end, and a step's seconds."""

    replicas: tuple[int, ...]
    ends: tuple[int, ...]
    seconds: float


def replicas(comm, job, rows):
    """A row for each model, setting and number of ranks."""
    speed = measure_links(comm)
    try:
        if comm.rank == 0:
            _all(job, rows, speed)
    finally:
        quiet_barrier()     # the other rank has only been the link's end


def _all(job, rows, speed):
    settings = settings_of(Wire(speed.latency + _PACKING, speed.bandwidth))
    for name in job['names']:
        rows.begin(name)
        try:
            intervals, serial = _costs(name)
        except GhostError as error:
            rows.add({'model': name, 'outcome': 'refused',
                      'reason': str(error)})
            continue
        for setting, ranks in itertools.product(settings, job['ranks']):
            found = compared(intervals, setting, ranks, job['each'] * ranks)
            rows.add({'model': name, 'setting': setting.name, 'ranks': ranks,
                      'outcome': 'right', 'micro_batch': serial,
                      'bandwidth': setting.wire.bandwidth,
                      'each': job['each'], 'atoms': intervals.count,
                      **found}, f'{ranks} ranks, {setting.name}, {name}')


def settings_of(wire):
    """The networks.

    Args:
        wire: Between two ranks of this machine.
    """
    return [Setting('one node, fp8', wire, 1.),
            Setting('one node, float32', wire, 4.),
            Setting('60 % memory, fp8', wire, 1., .6),
            Setting('1 Gbit/s, fp8', _GIGABIT, 1.),
            Setting('1 Gbit/s, float32', _GIGABIT, 4.)]


def compared(intervals, setting, ranks, parts):
    """The best uniform layout, and the best of all.

    Args:
        intervals: Of the model.
        setting: A :class:`Setting`.
        ranks: How many.
        parts: Micro-batches of the whole batch.
    """
    search = _Search(intervals, setting, parts)
    every = [one for stages in range(1, min(ranks, intervals.count) + 1)
             for one in _compositions(ranks, stages)]
    uniform = search.best([one for one in every if len(set(one)) == 1])
    # A layout must be better than the best uniform one to be looked at.
    best = search.best([one for one in every if len(set(one)) > 1], uniform)
    if uniform is None and best is None:
        return {'uniform': None, 'any': None}
    return {'uniform': uniform and uniform._asdict(),
            'any': best._asdict()}


def _compositions(ranks, stages):
    """All rows of so many positive numbers with that sum."""
    for cuts in itertools.combinations(range(1, ranks), stages - 1):
        yield tuple(end - start for start, end in itertools.pairwise(
            [0, *cuts, ranks]))


def _costs(name):
    """What all intervals of a model cost, and seconds of a micro-batch."""
    if name in LARGE_NAMES:
        model, batch = made(LARGE_NAMES[name], 1.)
        names = Names(model)
        with chainer.using_config('train', True):
            trace = Tracer(model, names).trace(
                lambda: model(*part(batch, _PARTS)))
    else:
        trace, names, _ = traced(MODELS[name])
    intervals = Intervals(
        trace.calls, order_of(trace.calls, list(names.parameters)),
        parameters_of(names))
    return intervals, float(intervals.forward[-1] + intervals.backward[-1])


# --- the search --------------------------------------------------------------

class _Search:
    """Looks for the best layout of a model in a setting."""

    def __init__(self, intervals, setting, parts):
        self._intervals, self._setting, self._parts = (intervals, setting,
                                                       parts)
        wire, edge = setting.wire, intervals.crossing
        self._compute = intervals.seconds().astype(float)
        self._forward = numpy.triu(intervals.forward[None, :]
                                   - intervals.forward[:, None])
        # Of the wires to both neighbours, per direction.
        self._traffic = (edge[:, None] + edge[None, :]) / wire.bandwidth
        self._empty = numpy.tril(numpy.ones(self._compute.shape, bool))
        # With SGD: values and sums of gradients.
        self._limit = setting.memory and setting.memory * least_memory(
            intervals, CutProblem(1, parts, copies=2., recompute=False))

    def best(self, layouts, beyond=None):
        """The layout with the shortest step.

        Args:
            layouts: Replicas of the stages.
            beyond: What it has to be better than, or is returned.
        """
        bounds = []
        for one in layouts:
            tables = self._tables(one)
            bound = _slowest(tables)
            if numpy.isfinite(bound):
                heapq.heappush(bounds, (bound, one))
        while bounds:
            bound, one = heapq.heappop(bounds)
            if beyond and bound >= beyond.seconds:
                break
            for ends in self._candidates(one, bound):
                seconds = step_seconds(
                    self._intervals, self._setting, one, ends, self._parts,
                    self._again(one, ends))
                if beyond is None or seconds < beyond.seconds:
                    beyond = Layout(one, ends, seconds)
        return beyond

    def _candidates(self, layout, bound):
        """Ends of stages none of which is slower than a bound."""
        ways = [_least(self._tables(layout), bound * slack, self._traffic)
                for slack in _SLACKS]
        plain = self._tables(layout, exchange=False)
        return dict.fromkeys([*ways, _least(
            plain, _slowest(plain), self._traffic)])

    def _tables(self, layout, exchange=True):
        """Seconds of a step that each interval takes as each stage.

        No schedule is faster than the slowest stage.  Traffic goes on beside
        compute, so that the larger of both counts.
        """
        tables = []
        for stage, count in enumerate(layout):
            most = -(-self._parts // count)
            one = most * numpy.maximum(self._compute, self._traffic / 2)
            if exchange:
                one = one + exchange_seconds(
                    self._intervals.parameters, count, self._setting)
            one = numpy.where(self._empty, numpy.inf, one)
            if self._limit:
                live = min(_warm_up(layout, stage), most)
                one = numpy.where(
                    self._memory(live) <= self._limit, one, numpy.where(
                        self._memory(live, True) <= self._limit,
                        one + most * self._forward, numpy.inf))
            tables.append(one)
        return tables

    def _memory(self, live, again=False):
        """Bytes of each interval as a stage; those that run forward again
        keep their inputs only."""
        intervals = self._intervals
        edge = intervals.crossing
        return (2. * intervals.parameters + intervals.temporary
                + 2 * (edge[:, None] + edge[None, :]) + live * edge[:, None]
                + (1 if again else live) * intervals.kept)

    def _again(self, layout, ends):
        """Which stages have to run forward again."""
        return [bool(self._limit) and self._memory(min(
            _warm_up(layout, stage), -(-self._parts // layout[stage])))[
                start, end] > self._limit
            for stage, (start, end) in enumerate(zip(
                [0, *ends[:-1]], ends, strict=True))]


def exchange_seconds(parameters, count, setting):
    """Of averaging float32 gradients among replicas.

    Args:
        parameters: Bytes of a stage's.
        count: Of replicas.
        setting: A :class:`Setting`.
    """
    return (2 * (count - 1) / count * parameters / 4 * setting.gradient_bytes
            / setting.wire.bandwidth)


def _slowest(tables):
    """The least possible time of the slowest stage."""
    best = tables[0][0]
    for one in tables[1:]:
        best = numpy.maximum(best[:, None], one).min(axis=0)
    return float(best[-1])


def _least(tables, bound, traffic):
    """Ends of stages within a bound, with the least traffic."""
    total, origins = None, []
    for one in tables:
        allowed = numpy.where(one > bound * (1 + 1e-9), numpy.inf,
                              traffic + 1e-6 * one)
        if total is None:
            total = allowed[0]
            continue
        sums = total[:, None] + allowed
        origins.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    ends = [len(total) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return tuple(reversed(ends))


# --- a step ------------------------------------------------------------------

def _warm_up(layout, stage):
    """Micro-batches that a rank of a stage holds at most.

    As many as keep the ranks from this stage on busy: PipeDream's number
    (Harlap et al., 2018), which is 1F1B's where all stages have as many.
    """
    return -(-sum(layout[stage:]) // layout[stage])


class _Rank:
    """A rank of a simulated step."""

    def __init__(self, most):
        self.most, self.live, self.free = most, 0, 0.
        self.backward, self.forward = [], []    # heaps of (arrival, number)
        self.wires = {1: 0., -1: 0.}            # when each is free again

    def begins(self):
        """When it does what next: (seconds, is backward); None: nothing."""
        options = []
        if self.backward:
            options.append((max(self.free, self.backward[0][0]), 0))
        if self.forward and self.live < self.most:
            options.append((max(self.free, self.forward[0][0]), 1))
        if not options:
            return None
        start, kind = min(options)
        return start, not kind


def step_seconds(intervals, setting, layout, ends, parts, again):
    """Of a step, by the rules that the module's docstring states.

    Args:
        intervals: Of the model.
        setting: A :class:`Setting`.
        layout: Replicas of each stage.
        ends: Index after the last atom of each stage.
        parts: Micro-batches of the whole batch.
        again: Which stages run forward a second time before backward.
    """
    starts = [0, *ends[:-1]]
    forward, backward = ([sums[end] - sums[start] for start, end
                          in zip(starts, ends, strict=True)]
                         for sums in (intervals.forward, intervals.backward))
    backward = [back + repeat * forth for forth, back, repeat
                in zip(forward, backward, again, strict=True)]
    sizes = [intervals.crossing[end] / setting.wire.bandwidth
             for end in ends[:-1]]
    ranks = [[_Rank(_warm_up(layout, stage)) for _ in range(count)]
             for stage, count in enumerate(layout)]
    for number in range(parts):
        heapq.heappush(ranks[0][number % layout[0]].forward, (0., number))

    def send(stage, to, number, now):
        mine, size = (ranks[stage][number % layout[stage]],
                      sizes[min(stage, to)])
        start = max(now, mine.wires[to - stage])
        mine.wires[to - stage] = start + size
        heap = ranks[to][number % layout[to]]
        heapq.heappush(heap.forward if to > stage else heap.backward,
                       (start + size + setting.wire.latency, number))

    left = parts * len(layout)
    last = len(layout) - 1
    while left:
        # The earliest of all, so that nothing that comes later counts.
        (start, is_backward), stage, rank = min(
            ((begins, stage, rank) for stage, row in enumerate(ranks)
             for rank in row if (begins := rank.begins()) is not None),
            key=lambda found: found[0])
        if is_backward:
            _, number = heapq.heappop(rank.backward)
            rank.free = start + backward[stage]
            rank.live -= 1
            left -= 1
            if stage:
                send(stage, stage - 1, number, rank.free)
        else:
            _, number = heapq.heappop(rank.forward)
            rank.free = start + forward[stage]
            rank.live += 1
            if stage == last:
                heapq.heappush(rank.backward, (rank.free, number))
            else:
                send(stage, stage + 1, number, rank.free)
    return float(max(
        max(rank.free for rank in row) + exchange_seconds(
            intervals.parameters[start, end], len(row), setting)
        for row, start, end in zip(ranks, starts, ends, strict=True)))

"""What an update takes, in seconds and bytes, in a way to run a job."""
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
# but no earlier than the rank has had the processor for both.
#
# A pipeline's step is that of its schedule where stages have cores of their
# own (schedule_time); where they share cores, it is no shorter than
# all their work at the speed that was measured with all ranks at work, and
# half of what a stage alone would wait for others is added to that.
#
# Seconds and bytes of a model are taken to grow along a line through the two
# sizes of a batch that were measured: a part is the same for any batch (calls
# of functions, gradients of weights' own arrays), the rest grows with the
# samples.
#
# Memory is a promise: no rank takes more than the user's limit.  So what is
# not known exactly is taken to be what it is at most.
from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from ..allreduce.plan import ALGORITHMS, share_summed
from ..codecs import CODECS
from ..mpi.placement import place
from .calls import Call, Value
from .cuts import CutProblem, chunk_costs, rank_bytes
from .intervals import Intervals
from .job_plan import Configuration
from .partition_plan import PartitionPlan
from .schedule_time import Costs, Link, step_time

#: Seconds in which Python packs and unpacks a message between stages, and in
#: which a stage passes by a call of another stage.
PACKING, _PLACEHOLDER = 5e-5, 8e-6
#: Seconds of an update that the exchange's thread costs besides.
_THREAD = 3e-4
#: Of the time that a stage alone would wait, what cores that it shares with
#: others do not fill.
_UNFILLED = 0.5
#: What MPI and the interpreter take for megabytes of gradients.  With MPICH
#: 5.0, 2 and 4 ranks, 0.5 to 32 M elements and all codecs: 2.3 to 2.8 MB.
_BUFFERS = 2_800_000
_FLOAT = 4              # bytes of what is left out, and of sums being made
#: Bytes and number of frames on their way.
_FRAME_BYTES, _FRAMES_IN_FLIGHT = 3 << 14, 3
#: Attributes of intervals that grow with the samples: sums, and others.
_SUMS = 'forward', 'backward', 'weights'
_BYTES = 'kept', 'deferred', 'temporary', 'plain', 'crossing'


# --- what was measured ------------------------------------------------------

@dataclass(frozen=True)
class ModelFigures:
    """The model's calls for two sizes of a batch, and what else takes time.

    Seconds are those of the processor of the first rank, which computes
    alone, in training.

    Attributes:
        samples: Of the larger batch.
        calls: Of a trace with so many samples.
        few: Samples of the smaller batch; equal to ``samples`` if only one
            was measured.
        calls_few: Of a trace with these.
        order: The model's parameters in groups, in the order of first use.
        parameters: By path.
        update: Seconds in which the optimizer updates all parameters.
        micro_batch: Seconds that each micro-batch of a pipeline takes beside
            its calls.
        optimizer_arrays: Arrays of a parameter's size that the optimizer
            keeps.
        update_temporary: Bytes that an update of a parameter takes for a
            while, as a multiple of the parameter's.
        heap: Bytes that the heap takes between the arrays of a pass, as a
            share of these; the most that was seen is 0.19.
        undivided: Why the model cannot be cut, so that ``calls`` are made
            up, one for each layer; '': it can.
    """

    samples: int
    calls: tuple[Call, ...]
    few: int
    calls_few: tuple[Call, ...]
    order: tuple[tuple[str, ...], ...]
    parameters: Mapping[str, Value]
    update: float = 0.0
    micro_batch: float = 0.0
    optimizer_arrays: int = 2
    update_temporary: float = 0.0
    heap: float = 0.2
    undivided: str = ''

    @property
    def elements(self) -> int:
        """Elements of all parameters, as far as shapes are known."""
        return sum(one.size for one in self.parameters.values())

    def elements_of_calls(self) -> list[int]:
        """Elements of the parameters that each call is the first to use."""
        left, found = dict(self.parameters), []
        for call in self.calls:
            found.append(sum(left.pop(name).size for name in call.parameters
                             if name in left))
        return found

    def elements_of_stages(self, cut: PartitionPlan) -> list[int]:
        """Elements of the parameters of each stage."""
        found = [0] * cut.stages
        for name, chunk in cut.homes().items():
            found[chunk % cut.stages] += self.parameters[name].size
        return found

    def passes(self, samples: float) -> numpy.ndarray:
        """Seconds of the calls by plain Chainer, with so many samples.

        Returns:
            float64[2, calls], forward and backward.
        """
        large, small = (numpy.array([
            [getattr(call, name) for call in calls]
            for name in ('forward', 'backward')])
            for calls in (self.calls, self.calls_few))
        # Few and short samples are measured badly.
        least = 0.5 * large.sum(axis=1) * min(samples / self.samples, 1.0)
        seconds = numpy.maximum(
            self._line(large.sum(axis=1), small.sum(axis=1), samples), least)
        shares = large / numpy.maximum(large.sum(axis=1), 1e-12)[:, None]
        return shares * seconds[:, None]

    @functools.cached_property
    def intervals(self) -> Callable[[float], Intervals]:
        """All intervals of the calls, by the number of samples."""
        return functools.cache(self._intervals)

    def _intervals(self, samples: float) -> Intervals:
        large, small = self._both
        found = copy.copy(large)
        for name in (*_SUMS, *_BYTES):
            one, other = getattr(large, name), getattr(small, name)
            if one.shape != other.shape:
                other = one * (self.few / self.samples)
            line = self._line(one, other, samples)
            if name in _SUMS:       # of which no call's part is negative
                line = numpy.maximum(numpy.diff(line, prepend=0.0),
                                     0.0).cumsum()
            setattr(found, name, numpy.maximum(line, 0.0))
        found.weights = numpy.minimum(
            numpy.diff(found.weights, prepend=0.0),
            numpy.diff(found.backward, prepend=0.0)).cumsum()
        # Holes that a micro-batch leaves in the heap, the next one fills.
        found.plain = found.plain + self.heap * (
            found.kept[0, found.count] + found.plain)
        found.temporary = found.temporary + self.heap * (
            found.kept + found.temporary)
        found.update_times = self.update_temporary
        return found

    @functools.cached_property
    def _both(self) -> tuple[Intervals, Intervals]:
        """Intervals as measured, with many samples and with few."""
        large = Intervals(self.calls, self.order, self.parameters)
        if self.few == self.samples:
            return large, large
        return large, Intervals(
            self.calls_few, self.order, self.parameters,
            self.calls if len(self.calls) == len(self.calls_few) else None)

    def _line(self, large: Any, small: Any, samples: float) -> Any:
        """The value at ``samples`` on the line through both."""
        if self.samples == self.few:
            return large * (samples / self.samples)
        return small + (large - small) * ((samples - self.few)
                                          / (self.samples - self.few))


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
            wire = sent(replicas) * CODECS[codec].nbytes / rate
        rounds = math.log2(replicas) / math.log2(self.replicas)
        return ExchangeFigures(replicas, self.fixed * rounds,
                               self.processor + wire, self.processor)


@dataclass(frozen=True)
class JobProfile:
    """All that was measured of a job.

    Attributes:
        model: The model.
        hosts: For each rank, the number of its host.
        slowdown: For each rank, how many times as long a pass takes where
            all ranks compute at once as on the first rank alone.
        exchanges: By the number of stages, the codec and the algorithm.
        links: The slowest between neighbouring stages, by their number.
        spare: Whether each rank has a core for its exchange's thread.
        reading: Seconds in which the data of an update are read and
            converted, and the model is not computed.
        overhead: Bytes of each rank beyond the interpreter's, whatever the
            rank computes.
    """

    model: ModelFigures
    hosts: tuple[int, ...]
    slowdown: tuple[float, ...]
    exchanges: Mapping[tuple[int, str, str], ExchangeFigures]
    links: Mapping[int, Link] = field(default_factory=dict)
    spare: bool = False
    reading: float = 0.0
    overhead: float = 16e6

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.hosts)

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
        crowded = 1.0
        if len(set(self.hosts)) == 1:       # which then has them all
            each, crowded = count, max(count / self.ranks, 1.0)
        return dataclasses.replace(
            self, hosts=tuple(rank // each for rank in range(count)),
            slowdown=tuple(self.slowdown[rank % self.ranks] * crowded
                           for rank in range(count)),
            exchanges={
                (count // one.replicas if count % one.replicas == 0 else 0,
                 codec, algorithm): one._replace(element=one.element
                                                 * crowded)
                for (_, codec, algorithm), one in self.exchanges.items()})

    def on_hosts(self, count: int, rate: float) -> JobProfile:
        """The profile of a job with a rank on each of so many hosts.

        Each rank has cores of its own and is as fast as the first one.

        Args:
            count: Of hosts.
            rate: Bytes per second of a host's link, in each direction.
        """
        return dataclasses.replace(
            self, hosts=tuple(range(count)), slowdown=(1.0,) * count,
            links={}, exchanges={
                (1, codec, algorithm): one.on_paper(codec, count, rate)
                for (_, codec, algorithm), one in self.exchanges.items()})


# --- seconds ----------------------------------------------------------------

def predict(profile: JobProfile, batch: int, way: Configuration
            ) -> dict[str, float]:
    """What an update takes.

    Args:
        profile: What was measured.
        batch: Samples of an update, of all replicas together.
        way: To run the job.

    Returns:
        Seconds by name, which add up to the whole: ``forward and backward``
        (of the busiest rank), ``waiting for stages``, ``exchange`` (what of
        it nothing hides), ``update``, ``other``.

    Raises:
        ValueError: The way does not fit the ranks.
    """
    if way.stages * way.replicas != profile.ranks:
        raise ValueError(f'{way} is for {way.stages * way.replicas} '
                         f'ranks, the profile for {profile.ranks}')
    parts = (_of_replicas(profile, batch, way) if way.cut is None
             else _of_stages(profile, batch, way, way.cut))
    return {name: float(seconds) for name, seconds in {
        **parts, 'other': profile.reading}.items()}


def _of_replicas(profile: JobProfile, batch: int, way: Configuration
                 ) -> dict[str, float]:
    model, slowest = profile.model, max(profile.slowdown)
    forward, backward = model.passes(batch / way.replicas) * slowest
    passes, update = forward.sum() + backward.sum(), model.update * slowest
    parts = {'forward and backward': passes, 'update': update,
             'exchange': 0.0}
    if way.replicas == 1:
        return parts
    figures = profile.exchange(way)
    whole = figures.of(model.elements)
    parts['exchange'] = whole
    if not way.overlap:
        return parts
    # On one host there is no wire that would go on by itself.
    alone = len(set(profile.hosts)) == 1
    busy = passes + (not profile.spare) * (
        whole if alone else model.elements * figures.processor)
    # Of each call: its elements, and when its backward pass is through.
    own = numpy.array(model.elements_of_calls())
    after = backward[::-1].cumsum()[::-1]       # of it and later ones
    # The last call is the first to be through.
    ends = (forward.sum() + after + figures.fixed
            + own.cumsum() * figures.element)
    parts['exchange'] = _THREAD + max(busy, ends.max(initial=0.0)) - passes
    return parts


def _of_stages(profile: JobProfile, batch: int, way: Configuration,
               cut: PartitionPlan) -> dict[str, float]:
    grid = place(profile.hosts, way.stages).ranks
    costs, crossing = _chunks(profile.model, batch, way, cut)
    # What slows all ranks is that they share cores; what slows one, its own.
    shared = min(profile.slowdown)
    speeds = [max(profile.slowdown[rank] for rank in row) / shared
              for row in grid]
    own = [Costs(*(speeds[chunk % way.stages] * seconds for seconds in cost))
           for chunk, cost in enumerate(costs)]
    # Where no pipeline of so many stages was measured: the slowest link.
    link = profile.links.get(way.stages) or min(
        profile.links.values(), key=lambda one: one.bandwidth, default=Link())
    whole = step_time(_problem(cut).steps(), own,
                      link._replace(message_bytes=crossing))
    work = [way.micro_batches * sum(
        sum(own[chunk]) for chunk in range(stage, len(own), way.stages))
        for stage in range(way.stages)]
    busy = max(work)
    all_work = shared * sum(work) / len(work)
    if all_work > busy:
        whole = max(whole, all_work + _UNFILLED * (whole - busy))
    elements = profile.model.elements_of_stages(cut)
    each = profile.model.update / max(profile.model.elements, 1)
    return {'forward and backward': busy,
            'waiting for stages': max(whole - busy, 0.0),
            'exchange': profile.exchange(way).of(max(elements))
            if way.replicas > 1 else 0.0,
            'update': each * max(max(elements),
                                 shared * sum(elements) / len(elements))}


def _problem(cut: PartitionPlan, **options: Any) -> CutProblem:
    """The conditions that a cut is for."""
    return CutProblem(cut.stages, cut.micro_batches, cut.schedule, cut.chunks,
                      **options)


def _chunks(model: ModelFigures, batch: int, way: Configuration,
            cut: PartitionPlan) -> tuple[list[Costs], list[float]]:
    """Seconds of each chunk for a micro-batch, and bytes that cross.

    Messages, and passing by the calls of other stages, are in them; what
    a micro-batch takes besides, each rank pays once.
    """
    intervals = model.intervals(batch / way.replicas / way.micro_batches)
    ends = intervals.ends_of(cut.positions)
    placeholders = _PLACEHOLDER * len(model.calls) * (1 - 1 / len(ends))
    found = []
    for chunk, cost in enumerate(chunk_costs(
            intervals, ends, cut.recompute, cut.schedule == 'zero_bubble')):
        packing = PACKING * ((chunk > 0) + (chunk + 1 < len(ends)))
        found.append(cost._replace(
            forward=(cost.forward + placeholders + packing
                     + model.micro_batch / cut.chunks),
            backward_input=cost.backward_input + packing))
    return found, [float(intervals.crossing[end]) for end in ends[:-1]]


# --- bytes ------------------------------------------------------------------

def rank_memory(profile: JobProfile, batch: int, way: Configuration
                ) -> tuple[float, ...]:
    """Bytes of each stage's ranks, beyond the interpreter's.

    The arguments are those of :func:`predict`.
    """
    model, cut = profile.model, way.cut
    intervals = model.intervals(batch / way.replicas / way.micro_batches)
    copies = 2.0 + model.optimizer_arrays
    if cut is None:
        last = intervals.count
        # The first updates wait for no forward pass, and take as much as any.
        worst = max(intervals.kept[0, last] + intervals.plain,
                    intervals.updating(0, last))
        return (profile.overhead + float(
            intervals.parameters[0, last] * copies + worst)
            + exchange_bytes(way, model.elements),)
    _, found = rank_bytes(intervals, _problem(
        cut, copies=copies, overhead=profile.overhead),
        intervals.ends_of(cut.positions), cut.recompute)
    return tuple(bytes_ + exchange_bytes(way, elements) for bytes_, elements
                 in zip(found, model.elements_of_stages(cut), strict=True))


def exchange_bytes(way: Configuration, elements: float) -> float:
    """Bytes that a communicator keeps beside a model and its gradients.

    With error feedback, what encodings have left out, of all gradients and
    of the means that the rank encodes; with overlap, wires, which are kept
    from one update to the next; frames on their way, and their sums.

    Args:
        way: Names codec, algorithm and overlap; its options count as those
            that are usual.
        elements: Of the gradients.  They are float32; of others there are
            copies besides.
    """
    if way.replicas == 1:
        return 0.0
    if way.codec == 'naive':        # a buffer for all gradients, and one more
        return 2 * _FLOAT * elements + _BUFFERS
    wire, feedback = (CODECS[way.codec].nbytes,
                      CODECS[way.codec].error_feedback)
    found = feedback * _FLOAT * elements * (1 + 1 / way.replicas)
    if way.overlap:
        found = max(found + wire * elements, feedback * _FLOAT * elements)
    frame = min(_FRAME_BYTES, elements * wire) / wire
    # Of each rank's piece: as it comes and as it goes; and sums, of the
    # rank's own piece, or of all pieces on their way round.
    sums = 2.0 * _FLOAT * way.replicas * share_summed(
        ALGORITHMS[way.algorithm].for_ranks(way.replicas))
    return found + _BUFFERS + _FRAMES_IN_FLIGHT * frame * (
        2 * wire * way.replicas + sums)

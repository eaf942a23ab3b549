"""What a rank does per second with each codec while all ranks work."""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import numpy
from mpi4py import MPI

from ...allreduce.bucket import Bucket
from ...allreduce.executor import Framing, PlanExecutor
from ...allreduce.plan import Actions, Opcode, Plan, direct, ring
from ...codecs import BlockScaled, Cast, Codec, Fp8Ratio, Tensors
from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from ...planning.job.codec_choice import form_of_sums
from ...planning.job.job_profile import CodecFigures, Figure
from ...report.stream import EventStream
from ..cold_caches import CacheFiller
from .update_costs import measure_updates

#: Ranks of the exchange of which each rank does its part.
_RANKS = 4
#: Elements: as many as a bucket has, in whole frames of any codec.
SIZE = 6 * _RANKS * Framing.frame_bytes
# Share of encoding and summing together that either takes at least.
_LEAST = 0.1
_FEWEST, _MOST = 3, 15          # repeats
#: Of a codec's part of the budget.
_SHARE = 0.5

_CODECS: dict[str, Callable[[], Codec]] = {
    'fp8': Fp8Ratio, 'float16': lambda: Cast('float16'),
    'float32': lambda: Cast('float32'),
    'int4': lambda: BlockScaled('int4'), 'int5': lambda: BlockScaled('int5')}


def measure_codecs(comm: MPI.Comm,
                   names: Iterable[str] = ('fp8', 'float16', 'float32'),
                   budget: float = 6.0) -> dict[str, CodecFigures]:
    """Measures codecs on all ranks at once; call it on all ranks.

    Rates are of :func:`operation_rates`, seconds of an update and a tensor
    of :func:`.measure_updates`.

    Args:
        comm: All ranks of the job, mpi4py's.
        names: Of communicators.
        budget: Seconds for all of them together.  Each is measured a few
            times, whatever that takes.

    Returns:
        The figures by name; the same on all ranks, bit for bit.

    Raises:
        ValueError: A name is unknown; on all ranks.
        RuntimeError: A rank has failed; on all ranks.
    """
    names = tuple(names)
    for name in names:
        if name not in _CODECS:
            raise ValueError(f'no codec is called {name!r}; choose from: '
                             f'{", ".join(_CODECS)}')
    each = budget / max(len(names), 1)
    found = {}
    for name in names:
        rates = operation_rates(comm, name, each * _SHARE)
        found[name] = CodecFigures(
            rates, *measure_updates(comm, name, each * (1 - _SHARE)))
    # Sums of floats need not come out alike on unlike processors.
    return comm.bcast(found)


def operation_rates(comm: MPI.Comm, name: str, budget: float
                    ) -> dict[str, Figure]:
    """Elements per second of processor time, by operation.

    A :class:`.PlanExecutor` of each rank alone carries out plans in which
    the rank sends itself contributions and partial sums, in frames of the
    default size, and the executor's own clock says what encoding and summing
    take.  What MPI takes is left out.  All ranks do so at the same time, so
    that they share the memory.  Of a run the median frame counts, which no
    other process has interrupted; of the ranks their mean.

    Args:
        comm: All ranks.
        name: Of the codec.
        budget: Seconds.

    Returns:
        By the names of :attr:`.CodecFigures.rates`; infinite for what the
        codec never does: float32 is summed in the wire, by ``add``, and
        blocks with a scale of their own never are.

    Raises:
        RuntimeError: A rank has failed; on all ranks.
    """
    bench: _Bench = raise_together(comm, lambda: _Bench(name))
    found: list[Mapping[str, float]] = []
    start = time.perf_counter()
    try:
        raise_together(comm, bench.seconds)     # touches the memory
        while len(found) < _FEWEST or len(found) < _MOST and comm.bcast(
                time.perf_counter() - start < budget):
            wait_until(comm.Ibarrier().Test)
            found.append(_mean(comm.allgather(
                raise_together(comm, bench.seconds))))
    finally:
        bench.free()
    return {operation: _rate([each[operation] for each in found])
            for operation in found[0]}


def _mean(of_ranks: list[Mapping[str, float]]) -> Mapping[str, float]:
    return {operation: statistics.fmean(each[operation] for each in of_ranks)
            for operation in of_ranks[0]}


def _rate(seconds: list[float]) -> Figure:
    """The rate, from the seconds of an element; infinite for no time."""
    if statistics.median(seconds) <= 0:
        return Figure(math.inf)
    return Figure.of(1 / each for each in seconds if each > 0)


class _Bench:
    """A rank's executors, and gradients for them to work on."""

    def __init__(self, name: str) -> None:
        self._codec = _CODECS[name]()
        generator = numpy.random.default_rng(0)
        gradient, parameter = (
            generator.standard_normal(SIZE, numpy.float32) for _ in range(2))
        self._tensors = Tensors(['/x'], [gradient], [parameter],
                                grain=self._codec.grain)
        self._state = self._codec.init()
        self._codec.begin(self._state, 1.0)
        self._largest = self._codec.propose(self._state, self._tensors)
        self._wire = numpy.zeros(self._tensors.size, self._codec.wire_dtype)
        self._filler = CacheFiller()
        self._events = EventStream()
        form = form_of_sums(name)
        self._sums_are_apart = form != 'wire'
        self._direct, self._ring = (
            self._executor(plan, form) for plan in (direct, ring))
        # Blocks with a scale of their own have no sums in their format.
        self._in_wire = (self._executor(direct, 'wire')
                         if self._codec.grain == 1 else None)

    def _executor(self, plan: Callable[[int], Plan], form: str
                  ) -> PlanExecutor:
        return PlanExecutor(MPI.COMM_SELF, [_to_itself(plan(_RANKS))],
                            self._events, Framing(form=form))

    def seconds(self) -> dict[str, float]:
        """Seconds of an element by operation; 0: it is never done."""
        share = 1 / _RANKS      # of the vector, whose mean a rank makes
        found = dict.fromkeys(('add', 'accumulate', 'add_partial', 'pack',
                               'mean'), 0.0)
        if self._in_wire:
            _, add = self._run(self._in_wire, encodes=False)
            found['add'] = add / (1 - share)
        mean = 0.0
        if self._sums_are_apart:
            mean, add = self._run(self._direct, encodes=False)
            with_packs, with_partials = self._run(self._ring, encodes=False)
            # Of each block there are as many contributions as ranks.  In a
            # ring sums of all blocks but two arrive, and leave again.
            found |= {
                'mean': mean / share, 'accumulate': add,
                'pack': (with_packs - mean) / (1 - 2 * share),
                'add_partial': (with_partials - add) / (1 - 2 * share)}
        writing, reading = self._run(self._direct)
        # On a busy machine the difference of two measurements may come out
        # as nothing, which neither ever takes.
        found |= {'encode': max(writing - mean, _LEAST * writing),
                  'decode': max(reading - add, _LEAST * reading)}
        return found

    def free(self) -> None:
        """Gives MPI's communicators back."""
        for executor in filter(None, (self._direct, self._ring,
                                      self._in_wire)):
            executor.free()

    def _run(self, executor: PlanExecutor, encodes: bool = True
             ) -> tuple[float, float]:
        """Seconds of an element, of what is written and what is read.

        With ``encodes`` gradients are encoded and means decoded, too.
        """
        self._filler.fill()
        bucket = executor.submit(Bucket(
            self._state, self._tensors, self._wire, coding=self._codec.step(
                self._state, self._tensors, self._largest,
                executor.prescale(self._codec)),
            encodes=encodes, decodes=encodes))
        self._largest = None
        total, before = numpy.zeros(2), self._clock()
        own = time.thread_time()
        while not bucket.finished:
            executor.advance()
            began, own = own, time.thread_time()
            found, before = before, self._clock()
            sections = before - found
            # The executor's clock is one on the wall: it goes on while other
            # processes have the core.
            total += sections * min((own - began) / max(sections.sum(), 1e-9),
                                    1.0)
        writing, reading = total / SIZE
        return float(writing), float(reading)

    def _clock(self) -> numpy.ndarray:
        seconds = self._events.seconds
        return numpy.array((seconds['encode'], seconds['decode']))


def _to_itself(plan: Plan) -> Plan:
    """Rank 0's part of a plan, whose messages come from itself.

    All messages of a frame are equally long, so that each is received as if
    it had come from another rank.
    """
    def own(actions: Actions) -> tuple[Actions]:
        return tuple(action if action.kind is Opcode.ENCODE
                     else action._replace(peer=0) for action in actions),

    return Plan(f'{plan.name} to itself', 1, 1, plan.blocks,
                own(plan.reduce[0]), (plan.owned[0],), plan.summed,
                own(plan.gather[0]))

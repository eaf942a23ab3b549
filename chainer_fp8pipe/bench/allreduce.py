"""Times the mean of gradients by every algorithm and codec, and says why."""
# All that is compared is timed in turns, so that a slow minute hits all of it.
# Beside its time stands what each exchange is spent on: the processor (the
# communicator's own clock, of the slowest rank), latency (what the exchange of
# a few elements takes), and the wire, which has the rest: bytes that move, and
# ranks that wait for each other.
from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ..communicators import create_communicator
from ..communicators.options import without_warmup

#: The name of the MPI library's float32 all-reduce in tables.
MPI_LIBRARY = "MPI's Allreduce"
# Elements of an exchange that takes as long as any smaller one.
_FEW = 64


class Case(NamedTuple):
    """A communicator to be timed: its name, its algorithm, other options."""

    codec: str
    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, comm: MPI.Comm) -> Any:
        """The communicator, without warm-up; call it on all ranks."""
        return create_communicator(
            self.codec, comm, algorithm=self.algorithm,
            **without_warmup(self.codec), **dict(self.options))

    def __str__(self) -> str:
        return ' '.join([self.codec, self.algorithm, *(
            f'{name}={value}' for name, value in self.options)])


class Shares(NamedTuple):
    """What an exchange is spent on, on the slowest rank.

    Attributes:
        processor: Seconds of encoding, summing and decoding.
        latency: Seconds that an exchange of a few elements takes.
        nbytes: Bytes that a rank sends, of the rank that sends most.
    """

    processor: float
    latency: float
    nbytes: int

    def wire(self, seconds: float) -> float:
        """Seconds of all that bytes move, and ranks wait for each other."""
        return max(seconds - self.processor - self.latency, 0.0)

    def percent(self, seconds: float) -> tuple[int, int, int]:
        """Processor, wire and latency, out of 100."""
        processor = round(100 * min(self.processor / seconds, 1.0))
        latency = min(round(100 * min(self.latency / seconds, 1.0)),
                      100 - processor)
        return processor, 100 - processor - latency, latency


class Result(NamedTuple):
    """Times of a case.

    Attributes:
        size: Elements of the gradients.
        case: None is the MPI library's.
        seconds: Until the last rank was through, once per repetition.
        shares: What they are spent on; None: nobody knows.
    """

    size: int
    case: Case | None
    seconds: tuple[float, ...]
    shares: Shares | None = None

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost but by rounding of float32."""
        return self.case is None or self.case.codec == 'float32'

    def said(self, with_parts: bool = True) -> str:
        """``'fp8 ring takes 3 ms (2 of the processor, ...)'``."""
        text = f'{self.case or MPI_LIBRARY} takes {self.median * 1e3:.3g} ms'
        if self.shares is None or not with_parts:
            return text
        return (f'{text} ({self.shares.processor * 1e3:.3g} of the processor, '
                f'{self.shares.wire(self.median) * 1e3:.3g} of the wire, '
                f'{self.shares.latency * 1e3:.3g} of latency)')


def model(comm: MPI.Comm, size: int) -> chainer.Link:
    """A parameter, the same on all ranks, with a gradient that is not."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(numpy.random.default_rng(
            0).standard_normal(size, numpy.float32))
    link.x.grad = numpy.random.default_rng((1, comm.rank)).standard_normal(
        size, numpy.float32)
    return link


def measure(comm: MPI.Comm, cases: Sequence[Case], sizes: Sequence[int],
            repeats: int) -> list[Result]:
    """Times all cases, and the MPI library's own beside them.

    On a terminal it shows on stderr how far rank 0 is.

    Args:
        comm: The ranks.
        cases: What to time.
        sizes: Elements of the gradients.
        repeats: Of each, after one for warming up.

    Raises:
        ValueError: A case does not fit these ranks; on all ranks.
    """
    shows = not comm.rank and sys.stderr.isatty()
    results = []
    for number, size in enumerate(sizes):
        with contextlib.ExitStack() as stack:
            link, few = model(comm, size), model(comm, min(size, _FEW))
            made = [case.make(comm) for case in cases]
            for communicator in made:
                stack.callback(communicator.finalize)
            counted = [_Counted(communicator, link) for communicator in made]
            data = numpy.zeros((2, size), numpy.float32)
            actions: list[Callable[[], object]] = [
                # MPICH took up to a fifth longer in place, as naive calls it.
                functools.partial(comm.Allreduce, *data), *counted,
                *[functools.partial(communicator.multi_node_mean_grad, few)
                  for communicator in made]]
            times = interleaved(comm, actions, repeats, _progress(
                f'{size:,} elements ({number + 1} of {len(sizes)})',
                len(actions) * (repeats + 1)) if shows else lambda: None)
        results.append(Result(size, None, times[0]))
        results += [
            Result(size, case, its, one.shares(comm, nothing))
            for case, its, nothing, one in zip(
                cases, times[1:], times[1 + len(cases):], counted,
                strict=False)]
    return results


class _Counted:
    """An exchange, as in an update, whose processor time and bytes are kept.
    """

    def __init__(self, communicator: Any, link: chainer.Link) -> None:
        self._communicator, self._link = communicator, link
        self._found: list[tuple[float, int]] = []

    def __call__(self) -> None:
        seconds, sent = self._so_far()
        self._communicator.multi_node_mean_grad(self._link)
        after, sent_after = self._so_far()
        self._found.append((after - seconds, sent_after - sent))

    def shares(self, comm: MPI.Comm, nothing: Sequence[float]) -> Shares:
        """Of the slowest rank; call it on all."""
        processor, sent = zip(*self._found, strict=True)
        return Shares(comm.allreduce(statistics.median(processor), MPI.MAX),
                      statistics.median(nothing),
                      comm.allreduce(max(sent), MPI.MAX))

    def _so_far(self) -> tuple[float, int]:
        events = self._communicator.events
        return (events.seconds['encode'] + events.seconds['decode'],
                events.bytes_sent)


def interleaved(comm: MPI.Comm, actions: Sequence[Callable[[], object]],
                repeats: int, tick: Callable[[], object]
                ) -> list[tuple[float, ...]]:
    """Times several actions in turns; all ranks begin each together.

    Args:
        comm: The ranks.
        actions: What to time.
        repeats: Of each, after one for warming up.
        tick: Called after each.

    Returns:
        Seconds of each action; the same on all ranks.
    """
    found: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for times, action in zip(found, actions, strict=True):
            comm.Barrier()
            start = time.perf_counter()
            action()
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat:
                times.append(seconds)
            tick()
    return [tuple(times) for times in found]


def table(results: Sequence[Result]) -> str:
    """The results as text, the fastest of each size marked, and why."""
    lines = [f'{"elements":>12}  {"codec":<10}{"algorithm":<18}'
             f'{"median [ms]":>11}  {"spread [ms]":<19}{"x MPI float32":>13}'
             f'  {"processor":>9}{"wire":>6}{"latency":>8}{"MB sent":>9}']
    for size in dict.fromkeys(result.size for result in results):
        ours = [result for result in results if result.size == size]
        base = next(one.median for one in ours if one.case is None)
        best = min(ours, key=lambda one: one.median)
        for one in ours:
            codec, algorithm = (one.case[:2] if one.case
                                else ('float32', MPI_LIBRARY))
            spread = (f'{min(one.seconds) * 1e3:.4g} - '
                      f'{max(one.seconds) * 1e3:.4g}')
            parts = ''
            if one.shares is not None:
                processor, wire, latency = one.shares.percent(one.median)
                parts = (f'  {processor:>7} %{wire:>4} %{latency:>6} %'
                         f'{one.shares.nbytes / 1e6:>9.3g}')
            lines.append(
                f'{size:>12,}  {codec:<10}{algorithm:<18}'
                f'{one.median * 1e3:>11.4g}  {spread:<19}'
                f'{base / one.median:>13.2f}{parts}'
                + ' <- fastest' * (one is best))
    return '\n'.join([*lines, *_explained(ours, best)])


def _explained(results: Sequence[Result], best: Result) -> Iterator[str]:
    """The call to copy, and why the best is, or that nothing lossy pays."""
    if best.case:
        options = ''.join(f', {name}={value!r}' for name, value in (
            ('algorithm', best.case.algorithm), *best.case.options))
        yield ''
        yield ('fastest for the largest: chainer_fp8pipe.create_communicator('
               f'{best.case.codec!r}{options})')
    rival = min((one for one in results if one.is_exact != best.is_exact),
                key=lambda one: one.median, default=None)
    if rival is None:
        return
    yield (f'warning: no compression pays here: {best.said(False)}, '
           f'{rival.said()}' if best.is_exact else
           f'why: {best.said()}; without compression {rival.said()}')


def as_json(results: Sequence[Result], comm: MPI.Comm) -> str:
    """All times, for programs."""
    return json.dumps({
        'ranks': comm.size,
        'library': MPI.Get_library_version().splitlines()[0].strip(),
        'results': [{
            'elements': one.size,
            'codec': one.case.codec if one.case else 'float32',
            'algorithm': one.case.algorithm if one.case else MPI_LIBRARY,
            'options': dict(one.case.options) if one.case else {},
            'seconds': one.seconds,
            'shares': one.shares and one.shares._asdict()}
            for one in results]}, indent=1)


def _progress(label: str, total: int) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        text = f'{label}: {done} of {total}'
        sys.stderr.write(f'\r{text}' if done < total
                         else '\r' + ' ' * len(text) + '\r')
        sys.stderr.flush()
    return tick

"""Times the mean of gradients by every algorithm and codec."""
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
from ..communicators.codec_communicator import CodecCommunicator
from ..communicators.options import without_warmup
from .explanation import Contender, Shares, explain

#: The name of the MPI library's float32 all-reduce in tables.
MPI_LIBRARY = "MPI's Allreduce"
# Elements of an exchange that takes as long as any smaller one.
_FEW = 64


class Case(NamedTuple):
    """A communicator to be timed: its name, its algorithm, other options."""

    codec: str
    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        """The options for timing: without float32 warm-up."""
        return {'algorithm': self.algorithm, **without_warmup(self.codec),
                **dict(self.options)}

    def make(self, comm: MPI.Comm) -> CodecCommunicator:
        """The communicator; call it on all ranks."""
        return create_communicator(self.codec, comm, **self.arguments())

    def call(self) -> str:
        """The call that makes the communicator, for users to copy."""
        options = ''.join(f', {name}={value!r}' for name, value in
                          (('algorithm', self.algorithm), *self.options))
        return f'create_communicator({self.codec!r}{options})'


class Times(NamedTuple):
    """Seconds until the last rank was through, once per repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Shortest and longest, in milliseconds."""
        return f'{min(self.seconds) * 1e3:.4g} - {max(self.seconds) * 1e3:.4g}'


class Result(NamedTuple):
    """A case's times for one size; ``case`` None is the MPI library's."""

    size: int
    case: Case | None
    times: Times
    shares: Shares | None = None

    @property
    def contender(self) -> Contender:
        """What :func:`.explain` wants to know."""
        name = (f'{self.case.codec} {self.case.algorithm}' if self.case
                else MPI_LIBRARY)
        exact = self.case is None or self.case.codec == 'float32'
        return Contender(name, exact, self.times.median, self.shares)


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
            repeats: int, progress: bool = True) -> list[Result]:
    """Times all cases, in turns, and the MPI library's own beside them.

    Args:
        comm: The ranks.
        cases: What to time.
        sizes: Elements of the gradients.
        repeats: Of each, after one for warming up.
        progress: Whether to show on stderr how far rank 0 is.

    Raises:
        ValueError: A case does not fit these ranks; on all ranks.
    """
    results = []
    for number, size in enumerate(sizes):
        with contextlib.ExitStack() as stack:
            link, few = model(comm, size), model(comm, min(size, _FEW))
            made = [case.make(comm) for case in cases]
            for communicator in made:
                stack.callback(communicator.finalize)
            # As in an update: encode to decode.
            counted = [_Counted(communicator, link) for communicator in made]
            actions = [_mpi_library(comm, size), *counted, *[
                functools.partial(communicator.multi_node_mean_grad, few)
                for communicator in made]]
            label = f'{size:,} elements ({number + 1} of {len(sizes)})'
            with _progress(comm, label, len(actions) * (repeats + 1),
                           progress) as tick:
                times = interleaved(comm, actions, repeats, tick)
            results.append(Result(size, None, times[0]))
            results += [
                Result(size, case, its, one.shares(comm, nothing.median))
                for case, its, nothing, one in zip(
                    cases, times[1:], times[1 + len(cases):], counted,
                    strict=False)]
    return results


class _Counted:
    """An exchange whose processor time and bytes are kept."""

    def __init__(self, communicator: CodecCommunicator, link: chainer.Link
                 ) -> None:
        self._communicator, self._link = communicator, link
        self._processor: list[float] = []
        self._sent: list[int] = []

    def __call__(self) -> None:
        before = self._so_far()
        self._communicator.multi_node_mean_grad(self._link)
        seconds, sent = self._so_far()
        self._processor.append(seconds - before[0])
        self._sent.append(sent - before[1])

    def shares(self, comm: MPI.Comm, latency: float) -> Shares:
        """Of the slowest rank; call it on all."""
        return Shares(
            comm.allreduce(statistics.median(self._processor), MPI.MAX),
            latency, comm.allreduce(max(self._sent), MPI.MAX))

    def _so_far(self) -> tuple[float, int]:
        events = self._communicator.events
        return (events.seconds['encode'] + events.seconds['decode'],
                events.bytes_sent)


def interleaved(comm: MPI.Comm, actions: Sequence[Callable[[], object]],
                repeats: int, tick: Callable[[], object]) -> list[Times]:
    """Times several actions in turns, so that a slow minute hits them all.

    All ranks begin an action together; ``tick`` is called after each.

    Returns:
        The times of each action; the same on all ranks.
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
    return [Times(tuple(times)) for times in found]


def table(results: Sequence[Result]) -> str:
    """The results as text, the fastest of each size marked."""
    lines = [f'{"elements":>12}  {"codec":<10}{"algorithm":<18}'
             f'{"median [ms]":>11}  {"spread [ms]":<19}{"x MPI float32":>13}'
             f'  {"processor":>9}{"wire":>6}{"latency":>8}{"MB sent":>9}']
    for size in dict.fromkeys(result.size for result in results):
        ours = [result for result in results if result.size == size]
        base = next(result.times.median for result in ours
                    if result.case is None)
        best = min(ours, key=lambda result: result.times.median)
        for result in ours:
            codec, algorithm = (result.case[:2] if result.case
                                else ('float32', MPI_LIBRARY))
            lines.append(
                f'{size:>12,}  {codec:<10}{algorithm:<18}'
                f'{result.times.median * 1e3:>11.4g}  '
                f'{result.times.spread:<19}'
                f'{base / result.times.median:>13.2f}{_parts(result)}'
                f'{" <- fastest" if result is best else ""}')
    largest = [result for result in results
               if result.size == max(result.size for result in results)]
    best = min(largest, key=lambda result: result.times.median)
    if best.case:
        lines += ['', 'fastest for the largest: '
                  f'chainer_fp8pipe.{best.case.call()}']
    return '\n'.join([*lines, *explain(
        [result.contender for result in largest])])


def _parts(result: Result) -> str:
    if result.shares is None:
        return ''
    processor, wire, latency = result.shares.percent(result.times.median)
    return (f'  {processor:>7} %{wire:>4} %{latency:>6} %'
            f'{result.shares.nbytes / 1e6:>9.3g}')


def as_json(results: Sequence[Result], comm: MPI.Comm) -> str:
    return json.dumps({
        'ranks': comm.size,
        'library': MPI.Get_library_version().splitlines()[0].strip(),
        'results': [{
            'elements': result.size,
            'codec': result.case.codec if result.case else 'float32',
            'algorithm': (result.case.algorithm if result.case
                          else MPI_LIBRARY),
            'options': dict(result.case.options) if result.case else {},
            'seconds': result.times.seconds,
            'shares': result.shares and result.shares._asdict()}
            for result in results]}, indent=1)


def _mpi_library(comm: MPI.Comm, size: int) -> Any:
    # MPICH took up to a fifth longer in place, as ChainerMN's naive calls it.
    data = numpy.zeros((2, size), numpy.float32)
    return lambda: comm.Allreduce(*data)


@contextlib.contextmanager
def _progress(comm: MPI.Comm, label: str, total: int, wanted: bool
              ) -> Iterator[Any]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        sys.stderr.write(f'\r{label}: {done} of {total}')
        sys.stderr.flush()

    if comm.rank or not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    yield tick
    sys.stderr.write('\r' + ' ' * (len(label) + 30) + '\r')

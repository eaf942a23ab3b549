"""``python -m chainer_fp8pipe bench allreduce``: what is fastest here."""
# All that is compared is timed in turns, so that a slow minute hits all of it,
# beside the MPI library's own float32 all-reduce.  Beside a time stands what
# it is spent on: the processor (the communicator's own clock, of the slowest
# rank), latency (what the exchange of a few elements takes), and the wire,
# which has the rest: bytes that move, and ranks that wait for each other.
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import chainer
import numpy
from mpi4py import MPI

from .allreduce.plan import ALGORITHMS, FORMS, sums_travel
from .codecs import CODECS
from .command_line import count, some_of, unwritable
from .communicators import create_communicator
from .communicators.options import without_warmup
from .launcher.virtual_hosts import (
    HostsError,
    VirtualHosts,
    enter,
    is_inside,
    parse_rate,
)
from .planner.exchange_times import spent
from .planning.job_plan import Configuration
from .report.quantities import parse

#: The name of the MPI library's float32 all-reduce in tables.
MPI_LIBRARY = "MPI's Allreduce"
# Elements of an exchange that takes as long as any smaller one.
_FEW = 64


class Result(NamedTuple):
    """Times of a case, and what they are spent on, on the slowest rank.

    Attributes:
        size: Elements of the gradients.
        case: The communicator; None is the MPI library's all-reduce, of which
            nobody knows the rest.
        seconds: Until the last rank was through, once per repetition.
        processor: Seconds of encoding, summing and decoding.
        latency: Seconds that an exchange of a few elements takes.
        nbytes: Bytes that a rank sends, of the rank that sends most.
    """

    size: int
    case: Configuration | None
    seconds: tuple[float, ...]
    processor: float = 0.0
    latency: float = 0.0
    nbytes: int = 0

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost but by rounding of float32."""
        return self.case is None or self.case.codec == 'float32'

    def percent(self) -> tuple[int, int, int]:
        """Processor, wire and latency, out of 100."""
        processor = round(100 * min(self.processor / self.median, 1.0))
        latency = min(round(100 * min(self.latency / self.median, 1.0)),
                      100 - processor)
        return processor, 100 - processor - latency, latency

    def in_words(self, with_parts: bool = True) -> str:
        """``'fp8 ring takes 3 ms (2 of the processor, ...)'``."""
        text = (f'{self.case.exchange if self.case else MPI_LIBRARY} takes '
                f'{self.median * 1e3:.3g} ms')
        if self.case is None or not with_parts:
            return text
        wire = max(self.median - self.processor - self.latency, 0.0)
        return (f'{text} ({self.processor * 1e3:.3g} of the processor, '
                f'{wire * 1e3:.3g} of the wire, {self.latency * 1e3:.3g} of '
                'latency)')


# --- measuring ---------------------------------------------------------------

def model(comm: MPI.Comm, size: int) -> chainer.Link:
    """A parameter, the same on all ranks, with a gradient that is not."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(numpy.random.default_rng(
            0).standard_normal(size, numpy.float32))
    link.x.grad = numpy.random.default_rng((1, comm.rank)).standard_normal(
        size, numpy.float32)
    return link


def made(case: Configuration, comm: MPI.Comm) -> Any:
    """The communicator, without warm-up; call it on all ranks."""
    return create_communicator(
        case.codec, comm, **case.communicator_options(),
        **without_warmup(case.codec))


def measure(comm: MPI.Comm, cases: Sequence[Configuration],
            sizes: Sequence[int], repeats: int) -> list[Result]:
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
    for place, size in enumerate(sizes, 1):
        with contextlib.ExitStack() as stack:
            link, few = model(comm, size), model(comm, min(size, _FEW))
            communicators = [made(case, comm) for case in cases]
            for communicator in communicators:
                stack.callback(communicator.finalize)
            data = numpy.zeros((2, size), numpy.float32)
            actions: list[Callable[[], Any]] = [
                # MPICH took up to a fifth longer in place, as naive calls it.
                functools.partial(comm.Allreduce, *data),
                *(functools.partial(spent, communicator, gradients)
                  for gradients in (link, few)
                  for communicator in communicators)]
            found = interleaved(comm, actions, repeats, _progress(
                f'{size:,} elements ({place} of {len(sizes)})',
                len(actions) * (repeats + 1)) if shows else lambda: None)
        times = [tuple(seconds for seconds, _ in its) for its in found]
        results.append(Result(size, None, times[0]))
        for number, case in enumerate(cases, 1):
            processor, sent = zip(*(took for _, took in found[number]),
                                  strict=True)
            results.append(Result(
                size, case, times[number],
                comm.allreduce(statistics.median(processor), MPI.MAX),
                statistics.median(times[number + len(cases)]),
                comm.allreduce(max(sent), MPI.MAX)))
    return results


def interleaved(comm: MPI.Comm, actions: Sequence[Callable[[], Any]],
                repeats: int, tick: Callable[[], object]
                ) -> list[list[tuple[float, Any]]]:
    """Seconds of several actions in turns, with what they return.

    The seconds are the same on all ranks, which begin each together; ``tick``
    is called after each, and there is one turn more than ``repeats``, for
    warming up.
    """
    found: list[list[tuple[float, Any]]] = [[] for _ in actions]
    for _ in range(repeats + 1):
        for its, action in zip(found, actions, strict=True):
            comm.Barrier()
            start = time.perf_counter()
            took = action()
            its.append((comm.allreduce(time.perf_counter() - start, MPI.MAX),
                        took))
            tick()
    return [its[1:] for its in found]


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


# --- what is printed ---------------------------------------------------------

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
            codec, algorithm = ((one.case.codec, one.case.algorithm)
                                if one.case else ('float32', MPI_LIBRARY))
            spread = (f'{min(one.seconds) * 1e3:.4g} - '
                      f'{max(one.seconds) * 1e3:.4g}')
            processor, wire, latency = one.percent()
            parts = (f'  {processor:>7} %{wire:>4} %{latency:>6} %'
                     f'{one.nbytes / 1e6:>9.3g}') if one.case else ''
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
            ('algorithm', best.case.algorithm),
            *best.case.options.items()))
        yield ''
        yield ('fastest for the largest: chainer_fp8pipe.create_communicator('
               f'{best.case.codec!r}{options})')
    rival = min((one for one in results if one.is_exact != best.is_exact),
                key=lambda one: one.median, default=None)
    if rival is not None:
        yield (f'warning: no compression pays here: {best.in_words(False)}, '
               f'{rival.in_words()}' if best.is_exact else
               f'why: {best.in_words()}; without compression '
               f'{rival.in_words()}')


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
            'shares': {'processor': one.processor, 'latency': one.latency,
                       'nbytes': one.nbytes} if one.case else None}
            for one in results]}, indent=1)


# --- the command -------------------------------------------------------------

_DESCRIPTION = """
Times the mean of gradients over all ranks, for every codec with every
algorithm, beside the MPI library's own float32 all-reduce:

    mpiexec -n 8 python -m chainer_fp8pipe bench allreduce --sizes 1M,25M

Start it as you start your training: same hosts, same ranks per host.  The
times are those of a communicator in an update: encode, exchange, decode.
Their parts are the processor (encoding, summing, decoding), the wire (moving
bytes, waiting for ranks) and latency (an exchange of a few elements).  A note
says where no codec is faster than float32.

Without mpiexec, --virtual makes hosts on this machine, each with a rank and a
cable of the rate --rate.  It does not need root:

    python -m chainer_fp8pipe bench allreduce --virtual 4 --rate 100mbit
"""

_UNITS = {'': 1, 'k': 10 ** 3, 'm': 10 ** 6, 'g': 10 ** 9}
#: Sums that travel do so in; by codec, what 'auto' means already.
_FORMS = 'auto', *FORMS
#: Those that a communicator can have without ranks that only sum.
_ALGORITHMS = tuple(
    row for row in ALGORITHMS.values() if not row.has_servers)
_TRIED = tuple(name for name, row in CODECS.items() if not row.for_study)
_NOT_TRIED = {name: (row.sums,) for name, row in CODECS.items()}


def add_bench(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    bench = commands.add_parser('bench')
    kinds = bench.add_subparsers(required=True, metavar='WHAT')
    parser = kinds.add_parser(
        'allreduce', help='which algorithm and codec is fastest here',
        description=_DESCRIPTION)
    parser.add_argument(
        '--sizes', type=_sizes, default='1M,8M', metavar='N,N...',
        help='elements of the gradients, with k, M or G (default: 1M,8M)')
    for name, default, known, what in (
            ('codecs', 'int4,fp8,float16,float32',
             _TRIED, 'some of '),
            ('algorithms', ','.join(
                row.name for row in _ALGORITHMS if row.differs(4)),
             tuple(row.name for row in _ALGORITHMS), 'some of '),
            ('partial-sums', 'auto', _FORMS,
             'what sums that other ranks add to travel in: ')):
        parser.add_argument(
            f'--{name}', type=some_of(known), default=default,
            metavar='NAME,...',
            help=f'{what}{", ".join(known)} (default: {default})')
    parser.add_argument(
        '--frame-bytes', type=_sizes, metavar='N,...',
        help='try these frames (default: the communicator\'s)')
    parser.add_argument('--repeats', type=count, default=5, metavar='N',
                        help='of each case, after one more (default: 5)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw times there')
    parser.add_argument('--virtual', type=count, metavar='N',
                        help='ranks on N hosts of their own, made on this '
                        'machine (Linux, iproute2, MPICH)')
    parser.add_argument('--rate', type=parse_rate, metavar='RATE',
                        help='of the cable of each such host: 100mbit, 1gbit '
                        '(default: 1gbit)')
    parser.set_defaults(call=_allreduce, parser=parser)


def _allreduce(options: argparse.Namespace) -> None:
    comm = MPI.COMM_WORLD
    if options.rate and not options.virtual:
        options.parser.error('--rate is of hosts that --virtual makes')
    if options.virtual and comm.size == 1:
        _on_virtual_hosts(options)
    if options.virtual and not is_inside():
        options.parser.error('--virtual starts its ranks itself; leave out '
                             'mpiexec')
    if comm.size < 2:
        options.parser.error('there is one rank only; start it with '
                             'mpiexec -n 2 or more, or give --virtual 4')
    # Rank 0 writes; others may be on hosts where the folder is not.
    if problem := comm.bcast(comm.rank == 0 and unwritable(options.json)):
        options.parser.error(f'--json: {problem}')
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    results = measure(comm, _cases(options, comm.size), options.sizes,
                      options.repeats)
    if comm.rank == 0:
        print(f'{comm.size} ranks, number of hosts: {hosts}, medians of '
              f'{options.repeats}\n\n{table(results)}', flush=True)
        if options.json:
            with open(options.json, 'w') as file:
                file.write(as_json(results, comm))


def _on_virtual_hosts(options: argparse.Namespace) -> NoReturn:
    """Runs this command again, in a rank on each host."""
    try:
        enter()
        code = VirtualHosts(options.virtual, options.rate or 1e9).run(
            [sys.executable, *sys.orig_argv[1:]])
    except HostsError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _cases(options: argparse.Namespace, ranks: int) -> list[Configuration]:
    found = []
    for codec in options.codecs:
        wanted = [form for form in options.partial_sums
                  if form not in _NOT_TRIED.get(codec, ())] or ['auto']
        for algorithm in options.algorithms:
            sums = codec != 'float32' and sums_travel(
                ALGORITHMS[algorithm].for_ranks(ranks))
            found += [Configuration(
                ranks, codec=codec, algorithm=algorithm, options={
                    name: value for name, value in (
                        ('partial_sums', form), ('frame_bytes', size))
                    if value not in ('auto', None)})
                for form in (wanted if sums else ['auto'])
                for size in options.frame_bytes or [None]]
    return found


def _sizes(text: str) -> list[int]:
    found = []
    for part in text.split(','):
        size = round(parse(part, _UNITS))
        if size < 1:
            raise argparse.ArgumentTypeError(
                f'{part!r} is no number of elements, such as 1000, 64k or 8M')
        found.append(size)
    return found

"""``python -m chainer_fp8pipe bench allreduce``: its arguments and output."""
from __future__ import annotations

import argparse
import os
from typing import Any

from mpi4py import MPI

from ..command_line import count
from .allreduce import Case, as_json, measure, table

_DESCRIPTION = """
Times the mean of gradients over all ranks, for every codec with every
algorithm, beside the MPI library's own float32 all-reduce:

    mpiexec -n 8 python -m chainer_fp8pipe bench allreduce --sizes 1M,25M

Start it as you start your training: same hosts, same ranks per host.  The
times are those of a communicator in an update: encode, exchange, decode.
Beside them stands what they are spent on: the processor (encoding, summing,
decoding), the wire (bytes that move, ranks that wait for each other), latency
(what an exchange of a few elements takes); and it is said where nothing
compressed is faster than float32.
"""

_UNITS = {'k': 10 ** 3, 'M': 10 ** 6, 'G': 10 ** 9}


def add_bench(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    bench = commands.add_parser('bench', help='measure this cluster')
    kinds = bench.add_subparsers(required=True, metavar='WHAT')
    parser = kinds.add_parser(
        'allreduce', help='which algorithm and codec is fastest here',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--sizes', type=_sizes, default='1M,8M', metavar='N,N...',
        help='elements of the gradients, with k, M or G (default: 1M,8M)')
    parser.add_argument(
        '--codecs', type=_names('int4', 'int5', 'fp8', 'float16',
                                   'float32'),
        default='int4,fp8,float16,float32', metavar='NAME,...',
        help='of int4, int5, fp8, float16, float32 (default: all but int5)')
    parser.add_argument(
        '--algorithms', type=_names('direct', 'ring', 'torus2d', 'mpi_op'),
        default='direct,ring,torus2d', metavar='NAME,...',
        help='of direct, ring, torus2d, mpi_op (default: the first three)')
    parser.add_argument(
        '--partial-sums', metavar='FORM,...', default='auto', type=_names(
            'auto', 'wire', 'float16', 'float32'),
        help='what sums of ring and torus2d travel in: auto, wire, float16, '
        'float32 (default: auto)')
    parser.add_argument(
        '--frame-bytes', type=_sizes, metavar='N,...',
        help='try these frames (default: the communicator\'s)')
    parser.add_argument('--repeats', type=count, default=5, metavar='N',
                        help='of each case, after one more (default: 5)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw times there')
    parser.set_defaults(call=_allreduce, parser=parser)


def _allreduce(options: argparse.Namespace) -> None:
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        options.parser.error('there is one rank only; start it with '
                             'mpiexec -n 2 or more')
    # Rank 0 writes; others may be on hosts where the folder is not.
    folder = os.path.dirname(os.path.abspath(options.json or 'x'))
    if not comm.bcast(os.path.isdir(folder)):
        options.parser.error(f'--json: there is no folder {folder}')
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    results = measure(comm, _cases(options), options.sizes, options.repeats)
    if comm.rank == 0:
        print(f'{comm.size} ranks, number of hosts: {hosts}, medians of '
              f'{options.repeats}\n\n{table(results)}', flush=True)
        if options.json:
            with open(options.json, 'w') as file:
                file.write(as_json(results, comm))


def _cases(options: argparse.Namespace) -> list[Case]:
    frames: list[tuple[tuple[str, Any], ...]] = [
        (('frame_bytes', size),) for size in options.frame_bytes or ()]
    return [Case(codec, algorithm, (*form, *frame))
            for codec in options.codecs for algorithm in options.algorithms
            for form in _forms(codec, algorithm, options.partial_sums)
            for frame in frames or [()]]


def _forms(codec: str, algorithm: str, wanted: list[str]
           ) -> list[tuple[tuple[str, str], ...]]:
    # Only there do sums travel in more than one form.
    if algorithm not in ('ring', 'torus2d') or codec == 'float32':
        return [()]
    # Forms that 'auto' means already, or that the codec refuses.
    less = {'float16': ('float16',), 'int4': ('wire', 'float32'),
            'int5': ('wire', 'float32')}.get(codec, ())
    wanted = [form for form in wanted if form not in less] or ['auto']
    return [() if form == 'auto' else (('partial_sums', form),)
            for form in wanted]


def _names(*known: str) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(',')
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f'{name!r} is none of {", ".join(known)}')
        return found
    return names


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(',')]


def _size(text: str) -> int:
    factor = _UNITS.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        size = round(float(digits) * factor)
    except (ValueError, OverflowError):     # of inf
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no number of elements, such as 1000, 64k or 8M')
    return size

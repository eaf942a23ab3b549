"""All-reduce over links of a known rate: ours, MPICH's and PyTorch's gloo.

    python benchmarks/allreduce.py star         # 4 hosts
    python benchmarks/allreduce.py two-level    # 4 hosts of 2 ranks
    python benchmarks/allreduce.py aggregator   # 4 hosts, 1 rank that sums
    python benchmarks/allreduce.py torus        # 3 x 3 hosts, a ring in them
    python benchmarks/allreduce.py node         # 4 ranks on one host

Hosts are virtual ones of this machine (Linux, iproute2).  A time is that of
an update's whole exchange, encoding and decoding included; for MPICH and
gloo, that of the all-reduce alone.  All cases are timed in turns in one run.
"""
from __future__ import annotations

import contextlib
import datetime
import math
import random
import statistics
import sys
import time

from chainer_fp8pipe.bench import gradients
from chainer_fp8pipe.communicators import create_communicator
from chainer_fp8pipe.communicators.factory import with_aggregators
from chainer_fp8pipe.communicators.options import make_options, without_warmup

import numpy
from environment import (
    RANKS,
    describe,
    milliseconds,
    parser,
    ranks_of,
    start,
    with_torch,
)
from mpi4py import MPI
from network import Star, Torus, begin

#: PyTorch's gloo between ranks of this machine.
ALONE = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29500',
         'GLOO_SOCKET_IFNAME': 'lo'}
_BYTES = {'fp8': 1, 'int4': 17 / 32, 'float16': 2, 'float32': 4}


def case(label, codec, order=None, **options):
    """``order``: the ranks of the network that are ranks 0, 1, ... here."""
    kind = ('aggregator' if options['algorithm'] == 'aggregator' else 'ours')
    return {'label': label, 'kind': kind, 'codec': codec, 'order': order,
            'options': {'nonfinite': 'pass', **options},
            'bytes': _BYTES[codec]}


# ChainerMN's `naive`, the one for gradients on the host, calls it in place.
MPICH = [{'label': f'float32 MPICH{", in place" * in_place}', 'kind': 'mpi',
          'in_place': in_place, 'bytes': 4} for in_place in (False, True)]
GLOO = [{'label': f'{dtype} gloo', 'kind': 'gloo', 'dtype': dtype,
         'bytes': _BYTES[dtype]} for dtype in ('float32', 'float16')]
# A ring of neighbours in the torus of 3 x 3.
NEIGHBOURS = [0, 1, 2, 5, 3, 4, 7, 8, 6]

CASES = {
    'star': [
        *MPICH, *GLOO,
        case('float32 ring', 'float32', algorithm='ring'),
        case('float32 direct', 'float32', algorithm='direct'),
        case('fp8 direct', 'fp8', algorithm='direct'),
        case('int4 direct', 'int4', algorithm='direct'),
        case('fp8 ring', 'fp8', algorithm='ring')],
    'two-level': [
        *MPICH,
        case('fp8 direct, one level', 'fp8', algorithm='direct',
             two_level='no'),
        case('fp8 direct, two levels', 'fp8', algorithm='direct'),
        case('fp8 ring, two levels', 'fp8', algorithm='ring'),
        case('float32 ring, two levels', 'float32', algorithm='ring')],
    'aggregator': [
        case('fp8 ring', 'fp8', algorithm='ring'),
        case('fp8 direct', 'fp8', algorithm='direct'),
        case('fp8 aggregator', 'fp8', algorithm='aggregator'),
        *(case(f'fp8 aggregator, frames of {size} KiB', 'fp8',
               algorithm='aggregator', frame_bytes=size << 10)
          for size in (64, 256)),
        case('fp8 aggregator, store and forward', 'fp8',
             algorithm='aggregator', frame_bytes=0),
        case('float32 aggregator', 'float32', algorithm='aggregator')],
    'torus': [
        made for codec in ('float32', 'fp8') for made in (
            case(f'{codec} ring', codec, NEIGHBOURS, algorithm='ring'),
            case(f'{codec} torus2d', codec, algorithm='torus2d',
                 shape=(3, 3)))],
}
CASES['node'] = CASES['star']
SIZES = {'node': [10 ** 6, 8 * 10 ** 6],
         'star': [10 ** 6, 8 * 10 ** 6, 64 * 10 ** 6],
         'two-level': [10 ** 6, 8 * 10 ** 6],
         'aggregator': [10 ** 3, 10 ** 4, 10 ** 5, 10 ** 6, 10 ** 7,
                        10 ** 8],
         'torus': [10 ** 6, 8 * 10 ** 6]}


def main() -> None:
    options = _arguments()
    sizes = options.sizes or SIZES[options.what]
    rate = options.rate or (200e6 if options.what == 'torus' else 500e6)
    cases = [case for case in CASES[options.what]
             if not options.only or any(part in case['label']
                                        for part in options.only)]
    if not cases:
        sys.exit(f'no case of {options.what} has {options.only} in its name')
    if any(case['kind'] == 'gloo' for case in cases) and not with_torch(
            not options.without_torch):
        cases = [case for case in cases if case['kind'] != 'gloo']
    job = {'cases': cases, 'sizes': sizes, 'repeats': options.repeats,
           'aggregators': int(options.what == 'aggregator')}
    payload = math.inf      # on one host no network sets a limit
    if options.what == 'node':
        print(describe(), flush=True)
        found = ranks_of('allreduce.py', job, 4, env={**RANKS, **ALONE})
    else:
        begin()
        print(describe(), flush=True)
        network = Torus(3, 3, rate) if options.what == 'torus' else Star(
            4, rate, switch=options.what == 'aggregator')
        payload = network.payload()
        print(f'{network.describe()}: {payload / 1e6:.1f} Mbit/s of '
              'payload', flush=True)
        found = ranks_of('allreduce.py', job, network=network,
                         each=2 if options.what == 'two-level' else 1)
    print()
    print(_table(found, cases, payload, options.what))


def seconds_at_the_limit(case, size, payload, what, workers):
    """What the links need at least, in this case.

    2 (P - 1) / P times the vector through a host's link, or once through an
    aggregator's; on a torus, as the ring that uses one link per rank.
    """
    hosts = workers // 2 if what == 'two-level' else workers
    share = (1 if case['kind'] == 'aggregator'
             else 2 * (hosts - 1) / hosts)
    return share * size * case['bytes'] * 8 / payload


def _table(found, cases, payload, what):
    by_label = {case['label']: case for case in cases}
    medians = {(row['size'], row['label']): statistics.median(row['seconds'])
               for row in found['rows']}
    base = cases[0]['label']
    lines = [f'{"elements":>12}  {"":<34}{"median [ms]":>12}'
             f'{"spread [ms]":>20}{"of limit":>10}  x {base}']
    for row in found['rows']:
        median = medians[row['size'], row['label']]
        limit = seconds_at_the_limit(by_label[row['label']], row['size'],
                                     payload, what, found['workers'])
        lines.append(
            f'{row["size"]:>12,}  {row["label"]:<34}'
            '{:>12}{:>20}'.format(*milliseconds(row['seconds']))
            + f'{limit / median:>10.3f}  '
            f'{medians[row["size"], base] / median:.2f}')
    lines.append('of limit: time that the links need for these bytes over '
                 'the time taken')
    return '\n'.join(lines)


def elements(text):
    """Numbers of elements; its name is in argparse's message."""
    return [round(float(part)) for part in text.split(',')]


def _arguments():
    given = parser(__doc__, 'torch')
    given.add_argument('what', choices=list(CASES))
    given.add_argument('--sizes', type=elements, metavar='N,...',
                       help='elements, e.g. 1e6,8e6')
    given.add_argument('--only', nargs='+', metavar='TEXT',
                       help='cases with one of these in their name, such '
                       'as "int4 direct"')
    given.add_argument('--rate', type=float, metavar='BIT/S',
                       help='of every link (default: 500e6; torus: 200e6)')
    given.add_argument('--repeats', type=int, default=5, metavar='N',
                       help='of every case, after one more (default: 5); '
                       'below 1 M elements, 20 times as many')
    return given.parse_args()


# --- ranks -------------------------------------------------------------------
#
# A job has cases, sizes, repeats (of short sizes MORE times as many) and
# aggregators: so many ranks, the last ones, take part in cases of the
# aggregator only.

SHORT = 10 ** 6     # elements: shorter ones take as long as ranks wake up
MORE = 20           # times as many repeats, in turns with all short ones


def rank(everyone, wanted):
    is_worker = everyone.rank < everyone.size - wanted['aggregators']
    workers = everyone.Split(not is_worker, everyone.rank)
    found = {'workers': workers.size, 'rows': []}
    groups = [{(size, case['label']): case for case in wanted['cases']}
              for size in wanted['sizes'] if size >= SHORT]
    short = {(size, case['label']): case for size in wanted['sizes']
              if size < SHORT for case in wanted['cases']}
    for todo in [short, *groups]:
        times = _in_turns(todo, wanted['repeats'] * (
            MORE if todo is short else 1), everyone, workers, is_worker)
        rows = [{'size': size, 'label': label, 'seconds': seconds}
                for (size, label), seconds in times.items()]
        found['rows'] += rows
        if everyone.rank == 0:
            _show(rows)
    return found


def _in_turns(todo, repeats, everyone, workers, is_worker):
    """Seconds by size and label, measured in another order each time."""
    times = {name: [] for name in todo}
    with contextlib.ExitStack() as stack:
        links = {size: gradients(workers, size) if is_worker else None
                 for size in {size for size, _ in todo}}
        kept = {}
        for repeat in range(repeats + 1):
            # What comes after a long exchange finds caches that are cold.
            for name in random.Random(repeat).sample(list(todo), len(todo)):
                (size, _), case = name, todo[name]
                if case['kind'] == 'aggregator':
                    seconds = _aggregated(case, everyone, workers,
                                          links[size])
                elif not is_worker:
                    continue
                else:
                    if name not in kept:
                        kept[name] = stack.enter_context(
                            _opened(case, workers, links[size], size))
                    seconds = _timed(kept[name], workers)
                if repeat and is_worker:
                    times[name].append(seconds)
    return times


def _show(rows):
    for row in rows:
        seconds = statistics.median(row['seconds'])
        print(f'  {row["size"]:>12,}  {row["label"]:<34}'
              f'{seconds * 1e3:10.4g} ms', flush=True)


def _timed(action, comm):
    comm.Barrier()
    begun = time.perf_counter()
    action()
    return comm.allreduce(time.perf_counter() - begun, MPI.MAX)


@contextlib.contextmanager
def _opened(case, comm, link, size):
    if case['kind'] == 'mpi':
        target = numpy.full(size, 0, numpy.float32)     # written
        source = MPI.IN_PLACE if case['in_place'] else target.copy()
        yield lambda: comm.Allreduce(source, target)
    elif case['kind'] == 'gloo':
        yield _gloo(comm, case['dtype'], size)
    else:
        order = case['order'] or range(comm.size)
        communicator = create_communicator(
            case['codec'], comm.Split(0, order.index(comm.rank)),
            **_options(case))
        yield lambda: communicator.multi_node_mean_grad(link)
        communicator.finalize()


def _options(case):
    """The communicator's, without warm-up."""
    return {**without_warmup(case['codec']), **case['options']}


def _aggregated(case, everyone, workers, link):
    """Opens, warms up, times and closes: an aggregator serves one only."""
    # MPI would poll, on a core that the other cases need.
    request = everyone.Ibarrier()
    while not request.Test():
        time.sleep(10e-3)
    communicator = with_aggregators(
        everyone, make_options(case['codec'], _options(case)))
    if communicator is None:    # this rank has served
        return None
    communicator.multi_node_mean_grad(link)
    seconds = _timed(lambda: communicator.multi_node_mean_grad(link), workers)
    communicator.finalize()
    return seconds


def _gloo(comm, dtype, size):
    import torch
    import torch.distributed as dist
    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group('gloo', rank=comm.rank, world_size=comm.size,
                                timeout=datetime.timedelta(minutes=5))
    data = torch.zeros(size, dtype=getattr(torch, dtype))
    return lambda: dist.all_reduce(data)


if __name__ == '__main__':
    start(main, rank)

"""What the ranks of the all-reduce benchmarks do.

The job has ``cases``, ``sizes``, ``repeats`` (of short sizes there
are :data:`MORE` times as many) and ``aggregators``: so many ranks, the last
ones, take part in cases of the aggregator only.
"""
from __future__ import annotations

import contextlib
import datetime
import random
import statistics
import time

from chainer_fp8pipe.bench import gradients
from chainer_fp8pipe.communicators import create_communicator
from chainer_fp8pipe.communicators.factory import with_aggregators
from chainer_fp8pipe.communicators.options import make_options, without_warmup

import numpy
from environment import as_rank
from mpi4py import MPI

SHORT = 10 ** 6     # elements: shorter ones take as long as ranks wake up
MORE = 20           # times as many repeats, in turns with all short ones


def main(everyone, wanted):
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
    start = time.perf_counter()
    action()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


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
    begun = everyone.Ibarrier()
    while not begun.Test():
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
    as_rank(main)

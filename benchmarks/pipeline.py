"""How fast a pipeline is, beside serial Chainer and PyTorch.

    python benchmarks/pipeline.py

trains the paper's network (fully connected layers of one width) serially and
over 2 and 4 stages.  Everything that is compared runs in the same processes,
turn by turn.  Needs ``pip install '.[mpich]'``; with PyTorch installed
(``pip install '.[compare]'``) its pipelines run beside.
"""
from __future__ import annotations

import os
import socket
import statistics
import time
import warnings

from chainer_fp8pipe import Divisible, PipelineUpdater, lazy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.iterators import SerialIterator
from environment import (
    ONE_THREAD,
    describe,
    parser,
    ranks_of,
    start,
)
from mpi4py import MPI

comm = MPI.COMM_WORLD
DEPTH, BATCH = 8, 480      # layers before the last one, and samples
SCHEDULES = (('gpipe', 1), ('1f1b', 1), ('zero_bubble', 1),
             ('zero_bubble', 2))        # with so many chunks per rank


def parse():
    given = parser(__doc__, 'torch')
    given.add_argument('--stages', type=int, nargs='+', default=[2, 4],
                       help='numbers of stages (default: 2 4)')
    given.add_argument('--widths', type=int, nargs='+',
                       default=[512, 1024, 2048],
                       help='of the layers (default: 512 1024 2048)')
    given.add_argument('--micro-batches', type=int, nargs='+',
                       default=[1, 2, 4, 8, 16],
                       help='per batch (default: 1 2 4 8 16)')
    given.add_argument('--rounds', type=int, default=7,
                       help='steps of each that are timed (default: 7)')
    return given.parse_args()


def main():
    options = parse()
    print(describe())
    print(f'{DEPTH} layers and one of 10, batch {BATCH}, '
          f'SGD, medians of {options.rounds} steps; one BLAS thread per rank')
    rows = []
    for stages in options.stages:
        rows += ranks_of('pipeline.py', {
            name: getattr(options, name) for name in (
                'widths', 'micro_batches', 'rounds', 'without_torch')},
            stages, env=ONE_THREAD)
        report([row for row in rows if row['stages'] == stages])


def report(rows):
    """The table for one number of stages."""
    stages = rows[0]['stages']
    torch = any('torch' in row for row in rows)
    print(f'\n{stages} stages{"":8}serial  ours  '
          f'{"spread":>11}  best schedule  speed-up   of (2)   of (3)'
          + ('   PyTorch  ours is' if torch else ''))
    print('width  parts      [ms]  [ms]  [ms]')
    for row in rows:
        best, times = fastest(row, 'ours')
        time = statistics.median(times)
        line = (f'{row["width"]:5} {row["micro_batches"]:6} '
                f'{1e3 * statistics.median(row["serial"]):9.1f} '
                f'{1e3 * time:5.0f}  {1e3 * min(times):4.0f} - '
                f'{1e3 * max(times):4.0f}  {best:>13} '
                f'{statistics.median(row["serial"]) / time:9.2f} '
                f'{paper(row)[0] / time:8.2f} {paper(row)[1] / time:8.2f}')
        if 'torch' in row:
            other = statistics.median(fastest(row, 'torch')[1])
            line += f' {1e3 * other:8.0f} {other / time:6.2f} x as fast'
        print(line)
    print("of (2), of (3): the paper's equations 2 and 3 from the serial time "
          'and the link, over ours')


def paper(row):
    """Seconds of a step by the paper's equations, without and with messages.

    With d stages, m micro-batches and t_comp the time of the serial step::

        t_comm = 2 * (latency + bytes / bandwidth)          (equation 1)
        t_pipe = (m + d - 1) * t_comp / (m * d)             (equation 2)
        T_pipe = t_pipe + (m + d - 2) * t_comm              (equation 3)

    t_comm is the time of a micro-batch's activation and its gradient to
    cross one boundary, during which the sender waits.
    """
    stages, parts = row['stages'], row['micro_batches']
    latency, bandwidth = row['link']
    t_comm = 2 * (latency + row['bytes'] / bandwidth)
    t_pipe = ((parts + stages - 1) / parts / stages
              * statistics.median(row['serial']))
    return t_pipe, t_pipe + (parts + stages - 2) * t_comm


def link_of(comm):
    """Latency in seconds, and bytes per second, between the first two ranks.
    """
    found = []
    for size in 64, 1 << 19:
        array, trips = np.zeros(size, np.uint8), []
        for _ in range(20):
            comm.Barrier()
            begin = time.perf_counter()
            for turn in 0, 1:
                if comm.rank == turn:
                    comm.Send(array, 1 - turn)
                elif comm.rank == 1 - turn:
                    comm.Recv(array, turn)
            trips.append((time.perf_counter() - begin) / 2)
        found.append(comm.bcast(min(trips)))
    return found[0], (1 << 19) / max(found[1] - found[0], 1e-9)


def fastest(row, kind):
    """Schedule and times with the smallest median."""
    return min(row[kind].items(),
               key=lambda item: statistics.median(item[1]))


# --- ranks -------------------------------------------------------------------

class Network(Divisible):
    """The paper's: layers of one width, the last one of 10."""

    def __init__(self, width, depth):
        super().__init__()
        for _ in range(depth):
            self.append(lazy(L.Linear, width, width))
            self.append(F.relu)
        self.append(lazy(L.Linear, width, 10))


def rank(comm, job):
    torch = None if job['without_torch'] else start_torch()
    rows = []
    for width in job['widths']:
        rows += at_width(width, job, torch)
    if torch:
        torch.distributed.destroy_process_group()
    return rows


def at_width(width, job, torch):
    """All rows of one width; what is compared takes turns."""
    batch = np.random.RandomState(0).rand(BATCH, width).astype('f')
    labels = np.random.RandomState(1).randint(
        0, 10, BATCH).astype('i')
    steps = {('serial', '', 0): serial(width, DEPTH, batch, labels)}
    models = {chunks: staged(width, DEPTH, chunks)
              for chunks in {chunks for _, chunks in SCHEDULES}
              if chunks * comm.size <= DEPTH}
    for parts in job['micro_batches']:
        for name, chunks in SCHEDULES:
            if chunks in models:
                updater = PipelineUpdater(
                    SerialIterator([(batch, labels)], 1), models[chunks], comm,
                    micro_batches=parts, schedule=name,
                    converter=lambda found, _: found[0])
                steps['ours', f'{name} x {chunks}' if chunks > 1 else name,
                      parts] = updater.update
    if torch:
        steps.update(torch_steps(torch, width, job, batch, labels))
    times, link = take_turns(steps, job['rounds']), link_of(comm)
    rows = []
    for parts in job['micro_batches']:
        row = {'stages': comm.size, 'width': width, 'micro_batches': parts,
               'serial': times['serial', '', 0], 'link': link,
               'bytes': 4 * width * BATCH / parts}
        for kind in ('ours', 'torch'):
            found = {name: value for (other, name, number), value
                     in times.items() if (other, number) == (kind, parts)}
            if found:
                row[kind] = found
        rows.append(row)
    return rows


def staged(width, depth, chunks):
    """An optimizer of this rank's stage."""
    model = Network(width, depth).stage(
        comm, balance=even(depth, chunks * comm.size), chunks=chunks)
    return chainer.optimizers.SGD(1e-3).setup(model)


def even(depth, parts):
    """As many pairs of a layer and its function for each part."""
    share, more = divmod(depth, parts)
    counts = [2 * (share + (part < more)) for part in range(parts)]
    counts[-1] += 1
    return counts


def serial(width, depth, batch, labels):
    """A step of plain Chainer on rank 0; the others sleep meanwhile."""
    if comm.rank:
        return None
    model = Network(width, depth)
    optimizer = chainer.optimizers.SGD(1e-3).setup(model)
    return lambda: optimizer.update(
        lambda: F.softmax_cross_entropy(model(batch), labels))


def take_turns(steps, rounds):
    """Seconds of each step, on the rank that was last; one turn to warm."""
    times = {key: [] for key in steps}
    for number in range(rounds + 1):
        for key, step in steps.items():
            comm.Barrier()
            start = time.perf_counter()
            if step:
                step()
            quiet_barrier()
            if number:
                times[key].append(comm.bcast(time.perf_counter() - start))
    return times


def quiet_barrier():
    """A barrier that leaves the cores to those who still work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


# --- PyTorch ----------------------------------------------------------------

def start_torch():
    """PyTorch with gloo over the same ranks; None if it is not there."""
    try:
        import torch
    except ImportError:
        return None
    port = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(comm.bcast(port)))
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', rank=comm.rank,
                                         world_size=comm.size)
    return torch


def torch_steps(torch, width, job, batch, labels):
    """A step per schedule and number of parts that PyTorch takes."""
    from torch.distributed import pipelining
    layers = []
    for _ in range(even(DEPTH, comm.size)[comm.rank] // 2):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    if comm.rank == comm.size - 1:
        layers.append(torch.nn.Linear(width, 10))
    module = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x, target = torch.from_numpy(batch), torch.from_numpy(labels).long()

    def step_of(schedule):
        def step():
            optimizer.zero_grad()
            arguments = (x,) if comm.rank == 0 else ()
            options = ({'target': target, 'losses': []}
                       if comm.rank == comm.size - 1 else {})
            schedule.step(*arguments, **options)
            optimizer.step()
        return step

    steps = {}
    for parts in job['micro_batches']:
        for name, kind in (('gpipe', pipelining.ScheduleGPipe),
                           ('1f1b', pipelining.Schedule1F1B)):
            if name == '1f1b' and parts < comm.size:
                continue        # it does not take fewer parts than stages
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                stage = pipelining.PipelineStage(
                    module, comm.rank, comm.size, torch.device('cpu'))
                steps['torch', name, parts] = step_of(kind(
                    stage, parts, loss_fn=torch.nn.functional.cross_entropy))
    return steps


if __name__ == '__main__':
    start(main, rank)

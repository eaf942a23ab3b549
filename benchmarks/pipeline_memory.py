"""Peak memory per rank of a pipeline, with and without recomputation.

    python benchmarks/pipeline_memory.py

counts the bytes of all arrays (NumPy tells ``tracemalloc`` of them), so the
figures are exact and do not depend on the machine.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc

from environment import describe, mpiexec, write_json

RECOMPUTE = ('no stage', 'every stage but the last', 'every stage')
PARTS = 8
WIDTH, DEPTH, BATCH = 256, 24, 2048


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--stages', type=int, nargs='+', default=[1, 2, 4],
                        help='numbers of stages (default: 1 2 4)')
    parser.add_argument('--json', metavar='FILE', help='write the raw data')
    parser.add_argument('--ranks', metavar='FILE', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        measure(options.ranks)
        return
    print(describe())
    print(f'{DEPTH} layers of {WIDTH}, batch {BATCH} in {PARTS} micro-batches;'
          ' MB on ranks 0, 1, ...\n')
    print(f'stages  {"schedule":12}{"recompute":26}{"parameters":>24}  '
          f'{"peak of a step, beyond them":34}live micro-batches')
    rows = []
    for stages in options.stages:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'rows.json')
            subprocess.run(
                [*mpiexec(stages), sys.executable, __file__, '--ranks', path],
                check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
            with open(path) as file:
                found = json.load(file)
        for row in found:
            print(f'{stages:6}  {row["schedule"]:12}{row["recompute"]:26}'
                  f'{megabytes(row["parameters"]):>24}  '
                  f'{megabytes(row["peak"]):34}'
                  + ' '.join(map(str, row['live'])))
        rows += found
    if options.json:
        write_json(options.json, {'rows': rows})


def megabytes(numbers):
    return ' '.join(f'{number / 1e6:.1f}' for number in numbers)


def measure(path):
    """What each rank does; rank 0 writes the rows."""
    from chainer_fp8pipe.planning.schedules.schedule_checker import check

    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rows = []
    for schedule in ('gpipe', '1f1b'):
        for recompute in RECOMPUTE:
            updater, parameters = make(comm, schedule, recompute)
            updater.update()        # gradients and buffers are there now
            gc.collect()
            tracemalloc.start()
            updater.update()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            rows.append({
                'stages': comm.size, 'schedule': schedule,
                'recompute': recompute,
                'parameters': comm.allgather(parameters),
                'peak': comm.allgather(peak),
                'live': check(updater.schedule).peak_live})
    if comm.rank == 0:
        with open(path, 'w') as file:
            json.dump(rows, file)


def make(comm, schedule, recompute):
    """An updater, and the bytes of this rank's parameters."""
    from chainer_fp8pipe import Divisible, PipelineUpdater, lazy

    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np
    model = Divisible(*[
        layer for _ in range(DEPTH)
        for layer in (lazy(L.Linear, WIDTH, WIDTH), F.tanh)])
    model = model.stage(comm, balance='layers')
    x = np.ones((BATCH, WIDTH), 'f')
    t = np.zeros(BATCH, 'i')
    iterator = chainer.iterators.SerialIterator([None], 1)
    updater = PipelineUpdater(
        iterator, chainer.optimizers.SGD().setup(model), comm,
        micro_batches=PARTS, schedule=schedule, recompute=recompute,
        converter=lambda batch, device: (x, t))
    return updater, sum(p.array.nbytes for p in model.params())


if __name__ == '__main__':
    main()

"""Predicted memory of ranks beside what their processes take.

    python benchmarks/planning_memory.py --json memory.json

For each model and number of ranks: one run measures the job and predicts the
memory of configurations that are drawn by chance; then each of them trains in
fresh processes, whose peak beyond that before the model was built is what the
kernel says (VmHWM, begun anew after the first update, which gets the model
from the first rank; the second and the third are those that take most).
"""
from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

import chainer_fp8pipe  # noqa: F401, before chainer
from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.planner.own_memory import forget_peak
from chainer_fp8pipe.report.process_memory import bytes_in

import numpy
from environment import describe, write_json
from mpi4py import MPI
from planning_models import NETS
from planning_ranks import drawn, example_of, make_model, updater_of

_UPDATES = 6


class Job(NamedTuple):
    """A model on some ranks; ``samples`` of each rank."""

    model: str
    ranks: int
    samples: int


#: Large enough that some megabytes of buffers do not matter.
JOBS = [Job('wide', 2, 64), Job('encoder', 4, 128), Job('language', 2, 64),
        Job('resnet50', 2, 16), Job('recurrent', 4, 256)]


def main() -> None:
    options = _arguments()
    if options.rank:
        _rank(*options.rank)
        return
    print(describe(), flush=True)
    print(f'\n{"job, and a configuration of it":<64}{"predicted":>10}'
          f'{"measured":>10}{"ratio":>7}  [MB], fullest rank', flush=True)
    rows = []
    for number, job in enumerate(JOBS):
        if not options.only or options.only in job.model:
            rows += _job(job, number, options)
            if options.json:
                write_json(options.json, {'rows': rows})
    errors = [row['predicted'] / row['measured'] - 1 for row in rows]
    print(f'\n{len(errors)} configurations: error '
          f'{100 * statistics.median(map(abs, errors)):.1f} % in the median, '
          f'{100 * max(map(abs, errors)):.1f} % at most; lowest prediction '
          f'{100 * min(errors):+.1f} %')


def _job(job, number, options):
    name = f'{job.model}, {job.ranks} ranks'
    found = _start(job, {'what': 'predict', 'seed': number,
                         'configurations': options.configurations})
    rows = []
    for one in found or []:
        measured = _start(job, {'what': 'train', 'choice': one['choice']})
        if measured is None:
            continue
        row = {'job': name, 'label': one['label'],
               'predicted': max(one['memory']), 'measured': max(measured),
               'ranks': measured, 'stages': one['memory']}
        print(f'{name + ": " + row["label"]:<64}'
              f'{row["predicted"] / 1e6:>10.1f}{row["measured"] / 1e6:>10.1f}'
              f'{row["predicted"] / row["measured"]:>7.3f}', flush=True)
        rows.append(row)
    return rows


def _start(job, what):
    with tempfile.TemporaryDirectory() as folder:
        specification = pathlib.Path(folder, 'job.json')
        result = pathlib.Path(folder, 'result.json')
        specification.write_text(json.dumps({**job._asdict(), **what}))
        mpiexec = pathlib.Path(sys.executable).with_name('mpiexec')
        code = subprocess.run(
            [str(mpiexec), '-n', str(job.ranks), sys.executable, __file__,
             '--rank', str(specification), str(result)],
            env={**os.environ, 'OMP_NUM_THREADS': '1',
                 'OPENBLAS_NUM_THREADS': '1'}, timeout=600).returncode
        if code:
            print(f'{job}: the ranks ended with exit code {code}')
            return None
        return json.loads(result.read_text())


def _rank(specification, result):
    job = json.loads(pathlib.Path(specification).read_text())
    comm = MPI.COMM_WORLD
    net = NETS[job['model']]._replace(samples=job['samples'])
    found = (_predict if job['what'] == 'predict' else _train)(
        comm, net, job)
    if comm.rank == 0:
        pathlib.Path(result).write_text(json.dumps(found))


def _predict(comm, net, job):
    from chainer_fp8pipe.planner.planned_job import measure
    from chainer_fp8pipe.planning.job.choices import Choices, Wanted
    batch = net.samples * comm.size
    wanted = Wanted(batch)
    profile = measure(make_model(net), example_of(net), comm, wanted,
                      net.optimizer())
    if comm.rank:
        return None
    print(f'overhead {profile.overhead / 1e6:.1f} MB, heap '
          f'{100 * profile.model.heap:.0f} % beyond the arrays of a pass')
    choices = Choices(profile, wanted)
    return [{'label': str(one), 'choice': one.as_dict(),
             'memory': list(choices.memory.bytes_of(one, batch))}
            for one in drawn(choices, job['seed'], job['configurations'])]


def _train(comm, net, job):
    """Bytes of each rank while it trains, beyond those before."""
    _warm_up(comm)
    before = bytes_in('VmRSS')
    updater, communicator = updater_of(comm, net, job['choice'],
                                       net.samples * comm.size)
    updater.update()
    gc.collect()
    forget_peak()
    for _ in range(_UPDATES):
        updater.update()
    measured = bytes_in('VmHWM') - before
    if communicator:
        communicator.finalize()
    return comm.allgather(measured)


def _warm_up(comm):
    """Loads what any training loads, BLAS's buffers and MPI's included."""
    importlib.import_module(
        'chainer_fp8pipe.training.updaters.pipeline_updater')
    matrix = numpy.ones((256, 256), 'f')
    matrix @ matrix
    wait_until(comm.Ibarrier().Test)
    random.random()


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', metavar='MODEL', help='this model only')
    parser.add_argument('--configurations', type=int, default=4, metavar='N',
                        help='of each job (default: 4)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw data there')
    parser.add_argument('--rank', nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == '__main__':
    main()

"""Any Chain, cut by itself: is it right, balanced, small and fast enough.

    python benchmarks/partition.py models       # those of benchmarks/models
    python benchmarks/partition.py functions    # all of Chainer's, every cut
    python benchmarks/partition.py memory       # limits, kept and predicted
    python benchmarks/partition.py speed        # serial, by hand, PyTorch
    python benchmarks/partition.py hybrid       # with replicas, on a network

``partition.py NAME --help`` says what each does and takes.  Each prints its
table with the aim beside the figure; progress goes to stderr.  ``hybrid``
needs root and iproute2, see benchmarks/network.
"""
from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time

import partition_tables
from environment import describe, mpiexec, with_torch, write_json

RANKS = os.path.abspath(__file__), '--rank'
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
              'MKL_NUM_THREADS': '1'}
#: So many functions are in one job: MPI libraries have room for some 2,000
#: communicators, and each cut takes some.
_IN_A_JOB = 60


def main():
    if sys.argv[1:2] == ['--rank']:
        return rank(*sys.argv[2:])
    options = _arguments().parse_args()
    print(describe(), flush=True)
    data = options.measure(options)
    if options.json:
        write_json(options.json, {'what': options.what, **data})
    return None


# --- what is measured --------------------------------------------------------

def models(options):
    """Loss and gradients of every model, ranks and schedule against plain
    Chainer in one process: the loss bit by bit."""
    from models import MODELS
    names = options.only or [case.name for case in MODELS.values()
                             if options.zoo or not case.slow]
    rows = []
    for ranks in options.ranks:
        rows += in_jobs(ranks, 'models', names, 'model', {},
                        options.patience, in_a_job=20)
    partition_tables.models(rows)
    return {'rows': rows}


def functions(options):
    """Every function and link of Chainer inside of a small model, cut
    between two ranks at every place where a cut can be."""
    from partition_calls import CALLS, LEFT_OUT
    rows = in_jobs(2, 'functions', options.only or sorted(CALLS),
                   'function', {}, options.patience, in_a_job=_IN_A_JOB)
    partition_tables.functions(rows, LEFT_OUT)
    return {'rows': rows}


def memory(options):
    """The largest model that a limit allows, and what it then takes."""
    rows = []
    for ranks in options.ranks:
        job = {'memory': options.memory, 'units': options.units,
               'most': options.most, 'updates': options.updates}
        row, = one_job(ranks, 'accepted', job)
        if row['layers']:
            # A process of its own: what the search took is not in it.
            found, = one_job(ranks, 'resident', {
                **job, 'layers': row['layers']}, malloc=False)
            row.update(found)
        rows.append(row)
    partition_tables.memory(rows)
    return {'rows': rows}


def speed(options):
    """A step over two ranks against serial Chainer, turn by turn."""
    rows = one_job(2, 'speed', {
        'models': options.only, 'rounds': options.rounds,
        'scale': options.scale, 'micro_batches': options.micro_batches,
        'torch': with_torch(not options.without_torch)})
    partition_tables.speed(rows)
    return {'rows': rows}


def hybrid(options):
    """Replicas of pipelines on a slow network against either alone."""
    from network import NetworkError, Star
    try:
        network = Star(4, options.rate)
    except NetworkError as error:
        sys.exit(str(error))
    with network, tempfile.TemporaryDirectory() as folder:
        payload = network.payload()
        said = (f'{network.describe()}: {payload / 1e6:.1f} Mbit/s of '
                'payload measured in both directions at once')
        print(said, flush=True)
        path = os.path.join(folder, 'rows.jsonl')
        done = network.run(
            [sys.executable, *RANKS, 'hybrid', path, json.dumps({
                'rounds': options.rounds, 'scale': options.scale,
                'micro_batches': options.micro_batches})],
            env=ONE_THREAD, timeout=3000)
        if done.returncode:
            sys.exit(f'the ranks ended with exit code {done.returncode}')
        rows = _read(path)
    partition_tables.hybrid(rows)
    return {'payload': payload, 'rows': rows}


# --- ranks -------------------------------------------------------------------

#: In which module each measurement is.
HOMES = {
    'models': 'partition_right', 'functions': 'partition_right',
    'accepted': 'partition_speed', 'resident': 'partition_speed',
    'speed': 'partition_speed', 'hybrid': 'partition_speed'}


class Rows:
    """Where rank 0 writes; on the others it does nothing."""

    def __init__(self, path, comm):
        self._path = path if comm.rank == 0 else None

    def begin(self, name):
        """Notes what comes now, in case that it ends the job."""
        self._write({'begin': name})

    def add(self, row, said=''):
        """Writes a row; says on stderr how far this is."""
        self._write(row)
        if self._path and said:
            sys.stderr.write(f'  {said}\n')
            sys.stderr.flush()

    def _write(self, row):
        if self._path:
            with open(self._path, 'a') as file:
                file.write(json.dumps(row) + '\n')


def rank(what, path, job):
    """What a rank does; a row is a line, so that none is lost by a crash."""
    import chainer_fp8pipe  # noqa: F401, before chainer

    from mpi4py import MPI
    measure = getattr(importlib.import_module(HOMES[what]), what)
    measure(MPI.COMM_WORLD, json.loads(job), Rows(path, MPI.COMM_WORLD))


# --- jobs of ranks -----------------------------------------------------------

def one_job(ranks, what, job, malloc=True):
    """The rows of one job; its failure ends the benchmark.

    Args:
        ranks: How many.
        what: They measure.
        job: Its arguments.
        malloc: Whether freed memory stays with the process, which steadies
            times and enlarges memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'rows.jsonl')
        done = subprocess.run(_command(ranks, what, path, job),
                              env=_environment(malloc))
        if done.returncode:
            sys.exit(f'{what}: the ranks ended with exit code '
                     f'{done.returncode}')
        return _read(path)


def in_jobs(ranks, what, names, key, job, patience, in_a_job):
    """Rows of all names; who ends a job or says nothing any more is out.

    Args:
        ranks: How many.
        what: They measure.
        names: Of what they measure.
        key: Under which rows have the name.
        job: More arguments.
        patience: Seconds without a row after which a job is ended.
        in_a_job: How many names a job is given at most.
    """
    rows, waiting = [], collections.deque(names)
    while waiting:
        now = [waiting.popleft()
               for _ in range(min(in_a_job, len(waiting)))]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'rows.jsonl')
            problem = _watched(_command(
                ranks, what, path, {**job, 'names': now}), path, patience)
            found, begun = _read(path), _begun(path)
        rows += found
        if problem:
            last = begun[-1] if begun else now[0]
            sys.stderr.write(f'  {last}: {problem}\n')
            rows.append({key: last, 'ranks': ranks, 'outcome': 'failed',
                         'schedule': '', 'cuts': 0, 'reason': problem})
            waiting.extendleft(reversed(now[now.index(last) + 1:]))
    return rows


def _command(ranks, what, path, job):
    return [*mpiexec(ranks), sys.executable, '-W', 'ignore', *RANKS, what,
            path, json.dumps(job)]


def _environment(malloc=True):
    steady = {'MALLOC_MMAP_MAX_': '0',
              'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}
    return {**os.environ, **ONE_THREAD, **(steady if malloc else {})}


def _watched(command, path, patience):
    """Runs a job; what was wrong with it, or ''."""
    with subprocess.Popen(command, env=_environment(False)) as job:
        size, since = -1, time.monotonic()
        while job.poll() is None:
            time.sleep(.2)
            now = os.path.getsize(path) if os.path.exists(path) else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                job.terminate()
                job.wait()
                return f'nothing for {patience:.0f} s'
        return (f'the ranks ended with exit code {job.returncode}'
                if job.returncode else '')


def _lines(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def _read(path):
    return [row for row in _lines(path) if 'begin' not in row]


def _begun(path):
    return [row['begin'] for row in _lines(path) if 'begin' in row]


# --- arguments ---------------------------------------------------------------

def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest='what', required=True, metavar='NAME')

    def kind(measure):
        one = kinds.add_parser(
            measure.__name__, help=' '.join(measure.__doc__.split()),
            description=' '.join(measure.__doc__.split()),
            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.set_defaults(measure=measure)
        one.add_argument('--json', metavar='FILE', help='write the raw data')
        return one

    def only(one, default, what='these alone'):
        one.add_argument('--only', nargs='+', metavar='NAME',
                         default=default, help=what)

    def number(one, name, default, said, type=int):
        one.add_argument(name, type=type, default=default, metavar='N',
                         help=said)

    def numbers(one, name, default, said):
        one.add_argument(name, type=int, nargs='+', default=default,
                         metavar='N', help=said)
    both = ['encoder', 'resnet50']

    one = kind(models)
    only(one, None)
    numbers(one, '--ranks', [2, 3, 4], 'numbers of ranks')
    one.add_argument('--zoo', action='store_true',
                     help="with the slow ones, Chainer's own networks")
    number(one, '--patience', 600, 'seconds for a model and schedule')

    one = kind(functions)
    only(one, None)
    number(one, '--patience', 300, 'seconds for a function')

    one = kind(memory)
    numbers(one, '--ranks', [1, 2, 4, 6], 'numbers of ranks')
    one.add_argument('--memory', default='400 MB', help='limit of a rank')
    number(one, '--units', 256, 'of the encoder')
    number(one, '--most', 512, 'layers at most')
    number(one, '--updates', 4, 'updates in training')

    one = kind(speed)
    only(one, both)
    number(one, '--rounds', 9, 'steps of each that are timed')
    number(one, '--scale', 1., 'of the models\' sizes', float)
    number(one, '--micro-batches', 4, 'per batch')
    one.add_argument('--without-torch', action='store_true',
                     help='leave out PyTorch')

    one = kind(hybrid)
    number(one, '--rounds', 7, 'steps of each that are timed')
    number(one, '--rate', 500e6, 'bit/s of every link', float)
    number(one, '--scale', 1., "of the encoder's sizes", float)
    number(one, '--micro-batches', 4, 'per batch')
    return parser


if __name__ == '__main__':
    main()

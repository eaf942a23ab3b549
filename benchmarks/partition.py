"""Any Chain, cut by itself: is it small and fast enough.

    python benchmarks/partition.py memory       # limits, kept and predicted
    python benchmarks/partition.py speed        # serial, by hand, PyTorch
    python benchmarks/partition.py hybrid       # with replicas, on a network

``partition.py NAME --help`` says what each does and takes.  Each prints its
table with the aim beside the figure; progress goes to stderr.  ``hybrid``
needs root and iproute2, see benchmarks/network.  Whether it is right,
tests/models tells.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from environment import (
    ONE_THREAD,
    RANKS,
    describe,
    mpiexec,
    with_torch,
    write_json,
)

_AS_RANK = os.path.abspath(__file__), '--rank'


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
    show_memory(rows)
    return {'rows': rows}


def speed(options):
    """A step over two ranks against serial Chainer, turn by turn."""
    rows = one_job(2, 'speed', {
        'models': options.only, 'rounds': options.rounds,
        'scale': options.scale, 'micro_batches': options.micro_batches,
        'torch': with_torch(not options.without_torch)})
    show_speed(rows)
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
            [sys.executable, *_AS_RANK, 'hybrid', path, json.dumps({
                'rounds': options.rounds, 'scale': options.scale,
                'micro_batches': options.micro_batches})],
            env=ONE_THREAD, timeout=3000)
        if done.returncode:
            sys.exit(f'the ranks ended with exit code {done.returncode}')
        rows = _read(path)
    show_hybrid(rows)
    return {'payload': payload, 'rows': rows}


# --- ranks -------------------------------------------------------------------

class Rows:
    """Where rank 0 writes; on the others it does nothing."""

    def __init__(self, path, comm):
        self._path = path if comm.rank == 0 else None

    def add(self, row, said):
        """Writes a row; says on stderr how far this is."""
        if self._path:
            with open(self._path, 'a') as file:
                file.write(json.dumps(row) + '\n')
            print(f'  {said}', file=sys.stderr, flush=True)


def rank(what, path, job):
    """What a rank does; a row is a line, so that none is lost by a crash."""
    import partition_speed
    from mpi4py import MPI
    getattr(partition_speed, what)(
        MPI.COMM_WORLD, json.loads(job), Rows(path, MPI.COMM_WORLD))


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
        done = subprocess.run(
            [*mpiexec(ranks), sys.executable, '-W', 'ignore', *_AS_RANK, what,
             path, json.dumps(job)],
            env={**os.environ, **(RANKS if malloc else ONE_THREAD)})
        if done.returncode:
            sys.exit(f'{what}: the ranks ended with exit code '
                     f'{done.returncode}')
        return _read(path)


def _read(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


# --- tables ------------------------------------------------------------------

def show_memory(rows):
    """What a limit allows; what was taken."""
    one = next((row for row in rows if row['ranks'] == 1), None)
    print('\n               parameters           over 1 rank     '
          'MB per rank, the most of any\nranks  layers         '
          'MB     / n, aim 0.8      limit  predicted  measured  over limit'
          '  off prediction')
    for row in rows:
        if not row['layers']:
            print(f'{row["ranks"]:5}  no model fits: {row["reason"]}')
            continue
        share = (row['parameters'] / one['parameters'] / row['ranks']
                 if one and one['layers'] else float('nan'))
        pairs = list(zip(row['measured'], row['predicted'], strict=True))
        measured = max(row['measured'])
        off = max((abs(found / said - 1), found / said - 1)
                  for found, said in pairs)[1]
        print(f'{row["ranks"]:5} {row["layers"]:7} '
              f'{row["parameters"] / 1e6:10.1f} {share:20.2f} '
              f'{row["limit"] / 1e6:10.0f} '
              f'{max(row["predicted"]) / 1e6:10.0f} {measured / 1e6:9.0f} '
              f'{100 * (measured / row["limit"] - 1):+9.1f} % '
              f'{100 * off:+13.1f} %')
    print('Aims: over the limit by 5 % at most; 10 % off the prediction, '
          'on the rank where\nit is most.')


def show_speed(rows):
    """Speed-ups side by side."""
    print(f'\n{"model":10} {"what":32} median [ms]       spread [ms]   '
          'speed-up')
    for row in rows:
        serial = statistics.median(row['times']['serial'])
        for what, times in row['times'].items():
            print(f'{row["model"]:10} {what:32} '
                  f'{1e3 * statistics.median(times):11.1f} '
                  f'{_spread(times):>20} '
                  f'{serial / statistics.median(times):8.2f}')
        for note in row['notes']:
            print(f'{"":10} {note}')


def show_hybrid(rows):
    """Steps on the network."""
    print('\n4 hosts                          median [ms]       spread [ms]   '
          'speed-up over the first')
    first = statistics.median(rows[0]['times'])
    for row in rows:
        print(f'{row["what"]:30} {1e3 * statistics.median(row["times"]):13.0f}'
              f' {_spread(row["times"]):>17} '
              f'{first / statistics.median(row["times"]):9.2f}')
    print(f'{rows[0]["parameters"] / 1e6:.1f} M parameters, batch '
          f'{rows[0]["batch"]} of all hosts together; a micro-batch is as '
          'large in all ways')


def _spread(times):
    return f'{1e3 * min(times):.1f} - {1e3 * max(times):.1f}'


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

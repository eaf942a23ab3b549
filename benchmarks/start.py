"""Where does the time of a job's start go?

    python benchmarks/start.py --ranks 4

Each row does what the row above does, and one thing more.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import describe, environment
from network.network import mpiexec

_ROOT = Path(__file__).parent.parent
_RUN = ['-m', 'chainer_fp8pipe', 'run', '--communicator', 'fp8']
_SCRIPT = str(_ROOT / 'benchmarks' / 'faults_inside' / 'unmodified.py')


def main() -> None:
    options = _parser().parse_args()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.ranks, options.repeats, folder)
    before = 0.0
    for name, times in rows.items():
        middle = statistics.median(times)
        print(f'{name:44} {middle:6.2f} s {middle - before:+6.2f} s '
              f'({min(times):.2f} to {max(times):.2f})')
        before = middle
    if options.json:
        Path(options.json).write_text(json.dumps({
            **environment(), 'ranks': options.ranks, 'seconds': rows}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=4,
                        help='of the job (default: 4)')
    parser.add_argument('--repeats', type=int, default=7,
                        help='of each row (default: 7)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw times there')
    return parser


def measure(ranks: int, repeats: int, folder: str) -> dict[str, list[float]]:
    """The times of each row, in seconds."""
    empty = Path(folder) / 'empty.py'
    empty.touch()
    launcher = [*mpiexec(), '-n', str(ranks)]
    python = [*launcher, sys.executable]
    imports = 'import chainer_fp8pipe, chainer, chainermn'
    script = [_SCRIPT, '--updates', '1', '--seconds', '0', '--out', folder]
    commands = {
        'mpiexec': [*launcher, 'true'],
        'Python': [*python, '-c', 'pass'],
        'NumPy': [*python, '-c', 'import numpy'],
        'mpi4py, MPI_Init, MPI_Finalize': [
            *python, '-c', 'import numpy; from mpi4py import MPI'],
        'Chainer, ChainerMN': [*python, '-c', imports],
        'this package: run, with an empty script': [
            *python, *_RUN, str(empty)],
        'data, model, an update': [*python, *_RUN, *script],
        'the launcher': [sys.executable, '-m', 'chainer_fp8pipe', 'launch',
                         '-n', str(ranks), *_RUN[3:], *script],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, env={
                               **os.environ, 'PYTHONPATH': str(_ROOT),
                               'OMP_NUM_THREADS': '1',
                               'OPENBLAS_NUM_THREADS': '1'})
            if repeat:          # the first one compiles and fills caches
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == '__main__':
    main()

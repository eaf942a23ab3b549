"""What the ranks of ``benchmarks/partition.py`` do; it starts them.

    python partition_ranks.py WHAT ROWS.jsonl JOB

A row is a line, so that those before a crash are not lost; a line with
``begin`` says what a rank is about to do.
"""
from __future__ import annotations

import importlib
import json
import sys

import chainer_fp8pipe  # noqa: F401, before chainer

from mpi4py import MPI

#: In which module each measurement is.
HOMES = {
    'models': 'partition_right', 'functions': 'partition_right',
    'balance': 'partition_times', 'best': 'partition_plans',
    'plan': 'partition_plans', 'replicas': 'partition_replicas',
    'ghosts': 'partition_times',
    'accepted': 'partition_memory', 'resident': 'partition_memory',
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


def main():
    what, path, job = sys.argv[1:]
    comm = MPI.COMM_WORLD
    measure = getattr(importlib.import_module(HOMES[what]), what)
    measure(comm, json.loads(job), Rows(path, comm))


if __name__ == '__main__':
    main()

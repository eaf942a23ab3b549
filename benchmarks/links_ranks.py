"""The ranks of ``links.py``: measure the network, write what they found.

    links_ranks.py RESULT [ROWS COLUMNS]
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

from chainer_fp8pipe.mpi.failure.abort import abort_on_exception
from chainer_fp8pipe.planner.network.links import measure_network

from mpi4py import MPI


def main():
    abort_on_exception()
    result, *torus = sys.argv[1:]
    begin = time.perf_counter()
    figures = measure_network(
        MPI.COMM_WORLD, torus=tuple(map(int, torus)) or None)
    seconds = time.perf_counter() - begin
    if MPI.COMM_WORLD.rank == 0:
        pathlib.Path(result).write_text(json.dumps(
            {'seconds': seconds, **dataclasses.asdict(figures)}))


if __name__ == '__main__':
    main()

"""What every benchmark says of itself: machine, date, versions, command."""
from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chainer_fp8pipe.launcher.hosts import find_starter

import numpy

_PACKAGES = ('numpy', 'chainer', 'mpi4py', 'mpich', 'torch', 'ml_dtypes',
             'pillow', 'turbojpeg', 'cykooz-resizer')

#: Of ranks: BLAS has one thread in each.
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
              'MKL_NUM_THREADS': '1'}
#: Of ranks that are timed.  Memory that is freed stays theirs: to give it
#: back, and to get other, keeps the kernel busy, and on a virtual machine its
#: host, long after.
RANKS = {**ONE_THREAD, 'MALLOC_MMAP_MAX_': '0',
         'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}


def describe() -> str:
    """Machine, date, versions and command, for the head of a result."""
    versions = []
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f'{name} {importlib.metadata.version(name)}')
    # Virtual machines share their host's memory with others.
    return (f'{_processor()}, {os.cpu_count()} cores, a core copies '
            f'{_copy_rate() / 1e9:.0f} GB/s, {datetime.date.today()}\n'
            f'Python {platform.python_version()}, {", ".join(versions)}\n'
            f'python {" ".join(sys.argv)}')


def _copy_rate() -> float:
    """Bytes per second, read and written, of a copy larger than caches."""
    source = numpy.ones(1 << 24, numpy.float32)
    target = numpy.empty_like(source)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        target[...] = source
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)


def with_torch(wanted: bool) -> bool:
    """Whether PyTorch is to run beside; says so if it is not there."""
    if wanted and importlib.util.find_spec('torch') is None:
        print("PyTorch is not installed (pip install '.[compare]'): left out",
              flush=True)
        return False
    return wanted


def parser(page: str, *more: str) -> argparse.ArgumentParser:
    """Shows a script's docstring; ``more``: "torch", for --without-torch."""
    made = argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    if 'torch' in more:
        made.add_argument('--without-torch', action='store_true',
                          help='leave out PyTorch (pip install torch)')
    return made


def ranks_of(script: str, job: Any, ranks: int = 0, network: Any = None, *,
             each: int = 1, env: Mapping[str, str] = RANKS) -> Any:
    """What the ranks of a script have found; ends where they fail.

    Args:
        script: A file of this folder, which calls :func:`start`.
        job: For the ranks; JSON.
        ranks: How many, on this machine.
        network: Or the hosts on which they are.
        each: How many on each host.
        env: Environment variables besides.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, result = (pathlib.Path(folder, name)
                         for name in ('job.json', 'result.json'))
        given.write_text(json.dumps(job))
        command = [sys.executable, str(pathlib.Path(__file__).with_name(
            script)), str(given), str(result)]
        if network is None:
            code = subprocess.run(mpiexec(ranks, *command),
                                  env={**os.environ, **env}).returncode
        else:
            code = network.run(command, each, env=env, timeout=3000)
        if code or not result.exists():
            sys.exit(f'the ranks ended with exit code {code}')
        return json.loads(result.read_text())


def start(main: Callable[[], object], rank: Callable[[Any, Any], Any]) -> None:
    """Runs a file that is both the benchmark and its ranks' part.

    Ranks do ``rank``, given all of them and the job; see :func:`ranks_of`.
    """
    if len(sys.argv) != 3 or not sys.argv[1].endswith('job.json'):
        main()
        return
    from mpi4py import MPI
    given, result = map(pathlib.Path, sys.argv[1:])
    found = rank(MPI.COMM_WORLD, json.loads(given.read_text()))
    if MPI.COMM_WORLD.rank == 0:
        result.write_text(json.dumps(found))


def milliseconds(seconds: Sequence[float]) -> tuple[str, str]:
    """Median and range, as text."""
    def said(value: float) -> str:
        return f'{value:,.0f}' if value >= 1e4 else f'{value:.4g}'
    return said(1e3 * statistics.median(seconds)), (
        f'{said(1e3 * min(seconds))} - {said(1e3 * max(seconds))}')


def mpiexec(ranks: int, *command: str) -> list[str]:
    """The command that starts so many ranks of another one."""
    try:
        return find_starter(os.environ).command(ranks, command)
    except ValueError as error:
        sys.exit(str(error))


def _processor() -> str:
    info = pathlib.Path('/proc/cpuinfo')
    if info.exists():
        name = ''
        for line in info.read_text().splitlines():
            if line.startswith('model name'):
                name = line.partition(':')[2].strip()
            if line.startswith('flags'):    # loops have a kind for each
                wide = 'avx512f' in line.split()
                return f'{name}, {"with" if wide else "without"} AVX-512'
    return platform.processor() or platform.machine()

"""What every benchmark says of itself: machine, date, versions, command."""
from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy

_PACKAGES = ('numpy', 'chainer', 'mpi4py', 'mpich', 'ml_dtypes', 'pillow',
             'turbojpeg', 'cykooz-resizer')

#: Of ranks: BLAS has one thread in each.
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
              'MKL_NUM_THREADS': '1'}
#: Of ranks that are timed.  Memory that is freed stays theirs: to give it
#: back, and to get other, keeps the kernel busy, and on a virtual machine its
#: host, long after.
RANKS = {**ONE_THREAD, 'MALLOC_MMAP_MAX_': '0',
         'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}


def environment() -> dict[str, Any]:
    """Machine, date, versions and command, for the head of a result."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        'machine': f'{_processor()}, {os.cpu_count()} cores',
        # Virtual machines share their host's memory with others.
        'copy_rate': _copy_rate(),
        'date': datetime.date.today().isoformat(),
        'python': platform.python_version(),
        'versions': versions,
        'command': ' '.join(['python', *sys.argv]),
    }


def describe() -> str:
    """The same as text."""
    about = environment()
    versions = ', '.join(f'{name} {version}'
                         for name, version in about['versions'].items())
    return (f'{about["machine"]}, a core copies '
            f'{about["copy_rate"] / 1e9:.0f} GB/s, {about["date"]}\n'
            f'Python {about["python"]}, {versions}\n{about["command"]}')


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


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What benchmarks on a virtual network understand besides."""
    parser.add_argument('--without-torch', action='store_true',
                        help='leave out PyTorch (pip install torch)')
    parser.add_argument('--json', metavar='FILE', help='write raw data')
    parser.add_argument('--plot', metavar='FILE', help='draw a figure')


def spread(seconds: Sequence[Sequence[float]]
           ) -> tuple[list[float], list[list[float]]]:
    """Medians in milliseconds, and error bars from the least to the most."""
    medians = [statistics.median(times) * 1e3 for times in seconds]
    return medians, [
        [median - min(times) * 1e3
         for median, times in zip(medians, seconds, strict=True)],
        [max(times) * 1e3 - median
         for median, times in zip(medians, seconds, strict=True)]]


def write_json(path: str, data: dict[str, Any]) -> None:
    """Writes the raw data of a benchmark, with its environment."""
    pathlib.Path(path).write_text(
        json.dumps({'environment': environment(), **data}, indent=1))


def mpiexec(ranks: int) -> list[str]:
    """The command that starts so many ranks: ``$MPIEXEC``, or mpiexec."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = (beside if os.path.exists(beside) else shutil.which('mpiexec'))
    command = shlex.split(os.environ.get('MPIEXEC', '')) or (
        [found] if found else [])
    if not command:
        sys.exit('no mpiexec beside the interpreter, on the path or in '
                 'MPIEXEC')
    return [*command, '-n', str(ranks)]


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

"""Which of OpenBLAS's kernels are fastest for small batches on this processor.

    python benchmarks/blas.py

NumPy brings OpenBLAS, which chooses kernels by the processor's name and
instructions.  Where there is AVX-512 it takes those for it, and for a batch of
32 these can be slower than Haswell's.  ``OPENBLAS_CORETYPE`` in the
environment makes it take others; ``training.py steps`` takes the fastest.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import numpy
from environment import RANKS, describe, write_json

VARIABLE = 'OPENBLAS_CORETYPE'
OWN = ''            # OpenBLAS's choice
#: Faster by less than this is no reason to take others than OpenBLAS's own.
ENOUGH = 0.9
BATCH, INPUTS, OUTPUTS = 32, 1024, 2048
PROCESSES = 3       # of each kind, in turns; the fastest counts

#: Milliseconds of a layer's three products, by kernels.
Measured = dict[str, list[float]]


def main() -> None:
    options = _arguments()
    if options.measure:
        print(json.dumps(_products()))
        return
    print(f'{describe()}\n')
    measured = measure()
    print(f'{"kernels":<12}'
          f'{"forward":>10}{"of the input":>14}{"of the weights":>16}   '
          f'ms; {BATCH} x {INPUTS} to {OUTPUTS}')
    for kernels, times in measured.items():
        print(f'{kernels or "own choice":<12}' + ''.join(
            f'{each:>{width}.3f}' for each, width
            in zip(times, (10, 14, 16), strict=True)))
    print(f'fastest: {in_words(fastest(measured))}')
    if options.json:
        write_json(options.json, {'ms': measured})


def choose() -> str:
    """The name of the fastest kernels, or of those that are set already."""
    return os.environ.get(VARIABLE) or fastest(measure())


def fastest(measured: Measured) -> str:
    """The name of the fastest kernels."""
    sums = {kernels: sum(times) for kernels, times in measured.items()}
    best = min(sums, key=sums.__getitem__)
    return best if sums[best] < ENOUGH * sums[OWN] else OWN


def in_words(kernels: str) -> str:
    """What these kernels are, or where they come from."""
    return f'{VARIABLE}={kernels}' if kernels else 'as BLAS chooses by itself'


def measure() -> Measured:
    """What each kind of kernels takes; without those that cannot run."""
    kinds = [OWN, 'Haswell'] if _is_openblas() else [OWN]
    found: dict[str, list[list[float]]] = {}
    for kernels in PROCESSES * kinds:
        environment = {**os.environ, **RANKS}
        environment.pop(VARIABLE, None)
        if kernels:
            environment[VARIABLE] = kernels
        # A processor without their instructions ends the process.
        done = subprocess.run([sys.executable, __file__, '--measure'],
                              env=environment, stdout=subprocess.PIPE,
                              text=True, check=kernels == OWN)
        if done.returncode == 0:
            found.setdefault(kernels, []).append(json.loads(done.stdout))
    return {kernels: min(times, key=sum) for kernels, times in found.items()}


def _is_openblas() -> bool:
    """Whether NumPy's BLAS has kernels of these names."""
    config = getattr(numpy.__config__, 'CONFIG', {})
    name = config.get('Build Dependencies', {}).get('blas', {}).get('name', '')
    return 'openblas' in name and platform.machine() in ('x86_64', 'AMD64')


def _products() -> list[float]:
    random = numpy.random.default_rng(0)
    x, weights, gradient = (
        random.standard_normal(shape, numpy.float32) for shape in (
            (BATCH, INPUTS), (OUTPUTS, INPUTS), (BATCH, OUTPUTS)))
    return [_median(action) * 1e3 for action in (
        lambda: x.dot(weights.T), lambda: gradient.dot(weights),
        lambda: gradient.T.dot(x))]


def _median(action) -> float:
    seconds = []
    for _ in range(31):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', metavar='FILE', help='write raw data')
    parser.add_argument('--measure', action='store_true',
                        help="only this process's kernels")
    return parser.parse_args()


if __name__ == '__main__':
    main()

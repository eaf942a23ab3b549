"""Which of OpenBLAS's kernels are fastest for small batches on this processor.

    python benchmarks/blas.py

NumPy brings OpenBLAS, which chooses kernels by the processor's name and
instructions.  Where there is AVX-512 it takes those for it, and for a batch of
32 these can be slower than Haswell's.  ``OPENBLAS_CORETYPE`` in the
environment makes it take others; the training benchmark uses what this finds.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy

VARIABLE = 'OPENBLAS_CORETYPE'
OWN = ''            # OpenBLAS's choice
#: Faster by less than this is no reason to take others than OpenBLAS's own.
ENOUGH = 0.95
BATCH, INPUTS, OUTPUTS = 32, 1024, 2048


def main() -> None:
    options = _arguments()
    if options.measure:
        print(json.dumps(_products()))
        return
    print(f'{"kernels":<12}'
          f'{"forward":>10}{"of the input":>14}{"of the weights":>16}   '
          f'medians, ms; {BATCH} x {INPUTS} to {OUTPUTS}')
    for kernels, seconds in _measured().items():
        print(f'{kernels or "own choice":<12}' + ''.join(
            f'{each * 1e3:>{width}.3f}' for each, width
            in zip(seconds, (10, 14, 16), strict=True)))
    print(f'training.py takes {describe(choose())}')


def choose() -> str:
    """The name of the fastest kernels, or of those that are set already."""
    if os.environ.get(VARIABLE):
        return os.environ[VARIABLE]
    measured = {kernels: sum(seconds)
                for kernels, seconds in _measured().items()}
    best = min(measured, key=measured.__getitem__)
    return best if measured[best] < ENOUGH * measured[OWN] else OWN


def describe(kernels: str) -> str:
    """In words."""
    return f'{VARIABLE}={kernels}' if kernels else "OpenBLAS's own kernels"


def _measured() -> dict[str, list[float]]:
    """Seconds of a layer's products by kernels; without those that fail."""
    found = {}
    for kernels in (OWN, 'Haswell'):
        environment = {**os.environ, 'OMP_NUM_THREADS': '1',
                       'OPENBLAS_NUM_THREADS': '1'}
        environment.pop(VARIABLE, None)
        if kernels:
            environment[VARIABLE] = kernels
        # A processor without their instructions ends the process.
        done = subprocess.run(
            [sys.executable, __file__, '--measure'], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            found[kernels] = json.loads(done.stdout)
    return found


def _products() -> list[float]:
    """Median seconds of the three products of a linear layer."""
    random = numpy.random.default_rng(0)
    x, weights, gradient = (
        random.standard_normal(shape, numpy.float32) for shape in (
            (BATCH, INPUTS), (OUTPUTS, INPUTS), (BATCH, OUTPUTS)))
    return [_median(action) for action in (
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
    parser.add_argument('--measure', action='store_true',
                        help="only this process's kernels, as JSON")
    return parser.parse_args()


if __name__ == '__main__':
    main()

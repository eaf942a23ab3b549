"""Sums and means of four contributions in fp8: the loops alone, in C.

    python benchmarks/mean_loops.py

What a rank of four does with each element of its share of a vector: it reads
four codes, the parameter and the residual, and writes a code and the
residual, 17 bytes together.  The program is compiled with the package's
headers and options, once for each set of vector instructions that this
processor has.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sysconfig
import tempfile

import chainer_fp8pipe.fp8

from environment import describe

#: As GCC and Clang name them.
_LEVELS = {'SSE2': 'x86-64', 'AVX2': 'x86-64-v3', 'AVX-512': 'x86-64-v4'}
_OPTIONS = ['-O3', '-ffp-contract=off', '-fno-trapping-math', '-DCLONES=']
_SOURCE = pathlib.Path(__file__).with_name('mean_loops.c')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(describe())
    print(f'{"instructions":14}{"pages":8}{"a copy, GB/s":>14}'
          f'{"from memory, G elements/s":>28}{"in the cache":>15}')
    with tempfile.TemporaryDirectory() as folder:
        for name, level in _LEVELS.items():
            program = os.path.join(folder, level)
            subprocess.run(
                [*sysconfig.get_config_var('CC').split(), *_OPTIONS,
                 f'-march={level}', '-I', *chainer_fp8pipe.fp8.__path__,
                 str(_SOURCE), '-o', program], check=True)
            for pages in ('small', 'huge'):
                if (found := _run(program, pages)) is None:
                    break
                copy, memory, cache = found
                print(f'{name:14}{pages:8}{8e-9 / copy:14.1f}'
                      f'{1e-9 / memory:28.2f}{1e-9 / cache:15.2f}')


def _run(program: str, pages: str) -> tuple[float, ...] | None:
    """Median seconds for an element; None: the processor cannot."""
    done = subprocess.run([program, pages], capture_output=True, text=True)
    if done.returncode:
        return None
    rounds = [[float(word) for word in line.split()]
              for line in done.stdout.splitlines()]
    return tuple(statistics.median(values)
                 for values in zip(*rounds, strict=True))


if __name__ == '__main__':
    main()

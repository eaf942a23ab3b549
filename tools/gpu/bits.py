"""Every operation of the format on the GPU, bit for bit against the CPU.

Encoding takes every float32 number that there is; decoding and adding take
every code and every pair of codes.  The others take random bits, numbers in
the format's range, and every boundary of the format.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from chainer_fp8pipe import fp8

import numpy as np

from .stand_in import cupy_or_stand_in

_ALL = 2 ** 32
_WRITTEN = ('out', 'residual', 'total')
_SCALES = (1.0, 3.0, 300.0, 2.0 ** -30, 2.0 ** 100)


class Case(NamedTuple):
    """One operation on some arrays, under the name that it counts for."""

    name: str
    operation: Callable[..., Any]
    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, Any]


class Tally:
    """What was compared of an operation, and what differed."""

    def __init__(self) -> None:
        self.elements = self.differing = self.both_nan = self.results = 0
        self.seconds = 0.0
        self.first = ''


def encodings(chunk: int, chunks: int) -> Iterator[Case]:
    """Every float32, in chunks; fewer than all, evenly spread, for a try."""
    for start in range(0, _ALL, _ALL // chunks):
        values = np.arange(start, start + chunk, dtype=np.uint32).view(
            np.float32)
        for rounding in fp8.ROUNDINGS:
            yield Case(f'encode, {rounding}', fp8.encode, {
                'values': values, 'out': np.empty(chunk, np.uint8)},
                {'rounding': rounding, 'seed': start})


def of_codes(floats: np.ndarray) -> Iterator[Case]:
    """What takes codes."""
    codes = np.arange(256, dtype=np.uint8)
    yield Case('decode', fp8.decode, {
        'codes': codes, 'out': np.empty(256, np.float32)}, {})
    a, b = np.repeat(codes, 256), np.tile(codes, 256)
    for rounding in fp8.ROUNDINGS:
        for seed in range(16):
            yield Case(f'add, {rounding}', fp8.add, {
                'a': a, 'b': b, 'out': np.empty_like(a)},
                {'rounding': rounding, 'seed': seed})
    for code in codes:
        yield Case('accumulate', fp8.accumulate, {
            'codes': np.full(floats.size, code), 'total': floats}, {})


def of_ratios(floats: np.ndarray) -> Iterator[Case]:
    """What takes gradients and parameters."""
    generator = np.random.default_rng(1)
    parameter, residual = (generator.permutation(floats) for _ in range(2))
    codes = generator.integers(0, 256, floats.size, np.uint8)
    for scale in _SCALES:
        for rounding in fp8.ROUNDINGS:
            for kept in (None, residual):
                arrays = {'gradient': floats, 'parameter': parameter,
                          'out': np.empty(floats.size, np.uint8)}
                if kept is not None:
                    arrays['residual'] = kept
                name = 'ratio_encode' + ' + residual' * (kept is not None)
                yield Case(f'{name}, {rounding}', fp8.ratio_encode, arrays, {
                    'scale': scale, 'rounding': rounding, 'seed': 5})
        for wire in (codes, residual):
            yield Case(f'ratio_decode, {wire.dtype}', fp8.ratio_decode, {
                'wire': wire, 'parameter': parameter,
                'out': np.empty_like(floats)}, {'scale': scale})


def interesting(size: int) -> np.ndarray:
    """Boundaries of the format, and random numbers of two kinds."""
    from tests.fp8 import reference
    boundaries = reference.interesting_floats()
    half = max(size - boundaries.size, 2) // 2
    return np.concatenate([boundaries, reference.random_bits(half),
                           reference.random_in_range(half)])


def compare(cupy: Any, case: Case, tally: Tally) -> None:
    """Runs a case on both sides and counts what is not the same."""
    start = time.perf_counter()
    here = {name: array.copy() if name in _WRITTEN else array
            for name, array in case.arrays.items()}
    there = {name: cupy.asarray(array)
             for name, array in case.arrays.items()}
    # Of the stand-in, asarray does not copy.
    there = {name: array.copy() for name, array in there.items()}
    expected = case.operation(**here, **case.options)
    found = case.operation(**there, **case.options)
    for name, wanted in here.items():
        if name not in _WRITTEN:
            continue
        got = there[name].get()
        bits = np.dtype(f'u{wanted.itemsize}')
        differs = wanted.view(bits) != got.view(bits)
        tally.elements += wanted.size
        if not differs.any():
            continue
        tally.differing += np.count_nonzero(differs)
        if wanted.dtype == np.float32:
            tally.both_nan += np.count_nonzero(
                differs & np.isnan(wanted) & np.isnan(got))
        tally.first = tally.first or first(case, name, differs, wanted, got)
    if expected != found:
        tally.results += 1
        tally.first = tally.first or (f'{case.name}, {dict(case.options)}: '
                                      f'{found} in place of {expected}')
    tally.seconds += time.perf_counter() - start


def first(case: Case, name: str, differs: np.ndarray, wanted: np.ndarray,
          got: np.ndarray) -> str:
    """The first element that differs, with what went in."""
    where = int(np.flatnonzero(differs)[0])

    def shown(array: np.ndarray) -> str:
        return f'{array[where]} (0x{array[where].tobytes()[::-1].hex()})'
    given = ', '.join(f'{other}={shown(array)}'
                      for other, array in case.arrays.items()
                      if other != 'out')
    return (f'{case.name}, {dict(case.options)}: element {where} of {name} is '
            f'{shown(got)} in place of {shown(wanted)}; {given}')


def table(tallies: Mapping[str, Tally]) -> str:
    lines = [f'{"operation":36}{"elements":>16}{"differing":>12}'
             f'{"both NaN":>10}{"counts":>8}{"seconds":>9}']
    for name, tally in tallies.items():
        lines.append(f'{name:36}{tally.elements:16,}{tally.differing:12,}'
                     f'{tally.both_nan:10,}{tally.results:8}'
                     f'{tally.seconds:9.1f}')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dry', action='store_true',
                        help='a stand-in for CuPy, and few numbers')
    dry = parser.parse_args().dry
    cupy = cupy_or_stand_in(dry)
    chunk, chunks = (2 ** 12, 256) if dry else (2 ** 26, 64)
    floats = interesting(2 ** 10 if dry else 2 ** 23)
    tallies: dict[str, Tally] = {}
    for cases in (of_codes(floats[:2 ** 18]), of_ratios(floats),
                  encodings(chunk, chunks)):
        for case in cases:
            compare(cupy, case, tallies.setdefault(case.name, Tally()))
    print(table(tallies))
    bad = [tally.first for tally in tallies.values() if tally.first]
    for line in bad:
        print('\n' + line)
    sys.exit(bool(bad))


if __name__ == '__main__':
    main()

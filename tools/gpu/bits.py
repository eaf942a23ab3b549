"""Every operation of the formats on the GPU, bit for bit against the CPU.

Encoding in fp8 takes every float32 number that there is; decoding and adding
take every code and every pair of codes.  The others take random bits, numbers
in the format's range, and every boundary of the format.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .bit_cases import Case, encodings, interesting, of_codes, of_ratios
from .record_cases import of_records
from .stand_in import cupy_or_stand_in

_WRITTEN = ('out', 'residual', 'total', 'records')


class Tally:
    """What was compared of an operation, and what differed."""

    def __init__(self) -> None:
        self.elements = self.differing = self.both_nan = self.results = 0
        self.seconds = 0.0
        self.first = ''


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
        element = array.reshape(-1)[where]
        return f'{element} (0x{element.tobytes()[::-1].hex()})'
    given = ', '.join(f'{other}={shown(array)}'
                      for other, array in case.arrays.items()
                      if other != 'out' and array.size == wanted.size)
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
                  of_records(floats), encodings(chunk, chunks)):
        for case in cases:
            compare(cupy, case, tallies.setdefault(case.name, Tally()))
    print(table(tallies))
    bad = [tally.first for tally in tallies.values() if tally.first]
    for line in bad:
        print('\n' + line)
    sys.exit(bool(bad))


if __name__ == '__main__':
    main()

"""Speed of the fp8 operations against ml_dtypes and a copy of memory.

All are measured in one process on one core, in turn, on arrays that were
written before, so that page faults and changes of the clock hit all alike.
Bytes per second count what an operation reads plus what it writes.
"""
from __future__ import annotations

import os
import statistics
import time

from chainer_fp8pipe import formats
from chainer_fp8pipe.codecs import CODECS, Tensors

import ml_dtypes
import numpy as np
from codec_updates import begin
from environment import describe, parser

REPEATS = 15


def cases(n):
    """By name: what does it once, bytes of an element, and its rival."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    a, c = np.zeros((2, n), np.uint8)
    formats.encode(x, a)
    their_a, their_c = (
        codes.view(ml_dtypes.float8_e5m2) for codes in (a, c))

    def coded(codec, what):
        tensors = begin(codec.init(), Tensors(
            ['/W'], [x.copy()], [w], grain=codec.grain))
        wire = np.empty(tensors.size, codec.wire_dtype)
        tensors.encode(wire)
        tensors.decode_into([y])
        return lambda: getattr(tensors, what)(wire)
    return {
        'copy': (lambda: np.copyto(y, x), 8, ''),
        'ml_dtypes encode': (
            lambda: np.copyto(their_c, x, casting='unsafe'), 5, ''),
        'ml_dtypes decode': (
            lambda: np.copyto(y, their_a, casting='unsafe'), 5, ''),
        'encode': (lambda: formats.encode(x, c), 5, 'ml_dtypes encode'),
        'decode': (lambda: formats.decode(a, y), 5, 'ml_dtypes decode'),
        **{f'{name} {what}': (
            coded(row.usual, what),
            4 + row.nbytes + 8 * (what == 'encode' and row.error_feedback),
            '') for name, row in CODECS.items()
           for what in ('encode', 'decode')}}


def main():
    given = parser(__doc__)
    given.add_argument(
        '--elements', type=int, default=2 ** 24, metavar='N',
        help='length of the arrays (default: 16 Mi, larger than caches)')
    options = given.parse_args()
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(describe())
    todo = cases(options.elements)
    seconds = {name: [] for name in todo}
    for repeat in range(REPEATS + 1):       # one to warm up
        for name, (run, *_) in todo.items():
            start = time.perf_counter()
            run()
            seconds[name] += [time.perf_counter() - start] * (repeat > 0)
    median = {name: statistics.median(its) for name, its in seconds.items()}
    print(f'{options.elements:,} elements, medians of {REPEATS}\n'
          f'{"":20}{"ms":>8}{"min - max":>18}{"GB/s":>8}{"x copy":>8}'
          f'{"x ml_dtypes":>13}')
    for name, (_, width, rival) in todo.items():
        share = width / 8 * median['copy'] / median[name]
        print(f'{name:20}{1e3 * median[name]:8.2f}'
              f'{1e3 * min(seconds[name]):9.2f} -'
              f'{1e3 * max(seconds[name]):7.2f}'
              f'{width * options.elements / median[name] / 1e9:8.1f}'
              f'{share:8.2f}' + (
                  f'{median[rival] / median[name]:13.1f}' if rival else ''))


if __name__ == '__main__':
    main()

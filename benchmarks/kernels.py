"""Speed of the fp8 operations against ml_dtypes and a copy of memory.

All are measured in one process on one core, in turn, on arrays that were
written before, so that page faults and changes of the clock hit all alike.
Bytes per second count what an operation reads plus what it writes; a copy's
count both ways, too.  "copy" is the faster of NumPy's and the C library's.
"""
from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from chainer_fp8pipe import formats
from chainer_fp8pipe.codecs import CODECS, Codec, Fp8Ratio, Tensors

import ml_dtypes
import numpy as np
from codec_updates import begin
from environment import describe, parser, write_json

COPIES = ('copy (NumPy)', 'copy (memcpy)')


class Case(NamedTuple):
    """One thing to measure.

    Attributes:
        run: Does it once.
        width: Bytes read and written per element.
        rival: Name of the ml_dtypes case that does the same.
        times_rival: How many times faster than that it should be.
        share_of_copy: Share of the copy's bytes/s it should reach.
        normal: Name of the case with normal values in place of subnormals.
    """

    run: Callable[[], object]
    width: int
    rival: str = ''
    times_rival: float = 0.0
    share_of_copy: float = 0.0
    normal: str = ''


def cases(n: int) -> dict[str, Case]:
    """All cases over arrays of n elements."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    tiny = x * np.float32(2.0 ** -16)  # nearly all below 2^-14
    denormal = rng.integers(1, 2 ** 23, n, dtype=np.uint32).view(np.float32)
    a, b, c = np.zeros((3, n), np.uint8)
    formats.encode(x, a)
    formats.encode(w, b)
    small, small2 = np.zeros((2, n), np.uint8)
    formats.encode(tiny, small)
    formats.encode(tiny[::-1].copy(), small2)
    their_a, their_b, their_c = (
        codes.view(ml_dtypes.float8_e5m2) for codes in (a, b, c))
    plain = Fp8Ratio(error_feedback=False)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p

    def encode(values: np.ndarray, **options: str) -> Callable[[], object]:
        return lambda: formats.encode(values, c, **options)

    def coded(codec: Codec, gradient: np.ndarray, what: str
              ) -> Callable[[], object]:
        tensors = begin(codec.init(), Tensors(
            ['/W'], [gradient.copy()], [w], grain=codec.grain))
        wire = np.empty(tensors.size, codec.wire_dtype)
        tensors.encode(wire)
        tensors.decode_into([y])
        run = getattr(tensors, what)
        return lambda: run(wire)

    return {
        COPIES[0]: Case(lambda: np.copyto(y, x), 8),
        COPIES[1]: Case(lambda: memcpy(y.ctypes.data, x.ctypes.data, 4 * n),
                        8),
        'ml_dtypes encode': Case(
            lambda: np.copyto(their_c, x, casting='unsafe'), 5),
        'ml_dtypes decode': Case(
            lambda: np.copyto(y, their_a, casting='unsafe'), 5),
        'ml_dtypes add': Case(
            lambda: np.add(their_a, their_b, out=their_c), 3),
        'encode': Case(encode(x), 5, 'ml_dtypes encode', 30, 0.8),
        'encode, fp8 subnormals': Case(encode(tiny), 5, normal='encode'),
        'encode, float32 subnormals': Case(
            encode(denormal), 5, normal='encode'),
        'encode truncate': Case(encode(x, rounding='truncate'), 5),
        'decode': Case(
            lambda: formats.decode(a, y), 5, 'ml_dtypes decode', 12, 0.8),
        'decode, subnormals': Case(
            lambda: formats.decode(small, y), 5, normal='decode'),
        'add': Case(lambda: formats.add(a, b), 3, 'ml_dtypes add', 18),
        'add, subnormals': Case(
            lambda: formats.add(small, small2), 3, normal='add'),
        'ratio': Case(coded(plain, x, 'encode'), 9, share_of_copy=0.8),
        'ratio, subnormals': Case(coded(plain, tiny, 'encode'), 9,
                                  normal='ratio'),
        **{f'{name} {what}': Case(
            coded(row.usual, x, what), 4 + row.nbytes
            + 8 * (what == 'encode' and row.error_feedback))
           for name, row in CODECS.items() for what in ('encode', 'decode')},
    }


def measure(todo: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat; the cases take turns."""
    for case in todo.values():
        case.run()
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(repeats):
        for name, case in todo.items():
            start = time.perf_counter()
            case.run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def verdict(value: float, target: float, at_most: bool = False) -> str:
    """``1.23 (>= 0.80 ok)``; only the value where there is no target."""
    if not target:
        return f'{value:.2f}'
    good = value <= target if at_most else value >= target
    sign = '<=' if at_most else '>='
    return f'{value:.2f} ({sign} {target:g} {"ok" if good else "short"})'


def table(todo: dict[str, Case], seconds: dict[str, list[float]],
          n: int) -> str:
    """The medians, what they mean, and the targets beside them."""
    median = {name: statistics.median(s) for name, s in seconds.items()}
    copy = 8 * n / min(median[name] for name in COPIES)
    lines = [f'{"":27}{"ms":>7} {"min - max":>15}{"G elem/s":>10}{"GB/s":>7}'
             '   x copy             x ml_dtypes          x normal values']
    for name, case in todo.items():
        time_ = median[name]
        rate = case.width * n / time_
        rival = normal = ''
        if case.rival:
            rival = verdict(median[case.rival] / time_, case.times_rival)
        if case.normal:
            normal = verdict(time_ / median[case.normal], 1.5, at_most=True)
        spread = f'{min(seconds[name]) * 1e3:.2f} - ' \
                 f'{max(seconds[name]) * 1e3:.2f}'
        lines.append(
            f'{name:27}{time_ * 1e3:7.2f} {spread:>15}{n / time_ / 1e9:10.2f}'
            f'{rate / 1e9:7.1f}   '
            f'{verdict(rate / copy, case.share_of_copy):18} '
            f'{rival:20} {normal}'.rstrip())
    return '\n'.join(lines)


def pin(core: int | None) -> int | None:
    """Stays on one core; on none where the system cannot do that."""
    if not hasattr(os, 'sched_setaffinity'):
        return None
    chosen = max(os.sched_getaffinity(0)) if core is None else core
    os.sched_setaffinity(0, {chosen})
    return chosen


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        '--elements', type=int, default=2 ** 24, metavar='N',
        help='length of the arrays (default: 16 Mi, larger than caches)')
    given.add_argument(
        '--repeats', type=int, default=15, metavar='N',
        help='measurements of each case; the table shows their median '
             '(default: %(default)s)')
    given.add_argument(
        '--core', type=int, metavar='N',
        help='processor core to stay on (default: the last one allowed)')
    args = given.parse_args()
    core = pin(args.core)
    print(describe())
    print(f'core {core}, {args.elements:,} elements, '
          f'medians of {args.repeats}')
    todo = cases(args.elements)
    seconds = measure(todo, args.repeats)
    print()
    print(table(todo, seconds, args.elements))
    if args.json:
        write_json(args.json, {
            'core': core, 'elements': args.elements, 'seconds': seconds})


if __name__ == '__main__':
    main()

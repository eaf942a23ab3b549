"""Speed of the formats' kernels on a GPU against a copy inside its memory.

Bytes per second count what a kernel reads plus what it writes; a copy's count
both ways, too.  The cases take turns, on arrays that are larger than the
caches, timed by events on the device.  "operation" is what a user calls: it
also allocates, counts what did not fit, and waits for the count.
"""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from chainer_fp8pipe import fp8
from chainer_fp8pipe.block_formats import FORMATS, RECORD, RecordFormat
from chainer_fp8pipe.fp8 import kernels

import numpy as np
from environment import describe, write_json

COPIES = ('copy (memcpy)', 'copy (kernel)')
TARGET = 0.85


class Case(NamedTuple):
    """One thing to measure: how it runs once, and its bytes per element."""

    run: Callable[[], object]
    width: float
    is_kernel: bool = True


def copies(xp: Any, x: Any, y: Any) -> dict[str, Case]:
    """Two ways to copy; a stand-in for CuPy has one."""
    found = {COPIES[1]: Case(lambda: xp.copyto(y, x), 8, False)}
    if hasattr(x, 'data') and hasattr(x.data, 'copy_from_device_async'):
        stream = xp.cuda.get_current_stream()
        found[COPIES[0]] = Case(lambda: y.data.copy_from_device_async(
            x.data, x.nbytes, stream), 8, False)
    return found


def cases(xp: Any, n: int) -> dict[str, Case]:
    """All cases over arrays of n elements."""
    from chainer_fp8pipe.fp8.gpu import run_kernel
    rng = np.random.default_rng(0)
    x, w, residual, y = (xp.asarray(rng.standard_normal(n, dtype=np.float32))
                         for _ in range(4))
    a, b, c, flags = (xp.asarray(np.zeros(n, np.uint8)) for _ in range(4))
    fp8.encode(x, a)
    fp8.encode(w, b)
    keys = np.uint32(1), np.uint32(2)
    scale, inverse, epsilon, bound = map(
        np.float32, (300, 1 / 300, 1e-5, 3.5))

    def kernel(which: kernels.Kernel, width: int, *arguments: Any) -> Case:
        return Case(lambda: run_kernel(which, *arguments), width)

    found = copies(xp, x, y)
    for number, rounding in enumerate(fp8.ROUNDINGS):
        found[f'encode, {rounding}'] = kernel(
            kernels.encode(number), 5, x, *keys, c)
        found[f'add, {rounding}'] = kernel(
            kernels.add(number), 3, a, b, *keys, c)
        found[f'ratio_encode, {rounding}'] = kernel(
            kernels.ratio_encode(number), 10, x, w, scale, epsilon, *keys, c,
            flags)
        found[f'ratio_encode + residual, {rounding}'] = kernel(
            kernels.ratio_feedback(number), 18, x, w, scale, inverse, epsilon,
            bound, *keys, c, flags, residual)
    return {
        **found,
        'decode': kernel(kernels.decode(), 5, a, y),
        'accumulate': kernel(kernels.accumulate(), 9, a, y),
        'ratio_decode, fp8 wire': kernel(
            kernels.ratio_decode('uint8'), 9, a, w, inverse, epsilon, y),
        'ratio_decode, float32 wire': kernel(
            kernels.ratio_decode('float32'), 12, x, w, inverse, epsilon, y),
        'operation: encode': Case(lambda: fp8.encode(x, c), 5, False),
        'operation: ratio_encode': Case(lambda: fp8.ratio_encode(
            x, w, c, scale=300.0), 9, False),
        'operation: ratio_encode + residual': Case(lambda: fp8.ratio_encode(
            x, w, c, scale=300.0, residual=residual), 17, False),
        'operation: ratio_decode, fp8 wire': Case(lambda: fp8.ratio_decode(
            a, w, y, scale=300.0), 9, False),
        **{name: case for made in FORMATS.values()
           for name, case in of_records(xp, made, x, residual, y).items()},
    }


def of_records(xp: Any, made: RecordFormat, x: Any, residual: Any, y: Any
               ) -> dict[str, Case]:
    """The cases of a format whose records have 32 elements."""
    from chainer_fp8pipe.block_formats.record_gpu import launch
    n = x.size
    records = xp.asarray(
        np.zeros((-(-n // RECORD), made.nbytes), np.uint8))
    made.encode(x, records)
    width = made.nbytes / RECORD

    def kernel(operation: str, width: float, *arguments: Any) -> Case:
        return Case(lambda: launch(operation, made.number, *arguments,
                                   np.int64(n)), width)
    one = np.float32(1)
    return {
        f'{made.name} encode': kernel('encode_alone', 4 + width, x, one,
                                      records),
        f'{made.name} encode + residual': kernel(
            'encode_feedback', 12 + width, x, one, residual, records),
        f'{made.name} decode': kernel('decode', 4 + width, records, one, y),
        f'{made.name} accumulate': kernel('accumulate', 8 + width, records,
                                          one, y),
        f'operation: {made.name} encode + residual': Case(
            lambda: made.encode(x, records, residual=residual), 12 + width,
            False),
        f'operation: {made.name} decode': Case(
            lambda: made.decode(records, y), 4 + width, False)}


def measure(xp: Any, todo: dict[str, Case], repeats: int
            ) -> dict[str, list[float]]:
    """Seconds of every repeat, by events on the device; cases take turns."""
    for case in todo.values():
        for _ in range(3):
            case.run()
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(repeats):
        for name, case in todo.items():
            seconds[name].append(elapsed(xp, case.run))
    return seconds


def elapsed(xp: Any, run: Callable[[], object]) -> float:
    """Seconds on the device's clock."""
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return xp.cuda.get_elapsed_time(begin, end) / 1e3


def table(todo: dict[str, Case], seconds: dict[str, list[float]],
          n: int) -> str:
    """The medians, and the share of the copy with its target."""
    median = {name: statistics.median(s) for name, s in seconds.items()}
    copy = 8 * n / min(median[name] for name in COPIES if name in median)
    lines = [f'{"":38}{"ms":>8} {"min - max":>17}{"GB/s":>8}   x copy']
    for name, case in todo.items():
        rate = case.width * n / median[name]
        share = f'{rate / copy:.2f}'
        if case.is_kernel:
            good = rate >= TARGET * copy
            share += f' (>= {TARGET:g} {"ok" if good else "short"})'
        spread = (f'{min(seconds[name]) * 1e3:.3f} - '
                  f'{max(seconds[name]) * 1e3:.3f}')
        lines.append(f'{name:38}{median[name] * 1e3:8.3f} {spread:>17}'
                     f'{rate / 1e9:8.0f}   {share}')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--elements', type=int, default=2 ** 27, metavar='N',
        help='length of the arrays (default: 128 Mi, larger than caches)')
    parser.add_argument(
        '--repeats', type=int, default=25, metavar='N',
        help='measurements of each case; the table shows their median '
             '(default: %(default)s)')
    parser.add_argument('--json', metavar='FILE',
                        help='also write every single measurement to FILE')
    args = parser.parse_args()
    import cupy as xp
    print(describe())
    print(f'{args.elements:,} elements, medians of {args.repeats}\n')
    todo = cases(xp, args.elements)
    seconds = measure(xp, todo, args.repeats)
    print(table(todo, seconds, args.elements))
    if args.json:
        write_json(args.json, {'elements': args.elements,
                               'seconds': seconds})


if __name__ == '__main__':
    main()

"""Speed of number formats and codecs on a GPU against copies of its memory.

    python benchmarks/gpu.py

Bytes per second count what an operation reads plus what it writes; a copy's
count both ways, too.  The cases take turns, on arrays larger than the caches,
timed by events on the device.  An operation is what a user calls: it also
counts what did not fit, and waits for the count.  The codecs' times are of an
update of 25.6 M parameters on one rank: gradients to a wire on the host, and
back; nothing is exchanged.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from chainer_fp8pipe import formats
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.staging import empty_wire

import numpy as np
from codec_updates import begin
from environment import describe, parser, write_json

COPY = 'copy'
#: 25.6 M parameters in 161 tensors, as ResNet-50's, of three sizes.
TENSORS = (*[64] * 107, *[147_456] * 40, *[1_403_000] * 14)
CODECS = {'fp8': Fp8Ratio(), 'int4': BlockScaled(),
          'float16': Cast('float16'), 'float32': Cast('float32')}


class Case(NamedTuple):
    """One thing to measure: how it runs once, and its bytes per element."""

    run: Callable[[], object]
    width: float


def cases(xp: Any, n: int) -> dict[str, Case]:
    """All operations over arrays of n elements."""
    rng = np.random.default_rng(0)
    x, w, residual, y = (xp.asarray(rng.standard_normal(n, dtype=np.float32))
                         for _ in range(4))
    codes, other = (xp.zeros(n, np.uint8) for _ in range(2))
    formats.encode(x, codes)
    found = {COPY: Case(lambda: xp.copyto(y, x), 8)}
    for rounding in formats.ROUNDINGS:
        found[f'encode, {rounding}'] = Case(
            lambda rounding=rounding: formats.encode(
                x, codes, rounding=rounding), 5)
    found |= {
        'add': Case(lambda: formats.add(codes, codes, other), 3),
        'decode': Case(lambda: formats.decode(codes, y), 5),
        'accumulate': Case(lambda: formats.accumulate(codes, y), 9),
        'ratio_encode': Case(lambda: formats.ratio_encode(
            x, w, codes, scale=300.0), 9),
        'ratio_encode + residual': Case(lambda: formats.ratio_encode(
            x, w, codes, scale=300.0, residual=residual), 17),
        'ratio_decode': Case(lambda: formats.ratio_decode(
            codes, w, y, scale=300.0), 9)}
    for name, made in formats.FORMATS.items():
        records = xp.zeros((-(-n // formats.RECORD), made.nbytes), np.uint8)
        width = made.nbytes / formats.RECORD
        made.encode(x, records)
        found |= {
            f'{name} encode + residual': Case(
                lambda made=made, records=records: made.encode(
                    x, records, residual=residual), 12 + width),
            f'{name} decode': Case(
                lambda made=made, records=records: made.decode(records, y),
                4 + width),
            f'{name} accumulate': Case(
                lambda made=made, records=records: made.accumulate(
                    records, y), 8 + width)}
    return found


def measure(xp: Any, todo: dict[str, Case], repeats: int
            ) -> dict[str, list[float]]:
    """Seconds of every repeat, by events on the device; cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for repeat in range(repeats + 3):
        for name, case in todo.items():
            start, end = xp.cuda.Event(), xp.cuda.Event()
            start.record()
            case.run()
            end.record()
            end.synchronize()
            if repeat >= 3:
                seconds[name].append(
                    xp.cuda.get_elapsed_time(start, end) / 1e3)
    return seconds


def show(todo: dict[str, Case], seconds: dict[str, list[float]], n: int
         ) -> None:
    """A line per case: median, spread, rate, and the share of the copy's."""
    copy = 8 * n / statistics.median(seconds[COPY])
    print(f'{"":32}{"ms":>8} {"min - max":>17}{"GB/s":>8}   x copy')
    for name, case in todo.items():
        rate = case.width * n / statistics.median(seconds[name])
        spread = (f'{min(seconds[name]) * 1e3:.3f} - '
                  f'{max(seconds[name]) * 1e3:.3f}')
        print(f'{name:32}{statistics.median(seconds[name]) * 1e3:8.3f} '
              f'{spread:>17}{rate / 1e9:8.0f}   {rate / copy:.2f}')


def updates(xp: Any, repeats: int) -> dict[str, list[float]]:
    """Prints a line per codec; returns the seconds."""
    found = {}
    rng = np.random.default_rng(0)
    gradients, parameters = (
        [xp.asarray(rng.standard_normal(size, dtype=np.float32)
                    * np.float32(spread)) for size in TENSORS]
        for spread in (1e-3, 0.1))
    names = [f'/{number}' for number in range(len(TENSORS))]
    print(f'\n{"codec":10}{"encode [ms]":>12}{"decode [ms]":>12}')
    for name, codec in CODECS.items():
        tensors = Tensors(names, gradients, parameters, grain=codec.grain)
        state = codec.init()
        wire = empty_wire(xp, tensors.size, codec.wire_dtype)
        coding = begin(state, tensors)
        line = f'{name:10}'
        for what, run in (('encode', coding.encode), ('decode',
                                                      coding.decode)):
            times = []
            for _ in range(repeats + 2):
                start = time.perf_counter()
                run(wire)
                xp.cuda.get_current_stream().synchronize()
                times.append(time.perf_counter() - start)
            found[f'{what}, {name}'] = times[2:]
            line += f'{statistics.median(times[2:]) * 1e3:12.2f}'
        print(line)
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        '--elements', type=int, default=2 ** 27, metavar='N',
        help='length of the arrays (default: 128 Mi, larger than caches)')
    given.add_argument(
        '--repeats', type=int, default=25, metavar='N',
        help='measurements of each case (default: %(default)s)')
    args = given.parse_args()
    import cupy as xp
    print(describe())
    print(f'{args.elements:,} elements, medians of {args.repeats}\n')
    todo = cases(xp, args.elements)
    seconds = measure(xp, todo, args.repeats)
    show(todo, seconds, args.elements)
    seconds |= updates(xp, args.repeats)
    if args.json:
        write_json(args.json, {'seconds': seconds})


if __name__ == '__main__':
    main()

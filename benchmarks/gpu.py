"""Speed of codecs on a GPU against a copy of the same gradients.

    python benchmarks/gpu.py

An update of 25.6 M parameters on one rank: gradients to a wire on the host,
and back; nothing is exchanged.  The codecs take turns, and all is waited for.
"""
from __future__ import annotations

import statistics
import time
from typing import Any

from chainer_fp8pipe.codecs import CODECS, Tensors
from chainer_fp8pipe.codecs.staging import empty_wire

import numpy as np
from codec_updates import begin
from environment import describe, parser, write_json

#: As many as ResNet-50's 161 tensors have, of three sizes.
TENSORS = (*[64] * 107, *[147_456] * 40, *[1_403_000] * 14)


def timed(xp: Any, run: Any, repeats: int) -> list[float]:
    """Seconds of every repeat, after two more."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        xp.cuda.get_current_stream().synchronize()
        found.append(time.perf_counter() - start)
    return found[2:]


def updates(xp: Any, repeats: int) -> dict[str, list[float]]:
    """Prints a line per codec; returns the seconds."""
    rng = np.random.default_rng(0)
    gradients, parameters = (
        [xp.asarray(rng.standard_normal(size, dtype=np.float32)
                    * np.float32(spread)) for size in TENSORS]
        for spread in (1e-3, 0.1))
    names = [f'/{number}' for number in range(len(TENSORS))]
    found = {'copy': timed(
        xp, lambda: [array.get() for array in gradients], repeats)}
    print('copy to the host '
          f'{statistics.median(found["copy"]) * 1e3:.2f} ms\n\n'
          f'{"codec":10}{"encode [ms]":>12}{"decode [ms]":>12}')
    for name, row in CODECS.items():
        codec = row.usual
        tensors = Tensors(names, gradients, parameters, grain=codec.grain)
        wire = empty_wire(xp, tensors.size, codec.wire_dtype)
        coding = begin(codec.init(), tensors)
        line = f'{name:10}'
        for what in 'encode', 'decode':
            run = getattr(coding, what)
            times = timed(xp, lambda run=run, wire=wire: run(wire), repeats)
            found[f'{what}, {name}'] = times
            line += f'{statistics.median(times) * 1e3:12.2f}'
        print(line)
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        '--repeats', type=int, default=25, metavar='N',
        help='measurements of each case (default: %(default)s)')
    args = given.parse_args()
    import cupy as xp
    print(describe())
    seconds = updates(xp, args.repeats)
    if args.json:
        write_json(args.json, {'seconds': seconds})


if __name__ == '__main__':
    main()

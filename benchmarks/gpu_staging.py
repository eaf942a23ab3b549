"""Speed of the way from a GPU to MPI's host memory and back.

What crosses is a wire, as the communicators make it: "shared", in memory that
the ranks of a node share and CUDA has registered.  Beside it: pinned memory,
which MPI alone reads; that and a second copy to or from memory that ranks
share, which is the way where CUDA refuses to register; and pageable memory.
The codecs' times are of one update of a model of the size of ResNet-50 on one
rank: gradients to a wire on the host, and back; nothing is exchanged.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from chainer_fp8pipe.codecs import (
    BlockScaled,
    Cast,
    Codec,
    Fp8Ratio,
    Tensors,
)
from chainer_fp8pipe.codecs.staging import download, empty_wire, upload_now
from chainer_fp8pipe.mpi.memory.node_memory import NodeMemory
from chainer_fp8pipe.mpi.memory.page_locked import PageLockedMemory

import numpy as np
from codec_updates import begin
from environment import describe, write_json

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
#: 25.6 M parameters in 161 tensors, as ResNet-50's, of three sizes.
TENSORS = (*[64] * 107, *[147_456] * 40, *[1_403_000] * 14)
CODECS = {'fp8': Fp8Ratio, 'int4': BlockScaled,
          'e2m1': lambda: BlockScaled('e2m1'),
          'int5': lambda: BlockScaled('int5'),
          'float16': lambda: Cast('float16'),
          'float32': lambda: Cast('float32')}


def medians(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds on the host's clock: least, median, most."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    del seconds[:2]
    return [min(seconds), statistics.median(seconds), max(seconds)]


def transfers(xp: Any, sizes: tuple[int, ...], repeats: int
              ) -> dict[str, list[float]]:
    """Prints one line per size and way; returns the seconds."""
    found = {}
    memory = NodeMemory()
    print(f'{"":10}{"bytes":>14}{"us":>12}{"GB/s":>8}')
    for size in sizes:
        pinned = empty_wire(xp, size, np.uint8)
        pinned[...] = np.arange(size, dtype=np.uint32).astype(np.uint8)
        pageable = pinned.copy()
        there = upload_now(xp, pinned)
        second = memory.empty(size)
        second[...] = pinned
        ways = {
            **shared_ways(xp, memory, there, pinned),
            'upload, pinned': partial(upload_now, xp, pinned),
            'download, pinned': partial(download, there, pinned),
            'upload, two copies': partial(upload_twice, xp, second, pinned),
            'download, two copies': partial(
                download_twice, there, pinned, second),
            'upload, pageable': partial(upload_now, xp, pageable),
            'download, pageable': partial(download, there, pageable)}
        for way, run in ways.items():
            found[f'{way}, {size}'] = times = medians(run, repeats)
            print(f'{way:20}{size:14,}{times[1] * 1e6:12.1f}'
                  f'{size / times[1] / 1e9:8.1f}')
        assert (pinned == pageable).all(), 'the bytes changed on their way'
        assert (pinned == second).all(), 'they changed at the second copy'
        assert (pinned[:256] == np.arange(min(size, 256))).all()
    return found


def shared_ways(xp: Any, memory: NodeMemory, there: Any, values: np.ndarray
                ) -> dict[str, Callable[[], object]]:
    """The ways through registered memory; none where CUDA refuses."""
    shared = PageLockedMemory(memory).empty(xp.cuda.runtime, values.size)
    if shared is None:
        return {}
    shared[...] = values
    return {'upload, shared': partial(upload_now, xp, shared),
            'download, shared': partial(download, there, shared)}


def upload_twice(xp: Any, shared: np.ndarray, pinned: np.ndarray) -> None:
    pinned[...] = shared
    upload_now(xp, pinned)


def download_twice(there: Any, pinned: np.ndarray, shared: np.ndarray
                   ) -> None:
    download(there, pinned)
    shared[...] = pinned


def updates(xp: Any, sizes: tuple[int, ...], repeats: int
            ) -> dict[str, list[float]]:
    """Prints one line per codec; returns the seconds."""
    found = {}
    rng = np.random.default_rng(0)

    def draw(spread: float) -> list[Any]:
        return [xp.asarray(rng.standard_normal(size, dtype=np.float32)
                           * np.float32(spread)) for size in sizes]
    names = [f'/{number}' for number in range(len(sizes))]
    gradients, parameters = draw(1e-3), draw(0.1)
    print(f'\n{"codec":10}{"encode [ms]":>12}{"GB/s":>7}{"decode [ms]":>14}'
          f'{"GB/s":>7}     GB of float32 gradients per second')
    for name, make in CODECS.items():
        codec = make()
        tensors = Tensors(names, gradients, parameters, grain=codec.grain)
        wire = empty_wire(xp, tensors.size, codec.wire_dtype)
        line = f'{name:10}'
        for what, run in (
                ('encode', partial(encode, codec, tensors, wire)),
                ('decode', partial(decode, codec, tensors, wire))):
            found[f'{what}, {name}'] = times = medians(run, repeats)
            width = 12 if what == 'encode' else 14
            line += (f'{times[1] * 1e3:{width}.2f}'
                     f'{4 * sum(sizes) / times[1] / 1e9:7.1f}')
        print(line)
    return found


def encode(codec: Codec, tensors: Tensors, wire: np.ndarray) -> None:
    """An update's way to the wire."""
    begin(codec, tensors)
    codec.encode(tensors, wire)


def decode(codec: Codec, tensors: Tensors, wire: np.ndarray) -> None:
    """Its way back, until the device has gone it."""
    codec.decode(tensors, wire)
    tensors.xp.cuda.get_current_stream().synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--repeats', type=int, default=15, metavar='N',
        help='measurements of each case; the table shows their median '
             '(default: %(default)s)')
    parser.add_argument('--json', metavar='FILE',
                        help='also write least, median and most to FILE')
    args = parser.parse_args()
    import cupy as xp
    print(describe())
    print(f'medians of {args.repeats}\n')
    found = transfers(xp, SIZES, args.repeats)
    found.update(updates(xp, TENSORS, args.repeats))
    if args.json:
        write_json(args.json, {'seconds': found})


if __name__ == '__main__':
    main()

"""Operations of the fp8 format with what they are to be tried on."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from chainer_fp8pipe import fp8

import numpy as np

_ALL = 2 ** 32
_SCALES = (1.0, 3.0, 300.0, 2.0 ** -30, 2.0 ** 100)


class Case(NamedTuple):
    """One operation on some arrays, under the name that it counts for."""

    name: str
    operation: Callable[..., Any]
    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, Any]


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
            for kept, bound in ((None, 0.0), (residual, np.inf),
                                (residual, 3.5)):
                arrays = {'gradient': floats, 'parameter': parameter,
                          'out': np.empty(floats.size, np.uint8)}
                if kept is not None:
                    arrays['residual'] = kept
                name = 'ratio_encode' + ' + residual' * (kept is not None)
                yield Case(f'{name}, {rounding}', fp8.ratio_encode, arrays, {
                    'scale': scale, 'rounding': rounding, 'seed': 5,
                    'bound': bound})
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

"""The values that C code finds in ghosts, which it reads without asking.

Two runs of a model on ghosts with different values show whether C code has
read any (see :mod:`.trace`).  Otherwise numbers are NaN, and integers are no
valid index.
"""
from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator
from typing import Any

import numpy


class Level(enum.Enum):
    """Which values ghosts have."""

    REST = enum.auto()      # NaN, and integers that are no index
    LOW = enum.auto()       # the same, but -inf for NaN
    VARIED = enum.auto()    # others, which differ from place to place


_level = [Level.REST]
#: The one element that all ghosts of a dtype share, and a read-only view of
#: it, so that C code that writes to a ghost fails.
_elements: dict[numpy.dtype, tuple[numpy.ndarray, numpy.ndarray]] = {}
#: An axis that is longer has one value in all its places.
_LONGEST = 1 << 20


@contextlib.contextmanager
def reading(level: Level) -> Iterator[None]:
    """In the block, ghosts have the values of a level, in all threads.

    That is, ghosts that are made in the block; in ``LOW``, older ones, too.
    """
    before = _level[0]
    _set(level)
    try:
        yield
    finally:
        _set(before)


def buffer(shape: tuple[int, ...], dtype: numpy.dtype
           ) -> tuple[numpy.ndarray, tuple[int, ...]]:
    """Memory and strides for a ghost."""
    if _level[0] is Level.VARIED:
        return _varied(shape, dtype)
    try:
        return _elements[dtype][1], (0,) * len(shape)
    except KeyError:
        element = numpy.full((), value(dtype), dtype)
        seen = element.view()
        seen.flags.writeable = False
        _elements[dtype] = element, seen
        return seen, (0,) * len(shape)


def value(dtype: numpy.dtype) -> Any:
    """The value of a ghost of one element."""
    return _value(dtype, _level[0])


def is_poison(error: IndexError) -> bool:
    """Whether an index was out of bounds because a ghost has no data."""
    return any(f'index {limit} is' in str(error) for limit in _indexes())


def _set(level: Level) -> None:
    _level[0] = level
    for dtype, (element, _) in _elements.items():
        element[...] = _value(
            dtype, level if level is Level.LOW else Level.REST)


@functools.lru_cache(None)
def _value(dtype: numpy.dtype, level: Level) -> Any:
    if dtype.kind in 'biufc' and level is Level.VARIED:
        return 1
    if dtype.kind in 'fc':
        return -numpy.inf if level is Level.LOW else numpy.nan
    if dtype.kind in 'iu':
        limits = numpy.iinfo(dtype)
        return limits.min if dtype.kind == 'i' else limits.max
    return False if dtype.kind == 'b' else numpy.zeros((), dtype)[()]


@functools.lru_cache(None)
def _indexes() -> tuple[Any, ...]:
    return tuple(_value(numpy.dtype(kind), Level.REST) for kind in 'iqIQ')


def _varied(shape: tuple[int, ...], dtype: numpy.dtype
            ) -> tuple[numpy.ndarray, tuple[int, ...]]:
    """Memory in which neighbours in any axis have different values.

    Axes share the memory, which is as long as all of them in a row.
    """
    steps = [int(size <= _LONGEST) for size in shape]
    length = sum(step * (size - 1)
                 for step, size in zip(steps, shape, strict=True)
                 if size > 1) + 1
    return (_row(dtype, 1 << (length - 1).bit_length()),
            tuple(dtype.itemsize * step for step in steps))


@functools.lru_cache(64)
def _row(dtype: numpy.dtype, length: int) -> numpy.ndarray:
    values = numpy.random.RandomState(0).randint(-8, 8, length)
    if dtype.kind in 'biu':
        values %= 2 if dtype.kind == 'b' else 4
    values[:1], values[1:2] = 1, 0
    if dtype.kind not in 'biufc':
        values[:] = 0
    row = values[:length].astype(dtype)
    row.flags.writeable = False
    return row

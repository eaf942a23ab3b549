"""Short notes of what the calls of a run get, to compare two runs.

A mark has two parts: if the first differs, the model makes other calls; if
only the second differs, an array has other values.
"""
from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from .. import nested
from ..ghost import is_ghost
from .traced_call import CHAINERS, TracedCall, attributes_of


class Marks:
    """A mark for each call of a run."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[Any, Any]] = {}
        # With the ghosts themselves, so that no other object gets their ids.
        self._ghosts: dict[int, tuple[Any, int]] = {}

    def add(self, number: int, call: TracedCall, node: Any, inputs: tuple
            ) -> None:
        """Notes what a call gets: its kind, link, constants and inputs."""
        arrays = list(inputs)
        for name, value in attributes_of(node).items():
            if name not in CHAINERS:
                arrays += nested.leaves(value)[0]
        self._marks[number] = (
            (call.kind, call.link, call.constants,
             tuple([_form(array) for array in arrays])),
            tuple([self._mark(array) for array in arrays]))

    def end(self, number: int, reports: Mapping[str, Any]) -> None:
        """Notes the number of calls, and what was reported."""
        self._marks[number] = (None, sorted(reports)), tuple(
            self._mark(reports[name]) for name in sorted(reports))

    def is_same(self, other: Marks, number: int) -> bool:
        """Whether a call of another run got the same."""
        return self._marks.get(number) == other._marks.get(number)

    def is_alike(self, other: Marks, number: int) -> bool:
        """Whether a call of another run got the same but for values."""
        return (number in self._marks and number in other._marks
                and self._marks[number][0] == other._marks[number][0])

    def _mark(self, value: Any) -> Any:
        if isinstance(value, chainer.Parameter):
            return id(value)
        array = nested.array_of(value)
        if is_ghost(array):
            return self._mark_of_ghost(array)
        return _digest(array) if isinstance(
            array, chainer.get_array_types()) else repr(array)

    def _mark_of_ghost(self, array: Any) -> Any:
        if array.recipe is None:
            return array.source
        found = self._ghosts.get(id(array))
        if found is None:
            recipe = array.recipe
            found = array, hash((
                repr(recipe.function), repr(recipe.tree),
                tuple([self._mark(leaf) for leaf in recipe.leaves])))
            self._ghosts[id(array)] = found
        return found[1]


def _form(value: Any) -> Any:
    array = nested.array_of(value)
    return isinstance(value, chainer.Variable), getattr(
        array, 'shape', None), getattr(array, 'dtype', None)


def _digest(array: Any) -> int:
    if array.dtype.hasobject or not array.size:
        return 0
    host: Any = numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(array))
    return zlib.crc32(host.reshape(-1).view(numpy.uint8))

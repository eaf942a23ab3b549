"""One call of a trace, and what a repetition of it must have."""
from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import chainer
import numpy

from ...planning.partition.calls import Call
from .. import nested
from ..ghost import is_ghost, looked_at
from .whole_call import Identity

#: Attributes that Chainer itself sets.
CHAINERS = frozenset([*vars(chainer.FunctionNode), *vars(chainer.Function),
                       *vars(chainer.function.FunctionAdapter), 'node',
                       'func', '_node', '_owned_node'])

#: Which attribute of a function is what the function runs, by class.
_RUNS = {'Whole': 'run', 'Forget': 'func'}


#: Arrays among a function's attributes whose values say what shape comes out.
#: Others may have new values in each batch, for which a trace must do.
_DECIDING = {'SplitAxis': 'indices', 'Pad': 'pad_width', 'Tile': 'reps',
             'Reshape': 'shape', 'Transpose': 'axes'}
#: What an index is among the attributes of Chainer's functions.
_INDEX = 'slices'
#: Values that are compared by themselves.
PLAIN = (int, float, complex, str, bytes, slice, numpy.dtype, numpy.generic,
         type(None))


@dataclass(eq=False)
class TracedCall(Call):
    """A call, and what a rank needs that does not run it.

    Attributes:
        kind: Class of the function.
        ghosts: The outputs.
        hidden: Attributes of the function that hold ghosts.
        attributes: Ghosts of what is read from the function afterwards.
        form: Of the result of a :class:`.Whole`.
        expected: For each input what a repetition must have: the ghost or
            parameter itself, the sources of a derived ghost, or shape and
            dtype.
        constants: Attributes that a repetition must have, with their values.
        inner: Paths of parameters that it reads inside of itself.
        error: What it raised; an iteration over a variable ends so.
        ignores: The label that the function leaves out of its mean, and the
            index of the input that has the labels, None if that cannot be
            told; None: there is none.
        reads: Paths of links whose persistent arrays it reads or writes.
    """

    kind: Any = None
    ghosts: tuple[Any, ...] = ()
    hidden: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    form: Any = None
    expected: tuple[Any, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    inner: tuple[str, ...] = ()
    error: Exception | None = None
    ignores: tuple[int, int | None] | None = None
    reads: tuple[str, ...] = ()


class Shape(NamedTuple):
    """Stands for an array among a function's attributes."""

    shape: tuple[int, ...]
    dtype: Any


class Values(NamedTuple):
    """Stands for an array whose values decide about shapes."""

    shape: tuple[int, ...]
    dtype: Any
    content: bytes

    @classmethod
    def of(cls, array: Any) -> Values:
        """Those of an array."""
        return cls(array.shape, array.dtype, array.tobytes())


class AnyIndex(NamedTuple):
    """Stands for an index; equal for those that give the same shape."""

    items: tuple[Any, ...]

    @classmethod
    def of(cls, index: Any) -> AnyIndex:
        """Of what is in the brackets."""
        return cls(tuple([
            (kind, item) if (kind := type(item)) is slice or kind is int
            else _described(item)
            for item in (index if type(index) is tuple else (index,))]))


def _described(item: Any) -> Any:
    """What of an item of an index decides about the shape of the result.

    Of conditions, how many hold; of numbers, how many there are.
    """
    if isinstance(item, list):
        item = numpy.array(item)
    if not isinstance(item, chainer.get_array_types()):
        return type(item), item
    if item.dtype.kind != 'b':
        return item.shape, item.dtype
    if is_ghost(item):
        raise looked_at(item, 'indexing by a condition')
    return item.shape, item.dtype, int(item.sum())


def kind_of(node: Any) -> Any:
    """The class of a function; that of an old-style one, too."""
    return type(getattr(node, 'function', node))


def attributes_of(node: Any) -> dict[str, Any]:
    """What the user's call has given to a function, by attribute."""
    if isinstance(node, chainer.function.FunctionAdapter):
        return node.function.__dict__
    return node.__dict__


def expected_of(x: Any) -> Any:
    """What :class:`.Rehearsal` compares an input with."""
    if isinstance(x, chainer.Parameter):
        return x
    array = nested.array_of(x)
    if not is_ghost(array):
        return array.shape, array.dtype
    return array if array.recipe is None else array.recipe.sources


def constants_of(node: Any) -> tuple[tuple[str, Any], ...]:
    """What decides about a call beside its inputs."""
    found: list[tuple[str, Any]] = []
    deciding = _DECIDING.get(kind_of(node).__name__)
    for name, value in attributes_of(node).items():
        if name == _RUNS.get(kind_of(node).__name__):
            found.append((name, Identity(value)))
        elif name in CHAINERS:
            continue
        elif name == _INDEX:
            found.append((name, AnyIndex.of(value)))
        elif isinstance(value, chainer.get_array_types()):
            if not is_ghost(value):
                found.append((name, Values.of(value) if name == deciding
                              else Shape(value.shape, value.dtype)))
        elif isinstance(value, (*PLAIN, type)) or (
                isinstance(value, (tuple, list)) and _is_plain(value)):
            found.append((name, copy.copy(value)))
    return tuple(found)


def is_same(value: Any, expected: Any) -> bool:
    """Whether an attribute is as a constant of :func:`constants_of`."""
    kind = type(expected)
    if kind is AnyIndex:
        return AnyIndex.of(value) == expected
    if kind is Identity:
        return Identity(value) == expected
    if kind is Shape:
        return (getattr(value, 'shape', None) == expected.shape
                and getattr(value, 'dtype', None) == expected.dtype)
    if kind is Values:
        return isinstance(value, chainer.get_array_types()) and (
            not is_ghost(value) and Values.of(value) == expected)
    try:
        # The second for what is not equal to itself.
        return type(value) is kind and bool(
            value == expected or (value != value and expected != expected))
    except ValueError:
        return False                # an array in one of two tuples


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is Ellipsis or isinstance(value, PLAIN)


def ignored_label(node: Any) -> int | None:
    """The label that a loss leaves out of its mean; None: there is none."""
    function = getattr(node, 'function', node)
    if (not getattr(function, 'normalize', False)
            or getattr(function, 'reduce', 'mean') == 'no'):
        return None
    return getattr(function, 'ignore_label', None)

"""A trace and its calls, and what a repetition of a call must have."""
from __future__ import annotations

import copy
import functools
import hashlib
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import chainer
import numpy
from chainer.functions.util.forget import Forget

from ..planning.calls import Call, Source
from . import nested
from .ghost import GhostError, is_ghost, looked_at
from .link_state import Attribute, LinkState
from .whole_call import Identity, WholeCall

#: Attributes of functions that Chainer itself sets.
CHAINERS = frozenset([*vars(chainer.FunctionNode), *vars(chainer.Function),
                       *vars(chainer.function.FunctionAdapter), 'node',
                       'func', '_node', '_owned_node'])

#: The attribute with the function that a function of this class runs.
_RUNS = {WholeCall: 'run', Forget: 'func'}
#: The attribute with an array whose values decide about the output's shape,
#: by class.  Other arrays may have other values in each batch.
_DECIDING = {'SplitAxis': 'indices', 'Pad': 'pad_width', 'Tile': 'reps',
             'Reshape': 'shape', 'Transpose': 'axes'}
#: Attributes whose numbers decide about no shape, though they may be integers,
#: by module.
_ARITHMETIC = {'chainer.functions.math.basic_math': ('value',)}
#: The attribute with an index.
_INDEX = 'slices'
#: Attributes of these types must be equal.
PLAIN = (int, float, complex, str, bytes, slice, numpy.dtype, numpy.generic,
         type(None))


@dataclass(eq=False)
class TracedCall(Call):
    """A call, with what its measurement found and what replays need.

    Attributes:
        kind: Class of the function.
        modules: ``numpy`` or ``cupy``, by output.
        kept_inputs: Numbers of the inputs that are kept for backward.
        kept_outputs: Numbers of the outputs that are kept for backward.
        views: By output in the memory of an input, the input's number.
        parts: Numbers of the views of another size than the input.
        inner: Paths of the parameters that are read inside of the call.
        form: Tree of the result of a :class:`.WholeCall`, and which of its
            leaves are variables.
        ghosts: The outputs.
        attributes: Ghosts for attributes that are read after the call.
        hidden: Attributes of the function that hold ghosts.
        expected: For each input what a repetition must have: the ghost or
            parameter itself, the sources of a derived ghost, or shape and
            dtype.
        constants: Attributes that decide what is called, with their values.
        demands: Those of them that a repetition must have.
        error: The exception of the call; an iteration over a variable ends
            with one.
        ignores: The label that the function leaves out of its mean, and the
            index of the input that has the labels (None if unknown); None:
            no label is left out.
        reads: Paths of the links whose persistent arrays the call uses.
    """

    kind: Any = None
    modules: dict[int | str, Any] = field(default_factory=dict)
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    views: Mapping[int, int] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    inner: tuple[str, ...] = ()
    form: Any = None
    ghosts: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    expected: tuple[Any, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    demands: tuple[tuple[str, Any], ...] = ()
    error: Exception | None = None
    ignores: tuple[int, int | None] | None = None
    reads: tuple[str, ...] = ()


@dataclass(eq=False)
class Trace:
    """The calls of one run of a model.

    Attributes:
        atomic: Paths of the links that are run as one call.
        calls: Those pinned to a stage, for the state of links, come first.
        first: Number of the first call that is not pinned.
        result: What the model returned, made of ghosts.
        reports: What was reported, by name.
        inside: Number of the call inside of which a value was reported, by
            the value's name.
        state: What links keep afterwards.
        touched: Attributes of links that the run has changed.
    """

    atomic: frozenset[str]
    calls: list[TracedCall] = field(default_factory=list)
    first: int = 0
    result: Any = None
    reports: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    state: LinkState = LinkState()
    touched: frozenset[Attribute] = frozenset()

    def describe(self, source: Source) -> str:
        """What messages call a value."""
        call = self.calls[source.call]
        return f'call {source.call} ({call.name} in {call.link})'

    @functools.cached_property
    def digest(self) -> str:
        """Equal on ranks that have traced the same calls."""
        text = hashlib.sha256()
        for call in self.calls:
            text.update(repr((
                call.name, call.link, call.inputs, call.parameters,
                [(key, value.shape, str(value.dtype))
                 for key, value in call.outputs.items()],
                call.constants)).encode())
        text.update(repr(sorted(self.reports)).encode())
        return text.hexdigest()


class AnyNumber:
    """Stands for a number about which no shape depends: a weight, a ratio.

    It may be another one in each batch, as a weight that grows is.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (numbers.Number, AnyNumber)) and (
            not is_ghost(other))

    def __hash__(self) -> int:
        return hash(AnyNumber)

    def __repr__(self) -> str:
        return 'any number'


class Alike(NamedTuple):
    """Stands for all values that are alike in one way.

    Attributes:
        of: The way: one of :func:`_shape`, :func:`_content`, :func:`_index`
            and :class:`.Identity`.
        form: What that gives for the values.
    """

    of: Callable[[Any], Any]
    form: Any

    @classmethod
    def to(cls, of: Callable[[Any], Any], value: Any) -> Alike:
        return cls(of, of(value))

    def __repr__(self) -> str:
        """The same on all ranks."""
        return repr(self.form)


def _shape(array: Any) -> Any:
    return getattr(array, 'shape', None), getattr(array, 'dtype', None)


def _content(array: Any) -> Any:
    """Equal for arrays of equal values, on which shapes depend."""
    return (*_shape(array), array.tobytes()) if isinstance(
        array, chainer.get_array_types()) and not is_ghost(array) else None


def _index(index: Any) -> Any:
    """Equal for indexes that give the same shape."""
    return tuple([
        (kind, item) if (kind := type(item)) is slice or kind is int
        else _item(item)
        for item in (index if type(index) is tuple else (index,))])


def _item(item: Any) -> Any:
    """What decides about the result's shape in an item of an index.

    The number of conditions that hold, or of positions.
    """
    if isinstance(item, list):
        item = numpy.array(item)
    kinds: Any = (nested.Dataless, *chainer.get_array_types())
    if not isinstance(item, kinds):
        return type(item), item
    if item.dtype.kind != 'b':
        return item.shape, item.dtype
    if is_ghost(item):
        raise looked_at(item, 'indexing by a condition')
    return item.shape, item.dtype, int(item.sum())


def kind_of(node: Any) -> Any:
    """The class of a function, which may be an old-style one."""
    return type(getattr(node, 'function', node))


def label_of(node: Any) -> str:
    """What Chainer calls a function."""
    try:
        return node.label
    except GhostError:      # it would name a number that it computes with
        return kind_of(node).__name__


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a function, which may be an old-style one."""
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
    """The attributes that a repetition of a call must have."""
    found: list[tuple[str, Any]] = []
    deciding = _DECIDING.get(kind_of(node).__name__)
    for name, value in attributes_of(node).items():
        if name == _RUNS.get(kind_of(node)):
            found.append((name, Alike.to(Identity, value)))
        elif name in CHAINERS or is_ghost(value):
            continue
        elif name == _INDEX:
            found.append((name, Alike.to(_index, value)))
        elif isinstance(value, chainer.get_array_types()):
            found.append((name, Alike.to(
                _content if name == deciding else _shape, value)))
        elif isinstance(value, (*PLAIN, type)) or (
                isinstance(value, (tuple, list)) and _is_plain(value)):
            found.append((name, copy.copy(value)))
    return tuple(found)


def loosened(call: TracedCall, inputs: Sequence[Any]
             ) -> tuple[tuple[str, Any], ...]:
    """The constants of a call, without numbers that may change.

    All of Chainer's that are no integers.  A user's own function may cut by
    such a number, unless its outputs have the shapes of inputs.

    Args:
        call: With its outputs.
        inputs: Arrays and variables.
    """
    shapes = [(), *(nested.array_of(x).shape for x in inputs)]
    module = call.kind.__module__
    if module.partition('.')[0] != 'chainer' and not all(
            value.shape in shapes for value in call.outputs.values()):
        return call.constants
    operands = _ARITHMETIC.get(module, ())
    return tuple([(name, AnyNumber() if name in operands and AnyNumber()
                   == value else _loose(value))
                  for name, value in call.constants])


def _loose(value: Any) -> Any:
    """A constant with :class:`AnyNumber` for each number that is no integer.

    Shapes depend on integers.
    """
    if type(value) in (tuple, list):
        return type(value)(map(_loose, value))
    return AnyNumber() if isinstance(value, (
        float, complex, numpy.inexact)) else value


def is_same(value: Any, expected: Any) -> bool:
    """Whether an attribute is as :func:`constants_of` has noted it."""
    kind = type(expected)
    if kind is Alike:
        return bool(expected.of(value) == expected.form)
    if kind is AnyNumber:
        return bool(expected == value)
    try:
        # The second for what is not equal to itself.
        return type(value) is kind and bool(
            value == expected or (value != value and expected != expected))
    except ValueError:
        return False                # an array in one of two tuples


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is Ellipsis or (isinstance(value, PLAIN)
                                 and not is_ghost(value))


def ignored_label(node: Any) -> int | None:
    """The label that a loss leaves out of its mean; None: it has none."""
    function = getattr(node, 'function', node)
    if (not getattr(function, 'normalize', False)
            or getattr(function, 'reduce', 'mean') == 'no'):
        return None
    return getattr(function, 'ignore_label', None)

"""A trace: its calls, where they are done, and what a repetition must have."""
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

from ..planning.calls import Assignment, Call, Source, assign
from ..planning.partition_plan import PartitionPlan
from . import nested
from .attributes import Attribute, Leaf, Links, State, placed, put_state
from .placeholder import (
    PlaceholderError,
    describe_source,
    is_placeholder,
    looked_at,
    sources,
)
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
_NOTHING: Any = object()
_INEXACT = float, complex, numpy.inexact
#: Attributes of these types must be equal.
PLAIN = (int, float, complex, str, bytes, slice, numpy.dtype, numpy.generic,
         type(None))


@dataclass(eq=False)
class TracedCall(Call):
    """A call, with its measured figures and the data that replays need.

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
        placeholders: The outputs. attributes: Placeholders for attributes that
        are read after the call. hidden: Attributes of the function that hold
        placeholders. expected: For each input what a repetition must have: the
        placeholder or
            parameter itself, the sources of a derived placeholder, or shape
            and dtype.
        constants: Attributes that decide what is called.
        demands: The same, with numbers that may be others.
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
    placeholders: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    expected: tuple[Any, ...] = ()
    constants: tuple[Constant, ...] = ()
    demands: tuple[Constant, ...] = ()
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
        result: What the model returned, made of placeholders.
        reports: What was reported, by name.
        inside: Number of the call inside of which a value was reported, by
            the value's name.
        state: What links keep afterwards.
        touched: Attributes of links that the run has changed.
        normalises: Whether a batch normalisation was called.
    """

    atomic: frozenset[str]
    calls: list[TracedCall] = field(default_factory=list)
    first: int = 0
    result: Any = None
    reports: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    state: State = ()
    touched: frozenset[Attribute] = frozenset()
    normalises: bool = False

    def describe(self, source: Source) -> str:
        """The name of a value in messages."""
        call = self.calls[source.call]
        return f'call {source.call} ({call.name} in {call.link})'

    @functools.cached_property
    def labels(self) -> frozenset[int]:
        """Numbers of the calls that make labels of the batch's integers.

        Of the labels of losses that leave some out.
        """
        found: set[int] = set()
        for call in self.calls:
            if call.ignores is None or call.ignores[1] is None:
                continue
            given = call.expected[call.ignores[1]]
            array = nested.array_of(given)
            needed = list(sources(array) if is_placeholder(array) else [
                one for one in given if isinstance(one, Source)])
            makers: set[int] = set()
            while needed:
                number = needed.pop().call
                if number not in makers:
                    makers.add(number)
                    needed.extend(self.calls[number].inputs)
            if all(number >= self.first and not self.calls[number].parameters
                   and all(value.dtype.kind in 'biu' for value
                           in self.calls[number].outputs.values())
                   for number in makers):
                found |= makers
        return frozenset(found)

    @functools.cached_property
    def digest(self) -> str:
        """Equal on ranks that have traced the same calls."""
        text = hashlib.sha256()
        for call in self.calls:
            text.update(repr((
                call.name, call.link, call.inputs, call.parameters,
                [(key, value.shape, str(value.dtype))
                 for key, value in call.outputs.items()],
                [(one.name, one.form) for one in call.constants])).encode())
        text.update(repr(sorted(self.reports)).encode())
        return text.hexdigest()


class StagedTrace:
    """The calls of a trace, each on a chunk: the program of a micro-batch.

    Args:
        trace: Of the model.
        plan: Where the model is cut.
        state: What links kept before the run that was traced.
        live: Whether a later run reads what this one leaves in links.
        keepers: As the attribute, of earlier traces.

    Attributes:
        stages: The chunk of each call.
        incoming: For each chunk the values that it receives.
        outgoing: For each chunk the values that it sends on; for the last
            one the values that the model returned.
        wanted: For each chunk the values to keep of its calls.
        reporters: The chunk that knows a reported value, by its name.
        holders: The chunks that use a parameter, by its path.
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        inner: Paths of the parameters that are read inside of calls.
        after: What links keep for the next run.
        attributes: Of links, that hold outputs of calls.
        missing: Paths of parameters that a rank lacks, with the chunk's
            number; set by the :class:`.Partition`.

    Raises:
        ValueError: The model returns something else than variables, or the
            calls of such a link would be on two chunks.
    """

    missing: set[tuple[str, int]]

    def __init__(self, trace: Trace, plan: PartitionPlan,
                 state: State, live: bool, keepers: Mapping[str, int]
                 ) -> None:
        self.trace, self.state = trace, state
        self.form, results = _results(trace)
        together = [*map(_sources_of, trace.reports.values()),
                    *(leaf.sources for entry in trace.state if live
                      for leaf in entry.leaves)]

        def assigned(homes: dict[int, int]) -> Assignment:
            return assign(trace.calls, plan.order, plan.positions, results,
                          together, homes)

        self.keepers = self._keepers(assigned(self._homes(keepers)).stages)
        keepers = {**self.keepers, **keepers}
        assignment = assigned(self._homes(keepers))
        self.stages, self.holders = assignment.stages, assignment.holders
        self._check(keepers)
        last = len(plan.cuts)
        crossing = assignment.crossing
        self.incoming = ((), *crossing)
        self.outgoing = (*crossing, results)
        self.reporters = {
            name: max([self.stages[source.call]
                       for source in _sources_of(value)],
                      default=self.stages[trace.inside[name]]
                      if name in trace.inside else last)
            for name, value in trace.reports.items()}
        self.after = placed(trace.state if live else (),
                            lambda source: self.stages[source.call])
        self.inner = frozenset(name for call in trace.calls
                               for name in call.inner)
        wanted = {source for several in (
            *self.outgoing, *map(_sources_of, trace.reports.values()))
            for source in several}
        self.attributes = frozenset(
            (entry.link, entry.name) for entry in trace.state + state)
        self.wanted = tuple(frozenset(
            source for source in wanted if self.stages[source.call] == chunk)
            for chunk in range(last + 1))

    def wants_gradient(self, source: Source) -> bool:
        """Whether backward needs the gradient of a value."""
        value = self.trace.calls[source.call].outputs[source.output]
        return value.wants and value.dtype.kind == 'f'

    def put_state(self, links: Links, values: Mapping[Source, Any],
                  chunk: int | None) -> None:
        """Gives links their state: values of a chunk, else placeholders."""
        calls = iter(self.trace.calls)

        def pin(leaf: Leaf, path: str) -> Any:
            found = next(calls).placeholders[0].array
            return values[found.source] if leaf.stage == chunk else found
        put_state(self.state, links, pin)

    def _homes(self, keepers: Mapping[str, int]) -> dict[int, int]:
        """The chunks of the calls that use links' running values."""
        return {number: keepers[name]
                for number, call in enumerate(self.trace.calls)
                for name in (*call.whole, *call.reads)
                if name in keepers}

    def _keepers(self, stages: Sequence[int]) -> dict[str, int]:
        chunks: dict[str, int] = {}
        for call, stage in zip(self.trace.calls, stages, strict=True):
            for name in call.whole:
                chunks[name] = max(stage, chunks.get(name, 0))
        return chunks

    def _check(self, keepers: Mapping[str, int]) -> None:
        for call, stage in zip(self.trace.calls, self.stages, strict=True):
            for name in (*call.whole, *call.reads):
                if keepers.get(name, stage) != stage:
                    raise ValueError(
                        f'link {name} keeps running values, and its calls '
                        'would be on two ranks for inputs of this form; make '
                        'the partition with such an example')


class Constant(NamedTuple):
    """An attribute that a repetition of a call must have, in some way.

    Attributes:
        name: Of the attribute.
        form: What ``form_of`` gives for the attribute's value.
        form_of: Gives the same for values that are alike.
        value: The value, where its identity is enough.
    """

    name: str
    form: Any
    form_of: Callable[[Any], Any]
    value: Any = _NOTHING

    def __str__(self) -> str:
        shown = self.form if self.value is _NOTHING else self.value
        return f'{shown!r:.40}'

    def fits(self, value: Any) -> bool:
        """Whether the attribute may have this value."""
        try:
            return bool(self.form == self.form_of(value))
        except ValueError:
            return False            # an array in one of two tuples


def _plain(value: Any) -> Any:
    """A key that equal values of one type share; NaN equals NaN."""
    kind = type(value)      # not its class: a placeholder looks like a number
    return kind, 'nan' if issubclass(kind, _INEXACT) and value != value else (
        value)


def _shape(array: Any) -> Any:
    return getattr(array, 'shape', None), getattr(array, 'dtype', None)


def _content(array: Any) -> Any:
    """Equal for arrays of equal values, on which shapes depend."""
    has_values = isinstance(array, chainer.get_array_types()) and (
        not is_placeholder(array))
    return (*_shape(array), array.tobytes()) if has_values else None


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
    if is_placeholder(item):
        raise looked_at(item, 'indexing by a condition')
    return item.shape, item.dtype, int(item.sum())


def kind_of(node: Any) -> Any:
    """The class of a function, which may be an old-style one."""
    return type(getattr(node, 'function', node))


def label_of(node: Any) -> str:
    """Chainer's name for a function."""
    try:
        return node.label
    except PlaceholderError:    # it would name a number that it computes with
        return kind_of(node).__name__


def link_of(node: Any) -> chainer.Link | None:
    """The link that a call runs as a whole; None: none."""
    run = getattr(node, 'run', None)
    return run if isinstance(run, chainer.Link) else None


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
    if not is_placeholder(array):
        return array.shape, array.dtype
    return array if array.recipe is None else array.recipe.sources


def constants_of(node: Any) -> tuple[Constant, ...]:
    """The attributes that a repetition of a call must have."""
    found = []
    kind = kind_of(node)
    deciding = _DECIDING.get(kind.__name__)
    for name, value in attributes_of(node).items():
        of: Callable[[Any], Any] | None = None
        if name == _RUNS.get(kind):
            of = Identity
        elif name in CHAINERS or is_placeholder(value):
            continue
        elif name == _INDEX:
            of = _index
        elif isinstance(value, chainer.get_array_types()):
            of = _content if name == deciding else _shape
        elif isinstance(value, type) or _is_plain(value):
            kept = copy.copy(value)         # of a list
            found.append(Constant(name, _plain(kept), _plain, kept))
        if of is not None:
            found.append(Constant(name, of(value), of))
    return tuple(found)


def loosened(call: TracedCall, inputs: Sequence[Any]
             ) -> tuple[Constant, ...]:
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
    return tuple([
        one if one.form_of is not _plain
        else one._replace(form=True, form_of=_is_number)
        if _is_number(one.value) and (one.name in operands
                                      or isinstance(one.value, _INEXACT))
        else one._replace(form=_loose(one.value), form_of=_loose)
        for one in call.constants])


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not is_placeholder(value)


def _loose(value: Any) -> Any:
    """The same for all numbers that are no integers; shapes depend on these.

    A weight that grows, or a ratio, may be another one in each batch.
    """
    if type(value) in (tuple, list):
        return type(value), tuple(map(_loose, value))
    return ('any number' if issubclass(type(value), _INEXACT)
            else _plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is Ellipsis or (isinstance(value, PLAIN)
                                 and not is_placeholder(value))


def ignored_label(node: Any) -> int | None:
    """The label that a loss leaves out of its mean; None: it has none."""
    function = getattr(node, 'function', node)
    if (not getattr(function, 'normalize', False)
            or getattr(function, 'reduce', 'mean') == 'no'):
        return None
    return getattr(function, 'ignore_label', None)


def _results(trace: Trace) -> tuple[Any, tuple[Source, ...]]:
    """The form of what a model returned, and its sources."""
    leaves, tree = nested.leaves(trace.result)
    found: list[Source] = []
    for leaf in leaves:
        array = nested.array_of(leaf)
        if not is_placeholder(array) or not isinstance(array.source, Source):
            said = (describe_source(array) if is_placeholder(array)
                    else 'an array that no function of Chainer has made')
            raise ValueError(f'the model returned {said}; it must return '
                             'what Chainer\'s functions give')
        found.append(array.source)
    return tree, tuple(found)


def _sources_of(value: Any) -> tuple[Source, ...]:
    """Names the calls that made a value, or the values in a tuple."""
    return tuple(source for leaf in nested.leaves(value)[0]
                 for source in sources(nested.array_of(leaf)))

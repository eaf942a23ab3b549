"""Forward passes along a trace: rehearsals, and a chunk's own calls."""
# The user's own forward runs on every rank, for every micro-batch, and each of
# its calls comes here.  A rehearsal does none of them: it compares what they
# are given with the trace, which takes some microseconds a call, and gives
# their placeholders.  A run does the calls of one chunk, on real values; the
# placeholders of others' are exchanged for what was received, where a call
# needs them.
#
# The calls of a model may depend on the batch's values: on the shape of a
# tree, on lengths of sequences, on random numbers.  So before a step every
# micro-batch is rehearsed against the known traces; where none fits, the
# model is traced anew.  A rehearsal also counts the labels that losses leave
# out: micro-batches are weighted by the number of the others, before the first
# backward pass.
#
# Each pass must find what the only pass would.  So the arrays of the batch are
# copied for each, as forward may write to them; random numbers between calls
# are seeded by the place of the micro-batch in the training; and what Python
# counts in attributes of links begins where the first pass of this micro-batch
# began.
from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import chainer
from chainer import Variable
from chainer.function import FunctionAdapter

from ..intercept.function_calls import (
    call_unchecked,
    intercepting,
    suspended,
)
from ..pipeline.randomness import Place, at, preserved
from ..planning.calls import Source
from . import nested
from .attributes import State, saved, signature
from .names import Names
from .placeholder import (
    PlaceholderError,
    describe_source,
    evaluated,
    is_placeholder,
    user_line,
)
from .trace import (
    StagedTrace,
    Trace,
    TracedCall,
    attributes_of,
    kind_of,
    label_of,
    link_of,
)
from .valueless_parameters import set_placeholder, without_shapes
from .whole_call import Pass

_REMEDY = ("A model's calls must depend on its inputs, on chainer.config "
           'and on numpy.random only; mark a function that branches on '
           'computed values by chainer_fp8pipe.atomic')
#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
_NOWHERE = Place(0, 0, 0, 0)
#: What links keep of a micro-batch: the program's ``after``, and the values of
#: this rank by their pinned calls in the next trace.
Kept = tuple[State, dict[Source, Any]]


class Diverged(RuntimeError):
    """A forward pass makes other calls than its trace."""


class CallError(RuntimeError):
    """A call of a function failed; the cause is the exception."""


class Replay(Pass):
    """Follows a forward pass along the calls of a trace.

    Args:
        trace: Of such a pass.
        names: Of the model's links and parameters.
    """

    def __init__(self, trace: Trace, names: Names) -> None:
        self._trace, self._calls, self._names = trace, trace.calls, names
        self._number = trace.first
        self.sees_links = bool(trace.atomic)

    def is_whole(self, link: chainer.Link) -> bool:
        return self._names.of(link) in self._trace.atomic

    def last_form(self) -> Any:
        return self._calls[self._number - 1].form

    def finish(self) -> None:
        """Raises Diverged if calls of the trace were not made."""
        if self._number != len(self._calls):
            call = self._calls[self._number]
            raise Diverged(
                f'the forward pass ended before call {self._number}, '
                f'{call.name} in {call.link}, of its trace. {_REMEDY}')


class Rehearsal(Replay):
    """Compares the calls of a forward pass with those of a trace.

    Attributes:
        labels: For each loss that leaves labels out, how many labels count,
            and how many it leaves out.
        fits: Whether all calls are those of the trace; see :func:`rehearse`.
        why: The constant that is not the trace's; '' if none was found.
    """

    fits, why = False, ''

    def __init__(self, trace: Trace, names: Names) -> None:
        super().__init__(trace, names)
        self.labels: list[tuple[int, int]] = []
        # Function and inputs of each call that makes labels, by its number.
        self._of_labels: dict[int, tuple[Any, tuple]] = {}
        self._makers = trace.labels

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here: no helpers are called
        # where all is as expected.
        number = self._number
        if number >= len(self._calls):
            raise Diverged
        call = self._calls[number]
        self._number = number + 1
        function = node.function if type(node) is FunctionAdapter else node
        if (type(function) is not call.kind
                or len(inputs) != len(call.expected)):
            raise Diverged
        for x, expected in zip(inputs, call.expected, strict=False):
            array = x._data[0] if isinstance(x, Variable) else x
            if array is not expected and x is not expected and (
                    not _is_alike(array, expected)):
                raise Diverged
        own = function.__dict__
        for one in call.demands:
            found, value = own.get(one.name), one.value
            if found is not value and (
                    type(found) is not type(value) or found != value) and (
                    not one.fits(found)):
                self.why = (
                    f'call {number} ({call.name} in {call.link}) has '
                    f'{one.name} = {found!r:.40}, and had {one}')
                raise Diverged
        if call.ignores is not None or number in self._makers:
            self._see_labels(number, call, node, inputs)
        if call.attributes:
            own.update(call.attributes)
        if call.error is not None:
            raise call.error.with_traceback(None)   # it holds the batch
        return call.placeholders

    def _see_labels(self, number: int, call: TracedCall, node: Any,
                    inputs: tuple) -> None:
        if number in self._makers:
            self._of_labels[number] = node, inputs
        if call.ignores is not None:
            label, index = call.ignores
            self.leave_out(None if index is None else inputs[index], label)

    def communicate(self, operation: Any, original: Callable) -> Any:
        return operation.answered(original, inside=False)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        if parameter._data[0] is None:
            set_placeholder(parameter, shape, 'that gets its shape')
        return True

    def leave_out(self, labels: Any, label: int) -> None:
        """Counts labels: an array, a variable or None if unknown."""
        array = self._label(labels)
        if array is None:
            self.labels.append((-1, 1))
        else:
            left = int((array == label).sum())
            self.labels.append((array.size - left, left))

    def _label(self, value: Any) -> Any:
        """The array of labels, which is made if need be; None: unknown."""
        array = nested.array_of(value)
        if not is_placeholder(array):
            return array
        if array.recipe:
            node, inputs = None, array.recipe.leaves
        elif isinstance(array.source, Source):
            node, inputs = self._of_labels.get(array.source.call, (None, ()))
        else:
            return None
        found = list(map(self._label, inputs))
        if not found or any(one is None for one in found):
            return None
        with suspended(), chainer.no_backprop_mode():
            return (evaluated(array.recipe, found) if node is None else
                    node.apply(tuple(found))[array.source.output].array)


class Run(Replay):
    """Does the calls of one chunk in a forward pass.

    Args:
        program: Of such a pass.
        chunk: Number of this chunk.
        values: Of other chunks; the wanted values that are made here are
            added.
        names: Of the model's links and parameters.
        place: Where in the training the pass is; seeds what calls draw.
        where: Says which rank has a chunk.

    Attributes:
        uses: How many of the calls that were done use a parameter, by its
            node.
    """

    def __init__(self, program: StagedTrace, chunk: int,
                 values: dict[Source, chainer.Variable], names: Names,
                 place: Place, where: Callable[[int], str]) -> None:
        super().__init__(program.trace, names)
        self.uses: collections.Counter[Any] = collections.Counter()
        # The calls that were done, by the ids of their functions.
        self._own: dict[int, TracedCall] = {}
        self._stages, self._chunk = program.stages, chunk
        self._values, self._wanted = values, program.wanted[chunk]
        self._asked = {one.call for one in self._wanted}
        self._place, self._where = place, where

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        if self.inside:
            return call_unchecked(node, inputs, original)
        number = self._number
        self._number = number + 1
        call = self._calls[number] if number < len(self._calls) else None
        if call is None or (call.kind is not type(node)
                            and call.kind is not kind_of(node)):
            raise self._diverged(number, call, node)
        if self._stages[number] != self._chunk:
            return self._elsewhere(call, node)
        arguments = self._arguments(inputs)
        own = attributes_of(node) if call.hidden else {}
        for name in call.hidden:
            leaves, tree = nested.leaves(own[name])
            own[name] = nested.rebuilt(tree, list(map(self.real, leaves)))
        self.inside = True
        try:
            if call.draws:
                with self._seeded(number, node, arguments):
                    outs = call_unchecked(node, arguments, original)
            else:
                outs = call_unchecked(node, arguments, original)
        except (PlaceholderError, Diverged):
            raise
        except Exception as error:
            if type(error) is type(call.error):     # ends an iteration
                raise
            raise CallError(
                f'{user_line()}: call {number} ({call.name} in {call.link}): '
                f'{type(error).__name__}: {error}') from error
        finally:
            self.inside = False
        self._note(number, call, node, outs)
        return outs

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        # A link that was traced, but not run, would give a shape again.
        return parameter._data[0] is not None

    def real(self, value: Any) -> Any:
        """The value that a placeholder stands for; others as they are."""
        array = nested.array_of(value)
        if not is_placeholder(array):
            return value
        is_variable = isinstance(value, chainer.Variable)
        if array.recipe is not None:
            with suspended():
                made = evaluated(array.recipe, [
                    nested.array_of(self.real(leaf))
                    for leaf in array.recipe.leaves])
            return chainer.Variable(made) if is_variable else made
        source = array.source
        if not isinstance(source, Source) or array.traced is not self._trace:
            raise PlaceholderError(
                f'{user_line()}: {describe_source(array)} is needed here; '
                'a value of an earlier micro-batch, or of a parameter that '
                'moved, cannot be used')
        leaf = self._values.get(source)
        if leaf is None:
            raise PlaceholderError(
                f'{user_line()}: {describe_source(array)} is needed and did '
                f'not come from {self._where(self._stages[source.call])}')
        if is_variable and isinstance(source.output, int) and (
                self._calls[source.call].placeholders[source.output] is value):
            return leaf
        # A variable that the user made of the array has no way back.
        return chainer.Variable(leaf.array) if is_variable else leaf.array

    def said(self, function: Any) -> str:
        """The call that has made a function, in messages."""
        call, where = self._own.get(id(function)), f'stage {self._chunk}'
        return f'{call.name} in {call.link}, on {where}' if call else where

    # --- details -------------------------------------------------------------

    def _elsewhere(self, call: TracedCall, node: Any) -> tuple:
        """The outputs of a call that another rank does."""
        if call.error is not None:
            raise call.error.with_traceback(None)   # it holds the batch
        if call.attributes:
            attributes_of(node).update(call.attributes)
        return call.placeholders

    def _diverged(self, number: int, call: TracedCall | None, node: Any
                  ) -> Diverged:
        """The error for a call that the trace has not got here."""
        return Diverged(f'{user_line()}: ' + (
            f'{label_of(node)} is called, and no such call was there'
            if call is None else
            f'call {number} is {label_of(node)}, and was {call.name} in '
            f'{call.link}') + f' when the model was traced. {_REMEDY}')

    def _arguments(self, inputs: tuple) -> tuple:
        """The inputs of a call with their values; counts parameters."""
        arguments = []
        read = set()
        for x in inputs:
            is_variable = isinstance(x, Variable)
            if is_placeholder(x._data[0] if is_variable else x):
                x = self.real(x)
            if isinstance(x, chainer.Parameter):
                read.add(x._node)
            elif is_variable:
                creator = x._node._creator_node
                # Backward would go through an earlier micro-batch's graph.
                if creator is not None and id(creator) not in self._own:
                    raise ValueError(
                        f'{user_line()}: a variable of an earlier batch or '
                        'micro-batch brings its graph; keep it in an '
                        'attribute of a link, or call its unchain()')
            arguments.append(x)
        for parameter in read:
            self.uses[parameter] += 1
        return tuple(arguments)

    @contextlib.contextmanager
    def _seeded(self, number: int, node: Any, arguments: tuple
                ) -> Iterator[None]:
        """A block in which the call's place seeds what the call draws."""
        xp = chainer.backend.get_array_module(
            *map(nested.array_of, arguments))
        place = self._place
        link = link_of(node)
        if link is not None and any(parameter._data[0] is None
                                    for parameter in link.params()):
            # Initial values, which are the same on every replica.
            place = place._replace(iteration=0, first_sample=0)
        with preserved(), at(
                place._replace(layer=number - self._trace.first), xp):
            yield

    def _note(self, number: int, call: TracedCall, node: Any,
              outs: tuple) -> None:
        """Keeps wanted values; checks their shapes."""
        for index, out in enumerate(outs):
            value = call.outputs[index]
            if out.shape != value.shape or out.dtype != value.dtype:
                raise Diverged(
                    f'{user_line()}: call {number} ({call.name} in '
                    f'{call.link}) gave {out.dtype} {out.shape}, and '
                    f'{value.dtype} {value.shape} when the model was traced. '
                    f'{_REMEDY}')
            if number in self._asked:
                source = Source(number, index)
                if source in self._wanted:
                    self._values[source] = out
        self._own[id(node)] = call
        for name in call.attributes:
            source = Source(number, name)
            if source in self._wanted:
                self._values[source] = chainer.Variable(
                    attributes_of(node)[name], requires_grad=False)


class MicroBatch:
    """A micro-batch that a model, or a method of it, is called with.

    A forward pass may write to its batch (``x /= 2``), and a micro-batch goes
    through several: so each has new copies of the arrays.

    Args:
        function: Is called with ``args`` and ``kwargs``.
        args: Arrays, and what may hold them.
        kwargs: The same, by name.
        place: Where in the training the micro-batch is; seeds what Python
            draws in forward.
        before: What links kept of the last batch's.

    Attributes:
        program: The calls that the function makes; known before the step.
        reports: What was reported in the calls of this rank, by name.
        kept: What links keep of it on this rank.
        found: The attributes before the first run on this rank.
    """

    program: StagedTrace

    def __init__(self, function: Callable, args: tuple,
                 kwargs: dict[str, Any], place: Place = _NOWHERE,
                 before: Kept = ((), {})) -> None:
        self.function, self.place = function, place
        self._leaves, self._tree = nested.leaves((args, kwargs))
        self.state, self.before = before
        self.reports: dict[str, Any] = {}
        self.kept: dict[Source, Any] = {}
        self.found: saved | None = None

    def __call__(self) -> Any:
        """Calls the function, at its place."""
        args, kwargs = self.arguments()
        with between_calls(self.place):
            return self.function(*args, **kwargs)

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """Arguments and keyword arguments, with new copies of the arrays."""
        return nested.rebuilt(self._tree, [
            leaf if isinstance(leaf, chainer.Variable) else leaf.copy()
            for leaf in self._leaves])

    def key(self, mode: str) -> Any:
        """A key that micro-batches share if one trace may do for both."""
        return (mode, getattr(self.function, '__func__', self.function),
                nested.signature(self._tree),
                tuple((leaf.shape, leaf.dtype.str) for leaf in self._leaves),
                signature(self.state))


def rehearse(program: StagedTrace, micro_batch: MicroBatch, names: Names
             ) -> Rehearsal:
    """Compares the calls of a micro-batch with those of a program.

    Args:
        program: Of a similar forward pass.
        micro_batch: Calls the model.
        names: Of the model's links and parameters.
    """
    trace, reports = program.trace, dict[str, Any]()
    rehearsal = Rehearsal(trace, names)
    with contextlib.suppress(Exception), \
            saved(names.links, trace.touched | program.attributes), \
            without_shapes(names.parameters.values()), \
            names.reporter.scope(reports), intercepting(rehearsal):
        program.put_state(names.links, {}, None)
        micro_batch()
        rehearsal.finish()
        rehearsal.fits = not (reports.keys() ^ trace.reports.keys()
                              ) - trace.inside.keys()
    return rehearsal        # a new trace raises the model's own error


@contextlib.contextmanager
def between_calls(place: Place) -> Iterator[None]:
    """A block in which all ranks draw the same numbers between calls.

    The place seeds ``numpy.random`` and ``random``; the latter gets its state
    back.
    """
    state = random.getstate()
    random.seed(repr(place))
    try:
        with at(place._replace(layer=_BETWEEN)):
            yield
    finally:
        random.setstate(state)


def _is_alike(array: Any, expected: Any) -> bool:
    """Whether an input that is not the expected object matches it."""
    if is_placeholder(array):
        return array.recipe is not None and (
            array.recipe.sources == expected and bool(expected))
    return type(expected) is tuple and len(expected) == 2 and (
        expected == (array.shape, array.dtype))

"""Runs a model once on made-up values, and writes down its calls."""
# Chainer has no shape inference, so each call is run alone, on an array of the
# right shape, and its outputs become placeholders at once: memory never holds
# more than one call.  Calls that are equal in function, attributes and inputs
# are run once; what was found of them is kept for later traces, too.
#
# The trace has what planning asks of a call (seconds, bytes that it keeps, and
# needs for a time, whose memory its outputs lie in, whether it draws or keeps
# running values) and what a rank needs that goes through forward without
# running the call (placeholders for the outputs, what a repetition must have).
#
# A link whose own code looks at data cannot be cut.  The error of the
# placeholder says so in the middle of the run; then the model is traced anew
# with the innermost link around the look as one call.  A look in the model's
# own forward is the user's to mark.
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
from chainer.functions.array.as_strided import AsStrided
from chainer.links import BatchNormalization

from ..intercept.function_calls import hold_calls, intercepting
from ..pipeline.batch_statistics import why_once
from ..pipeline.randomness import preserved
from ..planning.calls import Source, Value
from . import collectives, nested
from .attributes import Leaf, State, left_in, put_state, saved
from .measure import key_of, measured, returned_constants, with_real
from .names import Names
from .placeholder import (
    PlaceholderError,
    describe_source,
    is_placeholder,
    looked_at,
    made_up,
    origin,
    placeholder,
    sources,
    user_line,
)
from .trace import (
    PLAIN,
    Trace,
    TracedCall,
    attributes_of,
    constants_of,
    expected_of,
    ignored_label,
    kind_of,
    label_of,
    link_of,
    loosened,
)
from .valueless_parameters import place_array, set_placeholder
from .whole_call import Pass, WholeCall, is_marked

#: Figures of so many calls are kept, so that equal ones need not be run.
_MEASURED = 4096
OTHER_CALLS = (
    'the model makes other calls each time, for the same inputs; what it '
    'calls must depend on its inputs and on numpy.random only')


class Tracer:
    """Traces a model as often as need be.

    Args:
        names: Of the model's links and parameters, which may be placeholders.
        pipeline: The ranks over which the model is to be cut; None: unknown.

    Attributes:
        atomic: Paths of the links that are run as one call.
        memo: Figures of earlier calls, by :func:`.key_of`.
    """

    def __init__(self, names: Names, pipeline: Any = None) -> None:
        self.names, self.pipeline = names, pipeline
        collectives.hold(self)
        hold_calls(map(type, names.links.values()), self)
        self.memo: dict[Any, TracedCall] = {}
        self.atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def trace(self, run: Callable[[], Any], state: State = (),
              timed: bool = True) -> Trace:
        """The calls that ``run`` makes.  The model stays as it was.

        Args:
            run: Calls the model.
            state: What links keep from the run before.
            timed: Whether calls are timed, for which they are run again.

        Raises:
            PlaceholderError: The model's own forward looks at computed data.
        """
        while True:
            recorder = CallRecorder(self, timed)
            try:
                recorder.record(run, state)
                return recorder.trace
            except PlaceholderError:
                found = recorder.innermost()
                if found is None:
                    raise
                self.atomic |= {found}


@contextlib.contextmanager
def _placeholder_parameters(names: Names) -> Iterator[None]:
    """A block in which every parameter with a shape is a placeholder."""
    shaped = len(names.shaped)
    before = [(name, parameter, parameter._data[0], parameter._grad)
              for name, parameter in names.parameters.items()]
    for name, parameter, array, _ in before:
        if array is not None and not is_placeholder(array):
            place_array(parameter, placeholder(
                array.shape, array.dtype, name,
                chainer.backend.get_array_module(array)))
    done = False
    try:
        yield
        done = True
    finally:
        for name, parameter, array, gradient in before:
            # A parameter whose shape the run has found keeps its placeholder.
            # Not after an error: its link may have to run again as one call.
            if array is not None or not done or (
                    not is_placeholder(parameter._data[0])):
                if array is None and parameter._data[0] is not None:
                    # Made by its link, which will do so again.
                    names.made[name] = placeholder(
                        parameter.shape, parameter.dtype)
                place_array(parameter, array)
            parameter._grad = gradient
        if not done:
            del names.shaped[shaped:]


class CallRecorder(Pass):
    """Traces a run of a model; runs each of its calls alone.

    Attributes:
        trace: Of the run.
    """

    def __init__(self, tracer: Tracer, timed: bool) -> None:
        self.trace = Trace(tracer.atomic)
        self._calls = self.trace.calls
        self._names, self._memo = tracer.names, tracer.memo
        self._timed, self._pipeline = timed, tracer.pipeline
        self._stack: list[chainer.Link] = []
        self._first_call: dict[int, int] = {}   # of each link, by its id
        # The links around the first look at data, from the model inwards.
        self._looking: list[str] | None = None
        # Outputs in the memory of larger arrays.
        self._parts: set[Source] = set()
        # Of an output in the memory of another value: that value; None where
        # it is nobody's, as a parameter's.
        self._memory: dict[Source, Source | None] = {}
        # Of the call that is being run: its inputs, the parameters read
        # inside, those of them that were given values for it, labels that
        # are left out, and whether a link must not run twice.
        self._given: tuple = ()
        self._seen: set[str] = set()
        self._filled: list[chainer.Parameter] = []
        self._ignored: list[tuple[int, Any]] = []
        self._once = False

    def record(self, run: Callable[[], Any], state: State) -> None:
        """Fills the trace; the model stays as it was."""
        links, trace = self._names.links, self.trace
        with saved(links) as attributes, _placeholder_parameters(self._names):
            put_state(state, links, self._pin)
            trace.first = len(trace.calls)
            with preserved(), self._names.reporter.scope(trace.reports), \
                    collectives.refusing(links), intercepting(self):
                trace.result = run()
            for call in trace.calls:
                if call.error is not None:      # which holds the batch
                    call.error = call.error.with_traceback(None)
            trace.state = left_in(links, attributes)
            self._refuse_placeholders()
            trace.touched = frozenset(
                (path, name) for path, name in attributes.changed()
                if name not in links[path]._params)

    # --- the interceptor -----------------------------------------------------

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        if isinstance(link, BatchNormalization):
            self.trace.normalises = True
        if self.inside:
            self._once |= bool(why_once(link))
            return original(link, *args, **kwargs)
        self._stack.append(link)
        try:
            return super().call_link(link, args, kwargs, original)
        except PlaceholderError:
            if self._looking is None:
                self._looking = list(filter(None, map(self._names.of,
                                                      self._stack)))
            raise
        finally:
            self._stack.pop()

    def is_whole(self, link: chainer.Link) -> bool:
        return self._names.of(link) in self.trace.atomic

    def last_form(self) -> Any:
        return self._calls[-1].form

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        if self.inside:
            self._watch(inputs)
            label = ignored_label(node)
            if label is not None:
                self.leave_out(inputs[1], label)
            if isinstance(node, AsStrided):
                self._refuse_parts(self._given)
            return original(node, inputs)
        return self._traced(node, inputs, original)

    def communicate(self, operation: Any, original: Callable) -> Any:
        return operation.answered(original, self.inside, self._pipeline)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """Leaves a placeholder of a parameter of the model's."""
        name = self._names.of(parameter)
        if name is None or self.inside:
            return False            # the link does it itself
        if parameter._data[0] is None:
            self._names.shaped.append(name)
        set_placeholder(parameter, shape, name)
        return True

    def leave_out(self, labels: Any, label: int) -> None:
        """Notes labels inside of a call; a rehearsal sees the others."""
        if self.inside:
            self._ignored.append((label, nested.array_of(labels)))

    def before_backward(self, outputs: Any) -> None:
        """Refuses placeholders, which have no graph."""
        if self.inside:
            return
        for leaf in nested.leaves(outputs)[0]:
            if is_placeholder(nested.array_of(leaf)):
                raise looked_at(nested.array_of(leaf), 'a gradient')

    def before_unchain(self, output: chainer.Variable) -> None:
        """Refuses outputs of calls: their graph is on several ranks.

        The error is no PlaceholderError, which would have the link run as one
        call: that call's inputs would have a graph on other ranks, too.
        """
        if not self.inside and output.requires_grad and any(
                output is one for call in self._calls
                for one in call.placeholders):
            raise ValueError(
                f'{user_line()}: unchain_backward() in forward would have '
                'to cut off what other ranks compute; go on from '
                'chainer.Variable(x.array), which has no way back, instead')

    # --- the run -------------------------------------------------------------

    def innermost(self) -> str | None:
        """The link to run as one call after a look at data; None: none."""
        for name in reversed(self._looking or []):
            if name not in self.trace.atomic:
                return name if name != '/' else None
        return None

    def _refuse_placeholders(self) -> None:
        """Raises an error for a persistent value that is a placeholder."""
        for path, link in self._names.links.items():
            for name in link._persistent:
                value = vars(link).get(name)
                if is_placeholder(nested.array_of(value)):
                    self._looking = [path]
                    raise PlaceholderError(
                        f'link {path} sets its persistent {name!r} to '
                        f'{value!r}, so that the link cannot be cut')

    def _pin(self, leaf: Leaf, link: str) -> Any:
        """A placeholder of an array that a link keeps from an earlier run."""
        array = placeholder(
            leaf.shape, leaf.dtype, Source(len(self._calls), 0), leaf.xp,
            self.trace)
        self._calls.append(TracedCall(
            'state', link, outputs={0: Value(leaf.shape, leaf.dtype, False)},
            pinned=leaf.stage,
            placeholders=(chainer.Variable(array, requires_grad=False),)))
        return array

    # --- one call ------------------------------------------------------------

    def _traced(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        number = len(self._calls)
        for link in self._stack:
            self._first_call.setdefault(id(link), number)
        read: list[Any] = [self._read(x) for x in inputs]
        hidden = {name: found for name, value in attributes_of(node).items()
                  if (found := list(filter(is_placeholder, map(
                      nested.array_of, nested.leaves(value)[0]))))}
        every = read + [sources(array) for found in hidden.values()
                        for array in found]
        names = tuple(dict.fromkeys(
            one for found in every for one in found if isinstance(one, str)))
        asked: dict[str, Any] = {
            'name': label_of(node), 'link': self._link(),
            'kind': kind_of(node),
            'path': tuple(self._first_call[id(link)]
                          for link in self._stack),
            'expected': tuple(map(expected_of, inputs)),
            'constants': constants_of(node), 'hidden': tuple(hidden),
            'inputs': tuple(one for found in every for one in found
                            if isinstance(one, Source)),
            'reads': self._owners((*inputs,
                                   *attributes_of(node).values()))}
        whole = self._whole(node)
        if asked['kind'] is AsStrided:
            self._refuse_parts(inputs)
        try:
            figures = self._figures(node, inputs, original)
        except PlaceholderError:
            raise
        except Exception as error:
            self._calls.append(TracedCall(
                **asked, demands=asked['constants'], error=error,
                whole=whole, parameters=names))
            raise
        is_whole = figures.form is not None
        # The inputs of a call that is run as a whole are seen inside, too.
        inner = figures.inner + (names if is_whole else ())
        call = dataclasses.replace(
            figures, **asked, inner=inner,
            parameters=tuple(dict.fromkeys((*names, *figures.inner))),
            whole=whole + tuple(self._keeping(
                name.rpartition('/')[0] or '/' for name in inner)),
            once=any(map(why_once, self._stack)) or (
                is_whole and self._once),
            ignores=self._ignores(node, inputs, is_whole))
        self._note_memory(call, number, read)
        self._make_placeholders(call, number)
        call.demands = loosened(call, inputs)
        self._calls.append(call)
        attributes_of(node).update(call.attributes)
        return call.placeholders

    def _figures(self, node: Any, inputs: tuple, original: Callable
                 ) -> TracedCall:
        """The figures of a call: those of an equal one, or measured now."""
        key = key_of(node, inputs)
        found = self._memo.pop(key, None)
        if found is None:
            found = self._run(node, inputs, original)
        if key is not None:             # the last one is the latest
            self._memo[key] = found
            if len(self._memo) > _MEASURED:
                del self._memo[next(iter(self._memo))]
        return found

    def _note_memory(self, call: TracedCall, number: int, read: list[tuple]
                     ) -> None:
        """Notes the values whose memory the outputs share."""
        inside = not self._parts.isdisjoint(call.inputs)
        self._parts.update(Source(number, index) for index in (
            call.views if inside else call.parts))
        for output, index in call.views.items():
            self._memory[Source(number, output)] = next(
                (self._memory.get(source, source) for source in read[index]
                 if isinstance(source, Source)), None)
        retained = [
            *(source for index in call.kept_inputs
              for source in read[index] if isinstance(source, Source)),
            *(Source(number, index) for index in call.kept_outputs)]
        call.retained = tuple(filter(None, dict.fromkeys(
            self._memory.get(source, source) for source in retained)))

    def _make_placeholders(self, call: TracedCall, number: int) -> None:
        made = {
            key: placeholder(value.shape, value.dtype, Source(number, key),
                             call.modules[key], self.trace)
            for key, value in call.outputs.items()}
        call.placeholders = tuple(
            chainer.Variable(made[key], requires_grad=value.wants)
            for key, value in call.outputs.items()
            if isinstance(key, int))
        call.attributes = {key: array for key, array in made.items()
                           if isinstance(key, str)}

    def _refuse_parts(self, inputs: tuple) -> None:
        """Refuses parts, which other ranks get without the whole."""
        for array in map(nested.array_of, inputs):
            if is_placeholder(array) and (
                    array.recipe is not None or array.source in self._parts):
                raise PlaceholderError(
                    f'{user_line()}: as_strided reads the memory of which '
                    f'{describe_source(array)} is a part, and another rank '
                    'has the part alone. Mark the function around both: '
                    'chainer_fp8pipe.atomic(function)')

    def _read(self, x: Any) -> tuple:
        """The sources of an input, or the name of a parameter."""
        if isinstance(x, chainer.Parameter):
            name = self._names.of(x)
            if name is None:
                raise ValueError(
                    f'{user_line()}: the model uses a parameter that is not '
                    'among its own; register it in init_scope')
            return (name,)
        array = nested.array_of(x)
        if is_placeholder(array) and array.traced is not self.trace and (
                array.traced is not None):
            raise ValueError(
                f'{user_line()}: a value of an earlier batch or micro-batch '
                'is used; keep state in attributes of links, or compute it '
                'anew')
        found = sources(array)
        if is_placeholder(array) and not found:
            raise PlaceholderError(
                f'{user_line()}: the array of {describe_source(origin(array))}'
                ' is used, which is on one rank; use the parameter itself, or'
                ' mark the function around it: '
                'chainer_fp8pipe.atomic(function)')
        return found

    def _link(self) -> str:
        return (self._names.of(self._stack[-1]) or '/') if self._stack else '/'

    def _whole(self, node: Any) -> tuple[str, ...]:
        """Links whose calls must be on one stage.

        Those that are run as one call, and those whose persistent arrays are
        attributes of the function, which writes to them.
        """
        owners = self._owners(attributes_of(node).values())
        found = []
        for link in self._stack:
            name = self._names.of(link)
            if name is None:
                continue
            if name in self.trace.atomic:
                found += [name, *self._keeping(
                    path for path in self._names.links
                    if path.startswith(name.rstrip('/') + '/'))]
            elif name in owners:
                found.append(name)
        return tuple(dict.fromkeys(found))

    def _ignores(self, node: Any, inputs: tuple, is_whole: bool
                 ) -> tuple[int, int | None] | None:
        """See :attr:`.TracedCall.ignores`."""
        if not is_whole:
            label = ignored_label(node)
            return None if label is None else (label, 1)
        if not self._ignored:
            return None
        label, labels = self._ignored[0]
        if len({id(array) for _, array in self._ignored}) == 1:
            for index, x in enumerate(inputs):
                array = nested.array_of(x)
                if array is labels or (labels.base is array
                                       and labels.size == array.size):
                    return label, index
        return label, None

    def _keeping(self, paths: Iterable[str]) -> list[str]:
        """The paths of links that have persistent arrays."""
        return [path for path in dict.fromkeys(paths)
                if _persistent(self._names.links[path])]

    def _owners(self, values: Iterable[Any]) -> tuple[str, ...]:
        """Links whose persistent arrays, or views of them, are given."""
        arrays = set()
        for array in map(nested.array_of, values):
            if isinstance(array, chainer.get_array_types()) and not (
                    is_placeholder(array)):
                arrays |= {id(array), id(array.base)}
        return tuple([
            path for path, link in self._names.links.items()
            if any(id(array) in arrays for array in _persistent(link))
        ]) if arrays else ()

    def _watch(self, inputs: tuple) -> None:
        """Notes the parameters that a call reads inside of itself."""
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                name = self._names.of(x)
                if name is not None:
                    self._seen.add(name)
                if is_placeholder(x._data[0]):
                    place_array(x, made_up(x._data[0]))
                    self._filled.append(x)

    def _run(self, node: Any, inputs: tuple, original: Callable
             ) -> TracedCall:
        """Runs a call on made-up values; keeps figures only."""
        own = attributes_of(node)
        own.update({name: with_real(value) for name, value in own.items()})
        link, whole = link_of(node), isinstance(node, WholeCall)
        self._seen, self._given = set(), inputs
        self._ignored, self._once = [], False
        self.inside = True
        if link is not None:
            self._watch(tuple(link.params()))
        try:
            if whole:
                self._refuse_values(node, inputs, original)
            with saved(self._names.links if whole else {}), \
                    self._noting_reports():
                call = measured(node, inputs, original, self._timed)
            call.inner = tuple(sorted(self._seen))
            return call
        finally:
            self.inside = False
            while self._filled:
                parameter = self._filled.pop()
                place_array(parameter, placeholder(
                    parameter.shape, parameter.dtype,
                    self._names.of(parameter)))

    @contextlib.contextmanager
    def _noting_reports(self) -> Iterator[None]:
        seen = self.trace.reports
        before = dict(seen)
        yield
        self.trace.inside.update({
            name: len(self._calls) for name, value in seen.items()
            if before.get(name) is not value})

    def _refuse_values(self, node: Any, inputs: tuple, original: Callable
                       ) -> None:
        """Runs a whole function on different values.

        Raises:
            PlaceholderError: Numbers that it returns or keeps in attributes
            differ,
                so that other ranks cannot know them.
        """
        found = []
        for factor in (1.0, -37.0):
            with saved(self._names.links) as attributes:
                found.append((returned_constants(
                    node, inputs, original, factor), {
                    (path, name): repr(value)
                    for path, name in attributes.changed()
                    if isinstance(value := vars(
                        self._names.links[path])[name], PLAIN)}))
        (returned, kept), (others, later) = found
        if returned != others:
            raise PlaceholderError(
                f'{user_line()}: what {self._link()} returns beside arrays '
                f'({", ".join(set(returned) - set(others))}) depends on '
                'data that other ranks have not got. Return a variable, or '
                'mark a function around its use, too: '
                'chainer_fp8pipe.atomic(function)')
        for path, name in kept:
            if kept[path, name] != later.get((path, name)):
                raise PlaceholderError(
                    f'{user_line()}: link {path} keeps a number in {name!r} '
                    'that depends on data that other ranks have not got. '
                    'Keep an array or a variable, or nothing')


def _persistent(link: chainer.Link) -> list[Any]:
    """The persistent arrays of a link."""
    return [value for name in link._persistent if isinstance(
        value := vars(link).get(name), chainer.get_array_types())]

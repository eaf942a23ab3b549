"""Runs a model once on made-up values and writes down its calls.

Chainer has no shape inference, so each call is run alone, on an array of the
right shape, and its outputs become ghosts at once: memory never holds more
than one call.  Calls that are equal in function, attributes and inputs are
run once.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ...intercept.function_calls import intercepting
from ...planning.partition.calls import Source
from ..ghost import GhostError, ghost, is_ghost, line_of
from ..names import Names, reporter_of
from ..recent import Recent
from ..valueless_parameters import has_shape, lazily_shaped, place_array
from .call_recorder import CallRecorder, Repeat, describe
from .link_state import LinkState, frozen, saved
from .measuring import Measured
from .poison import Level, reading
from .traced_call import TracedCall
from .whole_call import is_marked

#: Calls whose figures are kept, so that equal ones need not be run again.
_MEASURED = 4096

OTHER_CALLS = (
    'the model makes other calls each time, for the same inputs; what it '
    'calls must depend on its inputs and on numpy.random only')


class Trace:
    """The calls of one run of a model.

    Attributes:
        calls: Pinned ones (state of links) first.
        first: Number of the first call that is none of those.
        result: What the model returned, of ghosts.
        reports: What was reported, by name.
        state: What links keep afterwards, see :class:`.LinkState`.
        touched: Attributes of links that the run has changed, with paths.
        atomic: Paths of the links that are run as one call.
        inside: The call in which something was reported, by name, for what
            was reported inside of a call.
    """

    def __init__(self, calls: list[TracedCall], first: int, result: Any,
                 reports: dict[str, Any], state: LinkState,
                 touched: frozenset[tuple[str, str]],
                 atomic: frozenset[str], inside: dict[str, int]) -> None:
        self.touched, self.inside = touched, inside
        self.calls, self.first, self.result = calls, first, result
        self.reports, self.state, self.atomic = reports, state, atomic

    def describe(self, source: Source) -> str:
        """What messages call a value."""
        return describe(self.calls, source)

    @functools.cached_property
    def digest(self) -> str:
        """Equal on ranks that have traced the same."""
        text = hashlib.sha256()
        for call in self.calls:
            text.update(repr((
                call.name, call.link, call.inputs, call.parameters,
                [(key, value.shape, str(value.dtype))
                 for key, value in call.outputs.items()],
                call.constants)).encode())
        text.update(repr(sorted(self.reports)).encode())
        return text.hexdigest()


class Tracer:
    """Traces a model as often as need be.

    Args:
        model: The whole model; its parameters may be ghosts.
        names: Of its links and parameters.
    """

    def __init__(self, model: chainer.Link, names: Names) -> None:
        self._model, self._names = model, names
        # Keys hold what calls are given, such as functions of the model's.
        self._memo: Recent[Measured] = Recent(_MEASURED)
        self._atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def trace(self, run: Callable[[], Any], state: LinkState | None = None,
              timed: bool = True) -> Trace:
        """The calls that ``run`` makes.  The model stays as it was.

        Args:
            run: Calls the model.
            state: What the links keep from the run before.
            timed: Whether calls are run again for their times; otherwise once,
                for their shapes and bytes.

        Raises:
            GhostError: The model's own forward looks at computed data.
        """
        while True:
            recorder = CallRecorder(self._names, self._memo, self._atomic,
                                 timed)
            try:
                with reading(Level.LOW):
                    trace = self._once(run, recorder, state)
                self._check(run, recorder, state)
                return trace
            except GhostError:
                found = recorder.innermost()
                if found is None:
                    raise
                self._atomic |= {found}

    def _check(self, run: Callable[[], Any], recorder: CallRecorder,
               state: LinkState | None) -> None:
        """Whether a value was read that is on another rank.

        Where C code reads ghosts, Python is not asked.  So the model runs
        again on ghosts with other values in them.

        Raises:
            GhostError: A call gets something else then, or another call is
                made.
            ValueError: The model makes other calls each time.
        """
        found = self._repeated(run, recorder, state, Level.VARIED).differences
        if not found:
            return
        # What differs for the same ghosts, too, says nothing: a model may
        # draw from a generator of its own.  Twice, as it may take turns.
        same = [self._repeated(run, recorder, state, Level.LOW)
                for _ in range(2)]
        if same[0].lost != same[1].lost:
            raise ValueError(OTHER_CALLS)
        for number, line in found.items():
            if any(number in again.differences for again in same):
                continue
            raise GhostError(
                f'{line}: {recorder.said(number)} depends on a value or '
                'condition that another rank computes, and that was read '
                'past Chainer, such as x[y.array > 0], '
                'numpy.asarray(y.array) or x[...] = y.array; use '
                'chainer.functions, or mark the function around it: '
                'chainer_fp8pipe.atomic(function)')

    def _repeated(self, run: Callable[[], Any], recorder: CallRecorder,
                  state: LinkState | None, level: Level) -> Repeat:
        """A run that says what is not as before."""
        again = Repeat(recorder)
        try:
            with reading(level):
                self._once(run, again, state)
        except Exception as error:
            # What it runs into it has not run into before.
            again.differ(line_of(error), lost=True)
        return again

    def _once(self, run: Callable[[], Any], recorder: CallRecorder,
              state: LinkState | None) -> Trace:
        reporter = reporter_of(self._names)
        with saved(self._names.links) as attributes, \
                _ghost_parameters(self._names, recorder), \
                lazily_shaped(self._names, recorder):
            begin = frozen(self._names.links)
            if state is not None:
                state.put(self._names.links, recorder.pin)
            first = len(recorder.calls)
            random = numpy.random.get_state()
            try:
                with reporter, intercepting(recorder):
                    result = run()
                recorder.drop_tracebacks()
            finally:
                numpy.random.set_state(random)
            after = LinkState.found(self._names.links, begin)
            recorder.refuse_ghosts(self._names.links)
            recorder.end(dict(reporter.observation))
            touched = frozenset(
                (path, name) for path, name in attributes.changed()
                if name not in self._names.links[path]._params)
        trace = Trace(recorder.calls, first, result,
                      dict(reporter.observation), after, touched,
                      self._atomic, recorder.reported)
        recorder.token.trace = trace
        return trace


class _ghost_parameters:
    """Inside, every parameter with a shape is a ghost."""

    def __init__(self, names: Names, recorder: CallRecorder) -> None:
        self._names = names

    def __enter__(self) -> None:
        self._shaped = len(self._names.shaped)
        self._before = []
        for name, parameter in self._names.parameters.items():
            array = parameter._data[0]
            self._before.append((name, parameter, array, parameter._grad))
            if array is not None and not is_ghost(array):
                place_array(parameter, ghost(
                    array.shape, array.dtype, name,
                    chainer.backend.get_array_module(array)))

    def __exit__(self, error: Any, *_: Any) -> None:
        for name, parameter, array, gradient in self._before:
            # What the run has found the shape of keeps it.  After a look at
            # data, its link may have to do more than give it a shape.
            if array is not None or error or not has_shape(parameter):
                if array is None and parameter._data[0] is not None:
                    # Made by its link, which will do so again.
                    self._names.made[name] = ghost(
                        parameter.shape, parameter.dtype)
                place_array(parameter, array)
            parameter._grad = gradient
        if error:
            del self._names.shaped[self._shaped:]

"""Runs a model once on made-up values and writes down its calls.

Chainer has no shape inference, so each call is run alone, on an array of the
right shape, and its outputs become ghosts at once: memory never holds more
than one call.  Calls that are equal in function, attributes and inputs are
run once.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer

from ...intercept.function_calls import hold_calls, intercepting
from ...intercept.initial_values import creating
from ...pipeline.randomness import preserved
from ..ghost import GhostError, ghost, is_ghost, line_of
from ..names import Names, reporter_of
from ..valueless_parameters import ShapesOnly, place_array
from . import collectives
from .call_recorder import CallRecorder, Repeat
from .link_state import LinkState, frozen, saved
from .measuring import Measured
from .poison import Level, reading
from .traced_call import Trace
from .whole_call import is_marked

OTHER_CALLS = (
    'the model makes other calls each time, for the same inputs; what it '
    'calls must depend on its inputs and on numpy.random only')


class Tracer:
    """Traces a model as often as need be.

    Args:
        model: The whole model; its parameters may be ghosts.
        names: Of its links and parameters.
        pipeline: The ranks over which the model is to be cut; None: unknown.
    """

    def __init__(self, model: chainer.Link, names: Names,
                 pipeline: Any = None) -> None:
        self._model, self._names = model, names
        self._pipeline = pipeline
        collectives.hold(self)
        hold_calls(map(type, names.links.values()), self)
        self._memo: dict[Any, Measured] = {}
        self._atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def trace(self, run: Callable[[], Any], state: LinkState | None = None,
              timed: bool = True) -> Trace:
        """The calls that ``run`` makes.  The model stays as it was.

        Args:
            run: Calls the model.
            state: What links keep from the run before.
            timed: Whether calls are timed, for which they are run again.

        Raises:
            GhostError: The model's own forward looks at computed data.
        """
        while True:
            recorder = CallRecorder(self._names, self._memo, self._atomic,
                                    timed, self._pipeline)
            try:
                with reading(Level.LOW):
                    self._once(run, recorder, state)
                self._check(run, recorder, state)
                return recorder.trace
            except GhostError:
                found = recorder.innermost()
                if found is None:
                    raise
                self._atomic |= {found}

    def _check(self, run: Callable[[], Any], recorder: CallRecorder,
               state: LinkState | None) -> None:
        """Runs the model again on ghosts with other values.

        Raises:
            GhostError: A call gets something else, or another call is made:
                C code has read a ghost.
            ValueError: The model makes other calls each time.
        """
        found = self._repeated(run, recorder, state, Level.VARIED).differences
        if not found:
            return
        # Calls may differ for equal ghosts, too, if the model draws from a
        # generator of its own.  Two runs, as it may take turns.
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
        """Another run, compared with that of the recorder."""
        again = Repeat(recorder)
        try:
            with reading(level):
                self._once(run, again, state)
        except Exception as error:
            # The first run had no such error.
            again.differ(line_of(error), lost=True)
        return again

    def _once(self, run: Callable[[], Any], recorder: CallRecorder,
              state: LinkState | None) -> None:
        links, trace = self._names.links, recorder.trace
        reporter = reporter_of(self._names)
        with saved(links) as attributes, _ghost_parameters(self._names), \
                creating(ShapesOnly(self._names, recorder)):
            begin = frozen(links)
            if state is not None:
                state.put(links, recorder.pin)
            trace.first = len(trace.calls)
            with preserved(), reporter, collectives.refusing(links), \
                    intercepting(recorder):
                trace.result = run()
            recorder.drop_tracebacks()
            trace.state = LinkState.found(links, begin)
            recorder.refuse_ghosts()
            trace.reports = dict(reporter.observation)
            recorder.end()
            trace.touched = frozenset(
                (path, name) for path, name in attributes.changed()
                if name not in links[path]._params)


class _ghost_parameters:
    """A block in which every parameter with a shape is a ghost."""

    def __init__(self, names: Names) -> None:
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
            # A parameter whose shape the run has found keeps its ghost.  Not
            # after an error: its link may have to run again as one call.
            if array is not None or error or not is_ghost(parameter._data[0]):
                if array is None and parameter._data[0] is not None:
                    # Made by its link, which will do so again.
                    self._names.made[name] = ghost(
                        parameter.shape, parameter.dtype)
                place_array(parameter, array)
            parameter._grad = gradient
        if error:
            del self._names.shaped[self._shaped:]

"""Links and functions that are run as one call, and never cut."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import current
from ..pipeline.backprop import InParameters, Tape
from . import nested

_NOTHING = numpy.zeros(1, 'f')
_MARK = '_chainer_fp8pipe_atomic'


def atomic(function: Any) -> Any:
    """Marks a function, method or link that :func:`partition` must not cut.

    One rank does all of a marked call.  Code in it may use values:
    ``float(x.array)``, a boolean index, writing in place, ``chainer.grad``.
    Links that look at data are found without a mark.

    Args:
        function: Takes and returns variables, arrays, or lists, tuples and
            dictionaries of these.  It may use parameters of the model.  A
            link is marked and returned.

    .. admonition:: Example

        >>> import chainer.functions as F
        >>> from chainer_fp8pipe import atomic
        >>> @atomic
        ... def clipped(x):
        ...     return x * (2.0 if float(abs(x.array).max()) < 1 else 1.0)
    """
    if isinstance(function, chainer.Link):
        vars(function)[_MARK] = True
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        interceptor = current()
        if interceptor is None:
            return function(*args, **kwargs)
        return interceptor.call_whole(function, args, kwargs)
    return call


def is_marked(link: chainer.Link) -> bool:
    """Whether a link was marked by :func:`atomic`."""
    return _MARK in vars(link)


class WholeCall(chainer.FunctionNode):
    """A link or function as one node of the graph.

    Forward runs the function on variables of its own, and backward goes
    through the graph between these and the outputs; gradients of parameters
    go into the parameters.

    A stage that runs forward again makes other calls anew, but not these: what
    a link counts, draws and keeps, it does once.

    Args:
        run: The link or function.
        function: Runs it.
        tree: Of its arguments.
        given: Which leaves of the arguments are variables.  A further input
            has backward called where no argument wants a gradient.
    """

    def __init__(self, run: Callable, function: Callable, tree: Any,
                 given: tuple[bool, ...]) -> None:
        self.run, self._function = run, function
        self.tree, self._given = tree, given
        self.result: Any = None
        self._kept: Any = None
        #: Whether forward will run again, and what it gave.
        self.repeats = False
        self._made: tuple | None = None

    @property
    def label(self) -> str:
        return getattr(self.run, '__name__', type(self.run).__name__)

    def check_layout_forward(self, inputs: Any) -> None:
        """Any layout will do."""

    def forward(self, inputs: tuple) -> tuple:
        self.retain_inputs(())
        if self._made is not None:
            made, self._made = self._made, None
            return made
        variables = [chainer.Variable(x, requires_grad=x.dtype.kind == 'f')
                     for x in inputs]
        args, kwargs = nested.rebuilt(self.tree, [
            variable if is_variable else variable.array
            for variable, is_variable in zip(variables, self._given,
                                             strict=False)])
        keep = chainer.config.enable_backprop or self.repeats
        # The function may compute gradients inside, also in a pass that is
        # run again before backward and keeps no graph.
        with chainer.using_config('enable_backprop',
                                  keep or chainer.config.train):
            outputs, self.result = nested.leaves(
                self._function(*args, **kwargs))
        self.variables = tuple(isinstance(output, chainer.Variable)
                               for output in outputs)
        if keep:
            self._kept = Tape(tuple(variables), tuple(
                itertools.compress(outputs, self.variables)))
        found = tuple(nested.array_of(output) for output in outputs)
        if self.repeats:
            self._made = found
        return found

    def backward(self, indexes: tuple, gradients: tuple) -> tuple:
        """Goes through the graph of the forward pass, and drops it."""
        tape, self._kept = self._kept, None
        found = tape.backward(tuple([
            None if gradient is None else gradient.array
            for gradient, is_variable in zip(gradients, self.variables,
                                             strict=True) if is_variable
        ]), InParameters)
        return tuple([_variable(found[index]) for index in indexes])


def _variable(array: Any) -> chainer.Variable | None:
    return None if array is None else chainer.Variable(
        array, requires_grad=False)


def call_whole(run: Callable, function: Callable, args: Any, kwargs: Any,
               last_form: Callable[[], tuple[Any, tuple[bool, ...]]]) -> Any:
    """Calls a link or function as one node; returns what it returns.

    Args:
        run: The link or function.
        function: Runs it.
        args: Arguments.
        kwargs: Keyword arguments.
        last_form: Gives the form of the result (see :class:`.Figures`) where
            the node was recorded, and not run.
    """
    leaves, tree = nested.leaves((args, kwargs))
    node = WholeCall(run, function, tree, tuple(
        isinstance(leaf, chainer.Variable) for leaf in leaves))
    # Backward is called, also where no argument wants a gradient.
    outputs = node.apply((*leaves, chainer.Variable(_NOTHING)))
    tree, variables = (last_form() if node.result is None
                       else (node.result, node.variables))
    return nested.rebuilt(tree, [
        output if is_variable else nested.array_of(output)
        for output, is_variable in zip(outputs, variables, strict=True)])

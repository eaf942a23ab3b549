"""Links and functions that are run as one call, and never cut."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import current
from ..pipeline.backprop import InParameters, Tape
from . import nested
from .placeholder import is_placeholder, remade

_NOTHING = numpy.zeros(1, 'f')
#: The attribute of a link that was marked by :func:`atomic`.
MARK = '_chainer_fp8pipe_atomic'


def atomic(function: Any) -> Any:
    """Marks a function, method or link that :func:`partition` must not cut.

    One rank does all of a marked call.  Code in it may use values:
    ``float(x.array)``, a boolean index, writing in place, ``chainer.grad``.
    Links that look at data in the example are found without a mark.

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
        vars(function)[MARK] = True
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        interceptor = current()
        if interceptor is None:
            return function(*args, **kwargs)
        return interceptor.call_whole(function, args, kwargs)
    return call


class ArrayCall(chainer.FunctionNode):
    """A function of arrays as one node, through which no gradient goes.

    It has the tree of its arguments, and of each leaf the kind:
    ``'variable'``, ``'array'`` or, where NumPy has a number, ``'number'``.
    """

    #: The same of what the function returned.
    result: tuple[Any, tuple[str, ...]]

    def __init__(self, run: Callable, tree: Any, kinds: tuple[str, ...]
                 ) -> None:
        self.run, self.tree, self.kinds = run, tree, kinds

    @property
    def label(self) -> str:
        return getattr(self.run, '__name__', type(self.run).__name__)

    def forward(self, inputs: tuple) -> tuple:
        args, kwargs = nested.rebuilt(self.tree, [
            x[()] if kind == 'number' else _locked(x)
            for x, kind in zip(inputs, self.kinds, strict=True)])
        found: Any = self.run(*args, **kwargs)
        kind = 'array'
        if isinstance(found, (bool, int, float, numpy.generic)):
            found, kind = numpy.asarray(found), 'number'
        leaves, tree = nested.leaves(found)
        self.result = tree, (kind,) * len(leaves)
        return tuple(leaves)


def _locked(array: Any) -> Any:
    """A view to which nobody can write."""
    if isinstance(array, numpy.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


class WholeCall(ArrayCall):
    """A link or function as one node of the graph.

    Forward runs the function on variables of its own, and backward goes
    through the graph between these and the outputs; gradients of parameters
    go into the parameters.  A further input has backward called where no
    argument wants a gradient.

    A stage that runs forward again makes other calls anew, but not these: what
    a link counts, draws and keeps, it does once.
    """

    _kept: Any = None
    #: Whether forward will run again, and what it gave.
    repeats = False
    _made: tuple | None = None

    def forward(self, inputs: tuple) -> tuple:
        self.retain_inputs(())
        if self._made is not None:
            made, self._made = self._made, None
            return made
        variables = [chainer.Variable(x, requires_grad=x.dtype.kind == 'f')
                     for x in inputs]
        args, kwargs = nested.rebuilt(self.tree, [
            variable if kind == 'variable' else variable.array[()]
            if kind == 'number' else variable.array
            for variable, kind in zip(variables, self.kinds, strict=False)])
        keep = chainer.config.enable_backprop or self.repeats
        # The function may compute gradients inside, also in a pass that is
        # run again before backward and keeps no graph.
        with chainer.using_config('enable_backprop',
                                  keep or chainer.config.train):
            outputs, tree = nested.leaves(self.run(*args, **kwargs))
        self.result = tree, tuple([_kind(output) for output in outputs])
        if keep:
            self._kept = Tape(tuple(variables), tuple([
                output for output in outputs
                if isinstance(output, chainer.Variable)]))
        found = tuple(nested.array_of(output) for output in outputs)
        if self.repeats:
            self._made = found
        return found

    def backward(self, indexes: tuple, gradients: tuple) -> tuple:
        """Goes through the graph of the forward pass, and drops it."""
        tape, self._kept = self._kept, None
        found = tape.backward(tuple([
            None if gradient is None else gradient.array
            for gradient, kind in zip(gradients, self.result[1], strict=True)
            if kind == 'variable']), InParameters)
        return tuple([None if found[index] is None else chainer.Variable(
            found[index], requires_grad=False) for index in indexes])


def _kind(leaf: Any) -> str:
    return ('variable' if isinstance(leaf, chainer.Variable) else
            'number' if getattr(leaf, 'scalar', False) else 'array')


def call_whole(run: Callable, args: Any, kwargs: Any,
               of: type[ArrayCall] = WholeCall) -> Any:
    """Calls a link or function as one node; returns what it returns."""
    leaves, tree = nested.leaves((args, kwargs))
    node = of(run, tree, tuple(map(_kind, leaves)))
    inputs = [remade(leaf, scalar=False) if kind == 'number' else leaf
              for leaf, kind in zip(leaves, node.kinds, strict=True)]
    if of is WholeCall:
        inputs.append(chainer.Variable(_NOTHING))
    outputs = node.apply(tuple(inputs))
    found = []
    for output, kind in zip(outputs, node.result[1], strict=True):
        array = nested.array_of(output)
        if kind == 'number':
            array = (remade(array, scalar=True) if is_placeholder(array)
                     else array[()])
        found.append(output if kind == 'variable' else array)
    return nested.rebuilt(node.result[0], found)

"""Has an interceptor see the calls of functions and links."""
# While any thread is in a block of `intercepting` or `creating`, what `_CALLS`
# and `_INIT` list of Chainer 7.8.1 is replaced (see `Patch`).  Every function
# goes through `FunctionNode.apply`, and every link that has no `__call__` of
# its own (for those see `hold_calls`) through `Link.__call__`.  The
# replacements act in the thread of the block only.  Another package's patch
# that was there before is the original that interceptors are given; one that
# comes later is called first.
#
# `call_unchecked` calls functions as Chainer does, without the checks of each
# call: some 10 us in place of 40, where a small product takes 100 and a
# pipeline makes the same calls for every micro-batch.  Results have the same
# bits.
from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer.functions.array import as_strided
from chainer.variable import VariableNode

from .patching import Current, Patch

#: Chainer's settings, of which it takes some time to ask itself.
_local: Any = chainer.config._local
_global: Any = chainer.config._global


class Interceptor:
    """Sees calls, and makes them or does something else.

    This one makes every call as Chainer does.  The calls that a method makes
    itself are intercepted, too, unless in a block of :func:`suspended`.
    """

    def apply(self, node: chainer.FunctionNode, inputs: Any,
              original: Callable[..., Any]) -> Any:
        """A function is called with variables and arrays.

        ``original(node, inputs)`` makes the call, and returns the outputs, a
        tuple of variables.
        """
        return original(node, inputs)

    def call_link(self, link: chainer.Link, args: tuple[Any, ...],
                  kwargs: Mapping[str, Any], original: Callable[..., Any]
                  ) -> Any:
        """A link is called; see :meth:`apply`."""
        return original(link, *args, **kwargs)

    def call_whole(self, function: Callable, args: Any, kwargs: Any) -> Any:
        """A function is called that :func:`~chainer_fp8pipe.atomic` marks."""
        return function(*args, **kwargs)

    def communicate(self, name: str, comm: Any,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        """A collective operation of ``comm`` is started, ``original()``.

        ``answer`` gives what would come if all ranks had sent the same; None:
        nobody knows.
        """
        return original()

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """A parameter gets its shape; False: Chainer is to draw values."""
        return False

    def before_backward(self, outputs: Any) -> None:
        """``backward``, ``chainer.backward`` or ``chainer.grad`` begins.

        ``outputs`` is a variable, or a list of them.
        """

    def before_unchain(self, output: chainer.Variable) -> None:
        """``output.unchain_backward`` begins."""

    def leave_out(self, labels: Any, label: int) -> None:
        """A mean leaves out the places where the labels are this one."""


_interceptor, _creation = Current(), Current()


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Has an interceptor see this thread's calls in a block.

    In nested blocks, the interceptor of the innermost one sees the calls.
    """
    with contextlib.ExitStack() as stack:
        for patch in _CALLS:
            stack.enter_context(patch)
        stack.enter_context(_interceptor.set_to(interceptor))
        yield


def suspended() -> contextlib.AbstractContextManager[None]:
    """Has no interceptor see this thread's calls in a block."""
    return _interceptor.set_to(None)


def current() -> Any:
    """The :class:`Interceptor` of this thread's calls; None: there is none."""
    return _interceptor.now


@contextlib.contextmanager
def creating(interceptor: Interceptor) -> Iterator[None]:
    """Has an interceptor asked to initialize this thread's new parameters.

    In a block of :func:`intercepting` inside it, that one is asked.
    """
    with _creation.set_to(interceptor), _INIT, _INITIALIZE:
        yield


def hold(owner: Any) -> None:
    """Keeps the patches installed as long as an object lives.

    To install and remove them takes some 40 us.
    """
    for patch in (*_CALLS, _INIT, _MEMORY):
        patch.hold(owner)


def hold_calls(kinds: Iterable[type], owner: Any) -> None:
    """Has links' own ``__call__``, as before Chainer 5, intercepted, too."""
    for kind in {base for one in kinds for base in one.__mro__}:
        if issubclass(kind, chainer.Link) and kind is not chainer.Link and (
                callable(vars(kind).get('__call__'))):
            _own_call(kind).hold(owner)


_own_call = functools.cache(lambda kind: Patch(kind, '__call__', _call))


# --- calls without checks ----------------------------------------------------

def call_unchecked(node: chainer.FunctionNode, inputs: Any,
                   original: Callable[..., Any]
                   ) -> tuple[chainer.Variable, ...]:
    """See :meth:`.Interceptor.apply`; ``original`` makes other calls.

    Those that somebody watches, of layouts, or of arrays not NumPy's.
    """
    arrays, requires_grad = [], False
    for x in inputs:
        if isinstance(x, chainer.Variable):
            if x._layout is not None:
                return original(node, inputs)
            requires_grad = requires_grad or x._requires_grad
            x = x._data[0]
        if type(x) is not numpy.ndarray:
            return original(node, inputs)
        arrays.append(x)
    if not arrays or is_watched(node):
        return original(node, inputs)
    node._input_layouts = (None,) * len(arrays)
    node._input_indexes_to_retain = node._output_indexes_to_retain = None
    found = node.forward(tuple(arrays))
    if type(found) is not tuple:
        raise TypeError(f'forward of {node.label} must return a tuple, not '
                        f'{type(found).__name__}')
    node._output_count = len(found)
    if node._output_layouts is None:
        node._output_layouts = (None,) * len(found)
    outputs = tuple([
        _variable(array, requires_grad)
        if layout is None and type(array) is numpy.ndarray
        else chainer.Variable(array, requires_grad=requires_grad,
                              layout=layout)
        for array, layout in zip(found, node._output_layouts, strict=True)])
    if _local.__dict__.get('enable_backprop', _global.enable_backprop):
        _join_graph(node, list(inputs), outputs, found)
    return outputs


def function_of(node: Any) -> Any:
    """A function itself, which may be an old-style one."""
    return (node.function if type(node) is chainer.function.FunctionAdapter
            else node)


def again(node: Any, own: Mapping[str, Any]) -> Any:
    """A copy of a function, with its attributes from before its run."""
    if type(node) is chainer.function.FunctionAdapter:
        function = copy.copy(node.function)
        function.__dict__.clear()
        function.__dict__.update(own)
        adapter = chainer.function.FunctionAdapter(function)
        # As Function.__call__ swaps the ownership.
        adapter._function, adapter._weak_function = function, None
        function._node, function._owned_node = weakref.ref(adapter), None
        return adapter
    made = object.__new__(type(node))
    made.__dict__.update(own)
    return made


def is_watched(node: chainer.FunctionNode) -> bool:
    """Whether hooks, debug mode or a static graph look at a call."""
    own = _local.__dict__
    return bool(
        node._n_local_function_hooks
        or chainer._thread_local.__dict__.get('function_hooks')
        or own.get('debug', _global.debug)
        or own.get('schedule_func', _global.schedule_func) is not None)


def unchecked() -> contextlib.AbstractContextManager[None]:
    """A block in which this thread's functions are called without checks."""
    interceptor: Any = Interceptor()
    interceptor.apply = call_unchecked
    return intercepting(interceptor)


def _variable(array: Any, requires_grad: bool) -> chainer.Variable:
    """``Variable(array, requires_grad=...)``, in a fifth of the time."""
    variable = chainer.Variable.__new__(chainer.Variable)
    node = VariableNode.__new__(VariableNode)
    node._variable = weakref.ref(variable)
    node.name, node._layout = None, None
    node._requires_grad = requires_grad
    node.dtype, node.shape = array.dtype, array.shape
    variable._requires_grad, variable._grad_valid = requires_grad, True
    variable._loss_scale = variable._grad_var = variable._grad = None
    variable._device = variable._layout = None
    variable._data, variable._node = [array], node
    return variable


def _join_graph(node: chainer.FunctionNode, inputs: list[Any],
                outputs: tuple[chainer.Variable, ...], arrays: tuple) -> None:
    """Makes the function a part of the graph."""
    for index, x in enumerate(inputs):
        if not isinstance(x, chainer.Variable):
            inputs[index] = _variable(x, False)
    nodes = tuple([x.node for x in inputs])
    node.inputs = nodes
    rank = max([x._rank for x in nodes])
    node.rank = rank
    for output in outputs:
        after = output._node
        after._creator_node, after._rank = node, rank + 1
    node.outputs = tuple([weakref.ref(output._node) for output in outputs])
    if node._input_indexes_to_retain is not None:
        for index in node._input_indexes_to_retain:
            inputs[index].retain_data()
    if node._output_indexes_to_retain is not None:
        for index in node._output_indexes_to_retain:
            outputs[index].retain_data()
        node._retained_output_data = tuple([
            arrays[index] for index in node._output_indexes_to_retain])
    node.lazy_grad_sum = _local.__dict__.get('lazy_grad_sum',
                                             _global.lazy_grad_sum)


# --- the replacements --------------------------------------------------------

def _apply(original: Any, self: Any, inputs: Any) -> Any:
    interceptor = _interceptor.now
    if interceptor is None:
        return original(self, inputs)
    return interceptor.apply(self, inputs, original)


def _call(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    interceptor = _interceptor.now
    if interceptor is None:
        return original(self, *args, **kwargs)
    return interceptor.call_link(self, args, kwargs, original)


def _telling(tell: Callable[..., object], original: Any, /, *args: Any,
             **kwargs: Any) -> Any:
    """Tells the interceptor before the original's call."""
    if _interceptor.now is not None:
        tell(_interceptor.now, *args, **kwargs)
    return original(*args, **kwargs)


_backward = functools.partial(
    _telling, lambda told, outputs, *_, **__: told.before_backward(outputs))
_unchain = functools.partial(
    _telling, lambda told, output: told.before_unchain(output))
_cross_entropy = functools.partial(
    _telling,
    lambda told, x, t, normalize, class_weight, ignore_label, reduce, *_:
    normalize and reduce == 'mean' and told.leave_out(t, ignore_label))


def _init(original: Any, self: Any, initializer: Any = None,
          shape: Any = None, name: Any = None, *, layout: Any = None) -> None:
    if _creation.now is None or isinstance(
            initializer, chainer.get_array_types()):
        original(self, initializer, shape, name, layout=layout)
        return
    original(self, initializer, None, name, layout=layout)
    if shape is not None:
        self.initialize(shape)


def _initialize(original: Any, self: Any, shape: Any) -> None:
    asked = _interceptor.now or _creation.now
    if asked is None or not asked.initialize(self, shape):
        original(self, shape)


def _base(original: Any, array: Any) -> Any:
    found = original(array)
    return (found if found.dtype == array.dtype
            else array.ravel('K'))      # as it lies in memory


# chainer/variable.py, lines 1775 and 1906
_INIT = Patch(chainer.Parameter, '__init__', _init)
_INITIALIZE = Patch(chainer.Parameter, 'initialize', _initialize)
# Reads the memory that an array is a view of: what came from another rank is a
# view of a message's bytes (functions/array/as_strided.py, line 108).
_MEMORY = Patch(as_strided, '_get_base_array', _base)
_CALLS = (
    # chainer/function_node.py, lines 242 and 1013 (grad), link.py, 262
    Patch(chainer.FunctionNode, 'apply', _apply),
    Patch(chainer, 'grad', _backward),
    Patch(chainer.Link, '__call__', _call),
    # variable.py, 1490 and 1644, and _backprop.py, 15
    Patch(chainer.Variable, 'backward', _backward),
    Patch(chainer.Variable, 'unchain_backward', _unchain),
    Patch(chainer, 'backward', _backward),
    # Of several functions, none of which gets the labels as an input
    # (functions/loss/softmax_cross_entropy.py, 390).
    Patch(sys.modules[chainer.functions.softmax_cross_entropy.__module__],
              '_double_backward_softmax_cross_entropy', _cross_entropy),
    _INITIALIZE)

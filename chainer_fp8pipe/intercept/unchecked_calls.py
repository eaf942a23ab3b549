"""Calls functions as Chainer does, without the checks of each call."""
# `FunctionNode.apply` (Chainer 7.8.1, chainer/function_node.py, line 242)
# checks types, layouts, devices and results of every call, which takes some 40
# us where a small product takes 100; and a backward pass calls two to three
# times as many functions as the forward pass.  A pipeline makes the same calls
# for every micro-batch.  Here a call takes some 12 us.  Results have the same
# bits, but for products of few samples, which may be rounded otherwise.
#
# Chainer's own `apply` is called for function hooks, debug mode, static
# graphs, layouts, arrays that are not NumPy's, and classes with an `apply` of
# their own.
#
# Nothing is patched but by `function_calls`.  Another package's patch of
# `FunctionNode.apply` that was there before sees only the calls for which
# Chainer's own `apply` is called; a patch that comes later sees all calls.
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.backends import intel64
from chainer.functions.connection.linear import LinearFunction
from chainer.variable import VariableNode

from .function_calls import Interceptor, intercepting

_config: Any = chainer.config
# What `chainer.config` looks into, too slowly for every call: the settings of
# this thread, and those of all threads.
_own, _all = _config._local, _config._global
_new = chainer.Variable.__new__
_new_node = VariableNode.__new__
#: So many times as many inputs and outputs as samples make x^T the narrow
#: factor of a product.
_NARROW = 8


def apply(node: chainer.FunctionNode, inputs: Any,
          original: Callable[..., Any]) -> tuple[chainer.Variable, ...]:
    """See :meth:`.Interceptor.apply`; ``original`` makes other calls."""
    arrays, variables, requires_grad = [], [], False
    for x in inputs:
        array = x
        if isinstance(x, chainer.Variable):
            array = x._data[0]
            requires_grad = requires_grad or x._requires_grad
            if x._layout is not None:
                return original(node, inputs)
        if type(array) is not numpy.ndarray:
            return original(node, inputs)
        arrays.append(array)
        variables.append(x)
    if not arrays or is_watched(node):
        return original(node, inputs)
    node._input_layouts = (None,) * len(arrays)
    node._input_indexes_to_retain = node._output_indexes_to_retain = None
    found = (_linear(node, arrays) if type(node) is LinearFunction
             else node.forward(tuple(arrays)))
    if type(found) is not tuple:
        raise TypeError(f'forward of {node.label} must return a tuple, not '
                        f'{type(found).__name__}')
    node._output_count = len(found)
    layouts = node._output_layouts
    if layouts is None:
        layouts = node._output_layouts = (None,) * len(found)
    outputs = tuple([
        _variable(array, requires_grad)
        if layout is None and type(array) is numpy.ndarray
        else chainer.Variable(array, requires_grad=requires_grad,
                              layout=layout)
        for array, layout in zip(found, layouts, strict=True)])
    if _own.__dict__.get('enable_backprop', _all.enable_backprop):
        _link(node, variables, outputs, found)
    return outputs


def check(node: chainer.FunctionNode, inputs: Any) -> None:
    """Has Chainer check the types of a call that :func:`apply` will make.

    Raises:
        InvalidType: They are wrong, though NumPy may take them.
    """
    layouts = [getattr(x, '_layout', None) for x in inputs]
    if _config.type_check and layouts.count(None) == len(layouts):
        node._input_layouts = tuple(layouts)
        node._check_data_type_forward(tuple([
            x.array if isinstance(x, chainer.Variable) else x
            for x in inputs]))


def _linear(node: LinearFunction, arrays: list[numpy.ndarray]) -> tuple:
    """The output of a linear function, as a product that BLAS likes better.

    Chainer computes x W^T as it stands.  For few samples OpenBLAS takes 0.5
    to 1.06 times as long for (W x^T)^T, with which adding the bias restores
    C's order; for many samples or few outputs up to 1.6 times as long.
    """
    x, weight = arrays[:2]
    if (any(array.dtype != numpy.float32 for array in arrays)
            or x.ndim != 2 or weight.ndim != 2
            or len(x) * _NARROW > min(weight.shape)
            or not weight.flags.c_contiguous or x.shape[1] != weight.shape[1]
            or intel64.should_use_ideep('>=auto')):
        return node.forward(tuple(arrays))
    node._config_use_ideep = _config.use_ideep
    node.retain_inputs((0, 1))
    product = weight.dot(x.T).T
    return (numpy.ascontiguousarray(product) if len(arrays) == 2
            else numpy.add(product, arrays[2], order='C'),)


def is_watched(node: chainer.FunctionNode) -> bool:
    """Whether hooks, debug mode or a static graph look at a call."""
    own = _own.__dict__
    return bool(
        node._n_local_function_hooks
        or getattr(chainer._thread_local, 'function_hooks', None)
        or own.get('debug', _all.debug)
        or own.get('schedule_func', _all.schedule_func) is not None)


def unchecked() -> contextlib.AbstractContextManager[None]:
    """A block in which this thread's functions are called without checks."""
    return intercepting(_UNCHECKED)


class _Unchecked(Interceptor):
    apply = staticmethod(apply)


_UNCHECKED = _Unchecked()


def _variable(array: Any, requires_grad: bool) -> chainer.Variable:
    """``Variable(array, requires_grad=...)``, in a fifth of the time."""
    variable = _new(chainer.Variable)
    node = _new_node(VariableNode)
    node._variable = weakref.ref(variable)
    node.name, node._layout = None, None
    node._requires_grad = requires_grad
    node.dtype, node.shape = array.dtype, array.shape
    variable._requires_grad, variable._grad_valid = requires_grad, True
    variable._loss_scale = variable._grad_var = variable._grad = None
    variable._device = variable._layout = None
    variable._data, variable._node = [array], node
    return variable


def _link(node: chainer.FunctionNode, inputs: list[Any],
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
    node.lazy_grad_sum = _own.__dict__.get('lazy_grad_sum',
                                           _all.lazy_grad_sum)

"""What is asked of Chainer's functions: class, attributes, a copy."""
from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import chainer
import numpy

#: Attributes of functions that Chainer itself sets.
CHAINERS = frozenset([*vars(chainer.FunctionNode), *vars(chainer.Function),
                      *vars(chainer.function.FunctionAdapter), 'node',
                      'func', '_node', '_owned_node'])
#: Types of values that say all of themselves, and can be sent.
PLAIN = (int, float, complex, str, bytes, slice, numpy.dtype, numpy.generic,
         type(None))


def kind_of(node: Any) -> Any:
    """The class of a function, which may be an old-style one."""
    return type(getattr(node, 'function', node))


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a function, which may be an old-style one."""
    if isinstance(node, chainer.function.FunctionAdapter):
        return node.function.__dict__
    return node.__dict__


def again(node: Any, own: Mapping[str, Any]) -> Any:
    """A copy of a function, with its attributes from before its run."""
    if isinstance(node, chainer.function.FunctionAdapter):
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


def ignored_label(node: Any) -> int | None:
    """The label that a loss leaves out of its mean; None: it has none."""
    function = getattr(node, 'function', node)
    if (not getattr(function, 'normalize', False)
            or getattr(function, 'reduce', 'mean') == 'no'):
        return None
    return getattr(function, 'ignore_label', None)

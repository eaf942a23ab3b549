"""Has an interceptor see the calls of functions and links.

While there is a block of :func:`intercepting` in any thread, these of Chainer
7.8.1 are replaced (see :class:`.Patch`): ``FunctionNode.apply``
(chainer/function_node.py, line 242), which every function goes through,
``Link.__call__`` (chainer/link.py, line 262), which every link goes through
that has no ``__call__`` of its own, ``Variable.backward`` and
``unchain_backward`` (variable.py, lines 1490 and 1644), ``chainer.backward``
(_backprop.py, line 15), ``chainer.grad`` (function_node.py, line 1013), and
the cross entropy that is made of several functions
(functions/loss/softmax_cross_entropy.py, line 390), whose labels no function
sees: an interceptor that has a method ``leave_out(labels, label)`` is told of
what its mean leaves out.  They act in the thread of the block only; other
threads call the originals.

Another package may have patched the same places before: its functions are the
originals then, which interceptors are given to call.  If it patches them
meanwhile, its functions are called first and stay; if they call what they
replaced, the interceptor sees these calls.

To put them on and take them off costs some 40 us, and Python 3.13 is slower
after several hundred times (see :class:`.Patch`); :func:`hold` saves that.
"""
from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import chainer

from .patching import Patch


class Interceptor(Protocol):
    """Sees calls, and makes them or does something else.

    Calls that are made by these two methods, or by what they call, come here
    again, unless in a block of :func:`suspended`.
    """

    def apply(self, node: chainer.FunctionNode, inputs: Any,
              original: Callable[..., Any]) -> Any:
        """A function is called.

        Args:
            node: The function.
            inputs: Variables and arrays.
            original: Makes the call: ``original(node, inputs)``.

        Returns:
            The outputs, a tuple of variables.
        """

    def before_backward(self, outputs: Any) -> None:
        """Gradients are asked for: ``backward``, ``chainer.backward`` or
        ``chainer.grad``.

        Args:
            outputs: Of what; a variable or a list of them.
        """

    def before_unchain(self, output: chainer.Variable) -> None:
        """A graph is to be cut off: ``unchain_backward``.

        Args:
            output: Where the graph ends.
        """

    def call_link(self, link: chainer.Link, args: tuple[Any, ...],
                  kwargs: Mapping[str, Any], original: Callable[..., Any]
                  ) -> Any:
        """A link is called.

        Args:
            link: The link.
            args: What was passed.
            kwargs: What was passed by name.
            original: Makes the call: ``original(link, *args, **kwargs)``.

        Returns:
            What the link returns.
        """


class _Thread(threading.local):
    """The interceptor of this thread's calls."""

    interceptor: Interceptor | None = None


_thread = _Thread()


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Has an interceptor see this thread's calls in a block.

    Of nested blocks, the innermost one's interceptor sees the calls.
    """
    with contextlib.ExitStack() as stack:
        for patch in _ALL:
            stack.enter_context(patch)
        stack.enter_context(_replaced(interceptor))
        yield


def suspended() -> contextlib.AbstractContextManager[None]:
    """Has no interceptor see this thread's calls in a block.

    A block of :func:`intercepting` in the block sees calls again.
    """
    return _replaced(None)


def current() -> Interceptor | None:
    """What sees this thread's calls now; None: nothing."""
    return _thread.interceptor


def hold(owner: Any) -> None:
    """Keeps them replaced as long as an object lives.

    Blocks of :func:`intercepting` cost next to nothing then.
    """
    for patch in _ALL:
        patch.install()
        weakref.finalize(owner, patch.remove)


@contextlib.contextmanager
def _replaced(interceptor: Interceptor | None) -> Iterator[None]:
    before, _thread.interceptor = _thread.interceptor, interceptor
    try:
        yield
    finally:
        _thread.interceptor = before


def _apply(original: Any) -> Any:
    def apply(self: Any, inputs: Any) -> Any:
        interceptor = _thread.interceptor
        if interceptor is None:
            return original(self, inputs)
        return interceptor.apply(self, inputs, original)
    return apply


def _call(original: Any) -> Any:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        interceptor = _thread.interceptor
        if interceptor is None:
            return original(self, *args, **kwargs)
        return interceptor.call_link(self, args, kwargs, original)
    return call


def _backward(original: Any) -> Any:
    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.interceptor is not None:
            _thread.interceptor.before_backward(outputs)
        return original(outputs, *args, **kwargs)
    return backward


def _cross_entropy(original: Any) -> Any:
    def loss(x: Any, t: Any, normalize: bool, class_weight: Any,
             ignore_label: int, reduce: str, *args: Any) -> Any:
        tell = getattr(_thread.interceptor, 'leave_out', None)
        if tell is not None and normalize and reduce == 'mean':
            tell(t, ignore_label)
        return original(x, t, normalize, class_weight, ignore_label, reduce,
                        *args)
    return loss


def _unchain(original: Any) -> Any:
    def unchain_backward(self: Any) -> Any:
        if _thread.interceptor is not None:
            _thread.interceptor.before_unchain(self)
        return original(self)
    return unchain_backward


_ALL = (Patch(chainer.FunctionNode, 'apply', _apply),
        Patch(chainer.Link, '__call__', _call),
        Patch(chainer.Variable, 'backward', _backward),
        Patch(chainer.Variable, 'unchain_backward', _unchain),
        Patch(chainer, 'backward', _backward),
        Patch(chainer, 'grad', _backward),
        Patch(sys.modules[chainer.functions.softmax_cross_entropy.__module__],
              '_double_backward_softmax_cross_entropy', _cross_entropy))

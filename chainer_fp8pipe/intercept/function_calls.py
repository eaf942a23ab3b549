"""Has an interceptor see the calls of functions and links.

While any thread is in a block of :func:`intercepting`, these of Chainer 7.8.1
are replaced (see :class:`.Patch`): ``FunctionNode.apply``
(chainer/function_node.py, line 242), which every function goes through,
``Link.__call__`` (chainer/link.py, line 262), which every link goes through
that has no ``__call__`` of its own (for those see :func:`hold_calls`),
``Variable.backward`` and
``unchain_backward`` (variable.py, lines 1490 and 1644), ``chainer.backward``
(_backprop.py, line 15), ``chainer.grad`` (function_node.py, line 1013), and
the cross entropy that is made of several functions
(functions/loss/softmax_cross_entropy.py, line 390), none of which gets the
labels as an input.  The replacements act in the thread of the block only;
other threads call the originals.

Another package's patch that was there before is the original that
interceptors are given.  A patch that comes later is called first and stays;
the interceptor sees the calls that it passes on.

To install and remove the patches costs some 40 us, and after several hundred
times Python 3.13 gets slower (see :class:`.Patch`); :func:`hold` saves both.
"""
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer

from .patching import Current, Patch

#: So many times as many frames lie between a model and a nested link's
#: ``forward``; Python limits their number.
_FRAMES = 4


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

    def communicate(self, operation: Any, original: Callable[[], Any]) -> Any:
        """A collective operation is started; see :class:`.Operation`."""
        return original()

    def before_backward(self, outputs: Any) -> None:
        """``backward``, ``chainer.backward`` or ``chainer.grad`` begins.

        ``outputs`` is a variable, or a list of them.
        """

    def before_unchain(self, output: chainer.Variable) -> None:
        """``output.unchain_backward`` begins."""

    def leave_out(self, labels: Any, label: int) -> None:
        """A mean leaves out the places where the labels are this one."""


_interceptor = Current()


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Has an interceptor see this thread's calls in a block.

    In nested blocks, the interceptor of the innermost one sees the calls.
    """
    limit = sys.getrecursionlimit()
    with contextlib.ExitStack() as stack:
        if _interceptor.now is None:
            stack.callback(sys.setrecursionlimit, limit)
            sys.setrecursionlimit(limit * _FRAMES)
        for patch in _ALL:
            stack.enter_context(patch)
        stack.enter_context(_interceptor.set_to(interceptor))
        yield


def suspended() -> contextlib.AbstractContextManager[None]:
    """Has no interceptor see this thread's calls in a block.

    A block of :func:`intercepting` inside it sees calls again.
    """
    return _interceptor.set_to(None)


def current() -> Interceptor | None:
    """The interceptor of this thread's calls; None: there is none."""
    return _interceptor.now


def hold(owner: Any) -> None:
    """Keeps the patches installed as long as an object lives."""
    for patch in _ALL:
        patch.hold(owner)


def hold_calls(kinds: Iterable[type], owner: Any) -> None:
    """Has links' own ``__call__`` intercepted as long as an object lives.

    As links were written before Chainer 5, with ``__call__`` for ``forward``.

    Args:
        kinds: Classes of links.
        owner: The object.
    """
    for kind in dict.fromkeys(
            base for one in kinds for base in one.__mro__):
        if issubclass(kind, chainer.Link) and kind is not chainer.Link and (
                callable(vars(kind).get('__call__'))):
            _own_call(kind).hold(owner)


@functools.lru_cache(None)
def _own_call(kind: Any) -> Patch:
    return Patch(kind, '__call__', _call)


def _apply(original: Any) -> Any:
    def apply(self: Any, inputs: Any) -> Any:
        interceptor = _interceptor.now
        if interceptor is None:
            return original(self, inputs)
        return interceptor.apply(self, inputs, original)
    return apply


def _call(original: Any) -> Any:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        interceptor = _interceptor.now
        if interceptor is None:
            return original(self, *args, **kwargs)
        return interceptor.call_link(self, args, kwargs, original)
    return call


def _backward(original: Any) -> Any:
    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _interceptor.now is not None:
            _interceptor.now.before_backward(outputs)
        return original(outputs, *args, **kwargs)
    return backward


def _cross_entropy(original: Any) -> Any:
    def loss(x: Any, t: Any, normalize: bool, class_weight: Any,
             ignore_label: int, reduce: str, *args: Any) -> Any:
        if _interceptor.now and normalize and reduce == 'mean':
            _interceptor.now.leave_out(t, ignore_label)
        return original(x, t, normalize, class_weight, ignore_label, reduce,
                        *args)
    return loss


def _unchain(original: Any) -> Any:
    def unchain_backward(self: Any) -> Any:
        if _interceptor.now is not None:
            _interceptor.now.before_unchain(self)
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

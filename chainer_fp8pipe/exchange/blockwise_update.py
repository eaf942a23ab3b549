"""The update of one parameter, range by range."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer import optimizer_hooks
from chainer.optimizers import (
    ada_delta,
    ada_grad,
    adam,
    corrected_momentum_sgd,
    momentum_sgd,
    nesterov_ag,
    rmsprop,
    rmsprop_graves,
    sgd,
)

from ..intercept.access import without_hook

#: Elements that are updated at a time, or more: so many of the gradient, the
#: parameter and what is in between stay in a core's cache, and take longer
#: than the way to them.
BLOCK = 1 << 16
# Rules and hooks that compute each element by itself, from what
# :class:`_Piece` has.  (Of Chainer's that say so, MSVAG counts its calls, and
# SMORMS3 makes new arrays, whose precision depends on hyperparameters.)
_RULES = (ada_delta.AdaDeltaRule, ada_grad.AdaGradRule, adam.AdamRule,
          corrected_momentum_sgd.CorrectedMomentumSGDRule,
          momentum_sgd.MomentumSGDRule, nesterov_ag.NesterovAGRule,
          rmsprop.RMSpropRule, rmsprop_graves.RMSpropGravesRule, sgd.SGDRule)
_HOOKS = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
          optimizer_hooks.GradientHardClipping)

# Methods that another package has put in their place must be called.
_ORIGINAL = chainer.UpdateRule.update, chainer.UpdateRule.update_core

#: What a rule, or a hook for it, does with a parameter, or a :class:`_Piece`.
Action = Callable[[Any, Any], object]


class BlockwiseUpdate:
    """Updates one parameter as its gradient comes, range by range.

    Every element is computed as in an update of all elements at once, so the
    result has the same bits.

    Args:
        parameter: One with a gradient.
        rule: Its update rule, for which :func:`is_elementwise` holds.
        actions: Hooks and the rule's update, one after the other.
    """

    def __init__(self, parameter: chainer.Parameter, rule: Any,
                 actions: Iterable[Action]) -> None:
        self._parameter = parameter
        self._rule = rule
        self._own = _directly(without_hook(rule))
        self._actions = tuple(actions)
        self._known: set[tuple[int, int]] = set()
        # Of ranges that wait, by either end: the other one.  They do not
        # adjoin, or they would be one, so no two have an end in common.
        self._ends: dict[int, int] = {}
        self._done: list[tuple[int, int]] = []
        rule._init_states(parameter)
        self._own._state = {}
        self._t = rule.t
        self._state: Mapping[str, Any] = rule._state
        values = parameter.array
        # What has no dimension, NumPy 1 computes in another precision.
        self._has_ranges = values.size > 0 and values.ndim > 0 and all(
            _is_flat(array) and array.shape == values.shape for array in (
                values, parameter.grad, *self._state.values()))
        if self._has_ranges:
            self._values = values.reshape(-1)
            self._piece = _Piece(parameter)

    def update(self, start: int, stop: int, gradient: numpy.ndarray) -> bool:
        """Updates a range, or keeps it for a larger one.

        Args:
            start: First element, of the parameter laid flat.
            stop: Last one plus one.
            gradient: Of the parameter, laid flat; this range is final, and
                may be overwritten.

        Returns:
            Whether any element was updated.
        """
        if (not self._has_ranges or start == stop
                or (start, stop) in self._known):
            return False
        self._known.add((start, stop))
        start, stop = self._join(start, stop)
        if stop - start < BLOCK:
            self._ends[start], self._ends[stop] = stop, start
            return False
        self._act(start, stop, gradient)
        return True

    def _join(self, start: int, stop: int) -> tuple[int, int]:
        """Joins the range with those before and behind that have waited."""
        start, stop = self._ends.pop(start, start), self._ends.pop(stop, stop)
        self._ends.pop(start, None)
        self._ends.pop(stop, None)
        return start, stop

    def _act(self, start: int, stop: int, gradient: numpy.ndarray) -> None:
        piece, rule = self._piece, self._own
        piece.data = piece.array = self._values[start:stop]
        piece.grad = gradient[start:stop]
        for name, value in self._state.items():
            rule._state[name] = value.reshape(-1)[start:stop]
        rule.t = self._t        # it counts updates, not ranges
        for action in self._actions:
            action(rule, piece)
        self._done.append((start, stop))

    def complete(self) -> None:
        """Updates all that is left; the whole gradient is final."""
        if not self._has_ranges:
            for action in self._actions:
                action(self._rule, self._parameter)
            return
        gradient = self._parameter.grad.reshape(-1)
        for start, stop in _gaps(self._done, gradient.size):
            self._act(start, stop, gradient)
        self._rule.t = self._own.t


class _Piece:
    """A range of a parameter, for Chainer's rules and hooks.

    Has what they read as plain attributes, without the checks of each access
    to a parameter of Chainer's.
    """

    array: numpy.ndarray
    data: numpy.ndarray     # the same
    grad: numpy.ndarray

    def __init__(self, parameter: chainer.Parameter) -> None:
        self.dtype = parameter.dtype
        self.device = parameter.device
        self._loss_scale = parameter._loss_scale


class _Direct:
    """An update rule for NumPy's float32 arrays, without Chainer's checks."""

    def update(self: Any, piece: _Piece) -> None:
        self.t += 1
        if piece._loss_scale is not None:
            piece.grad /= piece._loss_scale
        hookable = self._hookable
        for hook in hookable._pre_update_hooks.values():
            hook(self, piece)
        self.update_core_cpu(piece)
        for hook in hookable._post_update_hooks.values():
            hook(self, piece)


def _directly(rule: Any) -> Any:
    kind: Any = type(rule)
    rule.__class__ = _direct(kind)
    return rule


@functools.lru_cache(None)
def _direct(kind: Any) -> type:
    return type(kind.__name__, (_Direct, kind), {})


def is_large(parameter: chainer.Parameter) -> bool:
    """Whether the parameter has ranges that are worth an update."""
    return parameter.size >= BLOCK


def is_elementwise(rule: Any, hooks: Iterable[Any]) -> bool:
    """Whether an update may be done range by range.

    Args:
        rule: Whose update.
        hooks: The rule's, and the optimizer's for one parameter at a time.
    """
    # A method that was given to this rule alone is bound to the rule, and
    # would not see a range of its state.
    kind = type(rule)
    return (kind in _RULES and rule.enabled
            and (kind.update, kind.update_core) == _ORIGINAL
            and not any(map(callable, vars(rule).values()))
            and all(type(hook) in _HOOKS for hook in hooks))


def _is_flat(array: Any) -> bool:
    return (type(array) is numpy.ndarray and array.dtype == numpy.float32
            and array.flags.c_contiguous and array.flags.writeable)


def _gaps(done: Iterable[tuple[int, int]], size: int
          ) -> Iterator[tuple[int, int]]:
    """The blocks between ranges."""
    place = 0
    for start, stop in [*sorted(done), (size, size)]:
        for low in range(place, start, BLOCK):
            yield low, min(low + BLOCK, start)
        place = stop

"""Updates of parameters that wait for the first access.

An optimizer's update needs averaged gradients, and the next forward pass
needs the first layers' parameters before the others'.  So a parameter whose
gradient is still on its way gets an access hook: an access to the parameter,
its gradient or the state of its update rule waits for the gradient, and does
what the optimizer would have done.
"""
# A call of the optimizer gives each parameter a list of actions: the hooks for
# one parameter at a time, and the update of the parameter's rule, with the
# learning rate and the hooks that the rule has at the call.
# Whatever must see several gradients at once (clipping by the global norm,
# dynamic loss scaling, hooks that nobody knows) cannot wait: such an
# optimizer is refused, and finds all gradients when it looks at them.
#
# A large parameter is updated block by block, while the rest of its mean is
# still on its way, if rule and hooks compute each element by itself.  Each
# element is computed as in an update of all at once, so the bits are the
# same.  A block stays in a core's cache, from the gradient to the parameter.
from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import chainer
import numpy
from chainer import optimizer_hooks, optimizers
from chainer.optimizer import Hyperparameter

from ..intercept.access import (
    UPDATES,
    add_hook,
    remove_hook,
    without_hook,
)

#: Elements that are updated at a time: so many of the gradient, the parameter
#: and what is in between stay in a core's cache, and take longer than the way
#: to them.
BLOCK = 1 << 16

#: Is given the first and the last element plus one of a range of a parameter,
#: and the parameter's gradient, laid flat; whether it has used any of it now.
Use = Callable[[int, int, Any], bool]
#: What a rule, or a hook for it, does with a parameter, or a block of one.
Action = Callable[[Any, Any], object]

# What all of Chainer's ways to an array, and to a rule's state, go through.
_OF_PARAMETERS = ('_data', '_grad', '_grad_var')
_OF_RULES = ('_state', '_fp32_param', 't', 'enabled', '_use_fp32_update',
             '_hookable')
# Rules and hooks that compute each element by itself, from what a block has.
# (Of Chainer's that say so, MSVAG counts its calls, and SMORMS3 makes new
# arrays, whose precision depends on hyperparameters.)
_RULES = tuple(type(kind().create_update_rule()) for kind in (
    optimizers.AdaDelta, optimizers.AdaGrad, optimizers.Adam,
    optimizers.CorrectedMomentumSGD, optimizers.MomentumSGD,
    optimizers.NesterovAG, optimizers.RMSprop, optimizers.RMSpropGraves,
    optimizers.SGD))
_ELEMENTWISE = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
                optimizer_hooks.GradientHardClipping)
# Hooks that read one parameter at a time, draw no random numbers and do not
# change themselves, so that parameters may come in any order.
_ONE_BY_ONE = (*_ELEMENTWISE, optimizer_hooks.GradientLARS)
# Methods that another package has put in their place must be called.
_ORIGINAL = chainer.UpdateRule.update, chainer.UpdateRule.update_core


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A parameter, and what is to be done when its mean is there."""

    name: str
    parameter: chainer.Parameter
    rule: Any = None                # of the update; it has a hook, too
    actions: list[Action] = dataclasses.field(default_factory=list)
    is_elementwise: bool = False
    failure: BaseException | None = None
    is_busy: bool = False
    is_cleared: bool = False


class DeferredUpdate:
    """One update of a model, parameter by parameter.

    Args:
        parameters: By name, those whose gradients are on their way; as an
            attribute, too, for an access would wait.
        finish: Waits for the gradient of the parameter of this name, and
            writes it; may meanwhile give what is there of it to the other
            argument, if that is not None (:meth:`.BlockUpdate.update`).
        tell: Is given what ``finish`` or an update raises.
    """

    def __init__(self, parameters: Mapping[str, chainer.Parameter],
                 finish: Callable[[str, Use | None], object],
                 tell: Callable[[BaseException], object] = lambda _: None
                 ) -> None:
        self.parameters, self._finish, self._tell = parameters, finish, tell
        self._lock = threading.RLock()
        self._waiting = {id(parameter): _Waiting(name, parameter)
                         for name, parameter in parameters.items()}
        if self._waiting:
            # Ends when nothing waits, or nothing can access any more.
            self._ask_no_more = UPDATES.hold(self)
        for one in self._waiting.values():
            add_hook(one.parameter, _OF_PARAMETERS, self, one)
            # Scripts clear gradients before the next forward pass.
            vars(one.parameter)['cleargrad'] = functools.partial(
                self._clear_later, one)

    def adopt(self, optimizer: Any) -> bool:
        """Takes an optimizer's update over, if parameters may come one by one.

        Returns:
            Whether the update has been taken over.  An optimizer that has to
            see several gradients before it changes a parameter is refused:
            one that scales the loss dynamically, has a hook (other than
            Chainer's for one parameter at a time and those with
            ``reads_gradients = False``), has an update rule with a hook
            (other than those and with ``one_by_one = True``), or has
            parameters that were not averaged, or were updated or had their
            gradients cleared since.
        """
        found = [self._waiting.get(id(parameter))
                 for parameter in optimizer.target.params()]
        waiting = [one for one in found
                   if one and not one.actions and not one.is_cleared]
        before, after = _hooks_of(optimizer)
        if (optimizer._loss_scaling_is_dynamic or len(waiting) < len(found)
                or not all(_may_wait(hook, 'reads_gradients', False)
                           for hook in [*before, *after])
                or not all(_may_wait(hook, 'one_by_one', True)
                           for one in waiting
                           if one.parameter.update_rule is not None
                           for hooks in _hooks_of(one.parameter.update_rule)
                           for hook in hooks)):
            return False
        optimizer._loss_scaling_isnan = False
        for hook in before:
            _call(hook, optimizer, waiting)
        optimizer.t += 1
        for one in waiting:
            rule = one.parameter.update_rule
            if rule is None:
                continue
            one.actions.append(functools.partial(_update, _present(rule)))
            if one.rule is None:    # a parameter with two names comes twice
                one.is_elementwise = is_elementwise(rule, [
                    *(hook for hook in [*before, *after]
                      if type(hook) in _ONE_BY_ONE),
                    *sum(_hooks_of(rule), [])])
                add_hook(rule, _OF_RULES, self, one)
                one.rule = rule
        for hook in after:
            _call(hook, optimizer, waiting)
        return True

    def complete(self) -> None:
        """Waits for all that is left."""
        for one in tuple(self._waiting.values()):
            self.before_access(one)

    def before_access(self, one: _Waiting) -> None:
        """Waits for a parameter's mean and updates the parameter, once.

        Raises:
            Exception: What ``finish`` or the update raises, at every access:
                the parameter may be half updated.
        """
        parameter = one.parameter
        with self._lock:
            # The update below accesses the parameter, too.
            if one.is_busy or id(parameter) not in self._waiting:
                return
            if one.failure:
                raise one.failure
            one.is_busy = True
            vars(parameter).pop('cleargrad', None)
            try:
                blocks = None
                if (one.is_elementwise and parameter.size >= BLOCK
                        and has_plain_arrays(parameter, one.rule)):
                    blocks = BlockUpdate(parameter, one.rule, one.actions)
                self._finish(one.name, blocks.update if blocks else None)
                if blocks:
                    blocks.complete()
                else:
                    for action in one.actions:
                        action(one.rule, parameter)
            except BaseException as error:
                one.failure = error if isinstance(
                    error, Exception) else RuntimeError(
                        f'the update of parameter {one.name} was interrupted '
                        f'by {error!r}; go on from a snapshot')
                self._tell(error)
                raise
            finally:
                one.is_busy = False
            remove_hook(parameter)
            if one.rule is not None:
                remove_hook(one.rule)
            del self._waiting[id(parameter)]
            if one.is_cleared:
                parameter.cleargrad()
            if not self._waiting:
                del self._finish        # and what it refers to
                self._ask_no_more()

    def _clear_later(self, one: _Waiting) -> None:
        """In place of ``cleargrad``: the update needs the gradient."""
        with self._lock:
            if id(one.parameter) in self._waiting:
                one.is_cleared = True
                return
        one.parameter.cleargrad()


# --- what is done when a mean is there ---------------------------------------

def _hooks_of(owner: Any) -> tuple[list[Any], list[Any]]:
    """Before and after the update, of an optimizer or an update rule."""
    return (list(owner._hookable._pre_update_hooks.values()),
            list(owner._hookable._post_update_hooks.values()))


def _may_wait(hook: Any, mark: str, wanted: bool) -> bool:
    return (type(hook) in _ONE_BY_ONE
            or bool(getattr(hook, mark, not wanted)) is wanted)


def _call(hook: Any, optimizer: Any, waiting: list[_Waiting]) -> None:
    """Calls an optimizer's hook, or has it called for each parameter."""
    if type(hook) in _ONE_BY_ONE:
        # A rate that is set from now on is that of the next update.
        hook = copy.copy(hook)
        for one in waiting:
            one.actions.append(hook)
    elif getattr(hook, 'call_for_each_param', False):
        for one in waiting:
            hook(one.parameter.update_rule, one.parameter)
    else:
        hook(optimizer)


def _present(rule: Any) -> dict[str, Any]:
    """The learning rate and the hooks that a rule has now.

    Those that are set later are for the next update.
    """
    hyperparam = Hyperparameter()
    vars(hyperparam).update(rule.hyperparam.get_dict())
    hookable = copy.copy(vars(rule)['_hookable'])       # which is no access
    for timing in '_pre_update_hooks', '_post_update_hooks':
        setattr(hookable, timing, collections.OrderedDict(
            (name, copy.copy(hook))
            for name, hook in getattr(hookable, timing).items()))
    return {'hyperparam': hyperparam, '_hookable': hookable}


def _update(present: Mapping[str, Any], rule: Any, parameter: Any) -> None:
    """The rule's update of a parameter or a block, as :func:`_present` was."""
    own = {name: vars(rule)[name] for name in present}
    vars(rule).update(present)
    try:
        if isinstance(parameter, types.SimpleNamespace):
            _update_block(rule, parameter)
        else:
            rule.update(parameter)
    finally:
        vars(rule).update(own)


# --- block by block ----------------------------------------------------------

class BlockUpdate:
    """Updates one parameter as its gradient comes, block by block.

    Args:
        parameter: One for which :func:`has_plain_arrays` holds.
        rule: Its update rule, for which :func:`is_elementwise` holds.
        actions: Hooks and the rule's update, one after the other.
    """

    def __init__(self, parameter: chainer.Parameter, rule: Any,
                 actions: Sequence[Action]) -> None:
        self._parameter, self._rule, self._actions = parameter, rule, actions
        self._own = without_hook(rule)
        self._own._state = {}
        self._t = rule.t
        self._state: Mapping[str, Any] = rule._state
        self._values = parameter.array.reshape(-1)
        # Elements that have not come, by block.
        self._missing = [min(BLOCK, parameter.size - start)
                         for start in range(0, parameter.size, BLOCK)]
        # What rules and hooks read, without Chainer's checks.
        self._block = types.SimpleNamespace(
            dtype=parameter.dtype, device=parameter.device,
            _loss_scale=parameter._loss_scale)

    def update(self, start: int, stop: int, gradient: numpy.ndarray) -> bool:
        """Updates the blocks that are complete with this range.

        Args:
            start: First element, of the parameter laid flat.
            stop: Last one plus one.
            gradient: Of the parameter, laid flat; this range is final, was
                not given before, and may be overwritten.

        Returns:
            Whether any element was updated.
        """
        updated = False
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            low, high = block * BLOCK, (block + 1) * BLOCK
            self._missing[block] -= min(high, stop) - max(low, start)
            if not self._missing[block]:
                self._act(low, high, gradient)
                updated = True
        return updated

    def complete(self) -> None:
        """Updates all that is left; the whole gradient is final."""
        gradient = self._parameter.grad.reshape(-1)
        for block, missing in enumerate(self._missing):
            if missing:
                self._act(block * BLOCK, (block + 1) * BLOCK, gradient)
        self._rule.t = self._own.t

    def _act(self, start: int, stop: int, gradient: numpy.ndarray) -> None:
        block, rule = self._block, self._own
        block.data = block.array = self._values[start:stop]
        block.grad = gradient[start:stop]
        for name, value in self._state.items():
            rule._state[name] = value.reshape(-1)[start:stop]
        rule.t = self._t        # it counts updates, not blocks
        for action in self._actions:
            action(rule, block)


def _update_block(rule: Any, block: Any) -> None:
    """``UpdateRule.update`` for float32 on the host, without its checks."""
    rule.t += 1
    if block._loss_scale is not None:
        block.grad /= block._loss_scale
    for hook in rule._hookable._pre_update_hooks.values():
        hook(rule, block)
    rule.update_core_cpu(block)
    for hook in rule._hookable._post_update_hooks.values():
        hook(rule, block)


def has_plain_arrays(parameter: chainer.Parameter, rule: Any) -> bool:
    """Whether a block's arrays are computed with as the parameter's are.

    What has no dimension, NumPy 1 computes in another precision.
    """
    rule._init_states(parameter)
    values = parameter.array
    return values.ndim > 0 and all(
        type(array) is numpy.ndarray and array.dtype == numpy.float32
        and array.flags.c_contiguous and array.flags.writeable
        and array.shape == values.shape
        for array in (values, parameter.grad, *rule._state.values()))


def is_elementwise(rule: Any, hooks: Iterable[Any]) -> bool:
    """Whether an update may be done block by block.

    Args:
        rule: Whose update.
        hooks: The rule's, and the optimizer's for one parameter at a time.
    """
    # A method that was given to this rule alone is bound to the rule, and
    # would not see a block of its state.
    kind = type(rule)
    return (kind in _RULES and rule.enabled
            and (kind.update, kind.update_core) == _ORIGINAL
            and not any(map(callable, vars(rule).values()))
            and all(type(hook) in _ELEMENTWISE for hook in hooks))

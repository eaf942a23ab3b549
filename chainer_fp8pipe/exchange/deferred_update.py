"""Updates of parameters that wait for the first access.

An optimizer's update needs averaged gradients, and the next forward pass
needs the first layers' parameters before the others'.  So a parameter whose
gradient is still on its way gets an access hook: an access to the parameter,
its gradient or the state of its update rule waits for the gradient, and does
what the optimizer would have done.
"""
from __future__ import annotations

import collections
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import chainer
from chainer import optimizer_hooks
from chainer.optimizer import Hyperparameter

from ..intercept.access import add_hook, hook_of, remove_hook
from ..intercept.updates import ask_first, ask_no_more
from .blockwise_update import Action, BlockwiseUpdate, is_elementwise, is_large

#: Is given the first and the last element plus one of a range of a parameter,
#: and the parameter's gradient, laid flat; whether it has used any of it now.
Use = Callable[[int, int, Any], bool]

# What all of Chainer's ways to an array, and to a rule's state, go through.
_OF_PARAMETERS = ('_data', '_grad', '_grad_var')
_OF_RULES = ('_state', '_fp32_param', 't', 'enabled', '_use_fp32_update',
             '_hookable')
# Hooks that read one parameter at a time, draw no random numbers and do not
# change themselves, so that parameters may come in any order.
_ONE_BY_ONE = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
               optimizer_hooks.GradientHardClipping,
               optimizer_hooks.GradientLARS)


class DeferredUpdate:
    """One update of a model, parameter by parameter.

    Args:
        parameters: By name, those whose gradients are on their way.
        finish: Waits for the gradient of the parameter of this name, and
            writes it; may meanwhile give what is there of it to the other
            argument, if that is not None (:meth:`.BlockwiseUpdate.update`).
        tell: Is given what ``finish`` or an update raises.
    """

    def __init__(self, parameters: Mapping[str, chainer.Parameter],
                 finish: Callable[[str, Use | None], object],
                 tell: Callable[[BaseException], object] = lambda _: None
                 ) -> None:
        self._finish = finish
        self._tell = tell
        self._cleared: set[str] = set()
        self._waiting = {id(parameter): (name, parameter)
                         for name, parameter in parameters.items()}
        self._to_do: dict[str, list[tuple[Any, Action]]] = {}
        self._elementwise: set[str] = set()
        self._ranged: dict[str, BlockwiseUpdate] = {}
        self._rules: dict[str, Any] = {}
        self._failed: dict[str, BaseException] = {}
        self._busy: set[str] = set()
        self._lock = threading.RLock()
        if self._waiting:
            ask_first(_is_taken_over)
            # Called once: when nothing waits, or nothing can access any more.
            self._ask_no_more = weakref.finalize(
                self, ask_no_more, _is_taken_over)
            self._ask_no_more.atexit = False
        for parameter in parameters.values():
            add_hook(parameter, _OF_PARAMETERS, self, parameter)
            # Scripts clear gradients before the next forward pass.
            vars(parameter)['cleargrad'] = functools.partial(
                self._clear_later, parameter)

    def adopt(self, optimizer: Any) -> bool:
        """Takes an optimizer's update over, if parameters may come one by one.

        Returns:
            Whether the update has been taken over.  An optimizer that has to
            see several gradients before it changes a parameter is refused:
            one that scales the loss dynamically, has a hook (other than
            Chainer's for one parameter at a time and those with
            ``reads_gradients = False``), has an update rule with a hook
            (other than those and with ``one_by_one = True``), or has
            parameters that were not averaged, or whose gradients have been
            cleared since.
        """
        parameters = list(optimizer.target.params())
        before, after = _hooks_of(optimizer)
        # Reading hooks is an access, at a second update after one mean.
        if (self._cleared or optimizer._loss_scaling_is_dynamic
                or not all(_reads_one(hook)
                           or not getattr(hook, 'reads_gradients', True)
                           for hook in [*before, *after])
                or not all(_reads_one(hook)
                           or getattr(hook, 'one_by_one', False)
                           for parameter in parameters
                           if parameter.update_rule is not None
                           for hooks in _hooks_of(parameter.update_rule)
                           for hook in hooks)
                or any(id(parameter) not in self._waiting
                       for parameter in parameters)):
            return False
        optimizer._loss_scaling_isnan = False
        for hook in before:
            self._call(hook, optimizer, parameters)
        optimizer.t += 1
        hooks = [hook for hook in [*before, *after] if _reads_one(hook)]
        for parameter in parameters:
            self._do_later(parameter, hooks)
        for hook in after:
            self._call(hook, optimizer, parameters)
        return True

    def complete(self) -> None:
        """Waits for all that is left."""
        for _, parameter in tuple(self._waiting.values()):
            self.before_access(parameter)

    def before_access(self, parameter: chainer.Parameter) -> None:
        """Waits for a parameter's mean and updates the parameter, once.

        Raises:
            Exception: What ``finish`` or the update raises, at every access.
        """
        with self._lock:
            name, _ = self._waiting.get(id(parameter), ('', None))
            # The update below accesses the parameter, too.
            if not name or name in self._busy:
                return
            if name in self._failed:
                raise self._failed[name]
            self._busy.add(name)
            vars(parameter).pop('cleargrad', None)
            try:
                self._finish(name, self._use(name, parameter))
                self._act(name, parameter)
            except BaseException as error:
                self._tell(error)
                raise
            finally:
                self._busy.discard(name)
            remove_hook(parameter)
            if name in self._rules:
                remove_hook(self._rules.pop(name))
            del self._waiting[id(parameter)]
            if name in self._cleared:
                parameter.cleargrad()
            if not self._waiting:
                del self._finish        # and what it refers to
                self._ask_no_more()

    def _clear_later(self, parameter: chainer.Parameter) -> None:
        """In place of ``cleargrad``: the update needs the gradient."""
        with self._lock:
            if id(parameter) in self._waiting:
                self._cleared.add(self._waiting[id(parameter)][0])
                return
        parameter.cleargrad()

    def _use(self, name: str, parameter: chainer.Parameter) -> Use | None:
        """Updates a range; None: the parameter is updated all at once."""
        if name not in self._elementwise or not is_large(parameter):
            return None
        ranged = self._ranged.get(name)
        if ranged is None:
            rule = self._rules[name]
            if any(other is not rule for other, _ in self._to_do[name]):
                return None     # a second optimizer's update of one mean
            ranged = self._ranged[name] = BlockwiseUpdate(
                parameter, rule, [action for _, action in self._to_do[name]])

        def use(start: int, stop: int, gradient: Any) -> bool:
            try:
                return ranged.update(start, stop, gradient)
            except BaseException as error:
                self._fail(name, error)
                raise
        return use

    def _act(self, name: str, parameter: chainer.Parameter) -> None:
        """Updates a parameter, once."""
        try:
            actions = self._to_do.pop(name, ())
            ranged = self._ranged.pop(name, None)
            if ranged:
                ranged.complete()
                return
            for rule, action in actions:
                action(rule, parameter)
        except BaseException as error:
            self._fail(name, error)
            raise

    def _fail(self, name: str, error: BaseException) -> None:
        """Keeps the error: the parameter may be half updated."""
        self._failed[name] = (
            error if isinstance(error, Exception) else RuntimeError(
                f'the update of parameter {name} was interrupted by '
                f'{error!r}; go on from a snapshot'))

    def _call(self, hook: Any, optimizer: Any,
              parameters: list[chainer.Parameter]) -> None:
        if _reads_one(hook):
            # A rate that is set from now on is that of the next update.
            hook = copy.copy(hook)
            for parameter in parameters:
                self._add(parameter, parameter.update_rule, hook)
        elif getattr(hook, 'call_for_each_param', False):
            for parameter in parameters:
                hook(parameter.update_rule, parameter)
        else:
            hook(optimizer)

    def _do_later(self, parameter: chainer.Parameter, hooks: list[Any]
                  ) -> None:
        rule = parameter.update_rule
        if rule is None:
            return
        self._add(parameter, rule, functools.partial(
            _update, _present(rule)))
        if not hook_of(rule):     # a parameter with two names comes twice
            name, _ = self._waiting[id(parameter)]
            if is_elementwise(rule, [*hooks, *sum(_hooks_of(rule), [])]):
                self._elementwise.add(name)
            add_hook(rule, _OF_RULES, self, parameter)
            self._rules[name] = rule

    def _add(self, parameter: chainer.Parameter, rule: Any, action: Action
             ) -> None:
        name, _ = self._waiting[id(parameter)]
        self._to_do.setdefault(name, []).append((rule, action))


def _hooks_of(owner: Any) -> tuple[list[Any], list[Any]]:
    """Before and after the update, of an optimizer or an update rule."""
    return (list(owner._hookable._pre_update_hooks.values()),
            list(owner._hookable._post_update_hooks.values()))


def _reads_one(hook: Any) -> bool:
    return type(hook) in _ONE_BY_ONE


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


def _update(present: Mapping[str, Any], rule: Any,
            parameter: chainer.Parameter) -> None:
    """The rule's update, as :func:`_present` found the rule."""
    own = {name: vars(rule)[name] for name in present}
    vars(rule).update(present)
    try:
        rule.update(parameter)
    finally:
        vars(rule).update(own)


def deferred(model: chainer.Link) -> DeferredUpdate | None:
    """The update of a model that waits for accesses; None: there is none."""
    return next(filter(None, map(hook_of, model.params())), None)


def _is_taken_over(optimizer: Any) -> bool:
    """Whether an update that waits has taken this optimizer's over."""
    waiting = deferred(optimizer.target)
    return waiting is not None and waiting.adopt(optimizer)

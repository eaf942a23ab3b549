"""Updates that wait until somebody looks at a parameter.

An optimizer's update needs averaged gradients, and the next forward pass
needs the first layers' parameters before the others'.  So a parameter whose
gradient is still on its way is marked, and whoever looks at it, at its
gradient or at the state of its update rule finds it updated: the look waits
for the gradient, and does what the optimizer would have done.

A mark is a subclass, made for the purpose, of the class that the object has.
Its properties stand before the attributes that all of Chainer's ways to an
array go through.
"""
from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chainer
from chainer import optimizer_hooks
from chainer.optimizer import Hyperparameter

_MARK = '_deferred'
# Hooks that look at one parameter at a time, and draw no random numbers, so
# that it does not matter in which order parameters come.
_ONE_BY_ONE = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
               optimizer_hooks.GradientHardClipping,
               optimizer_hooks.GradientLARS)


class Deferred:
    """One update of a model, parameter by parameter.

    Args:
        parameters: By name, those whose gradients are on their way.
        finish: Waits for the gradient of the parameter of this name, and
            writes it.
    """

    def __init__(self, parameters: Mapping[str, chainer.Parameter],
                 finish: Callable[[str], None]) -> None:
        _install()
        self._finish = finish
        self._waiting = {id(parameter): (name, parameter)
                         for name, parameter in parameters.items()}
        self._to_do: dict[str, list[Callable[[], None]]] = {}
        self._rules: dict[str, list[Any]] = {}
        self._busy: set[str] = set()
        self._lock = threading.RLock()
        for parameter in parameters.values():
            _mark(parameter, _Mark(self, parameter),
                  ('_data', '_grad', '_grad_var'))

    def adopt(self, optimizer: Any) -> bool:
        """Does an optimizer's update, as far as it can be done now.

        Returns:
            Whether it has been taken over.  It is not if the optimizer has
            to see several gradients before it changes a parameter: it scales
            the loss dynamically, has a hook (other than Chainer's that look
            at one parameter at a time, and those with ``reads_gradients =
            False``), or has parameters that were not averaged.
        """
        parameters = list(optimizer.target.params())
        hookable = optimizer._hookable
        before = list(hookable._pre_update_hooks.values())
        after = list(hookable._post_update_hooks.values())
        if (optimizer._loss_scaling_is_dynamic
                or not all(map(_can_wait, [*before, *after]))
                or any(id(parameter) not in self._waiting
                       for parameter in parameters)):
            return False
        for hook in before:
            self._call(hook, optimizer, parameters)
        optimizer.t += 1
        for parameter in parameters:
            self._do_later(parameter)
        for hook in after:
            self._call(hook, optimizer, parameters)
        return True

    def complete(self) -> None:
        """Waits for all that is left."""
        for _, parameter in tuple(self._waiting.values()):
            self.look_at(parameter)

    def look_at(self, parameter: chainer.Parameter) -> None:
        """Waits for a parameter, if that has not been done.

        Raises:
            Exception: What ``finish`` raises, at every look.
        """
        with self._lock:
            name, _ = self._waiting.get(id(parameter), ('', None))
            # While it is updated here it looks at itself.
            if not name or name in self._busy:
                return
            self._busy.add(name)
            try:
                self._finish(name)
                for action in self._to_do.pop(name, ()):
                    action()
            finally:
                self._busy.discard(name)
            _unmark(parameter)
            for rule in self._rules.pop(name, ()):
                _unmark(rule)
            del self._waiting[id(parameter)]

    def _call(self, hook: Any, optimizer: Any,
              parameters: list[chainer.Parameter]) -> None:
        if not isinstance(hook, _ONE_BY_ONE):
            hook(optimizer)
            return
        for parameter in parameters:
            self._add(parameter, functools.partial(
                hook, parameter.update_rule, parameter))

    def _do_later(self, parameter: chainer.Parameter) -> None:
        rule = parameter.update_rule
        if rule is None:
            return
        # Whoever changes the learning rate now means the next update.
        hyperparam = Hyperparameter()
        vars(hyperparam).update(rule.hyperparam.get_dict())
        self._add(parameter, functools.partial(
            _update, rule, parameter, hyperparam))
        if not isinstance(rule, _Marked):   # of a parameter with two names
            _mark(rule, _Mark(self, parameter), ('_state', '_fp32_param', 't'))
            name, _ = self._waiting[id(parameter)]
            self._rules.setdefault(name, []).append(rule)

    def _add(self, parameter: chainer.Parameter,
             action: Callable[[], None]) -> None:
        name, _ = self._waiting[id(parameter)]
        self._to_do.setdefault(name, []).append(action)


def _can_wait(hook: Any) -> bool:
    return (isinstance(hook, _ONE_BY_ONE)
            or not getattr(hook, 'reads_gradients', True))


def deferred(model: chainer.Link) -> Deferred | None:
    """The update of a model that somebody has to look at; None: there is none.
    """
    for parameter in model.params():
        mark = vars(parameter).get(_MARK)
        if mark is not None:
            return mark.deferred
    return None


def _update(rule: Any, parameter: chainer.Parameter,
            hyperparam: Hyperparameter) -> None:
    own, rule.hyperparam = rule.hyperparam, hyperparam
    try:
        rule.update(parameter)
    finally:
        rule.hyperparam = own


@functools.lru_cache(None)
def _install() -> None:
    """Has Chainer's optimizers ask whether their update can wait."""
    original = chainer.GradientMethod.update

    @functools.wraps(original)
    def update(self: Any, lossfun: Any = None, *args: Any,
               **kwargs: Any) -> None:
        waiting = None if lossfun is not None else deferred(self.target)
        if waiting is None or not waiting.adopt(self):
            original(self, lossfun, *args, **kwargs)

    chainer.GradientMethod.update = update


# --- marks ------------------------------------------------------------------

class _Mark(NamedTuple):
    deferred: Deferred
    parameter: chainer.Parameter


class _Marked:
    """What marked objects have in common."""

    def __copy__(self) -> Any:
        # Chainer's would copy what is not there yet.  After the look this
        # has another class.
        self._look()
        return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._look()
        return self.__reduce_ex__(protocol)

    def _look(self) -> None:
        mark = vars(self).get(_MARK)
        if mark is not None:
            mark.deferred.look_at(mark.parameter)


class _Attribute:
    """An attribute of a marked object."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self._default
        owner._look()
        return vars(owner).get(self._name, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        owner._look()
        vars(owner)[self._name] = value


def _mark(owner: Any, mark: _Mark, attributes: tuple[str, ...]) -> None:
    kind: Any = type(owner)
    vars(owner)[_MARK] = mark
    owner.__class__ = _marked(kind, attributes)


def _unmark(owner: Any) -> None:
    if vars(owner).pop(_MARK, None) is not None:
        owner.__class__ = type(owner).__mro__[2]


@functools.lru_cache(None)
def _marked(kind: Any, attributes: tuple[str, ...]) -> type:
    return type(kind.__name__, (_Marked, kind), {
        name: _Attribute(name, getattr(kind, name, None))
        for name in attributes})

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

import collections
import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chainer
from chainer import optimizer_hooks
from chainer.optimizer import Hyperparameter

_MARK = '_deferred'
_OF_RULES = ('_state', '_fp32_param', 't', 'enabled', '_use_fp32_update',
             '_hookable')
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
                 finish: Callable[[str], object]) -> None:
        _install()
        self._finish = finish
        self._waiting = {id(parameter): (name, parameter)
                         for name, parameter in parameters.items()}
        self._to_do: dict[str, list[Callable[[], None]]] = {}
        self._rules: dict[str, list[Any]] = {}
        self._failed: dict[str, BaseException] = {}
        self._hookables: dict[int, Any] = {}
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
            the loss dynamically, it or an update rule has a hook (other than
            Chainer's that look at one parameter at a time, and those with
            ``reads_gradients = False``), or it has parameters that were not
            averaged.
        """
        parameters = list(optimizer.target.params())
        before, after = _hooks_of(optimizer)
        # To ask for hooks is a look, at a second update after one mean.
        if (optimizer._loss_scaling_is_dynamic
                or not all(map(_can_wait, [*before, *after]))
                or not all(_can_wait(hook) for parameter in parameters
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
            Exception: What ``finish`` or the update raises, at every look.
        """
        with self._lock:
            name, _ = self._waiting.get(id(parameter), ('', None))
            # While it is updated here it looks at itself.
            if not name or name in self._busy:
                return
            if name in self._failed:
                raise self._failed[name]
            self._busy.add(name)
            try:
                self._finish(name)
                self._act(name)
            finally:
                self._busy.discard(name)
            _unmark(parameter)
            for rule in self._rules.pop(name, ()):
                _unmark(rule)
            del self._waiting[id(parameter)]
            if not self._waiting:       # what it refers to is not needed
                self._finish = str

    def _act(self, name: str) -> None:
        """Does what is to be done with a parameter, once."""
        try:
            for action in self._to_do.pop(name, ()):
                action()
        except BaseException as error:      # it may be half done
            self._failed[name] = error
            raise

    def _call(self, hook: Any, optimizer: Any,
              parameters: list[chainer.Parameter]) -> None:
        if type(hook) not in _ONE_BY_ONE:
            if not getattr(hook, 'call_for_each_param', False):
                hook(optimizer)
                return
            for parameter in parameters:
                hook(parameter.update_rule, parameter)
            return
        # Whoever changes its rate now means the next update.
        hook = copy.copy(hook)
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
        marked = isinstance(rule, _Marked)  # of a parameter with two names
        if not marked:
            hookable = copy.copy(rule._hookable)
            for timing in '_pre_update_hooks', '_post_update_hooks':
                setattr(hookable, timing, collections.OrderedDict(
                    (name, copy.copy(hook)) for name, hook
                    in getattr(hookable, timing).items()))
            self._hookables[id(rule)] = hookable
        self._add(parameter, functools.partial(
            _update, rule, parameter, hyperparam, self._hookables[id(rule)]))
        if not marked:
            _mark(rule, _Mark(self, parameter), _OF_RULES)
            name, _ = self._waiting[id(parameter)]
            self._rules.setdefault(name, []).append(rule)

    def _add(self, parameter: chainer.Parameter,
             action: Callable[[], None]) -> None:
        name, _ = self._waiting[id(parameter)]
        self._to_do.setdefault(name, []).append(action)


def _hooks_of(owner: Any) -> tuple[list[Any], list[Any]]:
    """Before and after the update, of an optimizer or an update rule."""
    return (list(owner._hookable._pre_update_hooks.values()),
            list(owner._hookable._post_update_hooks.values()))


def _can_wait(hook: Any) -> bool:
    return (type(hook) in _ONE_BY_ONE
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
            hyperparam: Hyperparameter, hookable: Any) -> None:
    own = rule.hyperparam, rule._hookable
    rule.hyperparam, rule._hookable = hyperparam, hookable
    try:
        rule.update(parameter)
    finally:
        rule.hyperparam, rule._hookable = own


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

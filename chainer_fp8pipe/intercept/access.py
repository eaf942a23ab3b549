"""Access hooks: a call before some attributes of an object are read or set."""
# An object with a hook gets a subclass of its class, in which these attributes
# are properties.  Neither Chainer's classes nor other objects are changed, so
# other packages' patches of the classes do not matter.  When the hook is
# removed, in any thread, the object has its own class back.  If another
# package has meanwhile given the object a class derived from the subclass, the
# object keeps that class, and its properties call nothing until the next hook.
from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, Protocol

import chainer

from .patching import Patch

_HOOK = '_access_hook'


class AccessHook(Protocol):
    """Is told before each access to another object."""

    def before_access(self, subject: Any) -> None:
        """Prepares the subject; the access takes place afterwards."""

    def adopt(self, optimizer: Any) -> bool:
        """Whether the hook takes over an optimizer's update, for later."""


class _Call(NamedTuple):
    hook: Any
    subject: Any


def add_hook(owner: Any, attributes: tuple[str, ...], hook: AccessHook,
             subject: Any) -> None:
    """Has ``hook.before_access(subject)`` called before each access.

    An access reads or sets one of the attributes, copies the object or
    pickles it.

    Args:
        owner: The object; must have a ``__dict__``.
        attributes: Names of the attributes.
        hook: The hook.
        subject: The hook's argument.

    Raises:
        RuntimeError: The object has a hook already.
    """
    if hook_of(owner) is not None:
        raise RuntimeError(f'{type(owner).__name__} object has an access hook '
                           'already; read one of its attributes first')
    kind: Any = type(owner)
    vars(owner)[_HOOK] = _Call(hook, subject)
    if not issubclass(kind, _Hooked):
        owner.__class__ = _hooked(kind, attributes)


def remove_hook(owner: Any) -> None:
    """Removes an object's hook; objects without one stay as they are."""
    if vars(owner).pop(_HOOK, None) is not None and (
            type(owner).__bases__[0] is _Hooked):
        owner.__class__ = _class_before(owner)


def hook_of(owner: Any) -> Any:
    """The hook of an object; None if there is none."""
    found = vars(owner).get(_HOOK)
    return found.hook if found else None


def hook_in(model: chainer.Link) -> Any:
    """The hook of a model's parameters; None: they have none."""
    return next(filter(None, map(hook_of, model.params())), None)


def without_hook(owner: Any) -> Any:
    """A shallow copy without hook, for the hook's own accesses."""
    kind: Any = _class_before(owner)
    made = kind.__new__(kind)
    vars(made).update(vars(owner))
    vars(made).pop(_HOOK, None)
    return made


class _Hooked:
    def __copy__(self) -> Any:
        return copy.copy(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class _Attribute:
    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self._default
        _call_hook(owner)
        return vars(owner).get(self._name, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        _call_hook(owner)
        vars(owner)[self._name] = value


def _class_before(owner: Any) -> type:
    """The class that an object has without a hook."""
    classes = type(owner).__mro__
    if _Hooked not in classes:
        return classes[0]
    return classes[classes.index(_Hooked) + 1]


def _plain(owner: Any) -> Any:
    """The object, or a copy without hook if the hook stays after the call."""
    _call_hook(owner)
    # Usually the call has removed the hook.
    return without_hook(owner) if isinstance(owner, _Hooked) else owner


def _call_hook(owner: Any) -> None:
    found = vars(owner).get(_HOOK)
    if found:                   # another thread may have taken it off
        found.hook.before_access(found.subject)


@functools.lru_cache(None)
def _hooked(kind: Any, attributes: tuple[str, ...]) -> type:
    return type(kind.__name__, (_Hooked, kind), {
        name: _Attribute(name, getattr(kind, name, None))
        for name in attributes})


def _asking(original: Any) -> Any:
    def update(self: Any, lossfun: Any = None, *args: Any,
               **kwargs: Any) -> None:
        hook = hook_in(self.target) if lossfun is None else None
        if hook is None or not hook.adopt(self):
            original(self, lossfun, *args, **kwargs)
    return update


#: Has optimizers ask the hook of their parameters before they update without
#: a loss function: ``GradientMethod.update`` (Chainer 7.8.1,
#: chainer/optimizer.py, line 857), which Chainer's optimizers inherit and
#: ChainerMN's call.
UPDATES = Patch(chainer.GradientMethod, 'update', _asking)

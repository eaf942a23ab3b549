"""Asks a keeper before some attributes of an object are read or set.

A marked object gets a subclass of its class, in which these attributes are
properties.  Neither Chainer's classes nor other objects are changed, so other
packages' patches of the classes do not matter.  When the mark is taken off, in
any thread, the object has its own class back.  One object has one mark at a
time.  If another package has meanwhile given the object a class derived from
the marked one, the object keeps that class, and its properties ask nobody
until the next mark.
"""
from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, Protocol

_MARK = '_mark'


class Keeper(Protocol):
    """Is asked before each look at a marked object."""

    def look_at(self, subject: Any) -> None:
        """Prepares the subject; the look takes place afterwards."""


class _Mark(NamedTuple):
    keeper: Any
    subject: Any


def mark(owner: Any, attributes: tuple[str, ...], keeper: Keeper,
         subject: Any) -> None:
    """Has ``keeper.look_at(subject)`` called before each look.

    A look reads or sets one of the attributes, copies or pickles the object.

    Args:
        owner: The object; must have a ``__dict__``.
        attributes: Names of the attributes.
        keeper: Is asked.
        subject: Is given to the keeper.

    Raises:
        RuntimeError: The object has a mark already.
    """
    if keeper_of(owner) is not None:
        raise RuntimeError(f'{type(owner).__name__} object is marked already; '
                           'look at one of its attributes first')
    kind: Any = type(owner)
    vars(owner)[_MARK] = _Mark(keeper, subject)
    if not issubclass(kind, _Marked):
        owner.__class__ = _marked(kind, attributes)


def unmark(owner: Any) -> None:
    """Takes the mark off an object; others stay as they are."""
    if vars(owner).pop(_MARK, None) is not None and (
            type(owner).__bases__[0] is _Marked):
        owner.__class__ = _class_before(owner)


def keeper_of(owner: Any) -> Any:
    """The keeper of an object; None: the object is not marked."""
    found = vars(owner).get(_MARK)
    return found.keeper if found else None


def unmarked(owner: Any) -> Any:
    """A shallow copy without mark, for keepers, which need not be asked."""
    kind: Any = _class_before(owner)
    made = kind.__new__(kind)
    vars(made).update(vars(owner))
    vars(made).pop(_MARK, None)
    return made


class _Marked:
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
        _look_at(owner)
        return vars(owner).get(self._name, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        _look_at(owner)
        vars(owner)[self._name] = value


def _class_before(owner: Any) -> type:
    """The class that an object has without a mark."""
    classes = type(owner).__mro__
    if _Marked not in classes:
        return classes[0]
    return classes[classes.index(_Marked) + 1]


def _plain(owner: Any) -> Any:
    """A marked object, or an unmarked copy if the mark stays after a look."""
    _look_at(owner)
    # Usually the look has taken the mark off.
    return unmarked(owner) if isinstance(owner, _Marked) else owner


def _look_at(owner: Any) -> None:
    found = vars(owner).get(_MARK)
    if found:                   # another thread may have taken it off
        found.keeper.look_at(found.subject)


@functools.lru_cache(None)
def _marked(kind: Any, attributes: tuple[str, ...]) -> type:
    return type(kind.__name__, (_Marked, kind), {
        name: _Attribute(name, getattr(kind, name, None))
        for name in attributes})

"""Asks a keeper before anybody looks at an object.

A mark is a subclass, made for the purpose, of the class that the object has.
Its properties stand before the attributes that all ways to the object's
contents go through.

No class of Chainer is changed, so two packages cannot meet in one; and no
other object is: a marked one has its own class back when the mark is taken
off, in any thread.  One object has one mark at a time.  If another package has
given the object a class derived from the mark's meanwhile, the object keeps
that one, and its properties ask nobody until the next mark.
"""
from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, Protocol

_MARK = '_mark'


class Keeper(Protocol):
    """An object that is asked before each look at a marked one."""

    def look_at(self, subject: Any) -> None:
        """Prepares the subject; the look takes place when this returns."""


class _Mark(NamedTuple):
    keeper: Any
    subject: Any


def mark(owner: Any, attributes: tuple[str, ...], keeper: Keeper,
         subject: Any) -> None:
    """Has a keeper asked before each look at some attributes.

    Copies and pickles are looks, too.

    Args:
        owner: The object; one with a ``__dict__``.
        attributes: Their names.
        keeper: Its ``look_at`` is called.
        subject: With this.

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
    """Gives a marked object its own class back; others stay as they are."""
    if vars(owner).pop(_MARK, None) is not None and (
            type(owner).__bases__[0] is _Marked):
        owner.__class__ = _class_before(owner)


def keeper_of(owner: Any) -> Any:
    """Returns the keeper of an object; None: the object is not marked."""
    found = vars(owner).get(_MARK)
    return found.keeper if found else None


def unmarked(owner: Any) -> Any:
    """Returns a copy without mark; what the copy refers to is the owner's.

    For the keeper, which looks often and need not be asked.
    """
    kind: Any = _class_before(owner)
    made = kind.__new__(kind)
    vars(made).update(vars(owner))
    vars(made).pop(_MARK, None)
    return made


class _Marked:
    """What marked objects have in common."""

    def __copy__(self) -> Any:
        return copy.copy(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class _Attribute:
    """An attribute of a marked object."""

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
    """The class of an object without a mark."""
    classes = type(owner).__mro__
    if _Marked not in classes:
        return classes[0]
    return classes[classes.index(_Marked) + 1]


def _plain(owner: Any) -> Any:
    """A marked object, after a look, as one that is not marked."""
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

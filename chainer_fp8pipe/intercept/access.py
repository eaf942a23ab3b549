"""Objects that have something done before anybody looks at them.

A mark is a subclass, made for the purpose, of the class that the object has.
Its properties stand before the attributes that all ways to the object's
contents go through.
"""
from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, Protocol

_MARK = '_mark'


class Keeper(Protocol):
    """Who is asked before a look."""

    def look_at(self, subject: Any) -> None:
        """Does what is to be done; the look follows."""


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
    """
    kind: Any = type(owner)
    vars(owner)[_MARK] = _Mark(keeper, subject)
    owner.__class__ = _marked(kind, attributes)


def unmark(owner: Any) -> None:
    """Makes it again what it was, if it is marked."""
    if vars(owner).pop(_MARK, None) is not None:
        owner.__class__ = _class_before(owner)


def keeper_of(owner: Any) -> Any:
    """Who is asked before a look at this object; None: nobody."""
    found = vars(owner).get(_MARK)
    return found.keeper if found else None


def unmarked(owner: Any) -> Any:
    """A copy without mark; what it refers to is the owner's.

    For the keeper, who looks often and need not be asked.
    """
    kind: Any = _class_before(owner) if keeper_of(owner) else type(owner)
    made = kind.__new__(kind)
    vars(made).update(vars(owner))
    vars(made).pop(_MARK, None)
    return made


class _Marked:
    """What marked objects have in common."""

    def __copy__(self) -> Any:
        # Of what is not there yet.  After the look this has another class.
        _look_at(self)
        return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _look_at(self)
        return self.__reduce_ex__(protocol)


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
    """The class of a marked object before it was marked."""
    return type(owner).__mro__[2]       # after the mark and _Marked


def _look_at(owner: Any) -> None:
    found = vars(owner).get(_MARK)
    if found:                   # another thread may have taken it off
        found.keeper.look_at(found.subject)


@functools.lru_cache(None)
def _marked(kind: Any, attributes: tuple[str, ...]) -> type:
    return type(kind.__name__, (_Marked, kind), {
        name: _Attribute(name, getattr(kind, name, None))
        for name in attributes})

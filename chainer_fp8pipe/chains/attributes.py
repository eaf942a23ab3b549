"""What links keep in attributes, put back after a look at the model."""
# partition() runs forward on an example, and a link's own code on made-up
# values; what links keep must be as before then, whatever it is: an array, a
# list, a generator of random numbers, an object of the user's own that holds
# one.  So an object is noted whole: its items, the attributes of its
# `__dict__` and `__slots__`, the variables that a function closes over, and
# what C code keeps, as `copy` and `pickle` see it.  It is put back in place,
# as others may hold it, too; an object of C code that cannot be set is made
# anew.  Links, parameters, modules, threads, communicators and what Python
# cannot copy (files, locks, generators) are left alone.  In training, where
# forward runs once for a micro-batch, nothing is put back.
from __future__ import annotations

import collections
import operator
import random
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import chainer
import numpy

from .placeholder import is_placeholder

#: In place of an attribute that a link has not got.
ABSENT: Any = object()
_OWN = frozenset(('_params', '_persistent', '_children'))
Links = Mapping[str, chainer.Link]
Attribute = tuple[str, str]     # path of a link, name
#: What never changes in itself.
_FIXED = (int, float, complex, str, bytes, slice, range, type, type(None),
          types.ModuleType, numpy.dtype, numpy.generic, numpy.ufunc,
          chainer.Link, chainer.Parameter)
#: Modules whose objects have threads, locks or other ranks behind them.
_FOREIGN = frozenset((
    'asyncio', 'chainer', 'chainer_fp8pipe', 'chainermn', 'concurrent',
    'logging', 'mpi4py', 'multiprocessing', 'queue', 'socket', 'subprocess',
    'threading'))
#: Objects inside of each other that are noted.
_DEPTH = 100
_GENERATORS = (numpy.random.RandomState, numpy.random.BitGenerator,
               random.Random)
#: The generator behind the functions of ``random``.
_OF_PYTHON = vars(random)['_inst']
_HEAP_TYPE = 1 << 9     # Py_TPFLAGS_HEAPTYPE


class saved:
    """A ``with`` block after which links are as they were before.

    Args:
        links: By path.

    Attributes:
        memo: What was noted, by the ids of the objects.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    def __enter__(self) -> saved:
        return self.note()

    def __exit__(self, *_: Any) -> None:
        self.put_back()

    def note(self) -> saved:
        """Notes the attributes as they are now."""
        self._before: dict[Attribute, Any] = {}
        self.memo: dict[int, _Noted] = {}
        for path, name in self._names():
            link = self._links[path]
            value = vars(link).get(name, ABSENT)
            self._before[path, name] = (
                value if name in link._params else _noted(value, self.memo))
        return self

    def put_back(self) -> None:
        """Restores the attributes that were noted; may be repeated."""
        for path, name in self._present():
            if (path, name) not in self._before:
                del vars(self._links[path])[name]
        done: dict[int, Any] = {}
        for (path, name), before in self._before.items():
            restore(self._links[path], name, _put_back(before, done))

    def changed(self) -> frozenset[Attribute]:
        """The attributes that are not as they were."""
        return frozenset(
            (path, name) for path, name in self._present()
            if _is_changed(self._before.get((path, name), ABSENT),
                          vars(self._links[path])[name], set()))

    def _names(self) -> Iterable[Attribute]:
        return [
            (path, name) for path, link in self._links.items()
            for name in vars(link) if name not in _OWN]

    def _present(self) -> list[Attribute]:
        return [(path, name) for path, name in self._names()
                if name in vars(self._links[path])]


def generators(memo: dict[int, _Noted]) -> list[Any]:
    """The generators of random numbers among what was noted."""
    return [content.value for content in memo.values()
            if isinstance(content.value, _GENERATORS)
            and content.value is not _OF_PYTHON]


def state_of(generator: Any) -> Any:
    """A generator's state, for :func:`set_state`; None: it tells none."""
    found = _reduced(generator)         # not of SystemRandom
    return None if found is None else found[2]


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to another one's state; None leaves it as it is."""
    if state is not None:
        generator.__setstate__(state)


def restore(link: chainer.Link, name: str, value: Any) -> None:
    """Sets an attribute, or deletes it if it was ABSENT."""
    if value is ABSENT:
        vars(link).pop(name, None)
    else:
        vars(link)[name] = value


# --- the content of an object ------------------------------------------------

class _Way(NamedTuple):
    """How one part of an object's content is read and written.

    Attributes:
        read: Gives a list, a dictionary or an array.
        write: Is given the object, and such a content; None: it consists of
            other objects, which are put back themselves.
        is_fresh: Whether each reading makes other objects.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] | None
    is_fresh: bool = False


class _Noted:
    """An object that may change, with its content as it was read."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.parts: list[tuple[_Way, Any]] = []


def _noted(value: Any, memo: dict[int, _Noted], depth: int = 0) -> Any:
    """A :class:`_Noted` of a value that may change; others themselves."""
    if isinstance(value, _FIXED) or is_placeholder(value) or depth > _DEPTH:
        return value
    if id(value) in memo:
        return memo[id(value)]
    ways = _ways(value)
    if not ways:
        return value
    content = memo[id(value)] = _Noted(value)
    for way in ways:
        content.parts.append((way, _inside(
            way.read(value), lambda item: _noted(item, memo, depth + 1))))
    return content


def _put_back(before: Any, done: dict[int, Any]) -> Any:
    """The noted object with its noted content, in place if possible."""
    if not isinstance(before, _Noted):
        return before
    if id(before) in done:
        return done[id(before)]
    value = done[id(before)] = before.value
    for way, inside in before.parts:
        content = _inside(inside, lambda item: _put_back(item, done))
        if way.write is not None:
            written = way.write(value, content)
            value = done[id(before)] = value if written is None else written
    return value


def _is_changed(before: Any, now: Any, seen: set[int], fresh: bool = False
               ) -> bool:
    """Whether a value was replaced, or its content changed.

    With ``fresh`` equal values are the same, as each reading makes new ones.
    """
    if not isinstance(before, _Noted):
        return now is not before and not (fresh and _equal(before, now))
    if now is not before.value and not fresh:
        return True
    if id(before) in seen:
        return False
    seen.add(id(before))
    if type(now) is not type(before.value):
        return True
    return any(_differs(inside, way.read(now), seen, fresh or way.is_fresh)
               for way, inside in before.parts)


def _differs(before: Any, now: Any, seen: set[int], fresh: bool) -> bool:
    if isinstance(before, dict):
        return list(before) != list(now) or any(
            _is_changed(before[key], now[key], seen, fresh) for key in before)
    if isinstance(before, list):
        return len(before) != len(now) or any(
            _is_changed(one, other, seen, fresh)
            for one, other in zip(before, now, strict=True))
    if isinstance(before, set):
        return bool(before != now)
    return before.shape != now.shape or bool((before != now).any())


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:       # of an object that cannot be compared
        return False


def _inside(content: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a content, with ``change`` applied to each item."""
    if isinstance(content, dict):
        return {key: change(item) for key, item in content.items()}
    if isinstance(content, list):
        return list(map(change, content))
    return content.copy()


def _ways(value: Any) -> list[_Way]:
    """The ways to an object's content; none if it is left alone."""
    if isinstance(value, chainer.get_array_types()):
        # What cannot be written to may be large: a file in memory, say.
        return [_ARRAY] * bool(getattr(value.flags, 'writeable', True))
    if isinstance(value, chainer.Variable):
        return [_VARIABLE]
    if isinstance(value, types.FunctionType):
        return [_CLOSURE] * bool(value.__closure__)
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [_METHOD]
    # What draws for NumPy's functions is seeded anew for each pass.
    if (type(value).__module__.partition('.')[0] in _FOREIGN
            or value is numpy.random.mtrand._rand):
        return []
    found = [way for kind, way in _CONTAINERS if isinstance(value, kind)][:1]
    if not found and _base(type(value)) is not object and (
            _reduced(value) is not None):
        found = [_STATE]
    if hasattr(value, '__dict__') or _slots(type(value)):
        found.append(_ATTRIBUTES)
    return found


def _base(kind: type) -> type:
    """The innermost class that is written in C."""
    for base in kind.__mro__:
        new: Any = base.__new__
        if not base.__flags__ & _HEAP_TYPE or (
                isinstance(new, types.BuiltinMethodType)
                and new.__self__ is base):
            return base
    return object


def _reduced(value: Any) -> list[Any] | None:
    """Function, arguments and state of which an object can be made.

    None: Python does not know.
    """
    try:
        found = value.__reduce_ex__(4)
    except Exception:       # a lock, a file, a generator
        return None
    return None if isinstance(found, str) else [
        found[0], found[1], found[2] if len(found) > 2 else None]


def _set_state(value: Any, content: list[Any]) -> Any:
    """Writes what C code keeps; returns a new object where that fails."""
    function, arguments, state = content
    if state is not None and hasattr(value, '__setstate__'):
        value.__setstate__(state)
    now = _reduced(value)
    if now is None or all(one is other or _equal(one, other)
                          for one, other in zip(arguments, now[1],
                                                strict=False)):
        return None
    made = function(*arguments)
    if state is not None and hasattr(made, '__setstate__'):
        made.__setstate__(state)
    return made


def _slots(kind: type) -> dict[str, Any]:
    """The descriptors of ``__slots__``, by name."""
    return {name: one for base in kind.__mro__
            for name, one in vars(base).items()
            if isinstance(one, types.MemberDescriptorType)
            and '__slots__' in vars(base)}


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, '__dict__', {}))
    for name, slot in _slots(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:      # not set
            continue
    return found


def _set_attributes(value: Any, content: dict[str, Any]) -> None:
    slots = _slots(type(value))
    for name, slot in slots.items():
        if name in content:
            slot.__set__(value, content[name])
        elif name in _attributes(value):
            slot.__delete__(value)
    if hasattr(value, '__dict__'):
        own = value.__dict__
        for name in [name for name in own if name not in content]:
            del own[name]
        own.update((name, item) for name, item in content.items()
                   if name not in slots)


def _set_items(value: Any, content: Any) -> None:
    value.clear()
    (value.update if hasattr(value, 'update') else value.extend)(content)


def _cells(function: Any) -> list[Any]:
    return [getattr(cell, 'cell_contents', ABSENT)
            for cell in function.__closure__]


def _set_cells(function: Any, content: list[Any]) -> None:
    for cell, item in zip(function.__closure__, content, strict=True):
        if item is not ABSENT:
            cell.cell_contents = item


_ARRAY = _Way(lambda value: value,
              lambda value, content: operator.setitem(value, ..., content))
_VARIABLE = _Way(lambda value: value._data[:1],
                 lambda value, content: operator.setitem(
                     value._data, slice(1), content))
_CLOSURE = _Way(_cells, _set_cells)
_METHOD = _Way(lambda value: [value.__self__], None)
_STATE = _Way(_reduced, _set_state, is_fresh=True)
_ATTRIBUTES = _Way(_attributes, _set_attributes)
_CONTAINERS: tuple[tuple[Any, _Way], ...] = (
    (dict, _Way(dict, _set_items)), (set, _Way(set, _set_items)),
    ((list, collections.deque), _Way(list, _set_items)),
    (bytearray, _Way(list, lambda value, content: operator.setitem(
        value, slice(None), bytes(content)))), (tuple, _Way(list, None)))

"""What links keep in attributes, put back after a look at the model."""
# partition() runs forward on an example, and a link's own code on made-up
# values; what links keep must be as before then: arrays, containers,
# generators of random numbers, and attributes of objects that hold these, or
# of what functions close over.  Each is put back in place, as others may hold
# it, too.  Links, parameters, modules, threads and communicators are left
# alone, and so are slots, variables of a closure and what only C code sees.
# In training, where forward runs once for a micro-batch, nothing is put back.
from __future__ import annotations

import collections
import contextlib
import functools
import random
import types
from collections.abc import Iterable, Mapping
from typing import Any

import chainer
import numpy

from .placeholder import is_placeholder

#: In place of an attribute that a link has not got.
_ABSENT: Any = object()
_OWN = frozenset(('_params', '_persistent', '_children'))
Attribute = tuple[str, str]     # path of a link, name
#: What never changes in itself, or is left alone.
_FIXED = (int, float, complex, str, bytes, slice, range, type, type(None),
          types.ModuleType, numpy.dtype, numpy.generic, numpy.ufunc,
          chainer.Link, chainer.Parameter)
#: Modules whose objects have threads, locks or other ranks behind them.
_FOREIGN = frozenset((
    'asyncio', 'chainer', 'chainer_fp8pipe', 'chainermn', 'concurrent',
    'logging', 'mpi4py', 'multiprocessing', 'queue', 'socket', 'subprocess',
    'threading'))
_CONTAINERS: tuple[Any, ...] = (list, set, dict, collections.deque)
_GENERATORS = (numpy.random.RandomState, numpy.random.BitGenerator,
               random.Random)
#: Those behind NumPy's and Python's functions, which each pass seeds anew.
_SEEDED = numpy.random.mtrand._rand, vars(random)['_inst']


class saved:
    """A ``with`` block after which links are as they were before.

    Args:
        links: By path.
    """

    def __init__(self, links: Mapping[str, chainer.Link]) -> None:
        self._links = links

    def __enter__(self) -> saved:
        return self.note()

    def __exit__(self, *_: Any) -> None:
        self.put_back()

    def note(self) -> saved:
        """Notes the attributes as they are now."""
        self._before = {(path, name): vars(self._links[path])[name]
                        for path, name in self._names()}
        # By id, what may change, and a copy of what is in it.
        self._noted: dict[int, tuple[Any, list[Any]]] = {}
        to_do = [value for (path, name), value in self._before.items()
                 if name not in self._links[path]._params]
        while to_do:
            value = to_do.pop()
            if id(value) not in self._noted and not isinstance(
                    value, _FIXED) and not is_placeholder(value):
                contents = _contents(value)
                self._noted[id(value)] = value, contents
                to_do += [item for content in contents
                          for item in _items(content)]
        return self

    def put_back(self) -> None:
        """Restores the attributes that were noted; may be repeated."""
        for path, name in self._names():
            if (path, name) not in self._before:
                del vars(self._links[path])[name]
        for (path, name), value in self._before.items():
            vars(self._links[path])[name] = value
        for value, contents in self._noted.values():
            _write(value, contents)

    def replaced(self) -> frozenset[Attribute]:
        """The attributes that are other objects now."""
        return frozenset(
            (path, name) for path, name in self._names()
            if self._before.get((path, name), _ABSENT)
            is not vars(self._links[path])[name])

    def generators(self) -> list[Any]:
        """The generators of random numbers among what was noted."""
        return [value for value, _ in self._noted.values()
                if isinstance(value, _GENERATORS)]

    def _names(self) -> list[Attribute]:
        return [(path, name) for path, link in self._links.items()
                for name in vars(link) if name not in _OWN]


def state_of(generator: Any) -> Any:
    """A generator's state, for :func:`set_state`; None: it tells none."""
    if isinstance(generator, numpy.random.BitGenerator):
        return generator.state
    with contextlib.suppress(NotImplementedError):  # of SystemRandom
        return (generator.get_state() if hasattr(generator, 'get_state')
                else generator.getstate())
    return None


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to another one's state; None leaves it as it is."""
    if state is None:
        return
    if isinstance(generator, numpy.random.BitGenerator):
        generator.state = state
    elif hasattr(generator, 'set_state'):
        generator.set_state(state)
    else:
        generator.setstate(state)


# --- the content of an object ------------------------------------------------

class _Attributes(dict):
    """Those of an object, of which it may have items as well."""


class _State(tuple):
    """That of a generator."""


def _contents(value: Any) -> list[Any]:
    """Copies of what is in an object; none if it is left alone."""
    if isinstance(value, chainer.get_array_types()):
        # What cannot be written to may be large: a file in memory, say.
        return [value.copy()] if getattr(
            value.flags, 'writeable', True) else []
    if isinstance(value, chainer.Variable):
        return [value._data[:1]]
    if type(value).__module__.partition('.')[0] in _FOREIGN or any(
            value is one for one in _SEEDED):
        return []
    if isinstance(value, _GENERATORS):
        return [_State((state_of(value),))]
    found: list[Any] = [_held(value)]
    if isinstance(value, _CONTAINERS):
        kind = next(one for one in _CONTAINERS if isinstance(value, one))
        found.append(list(value) if kind is collections.deque
                     else kind(value))
    if hasattr(value, '__dict__') and not isinstance(
            value, types.FunctionType):
        found.append(_Attributes(vars(value)))
    return found


def _held(value: Any) -> tuple[Any, ...]:
    """Objects that another one holds for good, as seen from here."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator,
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        return tuple([getattr(cell, 'cell_contents', None)
                      for cell in value.__closure__ or ()])
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return value.__self__,
    return tuple([one.__get__(value, type(value))
                  for kind in type(value).__mro__
                  for name, one in vars(kind).items()
                  if isinstance(one, types.MemberDescriptorType)
                  and '__slots__' in vars(kind) and hasattr(value, name)])


def _items(content: Any) -> Iterable[Any]:
    """Objects in a content, which may change themselves."""
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, (list, set, tuple)) and not (
        isinstance(content, _State)) else ()


def _write(value: Any, contents: list[Any]) -> None:
    for content in contents:
        if isinstance(content, _Attributes):
            vars(value).clear()
            vars(value).update(content)
        elif isinstance(content, _State):
            set_state(value, *content)
        elif type(content) is tuple:
            continue            # what is in it has been written to itself
        elif isinstance(value, chainer.Variable):
            value._data[:1] = content
        elif isinstance(value, _CONTAINERS):
            value.clear()
            (value.extend if isinstance(content, list)
             else value.update)(content)
        else:
            value[...] = content

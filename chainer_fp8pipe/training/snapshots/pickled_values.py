"""Arrays of objects in snapshots of older versions, read without unpickling.

Older versions had NumPy pickle arrays of objects.  A pickle is a program for
a machine that may call anything; a restricted ``pickle.Unpickler`` still runs
that machine, which allocates by the program's numbers.  Here the program is
looked at as data: the few instructions that make None, numbers, texts, lists,
tuples and dictionaries are carried out, on Python's own values, and those
that call something are accepted only where they stand for NumPy's array
around them.  Nothing is called, and nothing is larger than the bytes that
spell it: a container cannot be used twice.
"""
from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable
from typing import Any

import numpy

from .zip_directory import DamagedSnapshot

#: Bytes of a pickle, of which Python's objects take some twenty times more.
LARGEST = 1 << 20
_ARRAY, _DTYPE = 'numpy.ndarray', 'numpy.dtype'
_CALLS = '_reconstruct', 'scalar'
_GLOBALS = {
    ('numpy', 'ndarray'): _ARRAY, ('numpy', 'dtype'): _DTYPE,
    **{(f'numpy.{core}.multiarray', name): name
       for core in ('core', '_core') for name in _CALLS},
}
_FRESH: dict[str, Callable[[], Any]] = {
    'NONE': lambda: None, 'NEWTRUE': lambda: True, 'NEWFALSE': lambda: False,
    'EMPTY_LIST': list, 'EMPTY_TUPLE': tuple, 'EMPTY_DICT': dict}
_LITERALS = {
    'BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT', 'BINUNICODE',
    'SHORT_BINUNICODE', 'BINUNICODE8', 'BINBYTES', 'SHORT_BINBYTES'}
_IMMUTABLE = (type(None), bool, int, float, str, bytes, numpy.generic)


class _Mark:
    """Where the parts of a container begin."""


class _Global:
    """The name of one of NumPy's, which is never looked up."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """What NumPy's functions would make of their arguments."""

    def __init__(self, name: str, kind: str = '') -> None:
        self.name = name
        self.kind = kind            # of a dtype, such as f4
        self.state: Any = None


def unpickled(program: bytes) -> numpy.ndarray:
    """The array of objects that a pickle describes.

    Raises:
        DamagedSnapshot: It describes something else, or is no pickle.
    """
    if len(program) > LARGEST:
        raise DamagedSnapshot('a pickled value is larger than any was')
    try:
        return _array(_Machine().run(program))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError,
            struct.error, OverflowError) as error:
        raise DamagedSnapshot(
            'a pickled value is more than numbers, texts, lists and '
            f'dictionaries, and is not read: {error}') from None


def _array(made: Any) -> numpy.ndarray:
    version, shape, dtype, by_columns, items = made.state
    if (made.name != _ARRAY or version != 1 or dtype.name != _DTYPE
            or dtype.kind not in ('O', 'O8', 'O4')
            or not isinstance(items, list) or math.prod(shape) != len(items)
            or min(shape, default=0) < 0):
        raise ValueError('no array of objects')
    value = numpy.empty(len(items), object)
    for place, item in enumerate(items):
        if isinstance(item, (_Made, _Global, _Mark)):
            raise ValueError("one of NumPy's")
        value[place] = item
    return value.reshape(shape, order='F' if by_columns else 'C')


def _number(made: Any, bits: bytes) -> Any:
    """One of NumPy's numbers."""
    dtype = numpy.dtype(made.state[1].replace('|', '=') + made.kind)
    if dtype.kind not in 'biufc' or len(bits) != dtype.itemsize:
        raise ValueError('a number of another size')
    return numpy.frombuffer(bits, dtype)[0]


class _Machine:
    """The stack and the memory of a pickle's program."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._kept: dict[int, Any] = {}
        self._do: dict[str, Callable[[], None]] = {
            'REDUCE': self._call, 'BUILD': self._build,
            'APPEND': lambda: self._append([self._stack.pop()]),
            'APPENDS': lambda: self._append(self._parts()),
            'SETITEM': lambda: self._set([self._stack.pop(-2),
                                          self._stack.pop()]),
            'SETITEMS': lambda: self._set(self._parts()),
            'STACK_GLOBAL': lambda: self._name(self._stack.pop(-2),
                                               self._stack.pop()),
            'TUPLE': lambda: self._stack.append(tuple(self._parts())),
        }

    def run(self, program: bytes) -> Any:
        """Carries a program out; its result."""
        for operation, argument, place in pickletools.genops(program):
            name = operation.name
            if name == 'STOP':
                if place != len(program) - 1 or len(self._stack) != 1:
                    raise ValueError('more than one value')
                return self._stack.pop()
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in self._do:
                self._do[name]()
            else:
                self._other(name, argument)
        raise ValueError('no end')

    def _other(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _FRESH:
            stack.append(_FRESH[name]())
        elif name == 'MARK':
            stack.append(_Mark())
        elif name in ('BINPUT', 'LONG_BINPUT', 'MEMOIZE'):
            self._kept[len(self._kept) if argument is None
                       else argument] = stack[-1]
        elif name in ('BINGET', 'LONG_BINGET'):
            value = self._kept[argument]
            is_dtype = isinstance(value, _Made) and value.name == _DTYPE
            if not (is_dtype or isinstance(value, (*_IMMUTABLE, _Global))
                    or value == ()):
                raise ValueError('a value in two places')
            stack.append(value)
        elif name == 'GLOBAL':
            self._name(*argument.split(' '))
        elif name in ('TUPLE1', 'TUPLE2', 'TUPLE3'):
            count = int(name[-1])
            if len(stack) < count:
                raise ValueError('too few values')
            stack[-count:] = [tuple(stack[-count:])]
        elif name not in ('PROTO', 'FRAME'):
            raise ValueError(f'the instruction {name}')

    def _parts(self) -> list[Any]:
        """Takes the values after the last mark from the stack."""
        place = max(place for place, value in enumerate(self._stack)
                    if isinstance(value, _Mark))
        parts = self._stack[place + 1:]
        del self._stack[place:]
        return parts

    def _append(self, parts: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError('no list')
        target.extend(parts)

    def _set(self, parts: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(parts) % 2:
            raise ValueError('no dictionary')
        target.update(zip(parts[::2], parts[1::2], strict=True))

    def _name(self, module: str, name: str) -> None:
        self._stack.append(_Global(_GLOBALS[module, name]))

    def _call(self) -> None:
        """Notes a call of NumPy's with the arguments that it always has."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if (function.name == '_reconstruct'
                and arguments[0].name == _ARRAY
                and arguments[1:] == ((0,), b'b')):
            self._stack.append(_Made(_ARRAY))
        elif function.name == _DTYPE:
            self._stack.append(_Made(_DTYPE, arguments[0]))
        elif function.name == 'scalar':
            self._stack.append(_number(*arguments))
        else:
            raise ValueError(f'a call of {function.name}')

    def _build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if not isinstance(made, _Made) or made.state is not None:
            raise ValueError('a state of nothing')
        made.state = state

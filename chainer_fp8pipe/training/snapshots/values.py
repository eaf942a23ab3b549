"""Values of Python's as arrays: what objects keep, and what is no array."""
# An array of numbers or texts is itself.  Anything else is JSON, in an array
# of dtype V1, which no other value has: None, numbers, texts, containers, and
# generators of random numbers.  Arrays in it are arrays of their own, whatever
# their size, with the keys ``KEY#0``, ``KEY#1``.  What JSON has not is a
# dictionary with one key, such as {"tuple": [...]}.
from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from .file import State, digest_of

JSON = numpy.dtype('V1')
_SEQUENCES: dict[str, Any] = {
    one.__name__: one for one in (tuple, set, frozenset, collections.deque)}
_CONTAINERS = list, dict, *_SEQUENCES.values()
_SIMPLE = frozenset((bool, int, float, str, type(None)))


def _set_generator(one: Any, state: Any) -> None:
    one.bit_generator.state = state


#: By class: how to get and to set a state, and to make one for a state.
_GENERATORS: dict[Any, tuple[Callable, Callable, Callable]] = {
    numpy.random.RandomState: (
        lambda one: one.get_state(legacy=False),
        numpy.random.RandomState.set_state,
        lambda state: numpy.random.RandomState()),
    numpy.random.Generator: (
        lambda one: one.bit_generator.state, _set_generator,
        lambda state: numpy.random.Generator(getattr(
            numpy.random, state['bit_generator'])())),
    random.Random: (random.Random.getstate, random.Random.setstate,
                    lambda state: random.Random())}
GENERATORS = tuple(_GENERATORS)


def is_plain(dtype: numpy.dtype) -> bool:
    """Whether a dtype is of numbers, texts or times, and nothing else."""
    return dtype.kind in 'biufcSUmM' and numpy.dtype(dtype.str) == dtype


def is_value(value: Any) -> bool:
    """Whether :func:`pack` takes it."""
    if type(value) in _SIMPLE:      # as most, of which there are thousands
        return True
    try:
        return bool(pack('', value))
    except TypeError:
        return False


def pack(key: str, value: Any) -> State:
    """Arrays from which :func:`unpack` makes an equal value.

    Raises:
        TypeError: A part of the value is of another kind than those above.
    """
    if isinstance(value, (numpy.generic, numpy.ndarray)) and is_plain(
            value.dtype):
        found = numpy.asarray(value)
        # NumPy's files know no empty texts.
        return {key: found if found.dtype.itemsize else
                found.astype(f'{found.dtype.kind}1')}
    text, arrays = _encoded(value, _refuse)
    return {key: numpy.frombuffer(text, JSON), **{
        f'{key}#{number}': array for number, array in enumerate(arrays)}}


def unpack(key: str, state: State) -> Any:
    """The value of :func:`pack`; an array stays one."""
    def decoded(value: dict[str, Any]) -> Any:
        (kind, content), = value.items()
        if kind in ('array', 'number'):
            found = state[f'{key}#{content}']
            return found if kind == 'array' else found[()]
        if kind == 'deque':
            return collections.deque(*content)
        for one, (_, set_state, make) in _GENERATORS.items():
            if kind == one.__name__:
                made = make(content)
                set_state(made, content)
                return made
        return dict(content) if kind == 'dict' else _SEQUENCES[kind](content)
    if state[key].dtype != JSON:
        return state[key]
    return json.loads(state[key].tobytes(), object_hook=decoded)


def fingerprint(value: Any) -> int:
    """A number that changes when a value does; objects are only told apart."""
    text, arrays = _encoded(value, lambda part: {'object': id(part)})
    return hash((text, *map(digest_of, arrays)))


def put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute, in place where it can be: others may refer to it."""
    now = attributes.get(name)
    if isinstance(value, numpy.ndarray) and isinstance(
            now, chainer.get_array_types()):
        value = chainer.backend.get_device_from_array(now).send(value)
        if (now.shape, now.dtype) == (value.shape, value.dtype) and getattr(
                getattr(now, 'flags', None), 'writeable', True):
            now[...] = value
            return
    elif isinstance(now, tuple) and hasattr(now, '_fields'):
        value = type(now)(*value)
    elif isinstance(value, (list, dict, set, collections.deque)) and (
            isinstance(now, type(value))):
        now.clear()
        (now.update if isinstance(now, (dict, set)) else now.extend)(value)
        return
    elif type(now) is type(value) in _GENERATORS:
        get_state, set_state, _ = _GENERATORS[type(now)]
        set_state(now, get_state(value))
        return
    attributes[name] = value


def _refuse(part: Any) -> Any:
    raise TypeError(f'it has an object of class {type(part).__name__}')


def _encoded(value: Any, other: Callable[[Any], Any]
             ) -> tuple[bytes, list[numpy.ndarray]]:
    """JSON, and the arrays in it; ``other`` gives JSON of another object."""
    arrays: list[numpy.ndarray] = []

    def json_of(value: Any) -> Any:
        kind = type(value)
        if kind in _SIMPLE:
            return value
        if kind in _CONTAINERS:
            found = [json_of(part) for part in (
                value.items() if kind is dict else value)]
            return found if kind is list else {kind.__name__: (
                [found, value.maxlen] if kind is collections.deque else found)}
        if kind in _GENERATORS:
            return {kind.__name__: json_of(_GENERATORS[kind][0](value))}
        if isinstance(value, (numpy.generic, *chainer.get_array_types())):
            array = numpy.asarray(chainer.backends.cuda.to_cpu(value))
            if is_plain(array.dtype) and array.dtype.itemsize:
                arrays.append(array)
                return {'number' if isinstance(value, numpy.generic)
                        else 'array': len(arrays) - 1}
        return other(value)
    # The script has made a subclass of a container again (put); the class of
    # one inside of another value would be lost.
    kind = next((one for one in _CONTAINERS if isinstance(value, one)), None)
    if kind not in (None, type(value), collections.deque):
        value = kind(value)
    try:
        return json.dumps(json_of(value)).encode(), arrays
    except RecursionError:
        raise TypeError('it is nested too deeply') from None

"""Values that are no arrays of numbers or texts, as JSON and back.

Trainers also save None (an optimizer that had no state yet, a trigger that
has not fired), and users' own extensions save lists, tuples and dictionaries.
NumPy makes arrays of objects of those, and files of arrays of objects are
pickles, which can run code when they are read.  JSON cannot.

A list is a list in JSON, and what JSON has not is a dictionary with one key:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, and
``{"number": ["<f4", "0000803f"]}`` for one of NumPy's, as bits.
"""
from __future__ import annotations

import json
import math
from typing import Any

import numpy

from .array_header import PLAIN_KINDS
from .zip_directory import DamagedSnapshot

#: Bytes of JSON of a value.  Python's objects take some twenty times that.
LARGEST = 1 << 16
_DEEPEST = 20


def is_plain(value: numpy.ndarray) -> bool:
    """Whether a file can hold this array as it is."""
    return value.dtype.kind in PLAIN_KINDS and (
        numpy.dtype(value.dtype.str) == value.dtype)


def to_json(value: numpy.ndarray) -> numpy.ndarray:
    """The text of an array of objects: bytes, without dimensions.

    Raises:
        TypeError: An object is of another kind than those above, or the text
            is longer than :data:`LARGEST`.
    """
    if value.dtype != object:
        raise TypeError(f'arrays of dtype {value.dtype} are not saved')
    text = json.dumps(
        {'shape': value.shape,
         'items': [_encoded(item, 0) for item in value.reshape(-1).tolist()]},
        separators=(',', ':')).encode('ascii')
    if len(text) > LARGEST:
        raise TypeError(
            f'it takes {len(text)} bytes as JSON, of at most {LARGEST}')
    return numpy.array(text)


def from_json(text: numpy.ndarray) -> numpy.ndarray:
    """The array of objects; the inverse of :func:`to_json`.

    Raises:
        DamagedSnapshot: The text is none of :func:`to_json`'s.
    """
    try:
        if text.shape or text.dtype.kind != 'S' or text.nbytes > LARGEST:
            raise ValueError('not a text')
        found = json.loads(text.item().decode('ascii'))
        shape, items = found['shape'], found['items']
        if math.prod(shape) != len(items) or min(shape, default=0) < 0:
            raise ValueError('items without a place')
        value = numpy.empty(len(items), object)
        for place, item in enumerate(items):
            value[place] = _decoded(item)
        return value.reshape(shape)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError,
            RecursionError) as error:
        raise DamagedSnapshot(f'a value is no JSON of a snapshot\'s: {error}'
                              ) from None


def _encoded(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise TypeError('it is nested too deeply')
    # bool is an int; subclasses of these would come back as another class.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encoded(item, depth + 1) for item in value]
    if type(value) is tuple:
        return {'tuple': [_encoded(item, depth + 1) for item in value]}
    if type(value) is dict:
        return {'dict': [[_encoded(key, depth + 1), _encoded(item, depth + 1)]
                         for key, item in value.items()]}
    if isinstance(value, numpy.generic) and is_plain(numpy.asarray(value)):
        return {'number': [value.dtype.str, value.tobytes().hex()]}
    raise TypeError(f'{value!r} is of class {type(value).__name__}')


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == 'tuple':
        return tuple(_decoded(item) for item in content)
    if kind == 'dict':
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind != 'number':
        raise ValueError(f'{kind} is no kind of value')
    dtype, bits = numpy.dtype(content[0]), bytes.fromhex(content[1])
    if dtype.kind not in PLAIN_KINDS or len(bits) != dtype.itemsize:
        raise ValueError('a number of another size')
    return numpy.frombuffer(bits, dtype)[0]

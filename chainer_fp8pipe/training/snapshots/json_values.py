"""Values that are no arrays of numbers or texts, as JSON and back.

Trainers also save None (an optimizer that had no state yet, a trigger that
has not fired), and users' own extensions save lists, tuples and dictionaries.
NumPy makes arrays of objects of those, and files of arrays of objects are
pickles, which can run code when they are read.  JSON cannot.

A list is a list in JSON, and what JSON has not is a dictionary with one key:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, and
``{"number": ["<f4", "0000803f"]}`` and ``{"array": ["<f4", [1],
"0000803f"]}`` for NumPy's, as bits; an array of objects is
``{"objects": [shape, [...]]}``.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy

#: Bytes of JSON of a value.  Python's objects take some twenty times that.
LARGEST = 1 << 20
#: Parts of a value: an update waits while they are looked at.
MOST_PARTS = 1 << 16
_PLAIN_KINDS = frozenset('biufcSUmM')
_DEEPEST = 20


def is_plain(dtype: numpy.dtype) -> bool:
    """Whether a dtype is of numbers, texts or times, and nothing else."""
    return dtype.kind in _PLAIN_KINDS and numpy.dtype(dtype.str) == dtype


def to_json(value: Any) -> bytes:
    """The text of a value.

    Raises:
        TypeError: A part of it is of another kind than those above, it has
            more than :data:`MOST_PARTS`, or the text is longer than
            :data:`LARGEST`.
    """
    parts = itertools.count(1)
    text = json.dumps(_encoded(value, 0, parts), separators=(',', ':')).encode(
        'ascii')
    if len(text) > LARGEST:
        raise TypeError(
            f'it takes {len(text)} bytes as JSON, of at most {LARGEST}')
    return text


def from_json(text: bytes) -> Any:
    """The value; the inverse of :func:`to_json`.

    Raises:
        ValueError: The text is none of :func:`to_json`'s.
    """
    try:
        if len(text) > LARGEST:
            raise ValueError('it is too long')
        return _decoded(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"a value is no JSON of a snapshot's: {error}"
                         ) from None


def object_array(value: Any) -> numpy.ndarray:
    """A value as an array of objects, which may be one already."""
    if isinstance(value, numpy.ndarray) and value.dtype == object:
        return value
    array = numpy.empty((), object)
    array[()] = value
    return array


def _encoded(value: Any, depth: int, parts: Iterator[int]) -> Any:
    if depth > _DEEPEST:
        raise TypeError('it is nested too deeply')
    if next(parts) > MOST_PARTS:
        raise TypeError(f'it has more than {MOST_PARTS} parts')
    # bool is an int; subclasses of these would come back as another class.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_encoded(item, depth + 1, parts) for item in value]
        return items if type(value) is list else {'tuple': items}
    if type(value) is dict:
        return {'dict': [[_encoded(key, depth + 1, parts),
                          _encoded(item, depth + 1, parts)]
                         for key, item in value.items()]}
    if isinstance(value, numpy.generic) and is_plain(value.dtype):
        return {'number': [value.dtype.str, value.tobytes().hex()]}
    if type(value) is numpy.ndarray and is_plain(value.dtype):
        if 2 * value.nbytes > LARGEST:
            raise TypeError(f'an array in it has {value.nbytes} bytes')
        return {'array': [value.dtype.str, value.shape,
                          value.tobytes().hex()]}
    if type(value) is numpy.ndarray and value.dtype == object:
        return {'objects': [value.shape, [
            _encoded(item, depth + 1, parts) for item in value.reshape(-1)]]}
    # Its text could be long, and take long.
    raise TypeError(f'it has an object of class {type(value).__name__}')


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
    if kind == 'objects':
        objects = numpy.empty(len(content[1]), object)
        for place, item in enumerate(content[1]):
            objects[place] = _decoded(item)
        return objects.reshape(content[0])
    if kind not in ('number', 'array'):
        raise ValueError(f'there is no kind {kind!r}')
    dtype = numpy.dtype(content[0])
    if not is_plain(dtype):
        raise ValueError(f'a number of dtype {dtype}')
    array = numpy.frombuffer(bytes.fromhex(content[-1]), dtype)
    return (array[0] if kind == 'number'
            else array.reshape(content[1]).copy())

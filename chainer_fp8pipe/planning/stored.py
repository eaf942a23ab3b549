"""Data classes as JSON files, which people may edit."""
# A plan is saved as what it is, field by field, and what may stand in a field
# is what the class says in its annotations.  So there is one reader for all
# classes, and none of them has a second list of its fields.  What fields mean
# together (stages times replicas are the ranks) is checked by the classes
# themselves when an object is made.
from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

#: What a value of a type is called in messages.
_NAMES = {int: 'a whole number', float: 'a number', str: 'a text',
          bool: 'true or false'}


def read_json(path: str, remedy: str = '') -> Any:
    """The content of a file.

    Args:
        path: Of the file.
        remedy: What to do if the file is no JSON, for the message.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no JSON; the message names path, place and
            remedy.
    """
    with open(path, encoding='utf-8') as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            reason = f' ({error}); {remedy}' if remedy else f': {error}'
            raise ValueError(f'{path} is no JSON{reason}') from None


def write_json(path: str, data: Any) -> None:
    """Writes a file that people can read and edit."""
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(data, file, indent=1)
        file.write('\n')


def made(kind: Any, data: Any, where: str = '') -> Any:
    """An object of a type, of what JSON has of it.

    Args:
        kind: A data class, whose ``before_made(data, where)`` may change the
            data before, ``tuple[...]``, ``Mapping[str, ...]``, ``Literal``,
            ``... | None``, or one of JSON's types.  Numbers are finite and
            not negative.
        data: As from :func:`read_json`; what is an object already, of a data
            class or another one, is taken as it is.
        where: Path of fields, for messages.

    Raises:
        ValueError: The data is no such object; the message says where.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind not in _NAMES and type(data) is kind:
        return data
    if dataclasses.is_dataclass(kind):
        before = getattr(kind, 'before_made', lambda data, where: data)
        return _object(kind, before(data, where), where)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else made(arguments[0], data, where)
    if origin is typing.Literal:
        if not any(type(data) is type(one) and data == one
                   for one in arguments):
            known = ', '.join(map(repr, arguments))
            raise ValueError(f'{where} must be one of {known}, not {data!r}')
        return data
    if origin is tuple:
        _check(isinstance(data, (list, tuple)), where, 'a list', data)
        return tuple(made(arguments[0], one, f'{where}.{number}')
                     for number, one in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        _check(isinstance(data, Mapping), where, 'an object', data)
        return {key: made(arguments[1], value, f'{where}.{key}')
                for key, value in data.items()}
    return _value(kind, data, where)


def _object(kind: Any, data: Any, where: str) -> Any:
    _check(isinstance(data, Mapping), where, 'an object', data)
    types_, prefix = typing.get_type_hints(kind), where and f'{where}.'
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            raise ValueError(f'{prefix}{name} is no field of a plan')
    for name, field in fields.items():
        if name not in data and dataclasses.MISSING is (
                field.default) is field.default_factory:
            raise ValueError(f'{prefix}{name} is missing')
    return kind(**{name: made(types_[name], value, f'{prefix}{name}')
                   for name, value in data.items()})


def _value(kind: Any, data: Any, where: str) -> Any:
    if kind is float and type(data) is int:
        try:
            data = float(data)
        except OverflowError:
            data = math.inf
    _check(type(data) is kind, where, _NAMES[kind], data)
    if kind in (int, float) and not 0 <= data < math.inf:
        raise ValueError(f'{where} must be 0 or more, and finite, not '
                         f'{data!r}')
    return data


def _check(is_right: bool, where: str, wanted: str, data: Any) -> None:
    if not is_right:
        raise ValueError(f'{where or "the plan"} must be {wanted}, not '
                         f'{data!r:.80}')

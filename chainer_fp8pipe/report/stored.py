"""Plans as JSON, which people may edit."""
# A plan is stored as what it is, field by field, and what may stand in a field
# is what its class says in its annotations.  So there is one reader for all
# classes, and none of them has a second list of its fields.  What fields mean
# together (stages times replicas are the ranks) is checked by the classes
# themselves when an object is made.
from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

#: What a value of a type is called in messages.
_NAMES = {int: 'a whole number', float: 'a number', str: 'a text',
          bool: 'true or false'}


def load(kind: Any, source: Any, remedy: str = 'make the plan again') -> Any:
    """Reads an object, and checks that its parts agree with each other.

    Args:
        kind: As for :func:`made`.
        source: The path of a file, its content, or an object, which is
            returned as it is.
        remedy: The end of messages.

    Raises:
        ValueError: The file cannot be read, or the source is no such object,
            or one that contradicts itself; the message names file, field and
            remedy.
    """
    name = source if isinstance(source, str) else 'the plan'
    try:
        if isinstance(source, str):
            with open(source, encoding='utf-8') as file:
                source = json.load(file)
        return made(kind, source)
    except OSError as error:
        reason = f'{name} cannot be read ({error.strerror})'
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f'{name} is no JSON ({error})'
    except ValueError as error:
        reason = f'{name}: {error}'
    raise ValueError(f'{reason}; {remedy}')


def save(path: str, data: Any) -> None:
    """Writes a file that people can read and edit."""
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(data, file, indent=1)
        file.write('\n')


def made(kind: Any, data: Any, where: str = '') -> Any:
    """An object of a type, of what JSON has of it.

    Args:
        kind: A data class or named tuple, ``tuple[...]``, ``Mapping[str,
            ...]``, ``Literal``, ``... | None``, or one of JSON's types.
        data: Of a JSON file; what is an object already, of a class or another
            one, is taken as it is.
        where: Path of fields, for messages.

    Raises:
        ValueError: The data is no such object; the message says where.
    """
    if kind is Any or kind not in _NAMES and type(data) is kind:
        return data
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:       # of a type and None
        return None if data is None else made(inner[0], data, where)
    if origin is typing.Literal:
        _check(any(type(data) is type(one) and data == one for one in inner),
               where, f'one of {", ".join(map(repr, inner))}', data)
        return data
    if origin is tuple:
        _check(isinstance(data, (list, tuple)), where, 'a list', data)
        kinds = inner[:1] * len(data) if inner[-1] is ... else inner
        _check(len(kinds) == len(data), where, 'a list', data)
        return tuple(made(one, value, f'{where}.{number}')
                     for number, (one, value) in enumerate(
                         zip(kinds, data, strict=True)))
    if kind in _NAMES:
        if kind is float and type(data) is int:
            data = float(data) if data < 10 ** 300 else math.inf
        _check(type(data) is kind, where, _NAMES[kind], data)
        _check(kind in (str, bool) or 0 <= data < math.inf, where,
               '0 or more, and finite', data)
        return data
    if origin is Mapping:
        _check(isinstance(data, Mapping), where, 'an object', data)
        return {key: made(inner[1], value, f'{where}.{key}')
                for key, value in data.items()}
    return _object(kind, data, where)


def _object(kind: Any, data: Any, where: str) -> Any:
    _check(isinstance(data, Mapping), where, 'an object', data)
    kinds, fields = typing.get_type_hints(kind), inspect.signature(
        kind).parameters.values()
    prefix = where and f'{where}.'
    for name in (*(one.name for one in fields if one.default is one.empty),
                 *data):
        if name not in data:
            raise ValueError(f'{prefix}{name} is missing')
        if name not in kinds:
            raise ValueError(f'{prefix}{name} is no field of a plan')
    return kind(**{name: made(kinds[name], value, f'{prefix}{name}')
                   for name, value in data.items()})


def _check(is_right: bool, where: str, wanted: str, data: Any) -> None:
    if not is_right:
        raise ValueError(f'{where or "the plan"} must be {wanted}, not '
                         f'{data!r:.80}')

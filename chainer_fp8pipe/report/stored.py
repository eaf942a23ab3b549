"""Plans as JSON, which people may edit."""
# What may stand in a field is what its class says in its annotations.  What
# fields mean together is checked by the classes.
from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..command_line import reason

#: What a value of a type is called in messages.
_NAMES = {int: 'a whole number of 0 or more', str: 'a text', tuple: 'a list',
          float: '0 or more, and finite', bool: 'true or false'}


def load(kind: Any, source: Any, remedy: str = 'make the plan again') -> Any:
    """Reads an object of a data class.

    Args:
        kind: The class.
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
        return _made(kind, source)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f'{name}: {reason(error)}; {remedy}') from error


def save(path: str, data: Any) -> None:
    """Writes a file that people can read and edit."""
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(data, file, indent=1)
        file.write('\n')


def _made(kind: Any, data: Any, where: str = '') -> Any:
    """An object of a type, of what JSON has of it at a path of fields."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    prefix = where and f'{where}.'
    is_data = dataclasses.is_dataclass(kind)
    if origin is Any or is_data and type(data) is kind:
        return data
    if origin is types.UnionType:       # of a type and None
        return None if data is None else _made(inner[0], data, where)
    if origin is tuple and isinstance(data, list | tuple):      # of one type
        return tuple(_made(inner[0], value, f'{prefix}{number}')
                     for number, value in enumerate(data))
    if isinstance(data, Mapping) and origin is Mapping:
        return dict(data)
    if isinstance(data, Mapping) and is_data:
        return _fields(kind, data, prefix)
    if origin is float and type(data) is int and data < 10 ** 300:
        data = float(data)
    if type(data) is origin and (origin in (str, bool)
                                 or 0 <= data < math.inf):
        return data
    raise ValueError(f'{where or "the plan"} must be '
                     f'{_NAMES.get(origin, "an object")}, not {data!r:.80}')


def _fields(kind: Any, data: Mapping, prefix: str) -> Any:
    """Makes a data class of what JSON has read."""
    kinds = typing.get_type_hints(kind)
    for name in data.keys() - kinds.keys():
        raise ValueError(f'{prefix}{name} is no field of a plan')
    for one in dataclasses.fields(kind):
        # Neither of them is there.
        if one.name not in data and one.default is one.default_factory:
            raise ValueError(f'{prefix}{one.name} is missing')
    return kind(**{name: _made(kinds[name], value, f'{prefix}{name}')
                   for name, value in data.items()})

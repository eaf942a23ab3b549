"""Plans as JSON, which people may edit."""
# A plan is stored as what it is, field by field, and what may stand in a field
# is what its class says in its annotations.  So there is one reader for all
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
_NAMES = {int: 'a whole number of 0 or more', str: 'a text', tuple: 'a list',
          float: '0 or more, and finite', bool: 'true or false'}


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
        kind: A data class, ``tuple[...]``, ``Mapping[str, ...]``,
            ``... | None``, or one of JSON's types.
        data: Of a JSON file; what is an object already, of a class or another
            one, is taken as it is.
        where: Path of fields, for messages.

    Raises:
        ValueError: The data is no such object; the message says where.
    """
    inner, prefix = typing.get_args(kind), where and f'{where}.'
    origin = typing.get_origin(kind) or kind
    if origin is Any or dataclasses.is_dataclass(kind) and (
            type(data) is kind):
        return data
    if origin is types.UnionType:       # of a type and None
        return None if data is None else made(inner[0], data, where)
    if origin is tuple and isinstance(data, list | tuple):
        kinds = inner[:1] * len(data) if inner[-1] is ... else inner
        if len(kinds) == len(data):
            return tuple(made(one, value, f'{prefix}{number}')
                         for number, (one, value) in enumerate(
                             zip(kinds, data, strict=True)))
    elif isinstance(data, Mapping) and origin not in _NAMES:
        if origin is not Mapping:
            return _object(kind, data, prefix)
        return {key: made(inner[1], value, f'{prefix}{key}')
                for key, value in data.items()}
    elif origin is float and type(data) is int and data < 10 ** 300:
        return made(float, float(data), where)
    elif type(data) is origin and (origin in (str, bool) or
                                   0 <= data < math.inf):
        return data
    raise ValueError(f'{where or "the plan"} must be '
                     f'{_NAMES.get(origin, "an object")}, not {data!r:.80}')


def _object(kind: Any, data: Mapping[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        # Neither of them is there.
        if one.name not in data and one.default is one.default_factory:
            raise ValueError(f'{prefix}{one.name} is missing')
    for name in data:
        if name not in kinds:
            raise ValueError(f'{prefix}{name} is no field of a plan')
    return kind(**{name: made(kinds[name], value, f'{prefix}{name}')
                   for name, value in data.items()})

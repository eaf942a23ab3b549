"""Finds what in an object keeps it from being copied or sent."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def obstacle(value: Any, name: str, copy: Callable[[Any], Any]) -> str:
    """Names the attribute or entry that cannot be copied; '' if all can.

    Args:
        value: The object.
        name: What messages call it.
        copy: Copies a value, or pickles it, or raises an exception.

    Returns:
        Such as ``"model.log (TextIOWrapper): cannot pickle ..."``.
    """
    return _obstacle(value, name, copy, set())


def _obstacle(value: Any, name: str, copy: Callable, seen: set[int]) -> str:
    if id(value) in seen:
        return ''
    seen.add(id(value))
    try:
        copy(value)
    except Exception as error:
        for path, part in _parts(value):
            if found := _obstacle(part, name + path, copy, seen):
                return found
        return f'{name} ({type(value).__name__}): {error}'
    return ''


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f'[{key!r}]', part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f'[{place}]', part) for place, part in enumerate(value))
    else:
        yield from ((f'.{key}', part) for key, part
                    in getattr(value, '__dict__', {}).items())

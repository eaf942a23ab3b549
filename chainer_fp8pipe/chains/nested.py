"""Arrays and variables inside of nested lists, tuples and dictionaries."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer


class Dataless:
    """Stands for an array, or a number of NumPy's."""


#: Chainer's answer takes a microsecond or two, and does not change.
ARRAYS: tuple[type, ...] = (Dataless, *chainer.get_array_types())
LEAVES = *ARRAYS, chainer.Variable


def leaves(value: Any) -> tuple[list[Any], Any]:
    """All arrays and variables in ``value``, and a tree for :func:`rebuilt`.

    Lists, tuples (named ones, too), deques and dictionaries are searched.
    """
    found: list[Any] = []
    return found, _walk(value, found)


def rebuilt(tree: Any, values: list[Any]) -> Any:
    """The value that a tree describes, with ``values`` for its leaves."""
    kind, content = tree
    if kind == 'leaf':
        return values[content]
    if kind == 'constant':
        return content
    if kind is dict:
        return {key: rebuilt(item, values) for key, item in content}
    items = [rebuilt(item, values) for item in content]
    return kind(*items) if hasattr(kind, '_fields') else kind(items)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The value with a function's results for its leaves."""
    found, tree = leaves(value)
    return rebuilt(tree, list(map(function, found))) if found else value


def arguments_of(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """What a model is called with for a converted batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return batch if isinstance(batch, tuple) else (batch,), {}


def taken(both: Any, rows: Sequence[int]) -> tuple[list, dict[str, Any]]:
    """Arguments, by place and by name, with copies of some samples only."""
    def of(column: Any) -> Any:     # an array, or a list of samples
        return column[rows] if hasattr(column, 'shape') else [
            column[row] for row in rows]
    args, kwargs = both
    return [*map(of, args)], {name: of(one) for name, one in kwargs.items()}


def array_of(value: Any) -> Any:
    """The array of a variable; a deferred parameter is not drawn."""
    return value._data[0] if isinstance(value, chainer.Variable) else value


def arrays(value: Any) -> list[Any]:
    """All arrays in ``value``, also those of variables."""
    return list(map(array_of, leaves(value)[0]))


def _walk(value: Any, found: list[Any]) -> Any:
    if isinstance(value, LEAVES):
        found.append(value)
        return 'leaf', len(found) - 1
    if isinstance(value, (list, tuple, deque)):
        return type(value), [_walk(item, found) for item in value]
    if isinstance(value, dict):
        return dict, [(key, _walk(item, found)) for key, item in value.items()]
    return 'constant', value

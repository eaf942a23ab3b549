"""What one can do with a list, on a model of numbered layers."""
from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

from chainer import Link

from .copyable import Copyable
from .joining import must_be_sequential, slots_of
from .lazy import Lazy


class LayerList(Copyable):
    """A list of layers, as ``chainer.Sequential`` is.

    What would give layers of the whole model other numbers is an error on a
    part of it.  Layers are compared by what they are, not by their names.
    """

    def __init__(self, *layers: Any, seed: int = 0) -> None:
        # Chainer's is not called: see __new__.
        self.seed = seed
        self.extend(layers)

    # --- reading ------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, i: Any) -> Any:
        position = self._position(i)
        return self._build(position, self.numbered_slots()[position][0])

    def _position(self, i: SupportsIndex) -> int:
        try:
            return range(len(self))[i]
        except IndexError:
            raise IndexError(f'there is no layer at position {i}: {self!r} '
                             f'has {len(self)}') from None

    def __contains__(self, layer: Any) -> bool:
        return any(_same(slot, layer) for slot in self._slots)

    def index(self, layer: Any, start: int | None = None,
              end: int | None = None) -> int:
        """Position in this list of the first such layer.

        Args:
            layer: What to look for.
            start: Look from here on.
            end: Look up to here.

        Raises:
            ValueError: It is not there.
        """
        for position in range(len(self))[start:end]:
            if _same(self._slots[position], layer):
                return position
        raise ValueError(f'{layer!r} is not in {self!r}')

    def count(self, layer: Any) -> int:
        """At how many places a layer stands."""
        return sum(_same(slot, layer) for slot in self._slots)

    def count_by_layer_type(self, type_name: str) -> int:
        """Number of layers whose class or function has this name."""
        return self._type_names().count(type_name)

    # --- changing -----------------------------------------------------------

    def append(self, layer: Any) -> None:
        """Adds a layer at the end.

        Args:
            layer: A link, a function, anything that can be called, or a
                :func:`lazy` layer.

        Raises:
            ValueError: It cannot be called, or this is a part of a model.
        """
        self.insert(len(self), layer)

    def extend(self, layers: Iterable[Any]) -> None:
        """Adds layers at the end."""
        # A model's lazies stay as they are.
        self[len(self):] = slots_of(layers)

    def insert(self, i: SupportsIndex, layer: Any) -> None:
        """Adds a layer before position ``i``.

        Raises:
            IndexError: ``i`` is out of range.
            ValueError: As :meth:`append`.
        """
        position = operator.index(i)
        if not -len(self) <= position <= len(self):
            raise IndexError(f'position {position} is out of range: there '
                             f'are {len(self)} layers')
        self[position:position] = [layer]

    def __setitem__(self, i: Any, layer: Any) -> None:
        if isinstance(i, slice):
            self._must_be_whole()
            self._slots[i] = [self._checked(item) for item in layer]
        else:
            self._slots[self._position(i)] = self._checked(layer)
        self._changed()

    def __delitem__(self, i: Any) -> None:
        self._must_be_whole()
        del self._slots[i]
        self._changed()

    def pop(self, i: SupportsIndex = -1) -> Any:
        """Takes out a layer, built, and returns it."""
        self._must_be_whole()
        layer = self[i]
        del self[i]
        return layer

    def remove(self, layer: Any) -> None:
        """Takes out the first such layer.

        Raises:
            ValueError: It is not there.
        """
        del self[self.index(layer)]

    def remove_by_layer_type(self, type_name: str) -> None:
        """Takes out all layers whose class or function has this name."""
        self[:] = [slot for slot, name in zip(
            self._slots, self._type_names(), strict=True)
            if name != type_name]

    def _type_names(self) -> list[str]:
        """Lazy layers are built only if they are made by functions."""
        return [slot.__name__ if isinstance(slot, Lazy)
                and isinstance(slot.factory, type)
                else _type_name(self[position])
                for position, slot in enumerate(self._slots)]

    def clear(self) -> None:
        """Takes out all layers."""
        del self[:]

    def reverse(self) -> None:
        """Puts the last layer first."""
        self[:] = self._slots[::-1]

    def add_link(self, link: Link) -> None:
        """:meth:`append`, for links only."""
        if not isinstance(link, Link):
            raise TypeError(f'{link!r} is not a link; use append')
        self.append(link)

    def _changed(self) -> None:
        self._complete = self._initialised = False
        self._name_links()

    def _checked(self, layer: Any) -> Any:
        if isinstance(layer, type) and issubclass(layer, Link):
            raise ValueError(
                f'{layer.__name__} is a class, not a layer; write '
                f'{layer.__name__}(...) or lazy({layer.__name__}, ...)')
        if layer is self:
            raise ValueError('a model cannot be a layer of itself')
        if not isinstance(layer, Lazy) and not callable(layer):
            raise ValueError('a layer must be callable: a link, a function, '
                             f'or lazy(...), not {layer!r}')
        return layer

    def __iadd__(self, other: Any) -> Any:
        must_be_sequential(other)
        self.extend(other)
        return self


def _same(slot: Any, layer: Any) -> bool:
    return slot is layer or slot == layer or (
        isinstance(layer, Lazy) and layer.layer is not None
        and slot is layer.layer)


def _type_name(layer: Any) -> str:
    if isinstance(layer, Link):
        return type(layer).__name__
    function = getattr(layer, 'func', layer)    # a functools.partial
    return getattr(function, '__name__', type(function).__name__)

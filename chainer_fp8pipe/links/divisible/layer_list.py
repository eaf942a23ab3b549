"""The list operations of ``chainer.Sequential`` on numbered layers.

Chainer's give copies and sums of the base class, cannot copy a lambda, and
would build lazy layers before their numbers are final.
"""
from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy
from chainer import Link, Sequential

from ...pipeline.layers import layer_name
from .layer_slots import LayerRange, LayerSlots
from .lazy import Lazy


class LayerList(LayerSlots):
    """A list of layers that can be edited, copied, added and pickled.

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
        """Position of the first such layer from ``start`` up to ``end``."""
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

    def extend(self, layers: Iterable[Any]) -> None:
        """Adds layers at the end; those of a model are not built."""
        self[len(self):] = _slots_of(layers)

    def insert(self, i: SupportsIndex, layer: Any) -> None:
        """Adds a layer before position ``i``; IndexError if out of range."""
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
        """Takes out the first such layer; there must be one."""
        del self[self.index(layer)]

    def remove_by_layer_type(self, type_name: str) -> None:
        """Takes out all layers whose class or function has this name."""
        self[:] = [slot for slot, name in zip(
            self._slots, self._type_names(), strict=True)
            if name != type_name]

    def _type_names(self) -> list[str]:
        """Names of the layers' types; builds lazies of functions only."""
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
        """Adds a link at the end."""
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

    # --- sums ---------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return self._sum(self, other)

    def __radd__(self, other: Any) -> Any:
        return self._sum(other, self)

    def __iadd__(self, other: Any) -> Any:
        _must_be_sequential(other)
        self.extend(other)
        return self

    def _sum(self, first: Any, second: Any) -> Any:
        _must_be_sequential(first)
        _must_be_sequential(second)
        return self._with([*_slots_of(first), *_slots_of(second)],
                          _joined_part(first, second))

    # --- copies -------------------------------------------------------------

    def _alike(self) -> Any:
        """A model of this class and with its attributes, without layers."""
        result = type(self).__new__(type(self))
        vars(result).update(vars(self))
        result._slots, result.name = [], None
        result._complete = result._initialised = False
        hooks = self._local_link_hooks
        result._local_link_hooks = None if hooks is None else hooks.copy()
        return result

    def _with(self, slots: list[Any], part: LayerRange | None = None) -> Any:
        """A model of this class and with its attributes, of other layers."""
        result = self._alike()
        result._slots, result._part = list(slots), part
        result._name_links()
        return result

    def copy(self, mode: str = 'share') -> Any:
        """A copy of the same class, with copies of the layers.

        Args:
            mode: ``'share'``: parameters share their arrays with these.
                ``'copy'``: they have equal values.  Both build lazy layers
                first.  ``'init'``: they have new initial values, drawn from
                NumPy's global generator; so is the seed of lazy layers that
                are not built yet.
        """
        if mode not in ('share', 'copy', 'init'):
            raise ValueError("mode must be 'share', 'copy' or 'init', not "
                             f'{mode!r}')
        if mode == 'share':
            copies = {id(layer): layer.copy('share') if isinstance(layer, Link)
                      else copy.copy(layer) for layer in self._layers}
            return self._with([copies[id(layer)] for layer in self._slots],
                              self._part)
        if mode == 'copy':
            self._numbered_layers()
        result = copy.deepcopy(self)
        result.name = None
        if mode == 'init':
            result._draw_again()
        return result

    def _draw_again(self) -> None:
        self._seed = int(numpy.random.randint(1 << 31))
        built = {id(layer): layer for layer in self._slots
                 if isinstance(layer, Link)}
        for layer in built.values():
            if isinstance(layer, LayerList):
                layer._draw_again()
                continue
            for parameter in layer.params(include_uninit=False):
                parameter.initialize(parameter.shape)

    def repeat(self, n_repeat: int, mode: str = 'init') -> Any:
        """A model of this class whose layers are copies of this whole model.

        As everywhere in Chainer, a repeated model becomes one layer;
        :meth:`flatten` makes its layers those of the model, so that it can
        be cut between them.

        Args:
            n_repeat: Number of copies.
            mode: Of :meth:`copy`.
        """
        self._must_be_whole()
        result = self._alike()
        for _ in range(n_repeat):
            result.append(self.copy(mode))
        return result

    def flatten(self) -> Any:
        """A whole model with the layers of the models inside of this one.

        Lazy layers stay so, unless they may turn out to be such models.
        """
        self._must_be_whole()
        return self._with(_flat_slots_of(self))

    def __copy__(self) -> Any:
        return self._with(self._slots, self._part)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in vars(self).items():
            vars(result)[name] = copy.deepcopy(value, memo)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        for number, layer in self.numbered_slots():
            # A lazy layer is called what its factory is.
            if getattr(layer, '__name__', '') == '<lambda>':
                raise ValueError(
                    f'{layer_name(number, layer)} cannot be pickled as it is '
                    'a lambda; use functools.partial or a function of a '
                    'module')
        # Those below 2 would not call __new__.
        return super().__reduce_ex__(max(operator.index(protocol), 2))


def _slots_of(layers: Iterable[Any]) -> list[Any]:
    """The layers; those of a model are not built."""
    return list(layers._slots if isinstance(layers, LayerSlots) else layers)


def _flat_slots_of(model: Sequential) -> list[Any]:
    """The layers, with those of models inside of it in their place."""
    flat: list[Any] = []
    for position, slot in enumerate(_slots_of(model)):
        if isinstance(slot, Lazy) and (
                not isinstance(slot.factory, type)
                or issubclass(slot.factory, Sequential)):
            slot = model[position]      # it may turn out to be a model
        flat.extend(_flat_slots_of(slot) if isinstance(slot, Sequential)
                    else [slot])
    return flat


def _must_be_sequential(other: Any) -> None:
    if not isinstance(other, Sequential):
        raise ValueError('only a chainer.Sequential can be added, not a '
                         f'{type(other).__name__}')


def _joined_part(first: Sequential, second: Sequential) -> LayerRange | None:
    """The layers of two models together; None for a whole model."""
    parts = [model._part for model in (first, second)
             if isinstance(model, LayerSlots) and model._part]
    if not parts:
        return None
    if isinstance(first, LayerSlots) and isinstance(second, LayerSlots) and (
            first.total == second.total and first.seed == second.seed):
        numbers = [number for model in (first, second)
                   for number, _ in model.numbered_slots()]
        start, end = min(numbers, default=0), max(numbers, default=-1) + 1
        if numbers == list(range(start, end)):
            whole = (start, end) == (0, parts[0].total)
            return None if whole else LayerRange(
                parts[0].total, ((start, end),), parts[0].rows)
    raise ValueError(
        f'{first!r} and {second!r} do not follow each other in one model; '
        'for a new model of their layers write Divisible(*first, *second)')


def _same(slot: Any, layer: Any) -> bool:
    return slot is layer or slot == layer or (
        isinstance(layer, Lazy) and layer.layer is not None
        and slot is layer.layer)


def _type_name(layer: Any) -> str:
    if isinstance(layer, Link):
        return type(layer).__name__
    function = getattr(layer, 'func', layer)    # a functools.partial
    return getattr(function, '__name__', type(function).__name__)

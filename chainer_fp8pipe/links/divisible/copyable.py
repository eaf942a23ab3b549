"""Copies of a model, of its own class."""
from __future__ import annotations

import copy
import operator
from typing import Any, SupportsIndex

import numpy
from chainer import Link

from ...pipeline.layers import layer_name
from .joining import flat_slots_of, joined_part, must_be_sequential, slots_of
from .layer_slots import LayerRange
from .numbered import Numbered


class Copyable(Numbered):
    """Can be copied and pickled, functions, lazy layers and all.

    Chainer's ``Sequential`` gives copies of the base class, and cannot copy
    a lambda.
    """

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
        """The same with other layers."""
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

        Raises:
            ValueError: Another mode.
        """
        if mode not in ('share', 'copy', 'init'):
            raise ValueError("mode must be 'share', 'copy' or 'init', not "
                             f'{mode!r}')
        if mode == 'share':
            return self._with(_shared(self._layers), self._part)
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
            if isinstance(layer, Copyable):
                layer._draw_again()
                continue
            for parameter in layer.params(include_uninit=False):
                parameter.initialize(parameter.shape)

    def repeat(self, n_repeat: int, mode: str = 'init') -> Any:
        """A model of this class whose layers are copies of this model.

        As everywhere in Chainer, what is repeated becomes one layer;
        :meth:`flatten` makes its layers those of the model, so that it can
        be cut between them.

        Args:
            n_repeat: How often.
            mode: Of :meth:`copy`.

        Raises:
            ValueError: Another mode, or this is a part.
        """
        self._must_be_whole()
        result = self._alike()
        for _ in range(n_repeat):
            result.append(self.copy(mode))
        return result

    def flatten(self) -> Any:
        """A model of this class with the layers of the models inside of it.

        Lazy layers stay so, unless they may turn out to be such models.

        Raises:
            ValueError: This is a part.
        """
        self._must_be_whole()
        return self._with(flat_slots_of(self))

    def __add__(self, other: Any) -> Any:
        must_be_sequential(other)
        return self._with([*slots_of(self), *slots_of(other)],
                          joined_part(self, other))

    def __radd__(self, other: Any) -> Any:
        must_be_sequential(other)
        return self._with([*slots_of(other), *slots_of(self)],
                          joined_part(other, self))

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


def _shared(layers: list[Any]) -> list[Any]:
    """Copies of layers that share arrays; one of a layer at two places."""
    copies = {id(layer): layer.copy('share') if isinstance(layer, Link)
              else copy.copy(layer) for layer in layers}
    return [copies[id(layer)] for layer in layers]

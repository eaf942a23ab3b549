"""Layers that are built only where they are used."""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import chainer
import numpy

from ..pipeline.layers import LayerError, layer_name
from ..pipeline.randomness import Place, at, current, preserved


class Lazy:
    """A layer that is not built yet, made by :func:`lazy`."""

    def __init__(self, factory: Callable, args: tuple,
                 kwargs: dict[str, Any]) -> None:
        if isinstance(factory, chainer.Link):
            raise TypeError(
                f'lazy takes a class or function that makes a layer, and '
                f'{type(factory).__name__} is a layer already; write '
                f'lazy({type(factory).__name__}, ...), or use the layer as '
                'it is')
        if not callable(factory):
            raise TypeError('lazy takes a class or function that makes a '
                            f'layer, not {factory!r}')
        self.factory, self.args, self.kwargs = factory, args, kwargs
        # Chainer's default when the model was written down counts, not that
        # when a rank gets to build this layer.
        dtype = chainer.config.dtype
        # A copy of mixed16 would not be taken for it.
        self._dtype = None if dtype is chainer.mixed16 else numpy.dtype(dtype)
        #: The layer, once it is built.
        self.layer: Callable | None = None

    @property
    def __name__(self) -> str:
        factory = getattr(self.factory, 'func', self.factory)   # a partial
        return getattr(factory, '__name__', type(factory).__name__)

    def __repr__(self) -> str:
        arguments = [self.__name__, *map(repr, self.args),
                     *(f'{key}={value!r}'
                       for key, value in self.kwargs.items())]
        return f'lazy({", ".join(arguments)})'

    @property
    def key(self) -> Hashable:
        """Equal for lazy layers of equal factories and arguments."""
        key = (self.factory, self.args, *self.kwargs.items(), self._dtype)
        try:
            hash(key)
        except TypeError:
            return id(self)
        return key

    def build(self, seed: int, index: int) -> Callable:
        """Layer ``index`` of the whole model, built at the first call."""
        if self.layer is None:
            self.layer = self.make(seed, index)
        return self.layer

    def make(self, seed: int, index: int) -> Callable:
        """Builds another such layer, without keeping it.

        Raises:
            LayerError: The layer, which the message names, cannot be built.
        """
        name = layer_name(index, self)
        try:
            with initialising(seed, index), \
                    chainer.using_config(
                        'dtype', self._dtype or chainer.mixed16):
                layer = self.factory(*self.args, **self.kwargs)
        except Exception as error:
            raise LayerError(f'{name} cannot be built: '
                             f'{type(error).__name__}: {error}') from error
        if not callable(layer):
            raise LayerError(f'{name} cannot be built: {self!r} returned '
                             f'{layer!r}, which is not a layer')
        return layer


def lazy(factory: Callable, *args: Any, **kwargs: Any) -> Lazy:
    """A layer of a :class:`Divisible`, built by the rank that owns it::

        model.append(lazy(L.Linear, 3072, 3072))

    is the layer ``L.Linear(3072, 3072)``, but takes no memory on ranks that
    own other layers.  Its initial values are drawn from NumPy's global
    generator seeded by the model's seed and the layer's index in the whole
    model, so they are the same on every rank; the generator gets its state
    back.  The same object twice is one layer twice, with shared parameters.

    Args:
        factory: A class or function that makes the layer of the arguments.

    Raises:
        TypeError: ``factory`` cannot be called, or is a layer already.

    .. admonition:: Example

        >>> import chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible, lazy
        >>> lazy(L.Linear, 3, 2, nobias=True)
        lazy(Linear, 3, 2, nobias=True)
        >>> Divisible(lazy(L.Linear, 3, 2))[0].W.shape
        (2, 3)
    """
    return Lazy(factory, args, kwargs)


def built(slot: Any) -> Any:
    """The layer of a slot; None if it is lazy and was not needed yet."""
    return slot.layer if isinstance(slot, Lazy) else slot


def own_copy(slot: Any, seed: int, index: int, device: Any) -> Any:
    """A copy of a slot's layer, or another one if it is not built.

    Args:
        slot: A layer, or a lazy one.
        seed: Of the model.
        index: Of the layer in the whole model.
        device: Chainer's, which the copy is sent to.

    Raises:
        LayerError: The layer cannot be built.
    """
    layer = built(slot)
    if layer is None:
        layer = slot.make(seed, index)
    elif isinstance(layer, chainer.Link):
        layer = copy.deepcopy(layer)
    if isinstance(layer, chainer.Link):
        with initialising(seed, index, device.xp):
            layer.to_device(device)
    return layer


@contextlib.contextmanager
def initialising(seed: int, index: int, xp: Any = numpy) -> Iterator[None]:
    """Seeds NumPy's generator inside by the model's seed and the layer.

    Inside of another layer that is being seeded (a ``Divisible`` may be a
    layer of another one, and a pipeline seeds its layers) this does nothing:
    equal models at different places must not start with equal values.
    """
    if current() is not None:
        yield
        return
    # The place of deferred initial values in a pipeline as well.
    with preserved(), at(Place(seed, 0, index, 0), xp):
        yield

"""Parameters without values: to be drawn later, or on another rank."""
# A model may be larger than the memory of a rank, so it can be built without
# values: in a block of `deferred`, or of a script under "run --pipeline", a
# large parameter with a shape gets a placeholder, and an initializer that
# draws from the state that NumPy's generator has then (`Drawing`); the
# generator moves on as if the values had been drawn.  partition() has rank 0
# draw one parameter after the other, and send it to its stage.
#
# Chainer gives a parameter its shape in the first forward pass.  A pass that
# is recorded must not draw (`initialize` of the interceptors): it leaves a
# placeholder of the shape, and a model that was recorded but not cut loses
# the shapes again.
#
# Until it has values, a parameter's class is `DeferredParameter`, and code
# outside of passes that asks for the array has it drawn.  One that another
# rank has is fetched where somebody does that (`fetching`).  Copies share the
# array with it, so `LOOKS` replaces `Parameter.raw_array` while it is held,
# which Chainer 7.8.1 inherits from `Variable` (chainer/variable.py, line 935).
from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import chainer
import numpy
from chainer.initializers import generate_array

from ..intercept.function_calls import (
    Interceptor,
    creating,
    current,
    suspended,
)
from ..intercept.patching import Current, Patch
from ..pipeline.randomness import preserved
from .placeholder import is_placeholder, placeholder

#: Bytes of a parameter that gets its values at once.
_SMALL = 1 << 16
#: The source of a placeholder for a parameter that nobody has drawn; of
#: others it is the parameter's path.
_YET = 'that is yet to be drawn'

#: Fetches the parameters of other ranks for code of this thread that looks at
#: one outside of passes; None: nobody does.
fetching = Current()


def _fetched(parameter: chainer.Parameter) -> Any:
    """The array, after a look at it."""
    array = parameter._data[0]
    if is_placeholder(array) and current() is None:
        if array.source != _YET and fetching.now is not None:
            fetching.now()
        elif array.source == _YET and isinstance(parameter, DeferredParameter):
            draw(parameter)
    return parameter._data[0]


LOOKS = Patch(chainer.Parameter, 'raw_array',
              lambda original: property(_fetched))


class DeferredParameter(chainer.Parameter):
    """A parameter that is drawn when its array is first asked for."""

    raw_array = property(_fetched)

    def to_device(self, device: Any) -> None:
        """Has the values made for another device."""
        array, device = self._data[0], chainer.get_device(device)
        if is_placeholder(array) and current() is None:
            self.__dict__.update(
                _initial_device=device, _device=device, _data=[placeholder(
                    array.shape, array.dtype, array.source, device.xp)])
        else:
            super().to_device(device)

    def __copy__(self) -> Any:
        made = super().__copy__()       # looks at the array
        made.__class__ = DeferredParameter
        return made


class Drawing(chainer.Initializer):
    """Draws with another initializer from a state of NumPy's generator."""

    def __init__(self, initializer: Any, state: Any) -> None:
        super().__init__(getattr(initializer, 'dtype', None))
        self.initializer, self._state = initializer, state

    def __call__(self, array: Any) -> None:
        is_here = isinstance(array, numpy.ndarray)
        host = array if is_here else numpy.empty(array.shape, array.dtype)
        with preserved(), suspended():
            numpy.random.set_state(self._state)
            self.initializer(host)
        if not is_here:
            array[...] = chainer.backend.get_array_module(array).asarray(host)


class Deferral(Interceptor):
    """Notes how the values of large parameters are to be made."""

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        shape, initializer = _as_tuple(shape), _of_chainer(parameter)
        if self._everything:
            draw_later(parameter, int(numpy.random.randint(1 << 31)))
        elif _is_drawn_later(parameter, shape):
            parameter.initializer = Drawing(initializer,
                                            numpy.random.get_state())
            # The generator moves on, as if the values had been kept.
            generate_array(initializer, shape, numpy)
        else:
            return False
        if type(parameter) is chainer.Parameter:
            parameter.__class__ = DeferredParameter
        # As if the initializer's gradient had come and gone.
        parameter._grad_valid, parameter._grad_initializer = True, None
        set_placeholder(parameter, shape, _YET)
        return True


@contextlib.contextmanager
def deferred(seed: int = 0, *, everything: bool = False) -> Iterator[None]:
    """Links that are made in the block have parameters without values.

    ::

        with deferred(seed=0):
            model = L.Classifier(MyChain())

    :func:`partition` draws them when each rank has its own; without it, a
    parameter is drawn at its first use.  Values are those of
    ``numpy.random.seed(seed)`` before the same lines.  NumPy's generator gets
    its state back.  A parameter has its values at once if it is smaller than
    64 kB, is made of an array, or by an initializer that is not Chainer's or
    has a generator of its own.  One whose shape comes with the first forward
    pass is drawn then, as ever.

    Args:
        seed: Of the initial values.
        everything: Whether no parameter of known shape has its values at
            once.  Each gets a seed of its own then.
    """
    with preserved():
        numpy.random.seed(operator.index(seed) & 0xffffffff)
        with creating(Deferral(everything)):
            yield


def draw_later(parameter: chainer.Parameter, *seed: int) -> None:
    """Has a parameter without values drawn from these seeds."""
    parameter.initializer = Drawing(
        _of_chainer(parameter), numpy.random.RandomState([
            number & 0xffffffff for number in seed]).get_state())


def draw(parameter: chainer.Parameter) -> None:
    """Gives a parameter of known shape its initial values."""
    array, device = parameter._data[0], parameter._initial_device
    with suspended(), chainer.using_config('dtype', array.dtype):
        settle(parameter, generate_array(
            parameter.initializer, array.shape, device.xp, device=device))


def place_array(parameter: chainer.Parameter, array: Any) -> None:
    """Sets a parameter's array, which may be a placeholder or None."""
    parameter._data[0] = array
    parameter._node._update_data_info(array)
    if is_placeholder(array):
        parameter._grad = None


def settle(parameter: chainer.Parameter, values: Any) -> None:
    """Gives a parameter values, so that nothing is drawn later."""
    place_array(parameter, values)
    parameter.initializer = _of_chainer(parameter)
    if type(parameter) is DeferredParameter:
        parameter.__class__ = chainer.Parameter
    parameter._grad = None


def take_away(name: str, parameter: chainer.Parameter) -> None:
    """Leaves a placeholder of a parameter that is on other ranks."""
    array = parameter._data[0]
    if array is not None:
        settle(parameter, placeholder(
            array.shape, array.dtype, name, parameter._initial_device.xp))
    parameter.update_rule = None


def set_placeholder(parameter: chainer.Parameter, shape: Any, source: str
                    ) -> None:
    """Gives a parameter a shape, and no values."""
    place_array(parameter, placeholder(
        _as_tuple(shape), _dtype(parameter), source,
        parameter._initial_device.xp))


def _as_tuple(shape: Any) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)


def _dtype(parameter: chainer.Parameter) -> numpy.dtype:
    return chainer.get_dtype(getattr(parameter.initializer, 'dtype', None))


def _of_chainer(parameter: chainer.Parameter) -> Any:
    """The initializer that the link has given."""
    found = parameter.initializer
    return found.initializer if isinstance(found, Drawing) else found


def _is_drawn_later(parameter: chainer.Parameter, shape: tuple[int, ...]
                    ) -> bool:
    """Whether a parameter is worth a note, which gives the same values."""
    initializer = _of_chainer(parameter)
    return (type(parameter) in (chainer.Parameter, DeferredParameter)
            and parameter.layout is None
            and parameter._initial_device.xp is numpy
            and numpy.prod(shape, dtype=float)
            * _dtype(parameter).itemsize >= _SMALL
            and type(initializer).__module__.startswith(
                'chainer.initializers.')
            and getattr(initializer, 'rng', None) is None)

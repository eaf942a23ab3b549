"""Parameters without values: to be drawn later, or on another rank."""
# A model may be larger than the memory of a rank, so there must be a way to
# build it without values: in a block of `deferred`, a parameter with a shape
# gets a placeholder, and the place in the sequence of parameters from which
# its values are drawn.  partition() has each rank draw its own, which gives
# the same values whatever rank draws them and however many there are.  Without
# partition(), whoever asks for the array draws it: `DeferredParameter` is the
# class of such a parameter until it has values.
#
# Chainer gives a parameter its shape in the first forward pass.  A pass that
# is recorded must not draw (`initialize` of the interceptors): it leaves a
# placeholder of the shape, and a model that was recorded but not cut loses
# the shapes again (`without_shapes`).
#
# A parameter that another rank has is a placeholder, too, and nothing is drawn
# for it; code outside of passes may look at it where somebody fetches it
# (`fetching`).  While `notice_looks` holds it, `Parameter.raw_array`, which
# Chainer 7.8.1 inherits from `Variable` (chainer/variable.py, line 935), is
# replaced for that.
from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
import numpy
from chainer.initializers import generate_array

from ..intercept.function_calls import (
    Creation,
    creating,
    current,
    suspended,
)
from ..intercept.patching import Current, Patch
from ..pipeline.randomness import preserved
from .placeholder import is_placeholder, placeholder


def place_array(parameter: chainer.Parameter, array: Any) -> None:
    """Sets a parameter's array, which may be a placeholder or None."""
    parameter._data[0] = array
    parameter._node._update_data_info(array)
    if is_placeholder(array):
        parameter._grad = None


_not_drawing = Current()


def without_drawing() -> contextlib.AbstractContextManager:
    """A block in which this thread reads parameters without drawing."""
    return _not_drawing.set_to(True)


#: Fetches the parameters of other ranks for code of this thread that looks at
#: one outside of passes; None: nobody does.
fetching = Current()


def _fetched(parameter: chainer.Parameter) -> Any:
    """The array, after a look at it."""
    array = parameter._data[0]
    if is_placeholder(array) and fetching.now is not None and (
            current() is None and is_elsewhere(array)):
        fetching.now()
    return parameter._data[0]


def is_elsewhere(array: Any) -> bool:
    """Whether a parameter's placeholder is of one that another rank has."""
    return str(array.source).startswith('/')


_LOOKS = Patch(chainer.Parameter, 'raw_array',
               lambda original: property(_fetched))


def notice_looks(owner: Any) -> None:
    """Has :data:`fetching` asked as long as an object lives."""
    _LOOKS.hold(owner)


class DeferredParameter(chainer.Parameter):
    """A parameter that is drawn when its array is first asked for."""

    _draw_from: tuple[int, ...]
    _draw_dtype: Any
    #: Makes the values in place of the initializer, given their shape.
    _values_from: Callable[[tuple[int, ...]], Any] | None = None

    @property
    def raw_array(self) -> Any:
        """The array, which is drawn now unless a recorded pass asks."""
        array = self._data[0]
        if (is_placeholder(array) and current() is None
                and not _not_drawing.now and not is_elsewhere(array)):
            draw(self)
        return _fetched(self)

    def initialize(self, shape: Any) -> None:
        """Draws values for a shape that is known only now."""
        self._values_from = None
        if not hasattr(self, '_draw_from'):
            super().initialize(shape)
            return
        with preserved():       # whoever draws in forward goes on as before
            super().initialize(shape)   # `deferred`: a placeholder
        if not is_placeholder(self._data[0]):
            place_array(self, placeholder(_shape(shape), self._data[0].dtype))
            draw(self)

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
        with without_drawing():
            return self._copy_to(DeferredParameter.__new__(DeferredParameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        array = self._data[0]
        if not is_placeholder(array) or current() is not None:
            reduced: Any = self.__reduce__()
            made = reduced[0](*copy.deepcopy(reduced[1], memo))
            if array is None and hasattr(self, '_draw_from'):
                draw_later(made, *self._draw_from)
        else:
            made = copy.copy(self)
            made._data = [placeholder(
                array.shape, array.dtype, array.source,
                self._initial_device.xp)]
            made.update_rule = copy.deepcopy(self.update_rule, memo)
        memo[id(self)] = made
        return made


class _Deferring(Creation):
    """Makes parameters without values."""

    creates = True

    def __init__(self, seed: int) -> None:
        self._seed, self._numbers = int(seed), itertools.count(1)

    def created(self, parameter: chainer.Parameter, shape: Any) -> None:
        draw_later(parameter, self._seed, next(self._numbers))
        parameter._draw_dtype = chainer.config.dtype
        if shape is not None:
            parameter._grad_initializer = None
            set_placeholder(parameter, shape, 'that is yet to be drawn')

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        # Of a copy with values of its own (Link.repeat).
        self.created(parameter, shape)
        return True


@contextlib.contextmanager
def deferred(seed: int = 0) -> Iterator[None]:
    """Links that are made in the block have parameters without values.

    ::

        with deferred(seed=0):
            model = L.Classifier(MyChain())

    :func:`partition` has each rank draw its own; without it, a parameter is
    drawn at its first use.  Values depend on the seed and on the number of
    parameters made before, not on the rank.  NumPy's generator is seeded in
    the block, and gets its state back.  A parameter that is made of an array
    has this array at once.

    Args:
        seed: Of the initial values.
    """
    seed = operator.index(seed)
    with preserved(), creating(_Deferring(seed)):
        numpy.random.seed([int(seed) & 0xffffffff, 0])
        yield


def draw_later(parameter: chainer.Parameter, *seed: int) -> None:
    """Has a parameter drawn from these seeds when its array is read."""
    parameter._draw_from = seed
    parameter._grad_valid = True        # as the initializer's has come
    if type(parameter) is chainer.Parameter:
        parameter.__class__ = DeferredParameter


def draw(parameter: chainer.Parameter) -> None:
    """Gives a parameter of known shape its initial values.

    If it was not made in :func:`deferred`, they come from NumPy's generator.
    """
    array = parameter._data[0]
    source = getattr(parameter, '_values_from', None)
    if source is not None:
        settle(parameter, parameter._initial_device.send(source(array.shape)))
        return
    draw_from = getattr(parameter, '_draw_from', None)
    state = numpy.random.get_state()
    if draw_from is not None:
        numpy.random.seed([number & 0xffffffff for number in draw_from])
    device = parameter._initial_device
    try:
        with suspended(), chainer.using_config(
                'dtype', getattr(parameter, '_draw_dtype', array.dtype)):
            values = generate_array(parameter.initializer, array.shape,
                                    device.xp, device=device)
    finally:
        if draw_from is not None:
            numpy.random.set_state(state)
    settle(parameter, values)


def settle(parameter: chainer.Parameter, values: Any) -> None:
    """Gives a parameter values, so that nothing is drawn later."""
    place_array(parameter, values)
    vars(parameter).pop('_values_from', None)
    if type(parameter) is DeferredParameter:
        parameter.__class__ = chainer.Parameter
    parameter._grad = None


def take_away(name: str, parameter: chainer.Parameter) -> None:
    """Leaves a placeholder of a parameter that is on other ranks."""
    array = parameter._data[0]
    if array is not None:
        settle(parameter, placeholder(
            array.shape, array.dtype, name,
            chainer.backend.get_array_module(array)))
    parameter.update_rule = None


def place_values_later(parameter: chainer.Parameter, shape: tuple[int, ...],
                       dtype: Any, source: Callable[[tuple[int, ...]], Any]
                       ) -> None:
    """Has a parameter get its values when they are first asked for.

    Args:
        parameter: Of Chainer's class, on the CPU.
        shape: Of the parameter.
        dtype: Of the parameter.
        source: Is given the shape, and returns the values in a NumPy array.
    """
    assert type(parameter) in (chainer.Parameter, DeferredParameter)
    parameter.__class__ = DeferredParameter
    parameter._values_from = source
    parameter._grad_initializer, parameter._grad_valid = None, True
    place_array(parameter,
                placeholder(shape, dtype, 'that is yet to be drawn'))


@contextlib.contextmanager
def without_shapes(parameters: Iterable[chainer.Parameter],
                   always: bool = True) -> Iterator[None]:
    """A block after which parameters have only the shapes of before.

    A recorded pass leaves placeholders of what gets its shape in forward.
    If the model is not cut then, a later forward pass must draw them, as
    usual.

    Args:
        parameters: Of the model that is recorded in the block.
        always: Not only if the block raises an error.
    """
    shapeless = [parameter for parameter in parameters
                 if parameter._data[0] is None]
    done = False
    try:
        yield
        done = not always
    finally:
        for parameter in shapeless:
            if not done and is_placeholder(parameter._data[0]):
                place_array(parameter, None)


def set_placeholder(parameter: chainer.Parameter, shape: Any, name: str
                    ) -> None:
    """Gives a parameter a shape, and no values."""
    place_array(parameter, placeholder(
        _shape(shape), chainer.get_dtype(
            getattr(parameter.initializer, 'dtype', None)), name,
        parameter._initial_device.xp))


def _shape(shape: Any) -> tuple[int, ...]:
    return (tuple(shape) if isinstance(shape, (tuple, list))
            else (int(shape),))

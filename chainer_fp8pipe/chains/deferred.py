"""Parameters without values: to be drawn later, or on another rank."""
# A model may be larger than the memory of a rank, so there must be a way to
# build it without values: in a block of `deferred`, or of a script under "run
# --pipeline", a large parameter with a shape gets a placeholder and a note of
# how its values are made: the state of NumPy's generator, which moves on as if
# the values had been drawn.  partition() has rank 0 draw one parameter after
# the other, and send it to its stage.  Without partition(), whoever asks for
# the array draws it: `DeferredParameter` is the class of such a parameter
# until it has values.  Values are those of a model that is built at once.
#
# Chainer gives a parameter its shape in the first forward pass.  A pass that
# is recorded must not draw (`initialize` of the interceptors): it leaves a
# placeholder of the shape, and a model that was recorded but not cut loses
# the shapes again.
#
# A parameter that another rank has is a placeholder, too, and nothing is drawn
# for it; code outside of passes may look at it where somebody fetches it
# (`fetching`).  While `notice_looks` holds it, `Parameter.raw_array`, which
# Chainer 7.8.1 inherits from `Variable` (chainer/variable.py, line 935), is
# replaced for that.
from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from chainer.initializers import constant, generate_array, normal, uniform

from ..intercept.function_calls import (
    Creation,
    creating,
    current,
    suspended,
)
from ..intercept.patching import Current, Patch
from ..pipeline.randomness import preserved
from .placeholder import is_placeholder, placeholder

#: Bytes of a parameter that gets its values at once.
_SMALL = 1 << 16
#: Random numbers that are drawn at a time where none is kept.
_CHUNK = 1 << 16
_LATER = 'that is yet to be drawn'


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

    #: Makes the values, given their shape.
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
        """Draws values: anew, or for a shape that is known only now."""
        source = None if self._data[0] is not None else self._values_from
        self._values_from, state = None, numpy.random.get_state()
        super().initialize(shape)       # in a pass: a placeholder
        if (source is None or type(self) is not DeferredParameter
                or self._values_from is not None):
            return
        numpy.random.set_state(state)   # forward draws on as before
        self._values_from = source
        if not is_placeholder(self._data[0]):
            set_placeholder(self, shape, _LATER)
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
            if array is None and self._values_from is not None:
                place_values_later(made, self._values_from)
        else:
            made = copy.copy(self)
            made._data = [placeholder(
                array.shape, array.dtype, array.source,
                self._initial_device.xp)]
            made.update_rule = copy.deepcopy(self.update_rule, memo)
        memo[id(self)] = made
        return made


class Drawn:
    """Values by an initializer, from a state of NumPy's generator.

    Args:
        initializer: Chainer's.
        state: It, or a list with it, of parameters each of which goes on
            where the one before has ended.
    """

    def __init__(self, initializer: Any, state: Any) -> None:
        self._initializer, self._state = initializer, state
        self._dtype = chainer.config.dtype

    def __call__(self, shape: tuple[int, ...]) -> Any:
        with preserved(), suspended(), chainer.using_config(
                'dtype', self._dtype):
            in_turn = isinstance(self._state, list)
            numpy.random.set_state(self._state[0] if in_turn else self._state)
            values = generate_array(self._initializer, shape, numpy)
            if in_turn:
                self._state[0] = numpy.random.get_state()
            return values


class Deferral(Creation):
    """Notes how the values of large parameters are to be made.

    Args:
        everything: See :func:`deferred`.

    Attributes:
        state: From where parameters are drawn that get their shape in
            forward, one after the other.
    """

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self.state = [numpy.random.get_state()]

    def created(self, parameter: chainer.Parameter, shape: Any) -> None:
        super().created(parameter, shape)
        if shape is None:
            place_values_later(parameter, Drawn(parameter.initializer,
                                                self.state))

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        shape, initializer = _shape(shape), parameter.initializer
        later = self._everything or (
            _is_large(parameter, shape)
            and _can_be_drawn_again(initializer, shape))
        if later:
            place_values_later(parameter, Drawn(
                initializer, self.state if self._everything
                else numpy.random.get_state()), shape)
        elif type(parameter) is DeferredParameter:
            parameter.__class__ = chainer.Parameter
        if later and not self._everything:
            _draw_and_forget(initializer, shape)
        return later


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
    has a generator of its own.

    Args:
        seed: Of the initial values.
        everything: Whether no parameter has its values at once.  Each is
            drawn in its turn, when it is first used.
    """
    with preserved():
        numpy.random.seed(operator.index(seed) & 0xffffffff)
        deferral = Deferral(everything)
        with creating(deferral):
            yield
        if not everything:
            deferral.state[0] = numpy.random.get_state()


def draw_later(parameter: chainer.Parameter, *seed: int) -> None:
    """Has a parameter drawn from these seeds when its array is read."""
    state = numpy.random.RandomState([
        number & 0xffffffff for number in seed]).get_state()
    place_values_later(parameter, Drawn(parameter.initializer, state))


def draw(parameter: chainer.Parameter) -> None:
    """Gives a parameter of known shape its initial values.

    If no note says how, they come from NumPy's generator.
    """
    shape = parameter._data[0].shape
    source = getattr(parameter, '_values_from', None)
    device = parameter._initial_device
    if source is not None:
        values = device.send(source(shape))
    else:
        with suspended(), chainer.using_config(
                'dtype', parameter._data[0].dtype):
            values = generate_array(parameter.initializer, shape, device.xp,
                                    device=device)
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


def place_values_later(parameter: chainer.Parameter,
                       source: Callable[[tuple[int, ...]], Any],
                       shape: Any = None) -> None:
    """Has a parameter get its values when they are first asked for.

    Args:
        parameter: Of Chainer's class.
        source: Is given the shape, and returns the values in a NumPy array.
        shape: None: as it is, or not known yet.
    """
    if type(parameter) is chainer.Parameter:
        parameter.__class__ = DeferredParameter
    parameter._values_from = source
    parameter._grad_valid = True        # as the initializer's has come
    if shape is not None:
        parameter._grad_initializer = None
        set_placeholder(parameter, shape, _LATER)


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


def _is_large(parameter: chainer.Parameter, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is worth a note in place of its values."""
    dtype = chainer.get_dtype(getattr(parameter.initializer, 'dtype', None))
    return (type(parameter) in (chainer.Parameter, DeferredParameter)
            and parameter.layout is None
            and parameter._initial_device.xp is numpy
            and numpy.prod(shape, dtype=float) * dtype.itemsize >= _SMALL)


def _can_be_drawn_again(initializer: Any, shape: tuple[int, ...]) -> bool:
    """Whether a second call gives the same values from the same state."""
    return (type(initializer).__module__.startswith('chainer.initializers.')
            and getattr(initializer, 'rng', None) is None
            # Or the error would come too late.
            and (len(shape) > 1 or isinstance(initializer, (
                constant.Constant, normal.Normal, uniform.Uniform))))


def _draw_and_forget(initializer: Any, shape: tuple[int, ...]) -> None:
    """Moves NumPy's generator on, as if the values had been drawn."""
    kind, count = type(initializer).__module__, int(numpy.prod(shape))
    known: dict[str, Any] = {normal.__name__: numpy.random.normal,
                             uniform.__name__: numpy.random.uniform}
    if kind in known:
        for start in range(0, count, _CHUNK):
            known[kind](size=min(_CHUNK, count - start))
    elif kind != constant.__name__:
        generate_array(initializer, shape, numpy)

"""A Chainer model's gradients as flat float32 arrays, and back."""
from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import chainer
import numpy

from ..codecs import Tensors
from ..codecs.coding import places

_FLOAT32 = numpy.dtype('float32')

#: What to do about a difference.
SAME_MODEL = ('Build the same model on all ranks: same layers, same names, '
              'same order.')


class Gradients:
    """The gradients of a model that take part in an exchange.

    A parameter that occurs under several names is exchanged once, under the
    first.  Gradients that are not float32, C-contiguous and writeable, or
    share memory, are copied; :meth:`write_back` brings the result home.

    Args:
        model: A Chainer link.
        zero_fill: Give parameters without gradient one of zeros.

    Attributes:
        entries: Name to description of every parameter, and the loss scale:
            what must be equal on all ranks.
        loss_scale: The factor of all gradients; None if there is none.
        problem: What forbids an exchange on this rank; '' if nothing.
        sizes: Elements of every parameter that has some, by name, whether
            it has a gradient or not.
        arrays: By the parameter's name, the gradients as they were found.
        parameters: Whose gradients these are, by name.
        share_parameters: Parameters have memory in common
            (``copy('share')``).
    """

    def __init__(self, model: chainer.Link, zero_fill: bool) -> None:
        self.entries: dict[str, str] = {}
        self.problem = ''
        self.sizes: dict[str, int] = {}
        self.arrays: dict[str, Any] = {}
        self.parameters: dict[str, chainer.Parameter] = {}
        self.loss_scale: float | None = None
        self.share_parameters = False
        self._flat: dict[str, tuple[Any, Any]] = {}
        self._copied: set[str] = set()
        self._scales: dict[float | None, str] = {}      # and whose they are
        self._filled: list[chainer.Parameter] = []
        values = [value for name, parameter in distinct_parameters(model)
                  if (value := self._take(name, parameter, zero_fill))
                  is not None]
        if len(self._scales) > 1:
            (one, name), (two, other), *_ = self._scales.items()
            self.problem = self.problem or (
                f'the gradients of parameters {name} and {other} have '
                f'different loss scales, {one} and {two}; scale all losses '
                'alike and clear gradients before each backward pass')
        gradients = list(self.arrays.values())
        in_place = _are_apart(gradients, True)
        if not in_place:
            self.problem = self.problem or self._different_devices(values)
        if self.problem:
            return
        self.loss_scale = next(iter(self._scales), None)
        # backward() sets the scale only of parameters that it reaches.
        for parameter in self._filled:
            parameter._loss_scale = self.loss_scale
        if gradients:
            self.entries['the loss scale'] = str(self.loss_scale)
        if in_place and _are_apart(values, False):
            self._flat = {name: (gradient.reshape(-1), value.reshape(-1))
                          for (name, gradient), value in zip(
                              self.arrays.items(), values, strict=True)}
        else:
            self._flatten(gradients, values)

    def _take(self, name: str, parameter: chainer.Parameter,
              zero_fill: bool) -> Any:
        """Notes a parameter; its array, if there is a gradient."""
        value = parameter.array
        if value is None:       # Chainer raises an error for its gradient
            self.entries[f'parameter {name}'] = 'not initialised'
            return None
        gradient = parameter.grad
        problem = problem_of(name, value, gradient)
        if problem:
            self.problem = self.problem or problem
            return None
        if value.size:
            self.sizes[name] = value.size
        if gradient is not None:
            self._scales.setdefault(parameter._loss_scale, name)
        elif zero_fill:
            gradient = parameter.grad = parameter.xp.zeros_like(value)
            self._filled.append(parameter)
        self.entries[f'parameter {name}'] = _text(
            value.dtype, value.shape,
            None if gradient is None else gradient.dtype)
        if gradient is None:
            return None
        self.arrays[name], self.parameters[name] = gradient, parameter
        return value

    def part(self, names: Iterable[str], grain: int = 1) -> Tensors:
        """Tensors of those of these parameters that have a gradient.

        Args:
            names: Of the parameters.
            grain: Of the codec.
        """
        flat = self._flat
        found = [name for name in names if name in flat]
        return Tensors(found, [flat[name][0] for name in found],
                       [flat[name][1] for name in found],
                       1.0 if self.loss_scale is None else self.loss_scale,
                       grain)

    def is_in_place(self, name: str) -> bool:
        """Whether a gradient's own memory is what is exchanged."""
        return name not in self._copied

    def write_back(self, name: str | None = None) -> None:
        """Brings the result into gradients that had to be copied.

        A finite value that is too large for float16 becomes the largest.

        Args:
            name: Of one of them; None: all.
        """
        for chosen in (self._copied if name is None
                       else self._copied & {name}):
            flat, parameter = self._flat[chosen][0], self.parameters[chosen]
            gradient, xp = parameter.grad, parameter.xp
            largest = numpy.finfo(gradient.dtype).max
            if largest < numpy.finfo(numpy.float32).max:
                flat = xp.where(xp.isfinite(flat),
                                xp.clip(flat, -largest, largest), flat)
            # A new array: the old one may be a view that is not writeable.
            parameter.grad = flat.reshape(gradient.shape).astype(
                gradient.dtype)

    def _flatten(self, gradients: list[Any], values: list[Any]) -> None:
        """Copies what cannot be exchanged, or shared, in place."""
        self.share_parameters = bool(_overlapping(values))
        overlapping = _overlapping(gradients)
        for place, (name, gradient, value) in enumerate(
                zip(self.arrays, gradients, values, strict=True)):
            flat = flat_float32(gradient)
            # The gradient of a sum is a view of one number, for example.
            if (place in overlapping or gradient.dtype != flat.dtype
                    or not gradient.flags.c_contiguous
                    or not getattr(gradient.flags, 'writeable', True)):
                flat = flat.copy()
                self._copied.add(name)
            self._flat[name] = flat, flat_float32(value)

    def _different_devices(self, values: list[Any]) -> str:
        """Names an array on another device than the first; '' if none is."""
        found = [(f'{kind} {name}', name, 'the CPU' if isinstance(
            array, numpy.ndarray) else f'GPU {array.device.id}')
            for (name, gradient), value in zip(
                self.arrays.items(), values, strict=True)
            for kind, array in (('parameter', value),
                                ('the gradient of parameter', gradient))]
        return next((
            f'{what} is on {place} but parameter {found[0][1]} is on '
            f'{found[0][2]}; move the whole model to one device '
            '(model.to_device)' for what, _, place in found
            if place != found[0][2]), '')


def flat_float32(array: Any) -> Any:
    """A view of one dimension, or a copy of another dtype or order."""
    if array.dtype == _FLOAT32 and array.flags.c_contiguous:
        return array.reshape(-1)
    # Overflow to infinity is reported after the exchange, by name.
    with numpy.errstate(over='ignore'):
        return array.astype(_FLOAT32).reshape(-1)


def distinct_parameters(model: chainer.Link
                        ) -> list[tuple[str, chainer.Parameter]]:
    """Names and parameters in the order of names, shared ones once."""
    seen: set[int] = set()
    found = []
    for item in sorted(model.namedparams(), key=operator.itemgetter(0)):
        if id(item[1]) not in seen:
            seen.add(id(item[1]))
            found.append(item)
    return found


def describe(array: Any) -> str:
    """Dtype and shape of a parameter's array; None: not initialised."""
    return 'not initialised' if array is None else _text(
        array.dtype, array.shape, array.dtype)


def problem_of(name: str, value: Any, gradient: Any) -> str:
    """Why this parameter cannot be exchanged; '' if it can."""
    for kind, array in (('parameter', value),
                        ('the gradient of parameter', gradient)):
        if array is None or (type(array) is numpy.ndarray
                             and array.dtype == _FLOAT32):
            continue        # as nearly always
        if not isinstance(array, (numpy.ndarray,
                                  chainer.backends.cuda.ndarray)):
            return (f'{kind} {name} is a {type(array).__module__}.'
                    f'{type(array).__name__}; it must be a NumPy or a CuPy '
                    'array (model.to_device)')
        if array.dtype.kind != 'f':
            return (f'{kind} {name} has dtype {array.dtype.name}; only '
                    'float16, float32 and float64 can be averaged (register '
                    'it as a persistent value instead)')
    return ''


@functools.lru_cache(4096)      # asked for at every update
def _text(dtype: numpy.dtype, shape: tuple[int, ...],
          gradient: numpy.dtype | None) -> str:
    text = f'{dtype.name} {shape}'
    if gradient is None:
        return f'{text} without gradient'
    return text if gradient == dtype else (
        f'{text} with a gradient of {gradient.name}')


def _are_apart(arrays: list[Any], writeable: bool) -> bool:
    """Whether it is certain, at a glance, that arrays can be used in place.

    They are float32, C-contiguous, on the host, and none overlaps another.
    """
    found = places(arrays, writeable)
    if found is None or len(arrays) < 2:
        return found is not None
    starts, sizes = found[numpy.argsort(found[:, 0])].T
    return bool((starts[:-1] + _FLOAT32.itemsize * sizes[:-1]
                 <= starts[1:]).all())


def _overlapping(arrays: list[Any]) -> set[int]:
    """Numbers of contiguous arrays that share memory with another one.

    The gradients of a sum's terms may be one array, for example.
    """
    spans = sorted(
        (array.__array_interface__['data'][0] if isinstance(
            array, numpy.ndarray) else array.data.ptr, array.nbytes, place)
        for place, array in enumerate(arrays)
        if array.nbytes and array.flags.c_contiguous)
    found = set()
    end, last = 0, -1
    for start, size, place in spans:
        if start < end:
            found |= {last, place}
        if start + size > end:
            end, last = start + size, place
    return found

"""A Chainer model's gradients as flat float32 arrays, and back."""
from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import chainer
import numpy

from ..codecs.tensors import places

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
        parameters: Those with a gradient, by name.
        arrays: Their gradients as they were found.
        flat: Their gradients as they are exchanged: flat, float32.
        values: Their arrays, likewise.
        copied: Names of those of which that is another array.
    """

    def __init__(self, model: chainer.Link, zero_fill: bool) -> None:
        self.entries: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.parameters: dict[str, chainer.Parameter] = {}
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.flat: dict[str, Any] = {}
        self.copied: set[str] = set()
        scales: dict[float | None, str] = {}        # and whose they are
        filled: list[chainer.Parameter] = []
        problems = [self._take(name, parameter, zero_fill, scales, filled)
                    for name, parameter in distinct_parameters(model)]
        if len(scales) > 1:
            (one, name), (two, other), *_ = scales.items()
            problems.append(
                f'the gradients of parameters {name} and {other} have '
                f'different loss scales, {one} and {two}; scale all losses '
                'alike and clear gradients before each backward pass')
        problems.append(self._different_devices())
        self.problem = next(filter(None, problems), '')
        self.loss_scale = next(iter(scales), None)
        # backward() sets the scale only of parameters that it reaches.
        for parameter in filled:
            parameter._loss_scale = self.loss_scale
        if self.arrays:
            self.entries['the loss scale'] = str(self.loss_scale)
        if not self.problem:
            self._lay_flat()

    def _lay_flat(self) -> None:
        """Copies what cannot be exchanged, or shared, where it is."""
        usual, shared = overlapping([*self.arrays.values()],
                                    [*self.values.values()])
        for (name, gradient), is_shared in zip(self.arrays.items(), shared,
                                               strict=True):
            flat = flat_float32(gradient)
            # The gradient of a sum is a view of one number, for example.
            if is_shared or not usual and (
                    gradient.dtype != _FLOAT32
                    or not gradient.flags.c_contiguous
                    or not getattr(gradient.flags, 'writeable', True)):
                flat = flat.copy()
                self.copied.add(name)
            self.flat[name] = flat
            self.values[name] = flat_float32(self.values[name])

    def _take(self, name: str, parameter: chainer.Parameter, zero_fill: bool,
              scales: dict[float | None, str], filled: list) -> str:
        """Notes a parameter; what forbids to exchange it, '' if nothing."""
        value = parameter.array
        if value is None:       # Chainer raises an error for its gradient
            self.entries[f'parameter {name}'] = 'not initialised'
            return ''
        gradient = parameter.grad
        problem = problem_of(name, value, gradient)
        if problem:
            return problem
        if value.size:
            self.sizes[name] = value.size
        if gradient is not None:
            scales.setdefault(parameter._loss_scale, name)
        elif zero_fill:
            gradient = parameter.grad = parameter.xp.zeros_like(value)
            filled.append(parameter)
        self.entries[f'parameter {name}'] = _text(
            value.dtype, value.shape,
            None if gradient is None else gradient.dtype)
        if gradient is not None:
            self.parameters[name] = parameter
            self.arrays[name], self.values[name] = gradient, value
        return ''

    def write_back(self, names: Iterable[str]) -> None:
        """Brings the result into those gradients that had to be copied.

        A finite value that is too large for float16 becomes the largest.
        """
        for name in self.copied.intersection(names):
            flat, parameter = self.flat[name], self.parameters[name]
            gradient, xp = parameter.grad, parameter.xp
            largest = numpy.finfo(gradient.dtype).max
            if largest < numpy.finfo(numpy.float32).max:
                flat = xp.where(xp.isfinite(flat),
                                xp.clip(flat, -largest, largest), flat)
            # A new array: the old one may be a view that is not writeable.
            parameter.grad = flat.reshape(gradient.shape).astype(
                gradient.dtype)

    def _different_devices(self) -> str:
        """Names an array on another device than the first; '' if none is."""
        first = None
        for kind, arrays in (('parameter', self.values),
                             ('the gradient of parameter', self.arrays)):
            for name, array in arrays.items():
                place = ('the CPU' if isinstance(array, numpy.ndarray)
                         else f'GPU {array.device.id}')
                first = first or (f'{kind} {name}', place)
                if place != first[1]:
                    return (f'{kind} {name} is on {place} but {first[0]} is '
                            f'on {first[1]}; move the whole model to one '
                            'device (model.to_device)')
        return ''


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
    name_of = operator.itemgetter(0)
    return sorted({id(item[1]): item for item in sorted(
        model.namedparams(), key=name_of, reverse=True)}.values(), key=name_of)


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


def overlapping(gradients: Sequence[Any], values: Sequence[Any]
                ) -> tuple[bool, list[bool]]:
    """Which gradients share memory with another, or a parameter.

    The gradients of a sum's terms may be one array, for example.

    Returns:
        Whether all arrays are float32, C-contiguous and on the host, and
        gradients can be written; and, of each gradient, the above.
    """
    written, read = places(gradients, True), places(values)
    usual = written is not None and read is not None
    spans = numpy.array([*map(_span, (*gradients, *values))],
                        numpy.int64).reshape(-1, 2) if not usual else (
        numpy.concatenate([written, read]) @ [[1, 1], [0, 4]])
    order = numpy.argsort(spans[:, 0], kind='stable')
    order = order[numpy.diff(spans[order])[:, 0] > 0]       # not what is empty
    starts, stops = spans[order].T
    begun = numpy.maximum.accumulate(stops)[:-1] > starts[1:]
    found = numpy.zeros(len(spans), bool)
    found[order[1:]] |= begun
    found[order[:-1]] |= stops[:-1] > starts[1:]
    return usual, found[:len(gradients)].tolist()


def _span(array: Any) -> tuple[int, int]:
    """First address of an array's memory, and the last one plus one."""
    start = (array.ctypes.data if isinstance(array, numpy.ndarray)
             else array.data.ptr)
    if array.flags.c_contiguous or not array.size:
        return start, start + array.nbytes
    reach = [(size - 1) * stride for size, stride in zip(
        array.shape, array.strides, strict=True)]
    return (start + sum(step for step in reach if step < 0),
            start + array.itemsize + sum(step for step in reach if step > 0))

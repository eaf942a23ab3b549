"""A Chainer model's gradients as flat float32 arrays, and back."""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import chainer
import numpy

from ..codecs import Tensors
from ..codecs.coding import places

_FLOAT = 4              # bytes of a float32

#: What to do about a difference.
SAME_MODEL = ('Build the same model on all ranks: same layers, same names, '
              'same order.')


class Found(NamedTuple):
    """A parameter as an update finds it."""

    name: str
    parameter: chainer.Parameter
    array: Any          # None: it is not initialised
    gradient: Any       # None: there is none


class Gradients:
    """The gradients of a model that take part in an exchange.

    A parameter that occurs under several names is exchanged once, under the
    first.  Gradients that are not C-contiguous float32 are copied;
    :meth:`write_back` brings the result home.

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
        tensors: The fused vector; None if there is a problem.
    """

    def __init__(self, model: chainer.Link, zero_fill: bool) -> None:
        self.entries: dict[str, str] = {}
        self.problem = ''
        self.sizes: dict[str, int] = {}
        self.arrays: dict[str, Any] = {}
        self.tensors: Tensors | None = None
        self.loss_scale: float | None = None
        self.parameters: dict[str, chainer.Parameter] = {}
        self._copies: dict[str, tuple[Any, chainer.Parameter]] = {}
        self._places: dict[str, int] = {}
        chosen, filled = [], []
        for name, parameter in distinct_parameters(model):
            array, gradient = arrays_of(parameter)
            problem = problem_of(name, array, gradient)
            self.problem = self.problem or problem
            if not problem and array is not None:
                size = math.prod(array.shape)
                if size:
                    self.sizes[name] = size
                if gradient is None and zero_fill:
                    gradient = parameter.xp.zeros_like(array)
                    parameter.grad = gradient
                    filled.append(parameter)
                if gradient is not None:
                    self.arrays[name] = gradient
                    self.parameters[name] = parameter
                    chosen.append(Found(name, parameter, array, gradient))
            self.entries[f'parameter {name}'] = describe(array, gradient)
        scales = _loss_scales(chosen, filled)
        self.problem = (self.problem or different_devices(chosen)
                        or _different_scales(scales))
        if not self.problem:
            self.loss_scale = next(iter(scales), None)
            # What a backward pass did not reach has no scale, or an old one.
            for parameter in filled:
                parameter._loss_scale = self.loss_scale
            self.tensors = self._fuse(chosen)
        if chosen:
            self.entries['the loss scale'] = str(self.loss_scale)

    def part(self, names: Iterable[str], grain: int = 1) -> Tensors:
        """Of these parameters, those that have a gradient.

        Args:
            names: Of the parameters.
            grain: Of the codec.
        """
        assert self.tensors is not None
        tensors = self.tensors
        if not self._places:
            self._places = {name: place
                            for place, name in enumerate(tensors.names)}
        chosen = [self._places[name] for name in names
                  if name in self._places]
        return Tensors([tensors.names[place] for place in chosen],
                       [tensors.gradients[place] for place in chosen],
                       [tensors.parameters[place] for place in chosen],
                       tensors.loss_scale, grain)

    @property
    def share_parameters(self) -> bool:
        """Whether parameters have memory in common (``copy('share')``)."""
        return self.tensors is not None and bool(
            _overlapping(self.tensors.parameters))

    def is_in_place(self, name: str) -> bool:
        """Whether a gradient's own memory is what is exchanged."""
        return name not in self._copies

    def write_back(self, name: str | None = None) -> None:
        """Brings the result into gradients that had to be copied.

        A finite value that is too large for float16 becomes the largest.

        Args:
            name: Of one of them; None: all.
        """
        for chosen in self._copies if name is None else (name,):
            if chosen not in self._copies:
                continue
            flat, parameter = self._copies[chosen]
            gradient = parameter.grad
            xp = parameter.xp
            largest = numpy.finfo(gradient.dtype).max
            if largest < numpy.finfo(numpy.float32).max:
                flat = xp.where(xp.isfinite(flat),
                                xp.clip(flat, -largest, largest), flat)
            # A new array: the old one may be a view that is not writeable.
            parameter.grad = flat.reshape(gradient.shape).astype(
                gradient.dtype)

    def _fuse(self, chosen: list[Found]) -> Tensors:
        gradients, parameters = [], []
        overlapping = _overlapping([found.gradient for found in chosen])
        for place, (name, parameter, array, gradient) in enumerate(chosen):
            flat = flat_float32(gradient)
            in_place = _shares(flat, gradient)
            if place in overlapping or not _may_be_written(gradient):
                flat = flat.copy()
                in_place = False
            if not in_place:
                self._copies[name] = flat, parameter
            gradients.append(flat)
            parameters.append(flat_float32(array))
        return Tensors([found.name for found in chosen], gradients,
                       parameters,
                       1.0 if self.loss_scale is None else self.loss_scale)


def flat_float32(array: Any) -> Any:
    """A view of one dimension, or a copy of another dtype or order."""
    if array.dtype == numpy.float32 and array.flags.c_contiguous:
        return array.reshape(-1)
    # Overflow to infinity is reported after the exchange, by name.
    with numpy.errstate(over='ignore'):
        return array.astype(numpy.float32).reshape(-1)


def _shares(flat: Any, array: Any) -> bool:
    return flat.dtype == array.dtype and array.flags.c_contiguous


def _may_be_written(array: Any) -> bool:
    # The gradient of a sum is a view of one number, for example.
    return getattr(array.flags, 'writeable', True)


def _overlapping(arrays: list[Any]) -> set[int]:
    """Which contiguous arrays have memory in common with another one.

    The gradients of a sum's terms may be one array, for example.
    """
    if _are_apart(arrays):
        return set()
    spans = sorted((_address(array), array.nbytes, place)
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


def _are_apart(arrays: list[Any]) -> bool:
    """Whether it is certain, at a glance, that none of them overlap."""
    if len(arrays) < 2:
        return True
    found = places(arrays)
    if found is None:
        return False
    starts, sizes = found[numpy.argsort(found[:, 0])].T
    return bool((starts[:-1] + _FLOAT * sizes[:-1] <= starts[1:]).all())


def _address(array: Any) -> int:
    if isinstance(array, numpy.ndarray):
        return array.__array_interface__['data'][0]
    return array.data.ptr


def _loss_scales(chosen: list[Found],
                 filled: list[chainer.Parameter]) -> dict[float | None, str]:
    """The loss scales of gradients that were computed, and whose they are."""
    zeros = {id(parameter) for parameter in filled}
    scales: dict[float | None, str] = {}
    for name, parameter, _, _ in chosen:
        if id(parameter) not in zeros:
            scales.setdefault(parameter._loss_scale, name)
    return scales


def _different_scales(scales: dict[float | None, str]) -> str:
    if len(scales) < 2:
        return ''
    (first, name), (second, other), *_ = scales.items()
    return (f'the gradients of parameters {name} and {other} have different '
            f'loss scales, {first} and {second}; scale all losses alike and '
            'clear gradients before each backward pass')


# --- parameters: what they are, and what is wrong with them ------------------

def distinct_parameters(model: chainer.Link
                        ) -> list[tuple[str, chainer.Parameter]]:
    """Names and parameters in the order of names, shared ones once."""
    seen: set[int] = set()
    found = []
    for name, parameter in sorted(model.namedparams(),
                                  key=lambda item: item[0]):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((name, parameter))
    return found


def arrays_of(parameter: chainer.Parameter) -> tuple[Any, Any]:
    """Array and gradient, each None if there is none.

    Chainer looks at several things each time that it is asked for them.
    """
    array = parameter.array
    # Chainer raises an error for the gradient of an uninitialised parameter.
    return array, None if array is None else parameter.grad


def describe(array: Any, gradient: Any) -> str:
    """Shape and dtype, and whether there is a gradient."""
    if array is None:
        return 'not initialised'
    return _text(array.dtype, array.shape,
                 None if gradient is None else gradient.dtype)


@functools.lru_cache(4096)      # asked for at every update
def _text(dtype: numpy.dtype, shape: tuple[int, ...],
          gradient: numpy.dtype | None) -> str:
    text = f'{dtype.name} {shape}'
    if gradient is None:
        return f'{text} without gradient'
    if gradient != dtype:
        return f'{text} with a gradient of {gradient.name}'
    return text


def problem_of(name: str, value: Any, gradient: Any) -> str:
    """Why this parameter cannot be exchanged; '' if it can."""
    if value is None:
        return ''
    for kind, array in (('parameter', value),
                        ('the gradient of parameter', gradient)):
        if array is None:
            continue
        if not _is_supported(array):
            return (f'{kind} {name} is a {type(array).__module__}.'
                    f'{type(array).__name__}; it must be a NumPy or a CuPy '
                    'array (model.to_device)')
        if array.dtype.kind != 'f':
            return (f'{kind} {name} has dtype {array.dtype.name}; only '
                    'float16, float32 and float64 can be averaged (register '
                    'it as a persistent value instead)')
    return ''


def _is_supported(array: Any) -> bool:
    return isinstance(array, (numpy.ndarray, chainer.backends.cuda.ndarray))


def different_devices(chosen: Sequence[Found]) -> str:
    """Which of these is not where the first one is; '' if all are."""
    kinds = {type(array) for found in chosen
             for array in (found.array, found.gradient)}
    if kinds <= {numpy.ndarray}:
        return ''
    first = chosen[0]
    wanted = _device(first.array)
    for found in chosen:
        for kind, array in (('parameter', found.array),
                            ('the gradient of parameter', found.gradient)):
            if _device(array) != wanted:
                return (f'{kind} {found.name} is on {_device(array)} but '
                        f'parameter {first.name} is on {wanted}; move the '
                        'whole model to one device (model.to_device)')
    return ''


def _device(array: Any) -> str:
    if isinstance(array, numpy.ndarray):
        return 'the CPU'
    return f'GPU {array.device.id}'

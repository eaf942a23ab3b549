"""A Chainer model's gradients as flat float32 arrays, and back."""
from __future__ import annotations

from typing import Any

import chainer
import numpy

from ..codecs import Tensors
from .parameters import (
    describe,
    different_devices,
    distinct_parameters,
    problem_of,
)


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
        tensors: The fused vector; None if there is a problem.
    """

    def __init__(self, model: chainer.Link, zero_fill: bool) -> None:
        self.entries: dict[str, str] = {}
        self.problem = ''
        self.tensors: Tensors | None = None
        self.loss_scale: float | None = None
        self._copies: list[tuple[Any, chainer.Parameter]] = []
        chosen = []
        filled = []
        for name, parameter in distinct_parameters(model):
            problem = problem_of(name, parameter)
            self.problem = self.problem or problem
            if not problem and parameter.array is not None:
                if parameter.grad is None and zero_fill:
                    parameter.grad = parameter.xp.zeros_like(parameter.array)
                    filled.append(parameter)
                if parameter.grad is not None:
                    chosen.append((name, parameter))
            self.entries[f'parameter {name}'] = describe(parameter)
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

    def write_back(self) -> None:
        """Brings the result into gradients that had to be copied.

        A finite value that is too large for float16 becomes the largest.
        """
        for flat, parameter in self._copies:
            gradient = parameter.grad
            xp = parameter.xp
            largest = numpy.finfo(gradient.dtype).max
            if largest < numpy.finfo(numpy.float32).max:
                flat = xp.where(xp.isfinite(flat),
                                xp.clip(flat, -largest, largest), flat)
            # A new array: the old one may be a view that is not writeable.
            parameter.grad = flat.reshape(gradient.shape).astype(
                gradient.dtype)

    def _fuse(self, chosen: list[tuple[str, chainer.Parameter]]) -> Tensors:
        gradients, parameters = [], []
        for _, parameter in chosen:
            flat = _flat(parameter.grad)
            if not _may_be_written(parameter.grad):
                flat = flat.copy()
            if not _shares(flat, parameter.grad):
                self._copies.append((flat, parameter))
            gradients.append(flat)
            parameters.append(_flat(parameter.array))
        return Tensors([name for name, _ in chosen], gradients, parameters,
                       1.0 if self.loss_scale is None else self.loss_scale)


def _flat(array: Any) -> Any:
    if array.dtype == numpy.float32 and array.flags.c_contiguous:
        return array.reshape(-1)
    # Overflow to infinity is reported after the exchange, by name.
    with numpy.errstate(over='ignore'):
        return array.astype(numpy.float32).reshape(-1)


def _shares(flat: Any, array: Any) -> bool:
    return (flat.dtype == array.dtype and array.flags.c_contiguous
            and _may_be_written(array))


def _may_be_written(array: Any) -> bool:
    # The gradient of a sum is a view of one number, for example.
    return getattr(array.flags, 'writeable', True)


def _loss_scales(chosen: list[tuple[str, chainer.Parameter]],
                 filled: list[chainer.Parameter]) -> dict[float | None, str]:
    """The loss scales of gradients that were computed, and whose they are."""
    zeros = {id(parameter) for parameter in filled}
    scales: dict[float | None, str] = {}
    for name, parameter in chosen:
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

"""Plain ``L.Linear`` layers, by the matrix products that BLAS likes best.

Chainer computes :math:`x W^T` as it stands.  OpenBLAS is faster at
:math:`(W x^T)^T`, where the second factor is the narrow one: by 10 to 30 % on
micro-batches of 30 to 120 samples.  Adding the bias puts the result into C's
order for next to nothing.  Products of weight gradients are left to
:class:`.GradientSums`, which makes one of those of several micro-batches.
"""
from __future__ import annotations

from typing import Any

import chainer
import chainer.links as L
import numpy
from chainer.backends import intel64

from .batch_statistics import BatchStatistics
from .gradient_sums import GradientSums


def is_plain(layer: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether :func:`forward` does what ``layer(*inputs)`` would do.

    True for an ``L.Linear`` on a float32 NumPy matrix without hooks and debug
    mode.  Gives the layer its weights, if these wait for the first input.
    """
    if (type(layer) is not L.Linear or len(inputs) != 1
            or 'forward' in vars(layer)):      # of this layer alone
        return False
    x, = inputs
    if (not _is_float32(x, 2) or layer.local_link_hooks
            or chainer.get_function_hooks() or chainer.is_debug()
            or intel64.should_use_ideep('>=auto')
            or any(not isinstance(hook, BatchStatistics)
                   for hook in chainer._get_link_hooks().values())):
        return False
    if layer.W.array is None:
        layer._initialize_params(x.shape[1])
    parameters = [parameter for parameter in (layer.W, layer.b)
                  if parameter is not None]
    return (all(isinstance(parameter, chainer.Parameter)
                and _is_float32(parameter.array, ndim)
                for parameter, ndim in zip(parameters, (2, 1), strict=False))
            and layer.W.shape[1] == x.shape[1])


def forward(layer: L.Linear, x: numpy.ndarray) -> numpy.ndarray:
    """The layer's output, float32[samples, outputs] in C's order."""
    product = layer.W.array.dot(x.T).T
    if layer.b is None:
        return numpy.ascontiguousarray(product)
    return numpy.add(product, layer.b.array, order='C')


class LinearTape:
    """A :class:`.Tape` for a layer that :func:`is_plain`.

    Args:
        layer: Of the tape.
        x: The layer's input, float32[samples, inputs].
        wanted: Whether the gradient of the input is of use.
    """

    wants = (True,)

    def __init__(self, layer: L.Linear, x: numpy.ndarray,
                 wanted: bool) -> None:
        self._layer, self._x, self._wanted = layer, x, wanted
        self._gradient: numpy.ndarray | None = None

    def backward(self, gradients: tuple[Any, ...], sums: GradientSums,
                 defer: bool = False) -> tuple[Any, ...]:
        gradient, = gradients
        if gradient is None:
            return (None,)
        self._gradient = gradient = gradient.astype(numpy.float32, copy=False)
        if not defer:
            self.backward_weight(sums)
        return (gradient.dot(self._layer.W.array) if self._wanted else None,)

    def backward_weight(self, sums: GradientSums) -> None:
        if self._gradient is not None:
            sums.add_product(self._layer, self._gradient, self._x)
            self._gradient = None


def _is_float32(array: Any, ndim: int) -> bool:
    return (type(array) is numpy.ndarray and array.ndim == ndim
            and array.dtype == numpy.float32)

"""Batch normalisation with the statistics of several ranks' batches.

Each rank sends its number of elements per channel, their mean, and the sum of
squares about it; these are joined as Chan, Golub and LeVeque join partial
variances ("Algorithms for computing the sample variance", 1983).  So nothing
cancels where the mean is much larger than the standard deviation, as it does
in the mean of squares less the square of the mean.  Each rank joins all in
the order of ranks, in float64, and finds the same bits.
"""
from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import chainer
import numpy
from chainer import backend
from chainer.backends import cuda
from chainer.functions.normalization import batch_normalization

from .channel_sums import ChannelView


class GroupStatistics(NamedTuple):
    """Statistics of a group's whole batch.

    Attributes:
        elements: Of each channel.
        mean: Of each channel; float64.
        variance: Of each channel, biased; float64.
    """

    elements: int
    mean: numpy.ndarray
    variance: numpy.ndarray


def refusal(channels: int) -> numpy.ndarray:
    """The message of a rank whose input cannot be normalised."""
    numbers = numpy.zeros(1 + 2 * channels)
    numbers[0] = -1
    return numbers


def join(everyone: numpy.ndarray) -> GroupStatistics:
    """Joins the statistics of all ranks' parts.

    Args:
        everyone: float64 of shape (ranks, 1 + 2 * channels): each rank's
            number of elements per channel, means, and sums of squares about
            them.

    Raises:
        ValueError: A rank has sent a :func:`refusal`, or no rank has any
            elements.
    """
    counts = everyone[:, :1]
    refused = numpy.flatnonzero(counts < 0)
    if refused.size:
        ranks = ', '.join(map(str, refused))
        raise ValueError(f'batch normalisation failed on rank {ranks} of the '
                         'group; see its message')
    means, squares = everyone[:, 1:].reshape(
        len(everyone), 2, -1).swapaxes(0, 1)
    total = counts.sum()
    if not total:
        raise ValueError('no rank of the group has a sample to normalise; '
                         'leave out batches that are empty on all ranks')
    mean = (counts * means).sum(axis=0) / total
    square = (squares + counts * (means - mean) ** 2).sum(axis=0)
    return GroupStatistics(int(total), mean, square / total)


class GroupedBatchNormalizationFunction(
        batch_normalization.BatchNormalization):
    """``chainer.functions.batch_normalization`` over a group's batch.

    One message forward and one backward, and the latter only if the gradient
    of ``x`` is wanted.  Statistics are float32 or better, and float64 where
    they are added up.  The gradients of gamma and beta are this rank's share:
    their sum over the group is that of the whole batch.

    Args:
        group: With ``gather``, see :class:`chainer_fp8pipe.mpi.groups.Group`.
        options: ``eps``, ``mean``, ``var``, ``decay`` and ``axis`` as in
            Chainer; running statistics, where given, are updated in place.

    Attributes:
        elements: After forward, those of each channel in the whole group.
        has_sent: Whether the others have heard from this rank.
    """

    elements = 0
    has_sent = False

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(**options)
        self._group = group

    def forward_chainerx(self, inputs: Any) -> Any:
        """Chainer's forward pass for ChainerX knows no group."""
        return chainer.Fallback

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        """``y`` in the shape and dtype of ``x``."""
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        view = self._view = ChannelView(x, gamma, self.axis)
        shift = self._shift = view.centre(x)
        local = _cpu(shift).astype(numpy.float64)
        count = max(view.elements, 1)       # a rank may have no samples
        # What is left is of the size of the deviations.
        sums, squares = _cpu(view.moments(x, shift))
        numbers = numpy.concatenate([
            [view.elements], local + sums / count,
            numpy.maximum(squares - sums ** 2 / count, 0)])
        self.has_sent = True
        whole = join(self._group.gather(numbers))
        self.elements = whole.elements
        if whole.elements == 1:
            warnings.warn(
                'a whole group of ranks has one element per channel; batch '
                'normalisation then gives beta, whatever the input',
                stacklevel=2)
        self._off = local - whole.mean
        self._inverse = 1 / numpy.sqrt(whole.variance + self.eps)
        self._update(whole, gamma.shape)
        scale = _cpu(gamma).ravel() * self._inverse
        return view.scaled(x, shift, scale,
                           _cpu(beta).ravel() + scale * self._off),

    def backward(self, indexes: tuple[int, ...],
                 grad_outputs: tuple[chainer.Variable]) -> Any:
        """Gradients of ``x``, and this rank's share of the others'."""
        x, gamma = self.get_retained_inputs()
        return _Gradient(self, 0 in indexes).apply((x, gamma, *grad_outputs))

    def gradients(self, x: Any, gamma: Any, gy: Any, of_x: bool
                  ) -> tuple[Any, ...]:
        """Arrays: gradients of x, gamma and beta."""
        view, inverse = self._view, self._inverse
        gbeta, products = _cpu(view.products(gy, x, self._shift))
        ggamma = inverse * (products + self._off * gbeta)
        shares = tuple(view.channels(share) for share in (ggamma, gbeta))
        if not of_x:
            return None, *shares
        everyone = self._group.gather(numpy.concatenate([ggamma, gbeta]))
        ggamma, gbeta = everyone.sum(axis=0).reshape(2, -1) / self.elements
        scale = _cpu(gamma).ravel() * inverse
        slope = -scale * inverse * ggamma
        gx = view.gradient(x, self._shift, slope,
                           slope * self._off - scale * gbeta, gy, scale)
        return gx, *shares

    def _update(self, whole: GroupStatistics, shape: tuple[int, ...]) -> None:
        if self.running_mean is None:
            return
        # Chainer's running variance is the unbiased one.
        unbiased = whole.variance * whole.elements / max(
            whole.elements - 1, 1)
        for average, now in ((self.running_mean, whole.mean),
                             (self.running_var, unbiased)):
            average *= self.decay
            average += backend.get_array_module(average).asarray(
                ((1 - self.decay) * now).reshape(shape), average.dtype)


class _Gradient(chainer.FunctionNode):
    """The backward pass, as a function of its own, as Chainer has it."""

    def __init__(self, function: GroupedBatchNormalizationFunction, of_x: bool
                 ) -> None:
        self._function = function
        self._of_x = of_x

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, gamma, gy = inputs
        return self._function.gradients(x, gamma, gy, self._of_x)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        raise NotImplementedError(
            'grouped batch normalisation has no second derivatives; use '
            "Chainer's BatchNormalization in a model that needs them")


def _cpu(array: Any) -> numpy.ndarray:
    return cuda.to_cpu(array)

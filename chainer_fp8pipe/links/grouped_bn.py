"""Batch normalisation with the statistics of the batches of several ranks."""
# Each rank sends its number of elements per channel, their mean, and the sum
# of squares about it; these are joined as Chan, Golub and LeVeque join partial
# variances ("Algorithms for computing the sample variance", 1983).  So nothing
# cancels where the mean is much larger than the standard deviation, as it does
# in the mean of squares less the square of the mean.  Each rank joins all in
# the order of ranks, in float64, and finds the same bits.
#
# There is one message forward and one backward.  A rank whose input does not
# fit sends a refusal in place of the former, so that all raise.
from __future__ import annotations

import math
import warnings
from typing import Any

import chainer
import numpy
from chainer import backend
from chainer.backends.cuda import to_cpu
from chainer.functions.normalization import batch_normalization
from chainer.utils import argument


class GroupedBatchNormalization(chainer.links.BatchNormalization):
    """``chainer.links.BatchNormalization`` over the batches of a group.

    Forward, backward and the running statistics are those of one process
    with the ranks' batches, one after the other; they may differ in length,
    and some may be empty.  The gradients of gamma and beta are this rank's
    share: their sum over the group is that of the whole batch.  All ranks of
    the group must call it equally often.  Where Chainer's ``train`` is False
    it sends nothing.

    Args:
        size: As in Chainer, like all but ``group``.
        group: The ranks; see :class:`chainer_fp8pipe.mpi.grid.Group`.

    Attributes:
        group_elements: Elements per channel in the group's last batch.

    Raises:
        ValueError: When called, on all ranks of the group: the input of one
            of them does not fit, or no rank has a sample.
    """

    group: Any
    group_elements = 0
    N: int

    def __init__(self, size: Any = None, *args: Any, group: Any,
                 **options: Any) -> None:
        super().__init__(size, *args, **options)
        self.group = group

    def forward(self, x: Any, **options: Any) -> chainer.Variable:
        """The normalised floating-point ``x``; options as in Chainer."""
        if not chainer.config.train:
            return super().forward(x, **options)
        finetune, = argument.parse_kwargs(options, ('finetune', False))
        if self.avg_mean is None:
            self._find_size(x)
        number = self.N + 1 if finetune else self.N
        # Recomputing a forward pass changes no running statistics.
        averages = {} if chainer.config.in_recomputing else {
            'mean': self.avg_mean, 'var': self.avg_var}
        function = GroupedBatchNormalizationFunction(
            self.group, eps=self.eps, axis=self.axis, **averages,
            decay=1 - 1 / number if finetune else self.decay)
        result = self._apply(function, x)
        if averages:
            self.N = number
        self.group_elements = function.elements
        return result

    def _apply(self, function: GroupedBatchNormalizationFunction, x: Any
               ) -> chainer.Variable:
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        try:
            return function.apply((x, gamma, beta))[0]
        except BaseException:
            if not function.has_sent:       # the others wait for this rank
                self.group.gather(_refusal(self.avg_mean.size))
            raise

    def _find_size(self, x: Any) -> None:
        """Initialises the parameters; all ranks must find the same size."""
        size = tuple(length for number, length in enumerate(x.shape)
                     if number not in self.axis
                     ) if hasattr(x, 'shape') else type(x).__name__
        for rank, other in enumerate(self.group.gather_objects(size)):
            if other != size:
                raise ValueError(
                    f'batch normalisation over axis={self.axis} finds '
                    f'channels of shape {other} on rank {rank} of the group, '
                    f'and {size} on rank {self.group.rank}')
        self._initialize_params(size)


def _refusal(channels: int) -> numpy.ndarray:
    """The message of a rank whose input cannot be normalised."""
    numbers = numpy.zeros(1 + 2 * channels)
    numbers[0] = -1
    return numbers


def _join(everyone: numpy.ndarray
         ) -> tuple[int, numpy.ndarray, numpy.ndarray]:
    """Elements per channel, means and biased variances of the whole batch.

    Args:
        everyone: float64 of shape (ranks, 1 + 2 * channels): each rank's
            number of elements per channel, means, and sums of squares about
            them; or its refusal.
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
    return int(total), mean, square / total


class GroupedBatchNormalizationFunction(
        batch_normalization.BatchNormalization):
    """``chainer.functions.batch_normalization`` over a group's batch.

    One message forward and one backward, and the latter only if the gradient
    of ``x`` is wanted.  Statistics are float32 or better, and float64 where
    they are added up.  The gradients of gamma and beta are this rank's share.
    Options are as in Chainer; ``mean`` and ``var`` are updated in place.
    """

    elements = 0            # of each channel in the whole group
    has_sent = False        # whether the others have heard from this rank

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(**options)
        self._group = group

    def forward_chainerx(self, inputs: Any) -> Any:
        return chainer.Fallback     # Chainer's for ChainerX knows no group

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        view = self._view = _ChannelView(x, gamma, self.axis)
        count = max(view.elements, 1)       # a rank may have no samples
        # About the mean of each channel, nearly: centred values are small, so
        # their squares lose no digits.
        shift = self._shift = view.column(to_cpu(view.sum(
            view.seen(x))) / count)
        local = to_cpu(shift)[:, 0].astype(numpy.float64)
        centred = view.seen(x) - shift
        sums, squares = (to_cpu(view.sum(one)) for one in (
            centred, centred ** 2))
        numbers = numpy.concatenate([
            [view.elements], local + sums / count,
            numpy.maximum(squares - sums ** 2 / count, 0)])
        self.has_sent = True
        self.elements, mean, variance = _join(self._group.gather(numbers))
        if self.elements == 1:
            warnings.warn(
                'a whole group of ranks has one element per channel; batch '
                'normalisation then gives beta, whatever the input',
                stacklevel=2)
        self._off = local - mean
        self._inverse = 1 / numpy.sqrt(variance + self.eps)
        self._update(mean, variance)
        scale = to_cpu(gamma).ravel() * self._inverse
        centred *= view.column(scale)
        centred += view.column(to_cpu(beta).ravel() + scale * self._off)
        return view.back(centred),

    def backward(self, indexes: tuple[int, ...],
                 grad_outputs: tuple[chainer.Variable]) -> Any:
        """Gradients of ``x``, and this rank's share of the others'."""
        x, gamma = self.get_retained_inputs()
        return _Gradient(self, 0 in indexes).apply((x, gamma, *grad_outputs))

    def gradients(self, x: Any, gamma: Any, gy: Any, of_x: bool
                  ) -> tuple[Any, ...]:
        """Arrays: gradients of x, gamma and beta."""
        view, inverse = self._view, self._inverse
        above, centred = view.seen(gy), view.seen(x) - self._shift
        gbeta, products = (to_cpu(view.sum(one)) for one in (
            above, above * centred))
        ggamma = inverse * (products + self._off * gbeta)
        shares = tuple(view.channels(share) for share in (ggamma, gbeta))
        if not of_x:
            return None, *shares
        everyone = self._group.gather(numpy.concatenate([ggamma, gbeta]))
        ggamma, gbeta = everyone.sum(axis=0).reshape(2, -1) / self.elements
        scale = to_cpu(gamma).ravel() * inverse
        slope = -scale * inverse * ggamma
        centred *= view.column(slope)
        centred += view.column(slope * self._off - scale * gbeta)
        centred += above * view.column(scale)
        return view.back(centred), *shares

    def _update(self, mean: numpy.ndarray, variance: numpy.ndarray) -> None:
        if self.running_mean is None:
            return
        # Chainer's running variance is the unbiased one.
        unbiased = variance * self.elements / max(self.elements - 1, 1)
        for average, now in ((self.running_mean, mean),
                             (self.running_var, unbiased)):
            average *= self.decay
            average += backend.get_array_module(average).asarray(
                ((1 - self.decay) * now).reshape(average.shape),
                average.dtype)


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
        # A limit that the documentation names: they would take one more
        # exchange of sums, in which every rank of the group takes part.
        raise NotImplementedError(
            'grouped batch normalisation has no second derivatives; use '
            "Chainer's BatchNormalization in a model that needs them")


# --- sums and factors by channel ---------------------------------------------

class _ChannelView:
    """An input as an array of shape (outer, channels, inner).

    Statistics are over the first and the last axis.

    Args:
        x: The input.
        gamma: An array of the shape of the channels.
        axis: Those that statistics are over; None: all but the second and
            those that follow it in gamma's shape.
    """

    def __init__(self, x: Any, gamma: Any, axis: tuple[int, ...] | None
                 ) -> None:
        self._xp = backend.get_array_module(x)
        self._gamma = gamma.shape, gamma.dtype
        # float16 would be too coarse.
        self._result = x.dtype
        self._dtype = numpy.result_type(x.dtype, gamma.dtype, numpy.float32)
        keys = batch_normalization._compute_key_axis(x.ndim, gamma.ndim, axis)
        others = [item for item in range(x.ndim) if item not in keys]
        first = keys[0] if keys else 0
        before = ([item for item in others if item < first]
                  if keys == tuple(range(first, first + len(keys)))
                  else others)
        after = [item for item in others if item not in before]
        self._order = *before, *keys, *after
        self._lengths = [x.shape[item] for item in self._order]
        self._shape = tuple(math.prod(x.shape[item] for item in items)
                            for items in (before, keys, after))
        self.elements = self._shape[0] * self._shape[2]     # of each channel

    def seen(self, x: Any) -> Any:
        """An array of the input's shape so; float32 or better."""
        return x.transpose(self._order).reshape(self._shape).astype(
            self._dtype, copy=False)

    def back(self, x: Any) -> Any:
        """An array of this shape in the input's shape and dtype."""
        order = sorted(range(len(self._order)), key=self._order.__getitem__)
        return x.astype(self._result, copy=False).reshape(
            self._lengths).transpose(order)

    def sum(self, x: Any) -> Any:
        """Each channel's sum, float64: in float32 it would lose digits."""
        return x.sum(axis=(0, 2), dtype=numpy.float64)

    def column(self, values: numpy.ndarray) -> Any:
        """One value per channel, to be broadcast."""
        return self._xp.asarray(values.astype(self._dtype))[:, None]

    def channels(self, values: numpy.ndarray) -> Any:
        """One value per channel, as gamma's."""
        shape, dtype = self._gamma
        return self._xp.asarray(values.reshape(shape).astype(dtype))

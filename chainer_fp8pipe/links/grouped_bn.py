"""Batch normalisation with the statistics of the batches of several ranks."""
# Each rank sends its number of elements per channel, their mean and variance,
# which are joined in float64, so that nothing cancels where the mean is large.
# There is one message forward and one backward.  A rank whose input does not
# fit sends a refusal in place of the former, so that all raise.
from __future__ import annotations

from typing import Any

import chainer
import numpy
from chainer import backend
from chainer.backends.cuda import to_cpu
from chainer.functions.normalization import batch_normalization
from chainer.utils import argument

from ..pipeline.means import joined, move


class GroupedBatchNormalization(chainer.links.BatchNormalization):
    """``chainer.links.BatchNormalization`` over the batches of a group.

    All is as in one process with the ranks' batches, one after the other; they
    may differ in length, and some may be empty.  The gradients of gamma and
    beta are this rank's share: their sum over the group is that of the whole
    batch.  All ranks of the group must call it equally often; where Chainer's
    ``train`` is False it sends nothing.

    Args:
        size: As in Chainer, like all but ``group``.
        group: The ranks; see :class:`chainer_fp8pipe.mpi.grid.Group`.

    Attributes:
        group_elements: Elements per channel in the group's last batch, an
            array without axes.

    Raises:
        ValueError: When called, on all ranks of the group: the input of one
            of them does not fit, or no rank has a sample.
    """

    group: Any
    group_elements: Any
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
        number = self.N + 1 if finetune else self.N
        function = GroupedBatchNormalizationFunction(
            self.group, eps=self.eps, axis=self.axis,
            decay=1 - 1 / number if finetune else self.decay)
        try:
            if self.avg_mean is None:
                self._initialize_params(tuple(
                    length for axis, length in enumerate(x.shape)
                    if axis not in self.axis))
            # Recomputing a forward pass changes no running statistics.
            if not chainer.config.in_recomputing:
                function.running_mean = self.avg_mean
                function.running_var = self.avg_var
            result, = function.apply((
                x, self._get_gamma()[0] if self.gamma is None else self.gamma,
                self._get_beta()[0] if self.beta is None else self.beta))
        except BaseException:
            if not function.has_sent:       # the others wait for this rank
                self.group.gather(())
            raise
        if not chainer.config.in_recomputing:
            self.N = number
        self.group_elements = function.elements
        return result


class GroupedBatchNormalizationFunction(
        batch_normalization.BatchNormalization):
    """``chainer.functions.batch_normalization`` over a group's batch.

    Statistics are float32 or better, and float64 where they are added up.
    Options are as in Chainer; ``mean`` and ``var`` are updated in place.
    """

    axis: Any
    has_sent = False        # whether the others have heard from this rank

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(**options)
        self._group = group
        # Of each channel in the whole group.
        self.elements = numpy.zeros((), int)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        self.axis = batch_normalization._compute_axis(
            x.ndim, gamma.ndim, self.axis)
        # float16 would be too coarse.
        self._dtype = numpy.result_type(x.dtype, gamma.dtype, numpy.float32)
        count = x.size // max(gamma.size, 1)    # a rank may have no samples
        # About the mean of each channel, nearly: centred values are small, so
        # their squares lose no digits.
        self._shift = self._sum(x) / max(count, 1)
        centred = self._centred(x)
        local = self._shift.astype(self._dtype).astype(float)
        sums, squares = self._sum(centred), self._sum(centred ** 2)
        self.has_sent = True
        mean, variance = self._joined(self._group.gather(
            numpy.concatenate([
                [count], local + sums / max(count, 1),
                numpy.maximum(squares - sums ** 2 / max(count, 1), 0)
                / max(count, 1)])))
        self._off = local - mean
        self._inverse = 1 / numpy.sqrt(variance + self.eps)
        if self.running_mean is not None:
            move((self.running_mean, self.running_var), self.decay,
                 int(self.elements), mean, variance)
        scale = to_cpu(gamma).ravel() * self._inverse
        centred *= self._spread(scale, x)
        centred += self._spread(to_cpu(beta).ravel() + scale * self._off, x)
        return centred.astype(x.dtype, copy=False),

    def backward(self, indexes: tuple[int, ...],
                 grad_outputs: tuple[chainer.Variable]) -> Any:
        """Gradients of ``x``, and this rank's share of the others'."""
        if chainer.config.enable_backprop:
            # They would take one more exchange of sums, in which every rank
            # of the group takes part.
            raise NotImplementedError(
                'grouped batch normalisation has no second derivatives; use '
                "Chainer's BatchNormalization in a model that needs them")
        x, gamma = [one.array for one in self.get_retained_inputs()]
        above, centred = grad_outputs[0].array.astype(
            self._dtype, copy=False), self._centred(x)
        gbeta = self._sum(above)
        ggamma = self._inverse * (self._sum(above * centred)
                                  + self._off * gbeta)
        xp = backend.get_array_module(x)
        found = [None, *[xp.asarray(one.reshape(gamma.shape).astype(
            gamma.dtype)) for one in (ggamma, gbeta)]]
        if 0 in indexes:
            everyone = self._group.gather(numpy.concatenate([ggamma, gbeta]))
            ggamma, gbeta = sum(everyone).reshape(2, -1) / self.elements
            scale = to_cpu(gamma).ravel() * self._inverse
            slope = -scale * self._inverse * ggamma
            centred *= self._spread(slope, x)
            centred += self._spread(slope * self._off - scale * gbeta, x)
            centred += above * self._spread(scale, x)
            found[0] = centred.astype(x.dtype, copy=False)
        return tuple([chainer.as_variable(found[index]) for index in indexes])

    def _sum(self, x: Any) -> numpy.ndarray:
        """Each channel's sum, float64: in float32 it would lose digits."""
        return to_cpu(x.sum(axis=self.axis, dtype=numpy.float64)).ravel()

    def _spread(self, values: numpy.ndarray, x: Any) -> Any:
        """One value per channel, to be broadcast over ``x``."""
        return backend.get_array_module(x).asarray(
            values.astype(self._dtype).reshape([
                1 if axis in self.axis else length
                for axis, length in enumerate(x.shape)]))

    def _centred(self, x: Any) -> Any:
        return x.astype(self._dtype, copy=False) - self._spread(self._shift, x)

    def _joined(self, everyone: list[Any]
                ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Means and biased variances of the whole batch.

        ``everyone`` has each rank's number of elements per channel, means,
        and variances; or nothing.
        """
        mine = len(everyone[self._group.rank])
        if other := [str(rank) for rank, one in enumerate(everyone)
                     if len(one) != mine]:
            raise ValueError(
                f'batch normalisation failed on rank {", ".join(other)} of '
                'the group, or has other channels there; see its message')
        parts = [(one[0], *one[1:].reshape(2, -1)) for one in everyone]
        self.elements[...] = sum(count for count, *_ in parts)
        if not self.elements:
            raise ValueError('no rank of the group has a sample to normalise; '
                             'leave out batches that are empty on all ranks')
        return joined(parts)

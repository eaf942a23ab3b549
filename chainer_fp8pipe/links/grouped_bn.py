"""A link: batch normalisation with the statistics of a group of ranks."""
from __future__ import annotations

from typing import Any

import chainer
from chainer.utils import argument

from .grouped_bn_function import GroupedBatchNormalizationFunction, refusal


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
        group: The ranks; see :class:`chainer_fp8pipe.mpi.groups.Group`.

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
        """The normalised input.

        Args:
            x: Floating-point variable or array.
            finetune: As in Chainer.
        """
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
        except Exception:
            if not function.has_sent:       # the others wait for this rank
                self.group.gather(refusal(self.avg_mean.size))
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

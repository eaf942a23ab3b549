"""Sets the learning rate of every update from the epoch."""
from __future__ import annotations

from typing import Any

from ..learning_rate import LearningRate, check_count


class RateSchedule:
    """Sets the optimizer's ``lr`` before each update.

    The epoch follows from the optimizer's count of updates, which is part of
    every snapshot, or is set by
    :class:`~chainer_fp8pipe.training.extensions.FollowEpochs`.

    Args:
        rate: The rates.
        samples: In the data set, over all ranks; every update is then taken
            to be of a whole batch, as those of Chainer's iterators are that
            repeat.  None: :attr:`epoch` must be set.

    Raises:
        ValueError: ``samples`` is no positive integer, or less than a batch.

    Attributes:
        epoch: Epochs so far, where ``samples`` is None.
    """

    name = 'Schedule'
    timing = 'pre'
    call_for_each_param = False
    #: So an update may begin before its gradients are there.
    reads_gradients = False

    def __init__(self, rate: LearningRate, samples: int | None = None
                 ) -> None:
        if samples is not None:
            check_count('samples', samples)
            if samples < rate.batch:
                raise ValueError(
                    f'batch={rate.batch} is more than the samples='
                    f'{samples} of the data set; pass the size of the whole '
                    'data set, not of the part of one rank')
        self.rate = rate
        self.samples = samples
        self.epoch: float | None = None

    def __call__(self, optimizer: Any) -> None:
        optimizer.hyperparam.lr = self.rate.at(self._epoch(optimizer))

    def _epoch(self, optimizer: Any) -> float:
        if self.samples is not None:
            return optimizer.t * self.rate.batch / self.samples
        if self.epoch is None:
            raise RuntimeError(
                'the learning rate cannot be known: nobody has said how far '
                'the training is. Pass samples=len(dataset) to large_batch, '
                'or, under a Trainer, call trainer.extend(FollowEpochs()) on '
                'all ranks')
        return self.epoch

"""An iterator whose order does not depend on the number of replicas."""
from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import chainer
import numpy

from ..images.iterator import epoch_order
from ..pipeline.schedules import at_least_one


class ReplicaIterator(chainer.dataset.Iterator):
    """Divides each batch over the replicas of a model.

    A batch of all replicas together is the same for any number of replicas,
    and every sample comes once in an epoch.  The order depends on the seed and
    the epoch's number alone.  Each replica takes consecutive samples; shares
    differ by one at most.  All stages of a pipeline use the same share.

    With ``repeat``, a batch at the end of an epoch takes samples of the next,
    as in Chainer's ``SerialIterator``.  Otherwise the last batch may be
    short; a rest too small for all replicas joins the batch before it.

    A saved run goes on with any number of replicas.  The attributes are those
    of ``SerialIterator``.

    Args:
        dataset: The whole data set, the same on all ranks.
        batch_size: Samples of all replicas together.
        grid: A :class:`~chainer_fp8pipe.mpi.grid.ProcessGrid`, which says
            which replica this is of how many; None: the only one.
        repeat: Go on after the first epoch.
        shuffle: Another order in each epoch; otherwise the data set's.
        seed: Of the order; the same on all ranks.

    Raises:
        ValueError: A batch or the data set has not a sample for each replica.
    """

    def __init__(self, dataset: Sequence, batch_size: int, grid: Any = None,
                 repeat: bool = True, shuffle: bool = True, seed: int = 0
                 ) -> None:
        batch_size = at_least_one('batch_size', batch_size)
        seed = operator.index(seed)
        index, replicas = (0, 1) if grid is None else (
            grid.replica_index, grid.replicas)
        if batch_size < replicas or len(dataset) < (
                1 if repeat else replicas):
            raise ValueError(
                f'batch_size={batch_size} of all replicas together and the '
                f'{len(dataset)} samples of the data set must be at least '
                f'one sample for each of the {replicas} replicas')
        self.dataset, self.batch_size, self.repeat = (
            dataset, batch_size, repeat)
        self._share: tuple[int, int] = index, replicas
        # Of the epoch that was read last.
        self._order_of = functools.lru_cache(1)(lambda epoch: epoch_order(
            len(dataset), seed, epoch, shuffle))
        self.reset()

    def reset(self) -> None:
        """Starts again with the first epoch."""
        self.epoch = 0
        self.current_position = 0
        self.is_new_epoch = False
        self._previous_epoch_detail = -1.0

    def __next__(self) -> list:
        if self.epoch and not self.repeat:
            raise StopIteration
        self._previous_epoch_detail, before = self.epoch_detail, self.epoch
        index, replicas = self._share
        size, whole = len(self.dataset), numpy.empty(0, int)
        left = size - self.current_position
        if self.repeat or left - self.batch_size >= replicas:
            left = self.batch_size
        while left:
            part = self._order_of(self.epoch)[self.current_position:][:left]
            whole = numpy.concatenate([whole, part])
            left -= len(part)
            ended, self.current_position = divmod(
                self.current_position + len(part), size)
            self.epoch += ended
        self.is_new_epoch = self.epoch > before
        start, stop = (len(whole) * number // replicas
                       for number in (index, index + 1))
        return [self.dataset[place] for place in whole[start:stop]]

    next = __next__

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / len(self.dataset)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        previous = self._previous_epoch_detail
        return None if previous < 0 else previous

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the position in the epochs.

        Raises:
            ValueError: It was saved with a larger data set.
        """
        position = serializer('current_position', self.current_position)
        if position >= len(self.dataset):
            raise ValueError(
                f'the iterator was saved after {position} samples of an '
                f'epoch, but the data set has {len(self.dataset)}; resume '
                'with the same data set')
        self.current_position = position
        self.epoch = serializer('epoch', self.epoch)
        self.is_new_epoch = serializer('is_new_epoch', self.is_new_epoch)
        self._previous_epoch_detail = serializer(
            'previous_epoch_detail', self._previous_epoch_detail)

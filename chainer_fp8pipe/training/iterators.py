"""An iterator whose order does not depend on the number of replicas."""
from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy
from chainer.iterators import SerialIterator, _statemachine

from ..images.iterator import epoch_order
from ..pipeline.schedules import at_least_one


class ReplicaIterator(SerialIterator):
    """Divides each batch over the replicas of a model.

    A batch of all replicas together is the same for any number of replicas,
    and every sample comes once in an epoch.  The order depends on the seed and
    the epoch's number alone.  Each replica takes consecutive samples; shares
    differ by one at most.  All stages of a pipeline use the same share.

    With ``repeat``, a batch at the end of an epoch takes samples of the next,
    as in Chainer's ``SerialIterator``.  Otherwise the last batch may be
    short; a rest too small for all replicas joins the batch before it.

    A saved run goes on with any number of replicas.

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

    _state: Any

    def __init__(self, dataset: Sequence, batch_size: int, grid: Any = None,
                 repeat: bool = True, shuffle: bool = True, seed: int = 0
                 ) -> None:
        batch_size = at_least_one('batch_size', batch_size)
        try:
            seed = operator.index(seed)
        except TypeError:
            raise ValueError(f'seed is {seed!r}; it must be a whole number'
                             ) from None
        if grid is not None and not hasattr(grid, 'replicas'):
            raise ValueError(
                f'grid is a {type(grid).__name__}; it must be a ProcessGrid: '
                'of replicas of a whole model ProcessGrid(comm, 1)')
        index, replicas = (0, 1) if grid is None else (
            grid.replica_index, grid.replicas)
        if batch_size < replicas or len(dataset) < (
                1 if repeat else replicas):
            raise ValueError(
                f'batch_size={batch_size} of all replicas together and the '
                f'{len(dataset)} samples of the data set must be at least '
                f'one sample for each of the {replicas} replicas')
        self._share: tuple[int, int] = index, replicas
        # A batch may have samples of two epochs, whose orders are kept.
        self._order_of = functools.lru_cache(2)(lambda epoch: epoch_order(
            len(dataset), seed, epoch, shuffle))
        # Chainer's order is the places in an epoch.
        super().__init__(dataset, batch_size, repeat, shuffle=False)

    def __next__(self) -> list:
        self._previous_epoch_detail, first = self.epoch_detail, self.epoch
        (index, replicas), size = self._share, self.batch_size
        left = len(self.dataset) - self.current_position
        if not self.repeat and left - size < replicas:
            size = left
        self._state, places = _statemachine.iterator_statemachine(
            self._state, size, self.repeat, None, len(self.dataset))
        if places is None:
            raise StopIteration
        begins = places == 0
        epochs = first + numpy.cumsum(begins) - begins[0]
        own = slice(*(len(places) * number // replicas
                      for number in (index, index + 1)))
        return [self.dataset[self._order_of(epoch)[place]] for epoch, place
                in zip(epochs[own].tolist(), places[own], strict=True)]

    next = __next__

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the position in the epochs.

        Raises:
            ValueError: It was saved with a larger data set.
        """
        super().serialize(serializer)
        if self.current_position >= len(self.dataset):
            raise ValueError(
                f'the iterator was saved after {self.current_position} '
                f'samples of an epoch, but the data set has '
                f'{len(self.dataset)}; resume with the same data set')

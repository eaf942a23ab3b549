"""``ReplicaUpdater``: the whole model and a share of each batch on a rank."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.dataset import convert
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from ...chains import nested
from ...mpi.waiting import wait_until
from .following_iterator import FollowingIterator, progress
from .together import Sums, learn_names, summed


class ReplicaUpdater(StandardUpdater):
    """Trains a model as plain Chainer does, on several ranks.

    Make it on all ranks.  The gradient is that of the mean loss of the whole
    batch, whose samples the ranks share, if the loss is a mean over samples;
    what the model reports is averaged likewise.

    Args:
        iterator: Gives this rank's samples; its attribute ``whole`` says how
            many all ranks got.
        optimizer: ChainerMN's multi-node optimizer, around a communicator of
            all ranks, set up with the model.
        comm: All ranks.
        given: As for ``StandardUpdater``.
    """

    def __init__(self, iterator: Any, optimizer: Any, comm: MPI.Comm,
                 **given: Any) -> None:
        super().__init__(iterator, optimizer, **given)
        self._comm = comm
        self._names: list[str] = []

    def update_core(self) -> None:
        """One update; call it on all ranks."""
        iterator, optimizer = (self.get_iterator('main'),
                               self.get_optimizer('main'))
        batch = iterator.next()
        if not len(batch):
            raise ValueError(f'a batch of {iterator.whole} has no sample for '
                             f'rank {self._comm.rank}; raise the batch size, '
                             'or let the iterator repeat')
        arrays = convert._call_converter(self.converter, batch,
                                         self.input_device)
        args, kwargs = arguments_of(arrays)
        weight = len(batch) * self._comm.size / iterator.whole
        self._reporting(weight, lambda: optimizer.update(
            _weighted(self.loss_func or optimizer.target, weight),
            *args, **kwargs))
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def resumed(self) -> None:
        """All ranks learn from the first how far the data are.

        ``resume`` calls this on all ranks.
        """
        iterator = self.get_iterator('main')
        now = self._comm.bcast(progress(iterator))
        if isinstance(iterator, FollowingIterator):
            iterator.follow(now)

    def _reporting(self, weight: float, work: Callable[[], None]) -> None:
        """Does the work; reports means over all ranks."""
        try:
            reporter = chainer.reporter.get_current_reporter()
        except IndexError:      # nobody listens, on any rank
            work()
            return
        found: dict[str, Any] = {}
        with reporter.scope(found):
            work()
        mine: Sums = {name: (weight * float(nested.array_of(value)), weight)
                      for name, value in found.items()
                      if numpy.size(nested.array_of(value)) == 1}
        new = numpy.array(not mine.keys() <= set(self._names))
        # MPI's own wait would keep the core from other ranks.
        wait_until(self._comm.Iallreduce(MPI.IN_PLACE, new, MPI.LOR).Test)
        if new:
            learn_names(self._comm, self._names, mine)
        reporter.report({**found, **{
            name: part / whole for name, (part, whole)
            in summed(self._comm, self._names, mine).items()}})


def arguments_of(arrays: Any) -> tuple[tuple, dict[str, Any]]:
    """What a model is called with for a converted batch."""
    if isinstance(arrays, dict):
        return (), arrays
    return arrays if isinstance(arrays, tuple) else (arrays,), {}


def _weighted(loss_func: Callable, weight: float) -> Callable:
    """The loss, as much as it counts in the mean over all ranks."""
    if weight == 1:
        return loss_func

    def weighted(*args: Any, **kwargs: Any) -> Any:
        return loss_func(*args, **kwargs) * weight
    return weighted

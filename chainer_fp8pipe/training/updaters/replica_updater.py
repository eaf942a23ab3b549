"""``ReplicaUpdater``: the whole model and a share of each batch on a rank."""
from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import chainer
from chainer.dataset import convert
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ...mpi.grid import ProcessGrid
from ...mpi.once import once
from .following_iterator import FollowingIterator, progress
from .group_failures import give_up, hear_failures
from .reported import Reported
from .together import Together
from .whole_model import draw_alike


class _Share(NamedTuple):
    """This rank's part of a batch."""

    args: tuple
    kwargs: dict[str, Any]
    size: int
    progress: tuple[float, ...]

    def samples(self) -> int:
        return self.size


class ReplicaUpdater(StandardUpdater):
    """Trains a model as plain Chainer does, on several ranks.

    Make it on all ranks.  The gradient is that of the mean loss of the whole
    batch, whose samples the ranks share, if the loss is a mean over samples;
    what the model reports is averaged likewise.  What fails on one rank is
    an error on all of them, as :class:`.Together` has it.

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
        self._together = Together(once(
            comm, 'replicas', lambda: ProcessGrid(comm, pipeline=1)))
        hear_failures(self.get_optimizer('main').target)

    def update_core(self) -> None:
        """One update; call it on all ranks."""
        iterator, optimizer = (self.get_iterator('main'),
                               self.get_optimizer('main'))
        share: Any = self._together.open('update', self._read).batch
        means = self._together.close(
            'update', lambda: self._backward(optimizer, share),
            lambda text: give_up(optimizer.target, text))

        def finish() -> None:
            draw_alike(getattr(optimizer, 'actual_optimizer', optimizer), 0)
            optimizer.update()
            # Only now: nobody is left alone in the exchange by an error.
            chainer.report(means)
        self._together.finish('update', finish)
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def resumed(self) -> None:
        """All ranks learn from the first how far the data are.

        ``resume`` calls this on all ranks.
        """
        iterator = self.get_iterator('main')
        now = self._comm.bcast(raise_together(
            self._comm, lambda: progress(iterator)))
        if isinstance(iterator, FollowingIterator):
            iterator.follow(now)

    def _read(self) -> Any:
        iterator = self.get_iterator('main')
        batch = iterator.next()
        if not len(batch):
            raise ValueError(f'a batch of {iterator.whole} has no sample for '
                             f'rank {self._comm.rank}; raise the batch size, '
                             'or let the iterator repeat')
        return _Share(*arguments_of(convert._call_converter(
            self.converter, batch, self.input_device)),
            len(batch), progress(iterator))

    def _backward(self, optimizer: Any, share: _Share) -> Reported:
        """What ``update`` does with a loss function, but for the update."""
        weight = share.size * self._comm.size / self.get_iterator(
            'main').whole
        found: dict[str, Any] = {}
        try:
            listening = chainer.reporter.get_current_reporter().scope(found)
        except IndexError:      # nobody is; another rank may be
            listening = contextlib.nullcontext()
        model = optimizer.target
        with listening:
            loss = (self.loss_func or model)(*share.args, **share.kwargs)
        # As much as it counts in the mean over all ranks.
        loss = loss if weight == 1 else loss * weight
        if getattr(optimizer, '_use_cleargrads', True):
            model.cleargrads()
        else:
            model.zerograds()
        loss.backward(loss_scale=optimizer._loss_scale)
        reported = Reported()
        for name, value in found.items():
            reported.add(name, value, weight)
        return reported


def arguments_of(arrays: Any) -> tuple[tuple, dict[str, Any]]:
    """What a model is called with for a converted batch."""
    if isinstance(arrays, dict):
        return (), arrays
    return arrays if isinstance(arrays, tuple) else (arrays,), {}

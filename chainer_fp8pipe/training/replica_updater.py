"""``ReplicaUpdater``: the whole model and a share of each batch on a rank."""
from __future__ import annotations

import contextlib
from typing import Any

import chainer
from chainer.dataset import convert
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from ..chains.nested import arguments_of
from ..mpi.agreement import raise_together
from ..mpi.watch import watch
from ..mpi.world import enter_world
from ..pipeline.group_failures import give_up, hear_failures
from ..pipeline.meetings import Together, show_traceback
from ..pipeline.reported import Reports, means, report_of
from ..pipeline.whole_model import refuse_noise
from ..report.stream import stream_of
from .updater import follow, progress


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
        enter_world()
        watch(comm)
        self.events = stream_of(
            getattr(self.get_optimizer('main'), 'communicator', None))
        self._together = Together(comm, self.events, 'exchange')
        hear_failures(self.get_optimizer('main').target)

    def update_core(self) -> None:
        """One update; call it on all ranks."""
        iterator, optimizer = (self.get_iterator('main'),
                               self.get_optimizer('main'))
        model, together = optimizer.target, self._together
        given, size = self._open()
        with together.heard(self._comm, lambda text: give_up(model, text)):
            found = means(together.meet(
                self._comm, self._backward(optimizer, given, size)))
        with together.heard(self._comm, lambda text: None):
            optimizer.update()
            # Only now: nobody is left alone in the exchange by an error.
            chainer.report(found)
            together.meet(self._comm)
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def resumed(self) -> None:
        """All ranks learn from the first how far the data are.

        ``resume`` calls this on all ranks.
        """
        iterator = self.get_iterator('main')
        follow(iterator, self._comm.bcast(raise_together(
            self._comm, lambda: progress(iterator))))

    def _open(self) -> tuple[Any, int]:
        """This rank's converted share of a batch, and its samples.

        Raises:
            StopIteration: The data have ended; on all ranks.
            ValueError: Something is wrong on one of them; on all ranks.
        """
        share: Any = None
        error: BaseException | None = None
        try:
            self._together.must_go_on()
            if self._comm.size > 1:
                optimizer = self.get_optimizer('main')
                refuse_noise(getattr(optimizer, 'actual_optimizer',
                                     optimizer))
            share = self._read()
        except StopIteration as reason:
            share = reason
        except BaseException as reason:     # the others wait for this rank
            error = reason
            show_traceback(self._comm)
        ended = isinstance(share, StopIteration)
        self._together.begin(self._comm, error, {
            'the step': 'update' + ' although the data have ended' * ended})
        if ended:
            raise share
        return share

    def _read(self) -> tuple[Any, int]:
        iterator = self.get_iterator('main')
        batch = iterator.next()
        if not len(batch):
            raise ValueError(f'a batch of {iterator.whole} has no sample for '
                             f'rank {self._comm.rank}; raise the batch size, '
                             'or let the iterator repeat')
        return convert._call_converter(
            self.converter, batch, self.input_device), len(batch)

    def _backward(self, optimizer: Any, given: Any, size: int) -> Reports:
        """What ``update`` does with a loss function, but for the update."""
        weight = size * self._comm.size / self.get_iterator('main').whole
        found: dict[str, Any] = {}
        try:
            listening = chainer.reporter.get_current_reporter().scope(found)
        except IndexError:      # nobody is; another rank may be
            listening = contextlib.nullcontext()
        model = optimizer.target
        args, kwargs = arguments_of(given)
        with listening:
            loss = (self.loss_func or model)(*args, **kwargs)
        # As much as it counts in the mean over all ranks.
        loss = loss if weight == 1 else loss * weight
        if getattr(optimizer, '_use_cleargrads', True):
            model.cleargrads()
        else:
            model.zerograds()
        loss.backward(loss_scale=optimizer._loss_scale)
        return {name: report_of(value, weight)
                for name, value in found.items()}

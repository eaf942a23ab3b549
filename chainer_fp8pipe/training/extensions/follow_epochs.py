"""Passes the trainer's epoch to the learning rate's schedule."""
from __future__ import annotations

from typing import Any

import chainer
import numpy
from chainer.training import extension

from ..hooks import RateSchedule


class FollowEpochs(extension.Extension):
    """Gives the updater's ``epoch_detail`` to the learning rate's schedule.

    Add it on all ranks, once the optimizers are set up, where the number of
    samples is not known or batches are not all of one size.  Where an
    optimizer has a communicator, rank 0's epoch counts for all: with
    different rates the ranks' weights would diverge.

    Raises:
        ValueError: No optimizer of the trainer has a schedule.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_WRITER
    default_name = 'FollowEpochs'

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        optimizers = trainer.updater.get_all_optimizers().values()
        if not any(map(_schedule, optimizers)):
            raise ValueError('FollowEpochs has nothing to follow for: no '
                             'optimizer was prepared by large_batch, or has '
                             'a hook Schedule')
        self(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        for optimizer in trainer.updater.get_all_optimizers().values():
            schedule = _schedule(optimizer)
            if schedule is None:
                continue
            epoch = numpy.array([trainer.updater.epoch_detail], float)
            communicator = getattr(optimizer, 'communicator', None)
            if communicator is not None and communicator.size > 1:
                communicator.mpi_comm.Bcast(epoch)
            schedule.epoch = float(epoch[0])


def _schedule(optimizer: Any) -> RateSchedule | None:
    return next((hook for hook
                 in optimizer._hookable._pre_update_hooks.values()
                 if isinstance(hook, RateSchedule)), None)

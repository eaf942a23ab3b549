"""Triggers that are those of all ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from chainer.training.triggers import IntervalTrigger, ManualScheduleTrigger
from mpi4py import MPI

from ..mpi.waiting import wait_until


def every_update(trainer: Any) -> bool:
    """A trigger without a state: snapshots do not know the extension."""
    return True


class Followed:
    """Fires where rank 0's trigger does; all ranks must ask.

    Clocks differ between ranks, and so may what an extension reports.

    Args:
        own: This rank's trigger.
        comm: The ranks.
        before: Called before each question.
    """

    def __init__(self, own: Any, comm: MPI.Comm,
                 before: Callable[[], None] = lambda: None) -> None:
        self.own = self.__wrapped__ = own
        self._comm, self._before = comm, before

    def __call__(self, trainer: Any) -> bool:
        self._before()
        fires = numpy.array([bool(self.own(trainer))])
        if not counts(self.own):
            # MPI's own wait would keep the core from other ranks.
            wait_until(self._comm.Ibcast(fires).Test)
        return bool(fires[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def counts(trigger: Any) -> bool:
    """Whether a trigger depends on the number of updates alone."""
    return trigger is every_update or type(trigger) in (
        IntervalTrigger, ManualScheduleTrigger, Followed)

"""Triggers that fire on all ranks when rank 0's does."""
from __future__ import annotations

from typing import Any

import numpy
from chainer.training.triggers import IntervalTrigger, ManualScheduleTrigger
from mpi4py import MPI

from ...mpi.waiting import wait_until

#: These depend on the number of updates alone.
_COUNTING = IntervalTrigger, ManualScheduleTrigger


def follow_rank_0(trainer: Any, comm: MPI.Comm) -> None:
    """Makes all triggers follow rank 0's, as clocks differ between ranks.

    Call it on all ranks, before the training runs.

    Args:
        trainer: The script's, on each rank.
        comm: All ranks.
    """
    trainer.stop_trigger = _followed(trainer.stop_trigger, comm)
    # Extensions that only write a picture are on rank 0 alone.
    everywhere = set.intersection(
        *map(set, comm.allgather(list(trainer._extensions))))
    for name, entry in trainer._extensions.items():
        if name in everywhere:
            entry.trigger = _followed(entry.trigger, comm)


def _followed(trigger: Any, comm: MPI.Comm) -> Any:
    return (trigger if type(trigger) in _COUNTING
            else Followed(trigger, comm))


class Followed:
    """A trigger that fires where rank 0's does; else as the script's own.

    Args:
        trigger: The script's, on each rank.
        comm: All ranks; all of them ask each time.
    """

    def __init__(self, trigger: Any, comm: MPI.Comm) -> None:
        self._trigger, self._comm = trigger, comm

    def __call__(self, trainer: Any) -> bool:
        fires = numpy.array([bool(self._trigger(trainer))])
        # MPI's own wait would keep the core from other ranks.
        wait_until(self._comm.Ibcast(fires).Test)
        return bool(fires[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)

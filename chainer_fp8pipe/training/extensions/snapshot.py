"""Snapshots of a whole job in one file, and continuation from them.

Chainer's ``snapshot`` writes the state of one rank.  A run continues exactly
only if every rank gets back its own iterator, random numbers and residuals,
so this one gathers all ranks.  Values that are equal on all ranks that have
them (a layer's parameters, its optimizer's state) are written once, under a
name without the rank; so a run can also go on with another number of stages
or replicas.
"""
from __future__ import annotations

import contextlib
import glob
import os
import re
import warnings
from typing import Any

import chainer
import numpy
from chainer.training import extension
from mpi4py import MPI

from ...mpi.agreement import Signature, agree, raise_together
from ...mpi.ranks import all_ranks
from . import snapshot_file, snapshot_transfer
from .job_state import (
    MODEL,
    collect,
    communicators,
    describe,
    incompatible,
    layout,
    missing,
    movable,
    restore,
)
from .snapshot_file import Content, SnapshotIndex

_PLAN = 'trainer/updater/plan'
_FILENAME = 'snapshot_iter_{}.npz'


class Snapshot(extension.Extension):
    """Writes ``snapshot_iter_N.npz`` for the whole job.  Add it on all ranks.

    Rank 0 writes, to a temporary file that is renamed when it is complete,
    so that no crash leaves half a snapshot or takes an older one.  Continue
    with :func:`resume`.

    A snapshot is written every epoch unless ``extend`` gets a trigger.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's.  Residuals are found in it and in the
            communicators of multi-node optimizers.
        retain: How many of the newest snapshots to keep; None: all.

    Raises:
        ValueError: ``retain`` is less than 1.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None) -> None:
        if retain is not None and retain < 1:
            raise ValueError(f'retain must be at least 1, not {retain!r}')
        self._comm = comm
        self._retain = retain

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Raises RuntimeError on all ranks if a new run finds snapshots.

        They would be mixed with its own.
        """
        ranks = all_ranks(self._comm)

        def look() -> None:
            if ranks.rank == 0 and trainer.updater.iteration == 0 and (
                    found := find_snapshots(trainer.out)):
                raise FileExistsError(
                    f'{found[-1]} is of another run; resume from it, move it '
                    "away, or choose another directory (the trainer's out)")
        raise_together(ranks, look)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        name = _FILENAME.format(trainer.updater.iteration)
        save(trainer, self._comm, os.path.join(trainer.out, name))
        if self._retain and all_ranks(self._comm).rank == 0:
            for path in find_snapshots(trainer.out)[:-self._retain]:
                os.remove(path)


def save(trainer: chainer.training.Trainer, comm: Any, path: str) -> None:
    """Writes the state of all ranks to ``path``; call it on all ranks.

    Raises:
        RuntimeError: Rank 0 could not write, on all ranks.  A file that was
            at ``path`` before is still there.
    """
    ranks = all_ranks(comm)
    state = raise_together(ranks, lambda: collect(trainer, comm))
    snapshot_transfer.write(ranks, path, state, _communicator(trainer, comm))


def resume(trainer: chainer.training.Trainer, comm: Any, path: str) -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With as many ranks, each with the same layers, and with the same kind of
    communicator, the run goes on exactly.  Otherwise everything is taken
    over that does not belong to a rank: model, optimizer, iteration,
    iterator, extensions.  Where ranks had different values (the running
    statistics of batch normalisation on replicas), all get the first one's.
    Residuals, codec state and random numbers then start afresh; rank 0 says
    so in a warning.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: The snapshot, or a directory, of which the newest is taken.
            Only rank 0 reads it.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: There is no snapshot, it is damaged, or it is of another
            model or optimizer, or lacks something.  On all ranks, and before
            anything is changed: trainer and file are as they were.
    """
    ranks = all_ranks(comm)
    with contextlib.ExitStack() as stack:
        content: Content | None = raise_together(
            ranks, lambda: stack.enter_context(_opened(path))
            if ranks.rank == 0 else None, error=ValueError)
        index: SnapshotIndex = ranks.bcast(content and content.index)
        _follow_plan(trainer, ranks, content, index)
        current = raise_together(ranks, lambda: collect(trainer, comm))
        exact = ranks.allreduce(
            index.ranks == ranks.size
            and index.communicator == _communicator(trainer, comm)
            and layout(index.of_rank(ranks.rank)) == layout(current),
            MPI.LAND)
        wanted = set(index.of_rank(ranks.rank) if exact
                     else movable(index.keys, current, trainer))
        wishes = numpy.array([key in wanted for key in index.keys], bool)
        unclaimed = _unclaimed(ranks, index, wishes)
        agree(ranks, Signature({}),
              missing(wanted, current, exact) or unclaimed)
        saved = snapshot_transfer.read(ranks, content, index.keys, wishes,
                                       exact)
    agree(ranks, Signature({}), incompatible(saved, current))
    restore(saved, trainer, comm)
    _after(trainer)
    if ranks.rank == 0 and not exact:
        warnings.warn(
            f'{index.path} is of a run with another layout ({index.ranks} '
            f'ranks, communicator {index.communicator}): model, optimizer '
            'and iterator go on, but residuals, codec state and random '
            'numbers start afresh', stacklevel=2)
    return trainer.updater.iteration


def find_snapshots(directory: str) -> list[str]:
    """The snapshots in a directory, oldest iteration first."""
    pattern = re.escape(_FILENAME).replace(r'\{\}', r'(\d+)')
    found = []
    for path in glob.glob(os.path.join(glob.escape(directory), '*')):
        if match := re.fullmatch(pattern, os.path.basename(path)):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def _communicator(trainer: chainer.training.Trainer, comm: Any) -> str:
    names = [getattr(communicator, 'name', type(communicator).__name__)
             for communicator in communicators(trainer, comm)]
    return ', '.join(names) or 'none'


def _opened(path: str) -> contextlib.AbstractContextManager[Content]:
    if os.path.isdir(path):
        found = find_snapshots(path)
        if not found:
            raise FileNotFoundError(f'there is no snapshot in {path}')
        path = found[-1]
    return snapshot_file.opened(path)


def _follow_plan(trainer: chainer.training.Trainer, ranks: MPI.Comm,
                 content: Content | None, index: SnapshotIndex) -> None:
    """Cuts a partitioned model as it was cut when the snapshot was made."""
    follow = getattr(trainer.updater, 'follow_plan', None)
    if follow is None or _PLAN not in index.keys:
        return
    text = raise_together(ranks, lambda: content.read(_PLAN).item()
                          if content else None, error=ValueError)
    follow(ranks.bcast(text))


def _unclaimed(ranks: MPI.Comm, index: SnapshotIndex, wishes: numpy.ndarray
              ) -> str:
    """The error about a key of the model that no rank takes; '' if none.

    Call it on all ranks.
    """
    claimed = numpy.empty_like(wishes)
    ranks.Allreduce(wishes, claimed, MPI.LOR)
    return next((f'the snapshot has {describe(key)}, the model has not'
                 for key, is_claimed in zip(index.keys, claimed, strict=True)
                 if key.startswith(MODEL) and not is_claimed), '')


def _after(trainer: chainer.training.Trainer) -> None:
    """Tells optimizers and updater that they were resumed."""
    for optimizer in trainer.updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    if hasattr(trainer.updater, 'resumed'):
        trainer.updater.resumed()

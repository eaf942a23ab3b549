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
from ..snapshots import snapshot_file, snapshot_transfer
from ..snapshots.snapshot_file import Content, SnapshotIndex
from ..snapshots.zip_directory import DamagedSnapshot
from .job_state import (
    MODEL,
    collect,
    describe,
    incompatible,
    layout,
    missing,
    movable,
    names_of_communicators,
    restore,
)
from .saving_beside import SavingBeside, remove_older

_FILENAME = 'snapshot_iter_{}.npz'
_DAMAGED = 'error', 'aside'


class Snapshot(extension.Extension):
    """Writes ``snapshot_iter_N.npz`` for the whole job.  Add it on all ranks.

    An update waits until the arrays are copied, into memory that is kept for
    the next snapshot: as much again as the rank's state.  The rest happens
    beside the updates that follow: rank 0 is sent what it lacks, and a thread
    of it writes to a temporary file, which is renamed when it is complete and
    on the disk, so that no crash leaves half a snapshot or takes an older
    one.  The next snapshot, and the end of the training, wait until the last
    one is whole.  Continue with :func:`resume`.

    Where a snapshot cannot be written (disk full, no permission), training
    goes on, rank 0 says so in a warning, and the older snapshots stay.

    A snapshot is written every epoch unless ``extend`` gets a trigger.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's.  Residuals are found in it and in the
            communicators of multi-node optimizers.
        retain: How many of the newest snapshots to keep; None: all.  Older
            ones are removed when the new one is whole.
        failures: How many snapshots in a row may fail before that is an
            error, on all ranks, at the next snapshot or the end of the
            training; None: any number.
        directory: Of the files, made when it is needed; None: the trainer's
            ``out``.

    Raises:
        ValueError: ``retain`` or ``failures`` is less than 1.
        RuntimeError: From the extension itself, on all ranks: a value cannot
            be saved, or ``failures`` snapshots in a row were not written.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None,
                 failures: int | None = 3, directory: str | None = None
                 ) -> None:
        for name, number in (('retain', retain), ('failures', failures)):
            if number is not None and number < 1:
                raise ValueError(f'{name} must be at least 1, not {number!r}')
        self._comm = comm
        self._retain = retain
        self._directory = directory
        self._beside = SavingBeside(comm, failures, find_snapshots)

    def directory(self, trainer: chainer.training.Trainer) -> str:
        """Where the snapshots of a trainer are."""
        return trainer.out if self._directory is None else self._directory

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Raises RuntimeError on all ranks if a new run finds snapshots.

        They would be mixed with its own.
        """
        ranks = all_ranks(self._comm)

        def look() -> None:
            if ranks.rank == 0 and trainer.updater.iteration == 0 and (
                    found := find_snapshots(self.directory(trainer))):
                raise FileExistsError(
                    f'{found[-1]} is of another run; resume from it, move it '
                    "away, or choose another directory (the trainer's out)")
        raise_together(ranks, look)
        self._beside.begin(trainer, self, self.directory(trainer))

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        iteration, directory = (trainer.updater.iteration,
                                self.directory(trainer))
        self._beside.save(
            trainer, os.path.join(directory, _FILENAME.format(iteration)),
            lambda: self._remove_older(directory, iteration))

    def finalize(self) -> None:
        """Completes the last snapshot, at the end of the training.

        At an end by an error, which the other ranks may not have met, only
        if they end by one, too.
        """
        self._beside.end()

    def _remove_older(self, directory: str, iteration: int) -> None:
        """Those of later iterations are of a run that was given up."""
        paths = [path for number, path in _numbered(directory)
                 if number <= iteration]
        remove_older(paths[:-self._retain] if self._retain else [])


def save(trainer: chainer.training.Trainer, comm: Any, path: str) -> None:
    """Writes the state of all ranks to ``path``; call it on all ranks.

    Raises:
        RuntimeError: Rank 0 could not write, or a value cannot be saved; on
            all ranks.  A file that was at ``path`` before is still there.
    """
    ranks = all_ranks(comm)
    state = raise_together(ranks, lambda: collect(trainer, comm))
    snapshot_transfer.write(ranks, path, state,
                            names_of_communicators(trainer, comm))


def resume(trainer: chainer.training.Trainer, comm: Any, path: str, *,
           damaged: str = 'error') -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With as many ranks, each with the same layers, and with the same kind of
    communicator, the run goes on exactly.  Otherwise everything is taken
    over that does not belong to a rank: model, optimizer, iteration,
    iterator, extensions.  Where ranks had different values (the running
    statistics of batch normalisation on replicas), all get the first one's.
    Residuals, codec state and random numbers then start afresh; rank 0 says
    so in a warning.

    The whole file is read and compared with its digests before anything is
    changed, and every value again when it is with its rank.  Nothing in a
    file is run, and nothing is allocated that the file has not got.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: The snapshot, or a directory, of which the newest whole one is
            taken; rank 0 says in a warning which it passed over and why.
            Only rank 0 reads it.
        damaged: What to do where no snapshot in a directory is whole:
            ``'error'``, or ``'aside'``, which renames all to
            ``NAME.damaged``, says so in a warning, and leaves the trainer as
            it is, to begin anew.  A file that cannot be read, which may be
            whole, is an error all the same.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: There is no whole snapshot, or it is of another
            model or optimizer, or lacks something.  On all ranks, and before
            anything is changed: trainer and file are as they were.
    """
    if damaged not in _DAMAGED:
        raise ValueError(f'damaged must be one of {", ".join(_DAMAGED)}, not '
                         f'{damaged!r}')
    ranks = all_ranks(comm)
    with contextlib.ExitStack() as stack:
        content: Content | None = raise_together(
            ranks, lambda: _whole(path, stack, damaged == 'aside')
            if ranks.rank == 0 else None, error=ValueError)
        index: SnapshotIndex | None = ranks.bcast(content and content.index)
        if index is None:
            return trainer.updater.iteration
        current = raise_together(ranks, lambda: collect(trainer, comm))
        exact = ranks.allreduce(
            index.ranks == ranks.size
            and index.communicator == names_of_communicators(trainer, comm)
            and layout(index.of_rank(ranks.rank)) == layout(current),
            MPI.LAND)
        wanted = set(index.of_rank(ranks.rank) if exact
                     else movable(index.keys, current, trainer))
        wishes = numpy.array([key in wanted for key in index.keys], bool)
        unclaimed = _unclaimed(ranks, index, wishes)
        agree(ranks, Signature({}),
              missing(wanted, current, exact) or unclaimed)
        saved = snapshot_transfer.read(ranks, content, index, wishes, exact)
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
    """The snapshots in a directory, oldest iteration first.

    Whether they are whole :func:`resume` finds out.
    """
    return [path for _, path in _numbered(directory)]


def _numbered(directory: str) -> list[tuple[int, str]]:
    pattern = re.escape(_FILENAME).replace(r'\{\}', r'(\d+)')
    found = []
    for path in glob.glob(os.path.join(glob.escape(directory), '*')):
        if match := re.fullmatch(pattern, os.path.basename(path)):
            found.append((int(match[1]), path))
    return sorted(found)


def _whole(path: str, stack: contextlib.ExitStack, aside: bool
           ) -> Content | None:
    """Opens a snapshot that is whole, or the newest that is in a directory.

    Warns of those that are passed over.  Where all are damaged, and are to
    be set aside, they are, and there is none.
    """
    if not os.path.isdir(path):
        return _checked(path, stack)
    found = find_snapshots(path)[::-1]
    if not found:
        raise FileNotFoundError(f'there is no snapshot in {path}')
    passed: list[str] = []
    unreadable = False
    for candidate in found:
        try:
            content = _checked(candidate, stack)
        except (DamagedSnapshot, OSError) as error:
            unreadable |= isinstance(error, OSError)
            passed.append(f'{candidate} is not whole and is passed over: '
                          f'{error.__cause__ or error}')
            continue
        for text in passed:
            warnings.warn(text, stacklevel=2)
        return content
    text = f'no snapshot in {path} can be gone on from; {"; ".join(passed)}'
    if unreadable or not aside:
        raise FileNotFoundError(text)
    for candidate in found:
        os.replace(candidate, f'{candidate}.damaged')
    warnings.warn(f'{text}; their names end in .damaged now, and the training '
                  'begins anew', stacklevel=2)
    return None


def _checked(path: str, stack: contextlib.ExitStack) -> Content:
    """Opens a snapshot after all of it was read and found whole."""
    with contextlib.ExitStack() as trial:
        content = trial.enter_context(snapshot_file.opened(path))
        with snapshot_file.explained(path):
            content.check()
        stack.push(trial.pop_all())
    return content


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

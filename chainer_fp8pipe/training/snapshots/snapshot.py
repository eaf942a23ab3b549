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
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import numpy
from chainer.training import extension
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi import all_ranks
from ...mpi.agreement import agree, raise_together
from ...mpi.grid import grid_of
from ...mpi.waiting import wait_until
from . import gather
from .file import (
    Content,
    DamagedSnapshot,
    SnapshotIndex,
    State,
    prepared,
    remove_unfinished,
)
from .gather import SnapshotWriting
from .optimizers import (
    extend_with_script_values,
    lost_rules,
    note_first_values,
    owners,
)
from .state import (
    MODEL,
    collect,
    describe,
    incompatible,
    layout,
    missing,
    names_of_communicators,
    restore,
    undoing,
    wishes,
    with_iterators,
)

_FILENAME = 'snapshot_iter_{}.npz'
_DAMAGED = 'error', 'aside'


class Snapshot(extension.Extension):
    """Writes ``snapshot_iter_N.npz`` for the whole job.  Add it on all ranks.

    An update waits for a copy of the rank's state, whose memory is kept.  The
    rest happens beside later updates: the other ranks send their parts to rank
    0, a thread of which writes a temporary file.  The file gets its name when
    it is complete and on the disk: no crash leaves half a snapshot.  The next
    snapshot, and the end of the training, wait for the last one.  Continue
    with :func:`resume`.

    If it cannot be written (disk full, no permission), training goes on with a
    warning of rank 0.

    A snapshot is written every epoch unless ``extend`` gets a trigger.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's.  Residuals are found in it and in the
            communicators of multi-node optimizers.
        retain: How many of the newest snapshots to keep; None: all.  Older
            ones are removed when the new one is whole.
        failures: So many failed snapshots in a row are an error on all ranks,
            at the next snapshot or the end of the training; None: never.
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
        self._retain, self._failures = retain, failures
        self._directory = directory
        self._failed = 0            # in a row
        self._warned: list[Warning] = []    # that are errors here
        self._writing: SnapshotWriting | None = None
        self._copies: State = {}
        # This extension in the trainer, whose trigger steps the writing.
        self._entry: Any = None

    def directory(self, trainer: chainer.training.Trainer) -> str:
        """Where the snapshots of a trainer are."""
        return trainer.out if self._directory is None else self._directory

    def path(self, trainer: chainer.training.Trainer) -> str:
        """Of the snapshot of a trainer's present state."""
        return os.path.join(self.directory(trainer), _FILENAME.format(
            trainer.updater.iteration))

    def older(self, path: str) -> list[str]:
        """The snapshots beside one, and itself, the newest last.

        Those of later iterations are of a run that was given up.
        """
        number = _number(path)
        return [one for one in find_snapshots(os.path.dirname(path))
                if _number(one) <= number]

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
            self.start(trainer)
        raise_together(ranks, look)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        self._complete()
        path, is_beside = self.path(trainer), self._entry is not None
        self._writing = _begin(
            trainer, self._comm, path, lambda: self._remove_older(path),
            self._copies if is_beside else None)
        if not is_beside:       # outside of a Trainer's loop
            self._complete()

    def finalize(self) -> None:
        """Completes the last snapshot, at the end of the training.

        At an end by an error, which the other ranks may not have met, only
        if they end by one, too.
        """
        if self._entry is not None:
            self._entry.trigger = self._entry.trigger.trigger
            self._entry = None
        if sys.exc_info()[0] is None:
            self._complete()
        elif (writing := self._writing) is not None:
            was_done = writing.is_done
            wait_until(writing.step_at_an_error)
            if not was_done:
                self._report(writing)
            self._writing = None
        self._copies = {}

    def start(self, trainer: chainer.training.Trainer) -> None:
        """Begins to save beside the training.

        Removes what killed runs have left.
        """
        note_first_values(trainer)
        if all_ranks(self._comm).rank == 0:
            remove_unfinished(self.directory(trainer))
        for entry in trainer._extensions.values():
            if entry.extension is self and self._entry is None:
                self._entry = entry
                entry.trigger = _SteppingTrigger(entry.trigger, self._step)

    def _step(self) -> bool:
        """Goes on with the file, without waiting; True when it is written."""
        writing = self._writing
        if writing is not None and not writing.is_done and writing.step():
            self._report(writing)
        return writing is None or writing.is_done

    def _complete(self) -> None:
        """Waits until the last file is written; on all ranks.

        Raises RuntimeError on all if too many in a row were not.
        """
        wait_until(self._step)
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.free()

        def raise_warning() -> None:
            if self._warned:
                raise self._warned.pop()
        raise_together(all_ranks(self._comm), raise_warning)
        self._failed = self._failed + 1 if writing.problem else 0
        if self._failed and self._failed == self._failures:
            raise RuntimeError(
                f'{self._failed} snapshots in a row could not be written, '
                f'the last with {writing.problem}. Make room, or choose '
                "another directory (the trainer's out), and resume; "
                'Snapshot(comm, failures=None) never ends a run')

    def _report(self, writing: SnapshotWriting) -> None:
        if writing.problem and all_ranks(self._comm).rank == 0:
            older = self.older(writing.path)
            try:
                warnings.warn(
                    f'{writing.path} could not be written '
                    f'({writing.problem}); training goes on, and ' + (
                        f'{older[-1]} is still there' if older else
                        'there is no older snapshot'), stacklevel=2)
            except Warning as error:    # the others raise at the next one
                self._warned = [error]

    def _remove_older(self, path: str) -> None:
        for old in self.older(path)[:-self._retain] if self._retain else ():
            try:
                os.remove(old)
            except OSError as error:
                warnings.warn(f'{old} is not removed: {error}', stacklevel=2)


class _SteppingTrigger:
    """A trigger, at whose questions, after every update, files go on."""

    def __init__(self, trigger: Any, step: Callable[[], object]) -> None:
        self.trigger, self._step = trigger, step

    def __call__(self, trainer: Any) -> bool:
        self._step()
        return self.trigger(trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trigger, name)


def save(trainer: chainer.training.Trainer, comm: Any, path: str) -> None:
    """Writes the state of all ranks to ``path``; call it on all ranks.

    Raises:
        RuntimeError: Rank 0 could not write, or a value cannot be saved; on
            all ranks.  A file that was at ``path`` before is still there.
    """
    writing = _begin(trainer, comm, path)
    wait_until(writing.step)
    writing.free()
    if writing.problem:
        raise RuntimeError(writing.problem)


def _begin(trainer: chainer.training.Trainer, comm: Any, path: str,
           after: Callable[[], None] = lambda: None,
           copies: State | None = None) -> SnapshotWriting:
    """Begins a file with the state of all ranks, as it is now."""
    ranks = all_ranks(comm)
    values = raise_together(ranks, lambda: prepared(
        collect(trainer, comm), copies))
    return SnapshotWriting(ranks, path, values,
                           names_of_communicators(trainer, comm), after)


def find_snapshots(directory: str) -> list[str]:
    """The snapshots in a directory, oldest iteration first.

    Whether they are whole :func:`resume` finds out.
    """
    return sorted((path for path in glob.glob(
        os.path.join(glob.escape(directory), '*')) if _number(path) >= 0),
        key=_number)


def _number(path: str) -> int:
    """The iteration of a snapshot, by its name; -1 for other files."""
    found = re.fullmatch(re.escape(_FILENAME).replace(r'\{\}', r'(\d+)'),
                         os.path.basename(path))
    return int(found[1]) if found else -1


def resume(trainer: chainer.training.Trainer, comm: Any, path: str, *,
           damaged: str = 'error') -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With the same number of ranks, the same layers on each, and the same kind
    of communicator, the run goes on exactly.  Otherwise model, optimizer,
    iteration, iterator and extensions go on.  Values that differed between
    ranks (statistics of batch normalisation on replicas) are the first rank's.
    An iterator over a share of the data set goes on at the same share of its
    epoch, in its own order.  Residuals, codec state and the random numbers of
    new ranks start afresh, with a warning of rank 0.

    Extensions are initialised with the script's learning rates, as with
    Chainer's snapshots.  A value of an optimizer that the script has changed
    since the run began replaces the snapshot's, with a warning.

    The whole file is compared with its digests before anything is changed,
    and every value again on its rank.  Nothing in a file is run.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: The snapshot, or a directory with several: the newest whole one
            counts.  Only rank 0 reads it.
        damaged: For a directory without a whole snapshot: ``'error'``, or
            ``'aside'``, which renames all to ``NAME.damaged`` with a warning,
            and leaves the trainer as it is.  A file that cannot be read is an
            error in both cases.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: There is no whole snapshot, or it is of another
            model or optimizer, or lacks something, or a rank cannot restore
            its part.  On all ranks: trainer and file are as they were.
    """
    ranks = all_ranks(comm)
    with contextlib.ExitStack() as stack:
        content = raise_together(
            ranks, lambda: None if ranks.rank else _whole(path, damaged),
            error=ValueError)
        if content is not None:
            stack.enter_context(content)
        index: SnapshotIndex | None = ranks.bcast(content and content.index)
        if index is None:
            return trainer.updater.iteration
        current = raise_together(ranks, lambda: collect(trainer, comm),
                                 error=ValueError)
        exact = ranks.allreduce(
            index.ranks == ranks.size
            and index.communicator == names_of_communicators(trainer, comm)
            and layout(index.of_rank(ranks.rank)) == layout(current),
            MPI.LAND)
        wanted = wishes(index, ranks.rank, exact, current, trainer)
        unclaimed = _unclaimed(ranks, index, wanted)
        agree(ranks, {}, missing(
            {key for key, wish in zip(index.owners, wanted, strict=True)
             if wish}, current, exact) or unclaimed)
        saved = gather.read(ranks, content, index, wanted)

    changed = problem = ''
    try:
        if not exact:
            saved, changed = with_iterators(saved, current, index, ranks.rank)
        problem = incompatible(saved, current, trainer)
    except Exception as error:      # the others must hear of it
        problem = f'{type(error).__name__}: {error}'
    agree(ranks, {}, problem)
    lost = ranks.gather(lost_rules(saved, current)) or []
    told_by: dict[str, int] = {}    # the first rank that has it, by its key
    for rank, keys in enumerate(ranks.allgather(
            [key for key, _ in owners(trainer)])):
        told_by = {**dict.fromkeys(keys, rank), **told_by}
    # A warning may be an error.
    raise_together(ranks, lambda: None if ranks.rank else _warn(
        index, ranks.size, exact, changed, lost), error=ValueError)
    undo = raise_together(ranks, lambda: undoing(trainer, comm, current),
                          error=ValueError)
    try:
        differences = raise_together(
            ranks, lambda: restore(saved, trainer, comm), error=ValueError)
    except ValueError:      # on all ranks
        undo()
        raise
    extend_with_script_values(trainer, differences,
                              lambda key: told_by[key] == ranks.rank)
    for optimizer in trainer.updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    if hasattr(trainer.updater, 'resumed'):
        trainer.updater.resumed()
    return trainer.updater.iteration


def _warn(index: SnapshotIndex, ranks: int, exact: bool, changed: str,
          lost: Iterable[str]) -> None:
    if not exact:
        warnings.warn(
            f'{index.path} is of a run with another layout ({index.ranks} '
            f'ranks, communicator {index.communicator}). Model, optimizer '
            f'and iterator go on{changed}; residuals and codec state start '
            'afresh' + (
                '' if ranks <= index.ranks else
                ', and the random numbers of new ranks'), stacklevel=5)
    for text in sorted(set(lost) - {''}):
        warnings.warn(text, stacklevel=5)


def _unclaimed(ranks: MPI.Comm, index: SnapshotIndex, wishes: numpy.ndarray
               ) -> str:
    """The error about a key of the model that no rank takes; '' if none.

    Call it on all ranks.
    """
    claimed = numpy.empty_like(wishes)
    ranks.Allreduce(wishes, claimed, MPI.LOR)
    return next((f'the snapshot has {describe(key)}, the model has not'
                 for key, is_claimed in zip(index.owners, claimed, strict=True)
                 if key.startswith(MODEL) and not is_claimed), '')


def _whole(path: str, damaged: str) -> Content | None:
    """Opens a snapshot that is whole, or the newest that is in a directory.

    Warns of those that are passed over.  Where all are damaged, and are to
    be set aside, they are, and there is none.
    """
    if damaged not in _DAMAGED:
        raise ValueError(f'damaged must be one of {", ".join(_DAMAGED)}, not '
                         f'{damaged!r}')
    if not os.path.isdir(path):
        return _checked(path)
    found = find_snapshots(path)[::-1]
    if not found:
        raise FileNotFoundError(f'there is no snapshot in {path}')
    passed: list[str] = []
    unreadable = False
    for candidate in found:
        try:
            content = _checked(candidate)
        except (DamagedSnapshot, OSError) as error:
            unreadable |= isinstance(error, OSError)
            passed.append(f'{candidate} is not whole and is passed over: '
                          f'{error.__cause__ or error}')
            continue
        for text in passed:
            warnings.warn(text, stacklevel=2)
        return content
    text = f'no snapshot in {path} can be gone on from; {"; ".join(passed)}'
    if unreadable or damaged == 'error':
        raise FileNotFoundError(text)
    for candidate in found:
        os.replace(candidate, f'{candidate}.damaged')
    warnings.warn(f'{text}; their names end in .damaged now, and the training '
                  'begins anew', stacklevel=2)
    return None


def _checked(path: str) -> Content:
    """Opens a snapshot after all of it was read and found whole."""
    with contextlib.ExitStack() as trial:
        content = trial.enter_context(Content(path))
        content.check()
        trial.pop_all()
    return content


# --- a model alone ----------------------------------------------------------

def save_whole_model(path: str, model: Any, grid: Any) -> None:
    """Writes the layers of all stages to one file; call it on all ranks.

    ``chainer.serializers.load_npz`` loads it into the whole model, ``Net()``,
    or into any part of it, ``Net().stage(comm)``.

    Args:
        path: The file, as for ``numpy.savez_compressed``.  The first
            replica's first stage writes it.
        model: This rank's stage, ``Net().stage(grid)``.
        grid: The ranks, as :class:`PipelineUpdater` takes them.

    Raises:
        RuntimeError: It could not be written; on all ranks.
    """
    grid = grid_of(grid)
    with saving_parts():
        own = raise_together(
            grid.comm, lambda: chainer.serializers.npz.serialize(model))
    stages = grid.pipeline.gather(own) if grid.replica_index == 0 else None

    def write() -> None:
        if stages:
            numpy.savez_compressed(path, **{
                key: value for stage in stages
                for key, value in stage.items()})
    raise_together(grid.comm, write)

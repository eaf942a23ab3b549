"""Snapshots that an extension has written while training goes on."""
from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import numpy

from ...mpi.agreement import raise_together
from ...mpi.ranks import all_ranks
from ...mpi.waiting import wait_until
from ..snapshots import snapshot_file
from ..snapshots.snapshot_writing import SnapshotWriting, prepared
from .job_state import collect, names_of_communicators
from .optimizer_state import note_first_values
from .update_marks import SteppingTrigger


class SavingBeside:
    """Saves the state of all ranks, one file at a time, beside the training.

    It belongs to an extension that is on all ranks, and whose ``initialize``,
    ``__call__`` and ``finalize`` call :meth:`begin`, :meth:`save` and
    :meth:`end`.

    Args:
        comm: The ranks, as for :class:`~.snapshot.Snapshot`.
        failures: How many files in a row may fail before that is an error;
            None: any number.
        older: The paths of older snapshots in a directory, the newest last.
    """

    def __init__(self, comm: Any, failures: int | None,
                 older: Callable[[str], list[str]]) -> None:
        self._comm, self._failures, self._older = comm, failures, older
        self._failed = 0            # in a row
        self._warned: list[Warning] = []    # that are errors here
        self._writing: SnapshotWriting | None = None
        self._copies: dict[str, numpy.ndarray] = {}
        self._is_stepped = False    # whether a trigger steps it
        self._restore_trigger: Callable[[], None] = lambda: None

    def begin(self, trainer: chainer.training.Trainer, extension: Any,
              directory: str) -> None:
        """Begins to save beside the training.

        Removes what killed runs have left in the directory.
        """
        note_first_values(trainer)
        if all_ranks(self._comm).rank == 0:
            snapshot_file.remove_unfinished(directory)
        for entry in trainer._extensions.values():
            if entry.extension is extension and not self._is_stepped:
                own = entry.trigger
                entry.trigger = SteppingTrigger(own, self._step)
                self._is_stepped = True
                self._restore_trigger = functools.partial(
                    setattr, entry, 'trigger', own)

    def save(self, trainer: chainer.training.Trainer, path: str,
             after: Callable[[], None] = lambda: None) -> None:
        """Begins a file when the last one is written; on all ranks.

        Waits for it, too, outside of a Trainer's loop.

        Args:
            trainer: Whose state is saved, as it is now.
            path: The file.
            after: What rank 0 does, in a thread, when the file is whole.

        Raises:
            RuntimeError: On all ranks: a value cannot be saved, or too many
                files in a row were not written.
        """
        self._complete()
        ranks = all_ranks(self._comm)
        values = raise_together(ranks, lambda: prepared(
            collect(trainer, self._comm),
            self._copies if self._is_stepped else None))
        self._writing = SnapshotWriting(
            ranks, path, values,
            names_of_communicators(trainer, self._comm), after)
        if not self._is_stepped:        # outside of a Trainer's loop
            self._complete()

    def end(self) -> None:
        """Completes the last file, at the end of the training.

        At an end by an error only if the other ranks end by one, too.

        Raises:
            RuntimeError: On all ranks: too many files in a row were not
                written.
        """
        self._restore_trigger()
        self._is_stepped = False
        if sys.exc_info()[0] is None:
            self._complete()
        elif (writing := self._writing) is not None:
            was_done = writing.is_done
            wait_until(writing.step_at_an_error)
            if not was_done:
                self._report(writing)
            self._writing = None
        self._copies = {}

    def _step(self) -> None:
        """Goes on with a file that is being written; waits for nothing."""
        if self._writing and not self._writing.is_done and (
                self._writing.step()):
            self._report(self._writing)

    def _complete(self) -> None:
        """Waits until the file is written; on all ranks.

        Raises RuntimeError on all if too many in a row were not.
        """
        if self._writing is None:
            return
        wait_until(self._stepped)
        writing, self._writing = self._writing, None
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

    def _stepped(self) -> bool:
        self._step()
        return self._writing is None or self._writing.is_done

    def _report(self, writing: SnapshotWriting) -> None:
        if writing.problem and all_ranks(self._comm).rank == 0:
            older = self._older(os.path.dirname(writing.path))
            try:
                warnings.warn(
                    f'{writing.path} could not be written '
                    f'({writing.problem}); training goes on, and ' + (
                        f'{older[-1]} is still there' if older else
                        'there is no older snapshot'), stacklevel=2)
            except Warning as error:    # the others raise at the next one
                self._warned = [error]


def remove_older(paths: Iterable[str]) -> None:
    """Removes snapshots; warns of those that cannot be removed."""
    for path in paths:
        try:
            os.remove(path)
        except OSError as error:
            warnings.warn(f'{path} is not removed: {error}', stacklevel=2)

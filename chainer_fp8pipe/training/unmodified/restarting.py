"""Gives an unmodified script snapshots, and has it go on from the newest."""
from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from chainer.training.extensions import _snapshot
from chainer.training.triggers import IntervalTrigger, TimeTrigger
from mpi4py import MPI

from ...command_line import Interval
from ...intercept.patching import AroundCalls
from ...intercept.training_objects import Originals
from ...report.launch_protocol import LauncherLine, is_launched
from ..snapshots.snapshot import Snapshot, find_snapshots, resume
from .files import Followed, ScriptSnapshot
from .launch import Refusal

_RETAIN = 2


class Restarting(Originals):
    """Adds snapshots to a script's Trainers, and resumes them.

    A Trainer that has the package's ``Snapshot`` gets no other, and one that
    the script has resumed is not resumed again.  Of a launched job, rank 0
    tells the launcher of updates.

    Args:
        comm: All ranks.
        directory: Of the first Trainer's snapshots; those that follow have
            its folders ``2``, ``3`` and so on.  None: nothing is added.
        every: The interval between snapshots.
    """

    def __init__(self, comm: MPI.Comm, directory: str | None,
                 every: Interval) -> None:
        self._comm, self._every = comm, every
        # Before the script changes the working directory.
        self._directory = directory and os.path.abspath(directory)
        self._trainers = 0
        self._has_own = False       # the last one has a Snapshot of its own

    def finish(self) -> None:
        """The script has ended; says if there is no snapshot of it."""
        if self._directory is None or self._comm.rank:
            return
        if not self._trainers:
            self._say('the script has run no chainer.training.Trainer, so '
                      '--snapshots has kept nothing')
        elif not self._has_own and not find_snapshots(self._folder()):
            self._say(f'the training has ended before its first snapshot was '
                      f'due; there is none in {self._directory} (--every)')

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        """Refuses a training of which no snapshot would be taken."""
        if self._directory is not None and not self._trainers:
            raise Refusal(
                'the script trains without a chainer.training.Trainer, so '
                '--snapshots would keep nothing; leave it out, or train by a '
                'Trainer')
        original(*args, **kwargs)

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        """Prepares a Trainer when all else has been done to it."""
        self._trainers += 1
        if self._directory is not None:
            self._add_snapshots(trainer)
        with (_telling_the_launcher(trainer.updater)
              if is_launched() and self._comm.rank == 0
              else contextlib.nullcontext()):
            original(trainer, *args, **kwargs)

    def _folder(self) -> str:
        """Of the last Trainer's snapshots."""
        assert self._directory is not None
        return os.path.join(self._directory, str(self._trainers)
                            ) if self._trainers > 1 else self._directory

    def _add_snapshots(self, trainer: Any) -> None:
        directory = self._folder()
        own = next((entry.extension for entry in trainer._extensions.values()
                    if isinstance(entry.extension, Snapshot)
                    and not isinstance(entry.extension, ScriptSnapshot)),
                   None)
        self._has_own = own is not None
        if own is not None:
            directory = own.directory(trainer)
            self._say(f'the Trainer has a Snapshot of its own; its snapshots '
                      f'are in {directory}, and --snapshots adds none')
        else:
            amount, unit = self._every
            trigger: Any = Followed(TimeTrigger(amount), self._comm)
            if unit != 'second':
                trigger = IntervalTrigger(
                    amount if unit == 'epoch' else int(amount), unit)
            trainer.extend(Snapshot(self._comm, _RETAIN, directory=directory),
                           trigger=trigger)
        if trainer.updater.iteration:
            self._say('the script has resumed its Trainer at update '
                      f'{trainer.updater.iteration} itself; --snapshots '
                      'resumes nothing')
            return
        is_there = self._comm.rank == 0 and bool(find_snapshots(directory))
        if not self._comm.bcast(is_there):
            self._say(f'snapshots go to {directory}, where there is none '
                      'yet; the training begins')
            return
        update = resume(trainer, self._comm, directory, damaged='aside')
        for entry in trainer._extensions.values():
            # Or Chainer's own would now be loaded over it.
            if isinstance(entry.extension, (ScriptSnapshot,
                                            _snapshot._Snapshot)):
                entry.extension.autoload = False
        self._say(f'the training goes on after update {update}, by a '
                  f'snapshot in {directory}' if update else
                  'the training begins')

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)


def check_writable(directory: str) -> None:
    """Raises ValueError if snapshots cannot be written there."""
    folder = os.path.abspath(directory)
    while not os.path.lexists(folder):      # it is made when needed
        folder = os.path.dirname(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f'--snapshots {directory}: {error.strerror}') from error


@contextlib.contextmanager
def _telling_the_launcher(updater: Any) -> Iterator[None]:
    """A block in which the launcher is told of an updater's updates."""
    line, calls = LauncherLine(), AroundCalls()

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        yield
        line.say(updater.iteration)
    calls.add(updater, 'update', told)
    try:
        yield
    finally:
        calls.remove()

"""Adds snapshots and reports to an unmodified script's Trainers."""
# A script may run several Trainers, and leave out, when it is started again,
# those whose results are there.  So a Trainer is not known by its number in
# this start but by its ``out`` and by its place in the script.  All Trainers
# so far are in ``DIR/trainers.json``.  Two that share out and place are
# refused: one would go on with the weights of the other.
from __future__ import annotations

import abc
import inspect
import json
import linecache
import os
import sys
from collections.abc import Callable
from typing import Any

import chainermn
from chainer.training.extensions import _snapshot
from chainer.training.triggers import IntervalTrigger, TimeTrigger
from mpi4py import MPI

from ...command_line import Interval
from ...intercept.training_objects import LIBRARIES, Originals
from ...report.launch_protocol import LauncherLine, is_launched
from ...report.record import written_whole
from ..run_report import RunReport
from ..snapshots.file import find_snapshots, iteration_of
from ..snapshots.snapshot import Snapshot, resume
from .launch import Refusal

_RETAIN = 2
_SCATTER = inspect.signature(chainermn.scatter_dataset)


class Additions(Originals, abc.ABC):
    """Prepares a script's Trainers when all else has been done to them.

    A Trainer that runs in an extension of another one is a part of that.

    Args:
        comm: All ranks.
        option: Of the command line, for messages.
        directory: Of the first Trainer; those that follow have its folders
            ``2``, ``3`` and so on.
    """

    #: What a Trainer must not have yet.
    adds: type

    def __init__(self, comm: MPI.Comm, option: str, directory: str | None
                 ) -> None:
        self._comm, self._option = comm, option
        # Before the script changes the working directory.
        self._directory = directory and os.path.abspath(directory)
        self._trains, self._trainers = False, 0

    def finish(self) -> None:
        """Says if there was no Trainer."""
        if self._directory is not None and not self._trainers:
            self._say(f'the script has run no chainer.training.Trainer, so '
                      f'{self._option} has kept nothing')

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        before, self._trains = self._trains, True
        try:
            if not before:
                self._trainers += 1
                if self._directory is not None and any(
                        isinstance(entry.extension, self.adds)
                        for entry in trainer._extensions.values()):
                    raise Refusal(f'the Trainer has a {self.adds.__name__} of '
                                  f'its own; leave {self._option} out')
                self._add_to(trainer)
            original(trainer, *args, **kwargs)
        finally:
            self._trains = before

    @abc.abstractmethod
    def _add_to(self, trainer: Any) -> None:
        """Prepares one of the script's Trainers."""

    def _folder(self, number: int) -> str:
        return os.path.join(self._directory or '', str(number) * (number > 1))

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)


class Reporting(Additions):
    """Adds a report to each of a script's Trainers."""

    adds = RunReport

    def _add_to(self, trainer: Any) -> None:
        trainer.extend(RunReport(
            self._comm, directory=self._folder(self._trainers)))


class Restarting(Additions):
    """Adds snapshots to a script's Trainers, and resumes them.

    Of what the script has resumed itself, and a newer snapshot, the newer one
    counts.  Of a launched job, rank 0 tells the launcher of updates.

    Args:
        comm: All ranks.
        option: As of :class:`Additions`.
        directory: None: no snapshots are added.
        every: The interval between snapshots.
    """

    adds = Snapshot

    def __init__(self, comm: MPI.Comm, option: str, directory: str | None,
                 every: Interval) -> None:
        super().__init__(comm, option, directory)
        self._every = every
        self._seen: list[dict[str, str]] = []       # of this start
        self._scattered = 0

    def scatter(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Shuffles without the script's seed alike at each start.

        Of other shares an iterator's position would say nothing.
        """
        given = _SCATTER.bind(*args, **kwargs)
        if self._directory is not None and given.arguments.get(
                'seed') is None:
            given.arguments['seed'] = self._scattered
            self._scattered += 1
        return original(*given.args, **given.kwargs)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        """Refuses a training of which no snapshot would be taken."""
        if self._directory is not None and not self._trainers:
            raise Refusal(
                'the script trains without a chainer.training.Trainer, so '
                '--snapshots would keep nothing; leave it out, or train by a '
                'Trainer')
        original(*args, **kwargs)

    def _add_to(self, trainer: Any) -> None:
        if is_launched() and self._comm.rank == 0:
            line = LauncherLine()
            trainer.extend(lambda trainer: line.say(trainer.updater.iteration),
                           'launcher', lambda trainer: True, sys.maxsize)
        if self._directory is None:
            return
        directory = self._comm.bcast(
            self._choose(trainer) if self._comm.rank == 0 else None)
        if directory is None:
            raise Refusal(
                f'a second Trainer has out={trainer.out} at the same place '
                'of the script, so --snapshots could not tell whose snapshots '
                'it finds; give each Trainer an out of its own')
        amount, unit = self._every
        trainer.extend(
            Snapshot(self._comm, _RETAIN, directory=directory),
            trigger=TimeTrigger(amount) if unit == 'second' else
            IntervalTrigger(amount if unit == 'epoch' else int(amount), unit))
        found = find_snapshots(directory)
        newest = self._comm.bcast(iteration_of(found[-1]) if found else -1)
        update = trainer.updater.iteration
        if update and update >= newest:
            self._say(f'the script has resumed its Trainer at update {update} '
                      'itself; --snapshots resumes nothing')
            return
        if newest < 0:
            self._say(f'snapshots go to {directory}, where there is none '
                      'yet; the training begins')
            return
        update = resume(trainer, self._comm, directory, damaged='aside')
        for entry in trainer._extensions.values():
            # Or Chainer's own would now be loaded over it.
            if isinstance(entry.extension, _snapshot._Snapshot):
                entry.extension.autoload = False
        self._say(f'the training goes on after update {update}, by a '
                  f'snapshot in {directory}' if update else
                  'the training begins')

    def _choose(self, trainer: Any) -> str | None:
        """A Trainer's folder; None if another one of this start has it."""
        file, known = os.path.join(self._folder(1), 'trainers.json'), []
        if os.path.exists(file):
            with open(file, encoding='utf-8') as index:
                known = json.load(index)
        about = {'out': str(trainer.out), 'place': _place()}
        if about in self._seen:
            return None
        self._seen.append(about)
        if about not in known:
            known.append(about)
            os.makedirs(self._folder(1), exist_ok=True)
            with written_whole(file) as index:
                json.dump(known, index, indent=1)
        return self._folder(1 + known.index(about))


def _place() -> str:
    """The lines of the script that are being run, without their numbers."""
    found, frame = [], sys._getframe()
    while frame is not None and frame.f_back is not None:
        name = frame.f_globals.get('__name__', '')
        if name == 'chainer_fp8pipe.compat' or name.startswith('runpy'):
            break
        if name.partition('.')[0] not in LIBRARIES:
            found.append(linecache.getline(
                frame.f_code.co_filename, frame.f_lineno).strip())
        frame = frame.f_back
    return ' < '.join(found)

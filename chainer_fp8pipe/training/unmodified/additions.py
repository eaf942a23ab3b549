"""Adds snapshots and reports to an unmodified script's Trainers."""
# A script may run several Trainers, and leave out, when it is started again,
# those whose results are there.  So a Trainer is not known by its number in
# this start but by its ``out`` and by its place in the script.  The folders of
# all Trainers so far are in ``DIR/trainers.json``.  Two Trainers that share
# out and place are refused: one would go on with the weights of the other.
#
# ``chainermn.scatter_dataset(shuffle=True)`` without a seed would give each
# start other shares, of which an iterator's position says nothing: the seed is
# kept in ``DIR/seed.json``.
from __future__ import annotations

import abc
import contextlib
import inspect
import json
import linecache
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import chainermn
import numpy
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
_INDEX, _SEED = 'trainers.json', 'seed.json'
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
        if not self._trains:
            self._trainers += 1
            self._add_to(trainer)
        before, self._trains = self._trains, True
        try:
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


def _of_kind(trainer: Any, kind: type) -> Any:
    """The script's own extension of a kind; None: it has none."""
    return next((entry.extension for entry in trainer._extensions.values()
                 if isinstance(entry.extension, kind)), None)


class Reporting(Additions):
    """Adds a report to each of a script's Trainers that has none."""

    def _add_to(self, trainer: Any) -> None:
        if _of_kind(trainer, RunReport) is not None:
            self._say('the Trainer has a RunReport of its own, and --report '
                      'adds none')
        else:
            trainer.extend(RunReport(
                self._comm, directory=self._folder(self._trainers)))


class Restarting(Additions):
    """Adds snapshots to a script's Trainers, and resumes them.

    A Trainer that has the package's ``Snapshot`` gets no other, and of what
    the script has resumed itself, and a newer snapshot, the newer one counts.
    Of a launched job, rank 0 tells the launcher of updates.

    Args:
        comm: All ranks.
        option: As of :class:`Additions`.
        directory: None: no snapshots are added.
        every: The interval between snapshots.
    """

    def __init__(self, comm: MPI.Comm, option: str, directory: str | None,
                 every: Interval) -> None:
        super().__init__(comm, option, directory)
        self._every = every
        self._seen: list[dict[str, str]] = []       # of this start
        # Of the shuffled shares of data sets, and how many there were.
        self._seed = comm.bcast(self._read(_SEED, secrets.randbits(32)))
        self._scattered = 0

    def scatter(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Shuffles without the script's seed as at the first start."""
        bound = _SCATTER.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if (self._directory is not None and given['shuffle']
                and given['seed'] is None):
            if self._scattered == 0:
                self._write(_SEED, self._seed)
            given['seed'] = int(numpy.random.SeedSequence(
                [self._seed, self._scattered]).generate_state(1)[0])
            self._scattered += 1
        return original(*bound.args, **bound.kwargs)

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
        own = _of_kind(trainer, Snapshot)
        directory = own.directory(trainer) if own else ''
        directory, is_known, problem = self._comm.bcast(
            self._choose(trainer, directory) if self._comm.rank == 0 else None)
        if problem:
            raise Refusal(problem)
        if own is not None:
            self._say(f'the Trainer has a Snapshot of its own; its snapshots '
                      f'are in {directory}, and --snapshots adds none')
        else:
            amount, unit = self._every
            trainer.extend(
                Snapshot(self._comm, _RETAIN, directory=directory),
                trigger=TimeTrigger(amount) if unit == 'second' else
                IntervalTrigger(amount if unit == 'epoch' else int(amount),
                                unit))
        found = find_snapshots(directory) if is_known else []
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

    def _choose(self, trainer: Any, own: str) -> tuple[str, bool, str]:
        """A Trainer's folder, and whether snapshots in it are this one's.

        Args:
            trainer: That is about to run.
            own: The folder of its own ``Snapshot``; '' if it has none.

        Returns:
            Both, and why it is refused; '' if it is not.
        """
        known: list[dict[str, str]] = self._read(_INDEX, [])
        about = {'out': str(trainer.out), 'place': _place()}
        if about in self._seen:
            return '', False, (
                f'a second Trainer has out={about["out"]} at the same place '
                'of the script, so --snapshots could not tell whose snapshots '
                'it finds; give each Trainer an out of its own')
        self._seen.append(about)
        for number, one in enumerate(known, 1):
            if one.items() >= about.items():
                return own or self._folder(number), True, ''
        folder = own or self._folder(len(known) + 1)
        # A script's own may be older than --snapshots.
        is_known = bool(own) and all(one['folder'] != own for one in known)
        self._write(_INDEX, [*known, {**about, 'folder': folder}])
        return folder, is_known, ''

    def _read(self, name: str, default: Any) -> Any:
        if self._directory is not None:
            with contextlib.suppress(FileNotFoundError), open(
                    os.path.join(self._directory, name),
                    encoding='utf-8') as file:
                return json.load(file)
        return default

    def _write(self, name: str, value: Any) -> None:
        if self._comm.rank == 0:
            os.makedirs(self._directory or '', exist_ok=True)
            with written_whole(os.path.join(self._directory or '', name)
                               ) as file:
                json.dump(value, file, indent=1)


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

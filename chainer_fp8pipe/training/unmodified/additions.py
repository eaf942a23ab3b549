"""Adds snapshots and reports to an unmodified script's Trainers."""
# A script may run several Trainers, and leave out, when it is started again,
# those whose results are there.  So a Trainer is not known by its number in
# this start but by its ``out`` and by its place in the script, which are in
# ``DIR/trainers.json``.  Two that share both are refused: one would go on with
# the weights of the other.  One that runs in an extension of another is a part
# of that.
from __future__ import annotations

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
from ...mpi.agreement import of_first_rank
from ...report.launch_protocol import LauncherLine, is_launched
from ...report.record import written_whole
from ..run_report import RunReport
from ..snapshots.file import find_snapshots, iteration_of
from ..snapshots.snapshot import Snapshot, resume
from .launch import Refusal

_RETAIN = 2
_SCATTER = inspect.signature(chainermn.scatter_dataset)


class Additions(Originals):
    """Adds snapshots and a report to a script's Trainers, and resumes them.

    Of what the script has resumed itself, and a newer snapshot, the newer one
    counts.  Of a launched job, rank 0 tells the launcher of updates.

    Args:
        comm: All ranks.
        snapshots: Their folder; those of a second Trainer are in its folder
            ``2``, and so on; None: there are none.
        every: The interval between snapshots.
        report: Likewise, of reports.
    """

    def __init__(self, comm: MPI.Comm, snapshots: str | None, every: Interval,
                 report: str | None) -> None:
        self._comm, self._every = comm, every
        # Before the script changes the working directory.
        self._snapshots = snapshots and os.path.abspath(snapshots)
        self._report = report and os.path.abspath(report)
        self._trains, self._trainers, self._scattered = False, 0, 0
        self._seen: list[dict[str, str]] = []       # of this start

    def finish(self) -> None:
        """Says if there was no Trainer."""
        if not self._trainers and (self._snapshots or self._report):
            self._say('the script has run no chainer.training.Trainer, so '
                      '--snapshots and --report have kept nothing')

    def scatter(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Shuffles without the script's seed alike at each start.

        Of other shares an iterator's position would say nothing.
        """
        given = _SCATTER.bind(*args, **kwargs)
        if self._snapshots and given.arguments.get('seed') is None:
            given.arguments['seed'] = self._scattered
            self._scattered += 1
        return original(*given.args, **given.kwargs)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        """Refuses a training of which no snapshot would be taken."""
        if self._snapshots and not self._trainers:
            raise Refusal(
                'the script trains without a chainer.training.Trainer, so '
                '--snapshots would keep nothing; leave it out, or train by a '
                'Trainer')
        original(*args, **kwargs)

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        before, self._trains = self._trains, True
        try:
            if not before:
                self._trainers += 1
                self._add_to(trainer)
            original(trainer, *args, **kwargs)
        finally:
            self._trains = before

    def _add_to(self, trainer: Any) -> None:
        """Prepares a Trainer when all else has been done to it."""
        if is_launched() and self._comm.rank == 0:
            line = LauncherLine()
            trainer.extend(lambda trainer: line.say(trainer.updater.iteration),
                           'launcher', lambda trainer: True, sys.maxsize)
        for kind, is_added in ((Snapshot, self._snapshots),
                               (RunReport, self._report)):
            if is_added and any(isinstance(entry.extension, kind)
                                for entry in trainer._extensions.values()):
                option = '--snapshots' if kind is Snapshot else '--report'
                raise Refusal(f'the Trainer has a {kind.__name__} of its own; '
                              f'leave {option} out')
        if snapshots := self._snapshots:
            self._resume(trainer, of_first_rank(
                self._comm, lambda: self._choose(trainer, snapshots)))
        if self._report:
            trainer.extend(RunReport(self._comm, directory=_numbered(
                self._report, self._trainers)))

    def _resume(self, trainer: Any, directory: str | None) -> None:
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

    def _choose(self, trainer: Any, directory: str) -> str | None:
        """A Trainer's folder; None if another one of this start has it."""
        file, known = os.path.join(directory, 'trainers.json'), []
        if os.path.exists(file):
            with open(file, encoding='utf-8') as index:
                known = json.load(index)
        about = {'out': str(trainer.out), 'place': _place()}
        if about in self._seen:
            return None
        self._seen.append(about)
        if about not in known:
            known.append(about)
            os.makedirs(directory, exist_ok=True)
            with written_whole(file) as index:
                json.dump(known, index, indent=1)
        return _numbered(directory, 1 + known.index(about))

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)


def _numbered(directory: str, number: int) -> str:
    return os.path.join(directory, str(number) * (number > 1))


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

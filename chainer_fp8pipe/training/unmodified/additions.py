"""Adds snapshots and reports to an unmodified script's Trainers."""
# A script that is started again may leave out Trainers that have ended before.
# So a Trainer is not known by its number in this start but by its ``out`` and
# by its place in the script, which the name of its folder is made of.  One
# that runs in an extension of another is a part of that.
from __future__ import annotations

import glob
import linecache
import os
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable
from typing import Any

from chainer.training.extensions import _snapshot
from chainer.training.triggers import IntervalTrigger, TimeTrigger
from mpi4py import MPI

from ...command_line import Interval
from ...intercept.patching import Current
from ...intercept.training_objects import LIBRARIES, Originals
from ...report.launch_protocol import is_launched, say_update
from ..run_report import RunReport
from ..snapshots.file import find_snapshots, iteration_of
from ..snapshots.snapshot import Snapshot, resume
from .launch import Refusal, refusing, say

_RETAIN = 2


class Additions(Originals):
    """Adds snapshots and a report to a script's Trainers, and resumes them.

    Of what the script has resumed itself, and a newer snapshot, the newer one
    counts.  Of a launched job, rank 0 tells the launcher of updates.

    Args:
        comm: All ranks.
        snapshots: A directory, in which each Trainer's snapshots have a
            folder; None: there are none.
        every: The interval between snapshots.
        report: A directory for a report, in which that of a second Trainer
            has a folder ``2``, and so on; None: there is none.
    """

    def __init__(self, comm: MPI.Comm, snapshots: str | None, every: Interval,
                 report: str | None) -> None:
        self._comm, self._every = comm, every
        # Before the script changes the working directory.
        self._snapshots = snapshots and os.path.abspath(snapshots)
        self._report = report and os.path.abspath(report)
        self._training, self._trainers, self._scattered = Current(), 0, 0
        self._seen = set[str]()     # of this start

    def scatter(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Shuffles without the script's seed alike at each start.

        Of other shares an iterator's position would say nothing.
        """
        if self._snapshots and len(args) < 5 and kwargs.get('seed') is None:
            kwargs['seed'] = self._scattered
            self._scattered += 1
        return original(*args, **kwargs)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        """Refuses a training of which nothing would be kept."""
        if self._snapshots and not self._trainers:
            raise Refusal(
                'the script trains before it runs a chainer.training.Trainer, '
                'of which --snapshots would keep nothing; leave the option '
                'out, or train by a Trainer')
        original(*args, **kwargs)

    def finish(self) -> None:
        if self._report and not self._trainers:
            say('the script has run no chainer.training.Trainer, so there is '
                'no report')

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        if not self._training.now:
            self._add_to(trainer)
        with self._training.set_to(True):
            original(trainer, *args, **kwargs)

    def _add_to(self, trainer: Any) -> None:
        """Prepares a Trainer when all else has been done to it."""
        self._trainers += 1
        if is_launched() and self._comm.rank == 0:
            trainer.extend(
                lambda trainer: say_update(trainer.updater.iteration),
                'launcher', lambda trainer: True, sys.maxsize)
        if self._snapshots:
            self._resume(trainer, os.path.join(
                self._snapshots, self._name_of(trainer)))
        if self._report:
            trainer.extend(RunReport(self._comm, directory=os.path.join(
                self._report, str(self._trainers) * (self._trainers > 1))))

    def _resume(self, trainer: Any, directory: str) -> None:
        amount, unit = self._every
        trainer.extend(
            Snapshot(self._comm, _RETAIN, directory=directory),
            trigger=TimeTrigger(amount) if unit == 'second' else
            IntervalTrigger(amount if unit == 'epoch' else int(amount), unit))
        found = find_snapshots(directory)
        newest = self._comm.bcast(iteration_of(found[-1]) if found else -1)
        update = trainer.updater.iteration
        if newest < 0 or update and update >= newest:
            others = {os.path.dirname(name) for depth in ('', '*/')
                      for name in glob.glob(f'{depth}snapshot_iter_*',
                                            root_dir=self._snapshots)}
            say(f'snapshots go to {directory}; the training ' + (
                f'goes on after update {update}, as the script says'
                if update else 'begins') + ''.join(
                f'; those in {name or "."} are of another Trainer (another '
                'out, or place in the script) or version'
                for name in sorted(others - self._seen)))
            return
        with refusing(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always', UserWarning)
            update = resume(trainer, self._comm, directory, damaged='aside')
        for entry in trainer._extensions.values():
            # Or Chainer's own would now be loaded over it.
            if isinstance(entry.extension, _snapshot._Snapshot):
                entry.extension.autoload = False
        for one in told:
            say(str(one.message))
        if update:
            say(f'the training goes on after update {update}, by a snapshot '
                f'in {directory}')

    def _name_of(self, trainer: Any) -> str:
        """The name of a Trainer's folder."""
        out, place = self._comm.bcast((str(trainer.out), _place()))
        name = '{}-{:08x}'.format(
            os.path.basename(os.path.normpath(out)),
            zlib.crc32(f'{out} {place}'.encode()))
        if name in self._seen:
            raise Refusal(
                f'a second Trainer has out={out} at the same place of the '
                'script, so --snapshots could not tell whose snapshots it '
                'finds; give each Trainer an out of its own')
        self._seen.add(name)
        return name


def _place() -> str:
    """The lines of the script that are being run, without their numbers."""
    return ' < '.join(
        linecache.getline(frame.f_code.co_filename, line).strip()
        for frame, line in traceback.walk_stack(None)
        if (frame.f_globals.get('__package__') or frame.f_globals['__name__']
            ).partition('.')[0] not in {*LIBRARIES, 'runpy'})

"""Gives an unmodified script a ``RunReport``."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from ...intercept.training_objects import Originals
from ..run_report import RunReport


class Reporting(Originals):
    """Adds a report to each of a script's Trainers.

    A Trainer that has a report of its own gets no other, nor does one that
    runs in an extension of another one.

    Args:
        comm: All ranks.
        directory: Of the first Trainer's report; those that follow have its
            folders ``2``, ``3`` and so on.
    """

    def __init__(self, comm: MPI.Comm, directory: str) -> None:
        # Before the script changes the working directory.
        self._comm, self._directory = comm, os.path.abspath(directory)
        self._trainers, self._trains = 0, False

    def finish(self) -> None:
        """The script has ended; says if there is no report of it."""
        if not self._trainers:
            self._say('the script has run no chainer.training.Trainer, so '
                      '--report has recorded nothing')

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        """Prepares a Trainer when all else has been done to it."""
        if self._trains:
            original(trainer, *args, **kwargs)
            return
        self._trainers += 1
        if any(isinstance(entry.extension, RunReport)
               for entry in trainer._extensions.values()):
            self._say('the Trainer has a RunReport of its own, and --report '
                      'adds none')
        else:
            trainer.extend(RunReport(self._comm, directory=os.path.join(
                self._directory, *[str(self._trainers)] * (
                    self._trainers > 1))))
        self._trains = True
        try:
            original(trainer, *args, **kwargs)
        finally:
            self._trains = False

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)

"""How far a job has come, by the snapshots in its directory."""
from __future__ import annotations

import os
import re
from typing import NamedTuple

#: As the ``Snapshot`` extension names its files.
_FILE = re.compile(r'snapshot_iter_(\d+)\.npz')


class SavedProgress(NamedTuple):
    """The newest snapshot; of two, the one that is further is greater.

    Attributes:
        trainer: Which of the script's Trainers it is of, from 1; 0: there
            is no snapshot.
        update: The number of updates.
        path: Of the file.
    """

    trainer: int = 0
    update: int = -1
    path: str = ''

    @property
    def is_there(self) -> bool:
        """Whether there is a snapshot."""
        return bool(self.path)


def saved_progress(directory: str | None) -> SavedProgress:
    """Looks into a directory, which the first Trainer has for itself.

    Those that follow have its folders ``2``, ``3`` and so on.
    """
    newest = SavedProgress()
    if directory is not None:
        for trainer, folder in [(1, directory), *_others(directory)]:
            for name in _names(folder):
                if found := _FILE.fullmatch(name):
                    newest = max(newest, SavedProgress(
                        trainer, int(found[1]), os.path.join(folder, name)))
    return newest


def _others(directory: str) -> list[tuple[int, str]]:
    return [(int(name), os.path.join(directory, name))
            for name in _names(directory) if name.isdecimal()]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:         # there is none yet, or the disk is away
        return []

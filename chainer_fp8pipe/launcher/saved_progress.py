"""The files of a job's snapshots: how far it has come, what is unfinished."""
from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

#: As the ``Snapshot`` extension names its files.
_FILE = re.compile(r'snapshot_iter_(\d+)\.npz')
#: As a file is called while it is being written.
_UNFINISHED = 'snapshot.partial'


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
    for trainer, folder in _folders(directory):
        for name in _names(folder):
            if found := _FILE.fullmatch(name):
                newest = max(newest, SavedProgress(
                    trainer, int(found[1]), os.path.join(folder, name)))
    return newest


def remove_unfinished(directory: str | None) -> None:
    """Removes what a job was writing in its directory when it ended."""
    for _, folder in _folders(directory):
        for name in _names(folder):
            if name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):
                    os.remove(os.path.join(folder, name))


def _folders(directory: str | None) -> list[tuple[int, str]]:
    """By the numbers of Trainers."""
    if directory is None:
        return []
    return [(1, directory), *(
        (int(name), os.path.join(directory, name))
        for name in _names(directory) if name.isdecimal())]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:         # there is none yet, or the disk is away
        return []

"""The files of a folder and their labels, compact enough for millions.

    ROOT/CLASS/*.JPEG

The names are one block of bytes rather than a string each, so that worker
processes share it instead of each having a copy.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy

from .segment import Segment

#: What names of images end with, in small or capital letters.
SUFFIXES = ('.jpeg', '.jpg', '.png')


class FileTable:
    """The files of a folder, and the class of each.

    Args:
        root: The folder.
        classes: Names of its folders, in the order of the labels.
        names: uint8: all names inside ``root``, one after the other.
        ends: int64, one per file: where its name ends in ``names``.
        labels: int32, one per file: index of its class.
    """

    def __init__(self, root: str, classes: list[str], names: numpy.ndarray,
                 ends: numpy.ndarray, labels: numpy.ndarray) -> None:
        self.root, self.classes = root, classes
        self.names, self.ends, self.labels = names, ends, labels

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        name = self.names[start:self.ends[index]].tobytes()
        return os.path.join(self.root, os.fsdecode(name))


class TableHandle(NamedTuple):
    """A table in shared memory, as sent to a child process."""

    fd: int
    root: str
    files: int
    characters: int

    def open(self) -> FileTable:
        """The table, without the names of the classes."""
        segment, n = Segment(self.fd), self.files
        return FileTable(
            self.root, [], segment.array(12 * n, (self.characters,), 'u1'),
            segment.array(0, (n,), 'i8'), segment.array(8 * n, (n,), 'i4'))


def share(table: FileTable) -> tuple[Segment, TableHandle]:
    """Copies a table to shared memory that children can open."""
    segment = Segment.of([table.ends, table.labels, table.names])
    return segment, TableHandle(segment.fd, table.root, len(table),
                                len(table.names))


def find_images(root: str) -> FileTable:
    """Looks for ``root/CLASS/*.JPEG`` (or ``.jpg``, ``.png``).

    Classes are numbered in the order of their names, and files are sorted,
    whatever the order of the file system.  Other files, hidden ones, and
    folders inside a class are left out.

    Raises:
        ValueError: There is no such folder, no class, or one without images.
    """
    check_folder(root)
    classes = sorted(entry.name for entry in os.scandir(root)
                     if not entry.name.startswith('.') and _is(entry.is_dir))
    if not classes:
        raise ValueError(f'{root!r} has no folders in it; images are '
                         'expected as ROOT/CLASS/*.JPEG')
    found = [_images(os.path.join(root, name)) for name in classes]
    empty = [name for name, files in zip(classes, found, strict=True)
             if not files]
    if empty:
        raise ValueError(
            f'no images ({", ".join(SUFFIXES)}) in '
            f'{", ".join(repr(name) for name in empty[:5])}'
            + (f' and {len(empty) - 5} more' if len(empty) > 5 else '')
            + f' of {root!r}; every folder there is a class and takes a '
            'label: remove those that are not classes')
    names = [os.fsencode(os.path.join(folder, name))
             for folder, files in zip(classes, found, strict=True)
             for name in files]
    return FileTable(
        root, classes, numpy.frombuffer(b''.join(names), numpy.uint8),
        numpy.cumsum([len(name) for name in names], dtype=numpy.int64),
        numpy.repeat(numpy.arange(len(classes), dtype=numpy.int32),
                     [len(files) for files in found]))


def check_folder(root: str) -> None:
    """Raises ValueError if ``root`` is not a folder."""
    if not os.path.isdir(root):
        raise ValueError(f'{root!r} is not a folder; images are expected as '
                         'ROOT/CLASS/*.JPEG')


def _images(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries
                      if entry.name.lower().endswith(SUFFIXES)
                      and not entry.name.startswith('.')
                      and _is(entry.is_file))


def _is(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:     # such as a link that leads to itself
        return False

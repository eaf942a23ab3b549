"""Finds the files of a folder, and reads and transforms one.

    ROOT/CLASS/*.JPEG

The random numbers of a sample depend on the seed, the epoch and the sample
alone, not on the thread that reads it or on the time.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy

from .cache import Cache
from .decoding import Decoder, ImageError
from .transforms import Crop, Transform

#: What names of images end with, in small or capital letters.
SUFFIXES = ('.jpeg', '.jpg', '.png')


class FileTable(NamedTuple):
    """The files of a folder, and the class of each.

    Attributes:
        root: The folder.
        classes: Names of its folders, in the order of the labels.
        labels: int32, one per file: index of its class.
        names: Names inside ``root``, one per file, bytes of one length: a
            million strings would take several times the memory.
    """

    root: str
    classes: list[str]
    labels: numpy.ndarray
    names: numpy.ndarray

    def path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))


def find_images(root: str) -> FileTable:
    """Looks for ``root/CLASS/*.JPEG`` (or ``.jpg``, ``.png``).

    Classes are numbered in the order of their names, and files are sorted,
    whatever the order of the file system.  Other files, hidden ones, and
    folders inside a class are left out.

    Raises:
        ValueError: There is no such folder, no class, or one without images.
    """
    check_folder(root)
    classes = _sorted(root, lambda entry: entry.is_dir())
    if not classes:
        raise ValueError(f'{root!r} has no folders in it; images are '
                         'expected as ROOT/CLASS/*.JPEG')
    found = [_sorted(os.path.join(root, name), lambda entry: (
        entry.name.lower().endswith(SUFFIXES) and entry.is_file()))
        for name in classes]
    empty = [name for name, files in zip(classes, found, strict=True)
             if not files]
    if empty:
        raise ValueError(
            f'no images ({", ".join(SUFFIXES)}) in '
            f'{", ".join(repr(name) for name in empty[:5])}'
            + (f' and {len(empty) - 5} more' if len(empty) > 5 else '')
            + f' of {root!r}; every folder there is a class: remove the '
            'others')
    return FileTable(
        root, classes,
        numpy.repeat(numpy.arange(len(classes), dtype=numpy.int32),
                     [len(files) for files in found]),
        numpy.array([os.fsencode(os.path.join(folder, name))
                     for folder, files in zip(classes, found, strict=True)
                     for name in files]))


def check_folder(root: str) -> None:
    """Raises ValueError if ``root`` is not a folder."""
    if not os.path.isdir(root):
        raise ValueError(f'{root!r} is not a folder; images are expected as '
                         'ROOT/CLASS/*.JPEG')


def _sorted(folder: str, wanted: Callable[[os.DirEntry], bool]) -> list[str]:
    """Names in a folder, without hidden ones."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Such as a link that leads to itself.
            with contextlib.suppress(OSError):
                if not entry.name.startswith('.') and wanted(entry):
                    names.append(entry.name)
    return sorted(names)


class Reader:
    """Reads samples of a table; without a transform whole images.

    ``seed`` is that of the random numbers.  Several threads may read.
    """

    def __init__(self, table: FileTable, transform: Transform | None,
                 decoder: Decoder, cache: Cache | None, seed: int) -> None:
        self.table, self.transform, self.decoder = table, transform, decoder
        self.cache, self.seed = cache, seed

    def read(self, index: int, epoch: int, out: numpy.ndarray) -> None:
        """Writes a sample, as it is in an epoch, into ``out``.

        Raises:
            ImageError: The image, which the error names, cannot be used.
            OSError: The file cannot be read.
            ValueError: The transform returns another shape than it has.
            TypeError: It returns values that its dtype does not hold.
        """
        result = self.draw(index, numpy.random.default_rng(
            [self.seed, epoch, index]), out)
        if result is not out:       # what it returns counts
            if numpy.shape(result) != out.shape:
                raise ValueError(
                    f'finish() returns an array of {numpy.shape(result)}, '
                    f"but the transform's shape is {out.shape}")
            numpy.copyto(out, result, 'same_kind')

    def draw(self, index: int, rng: numpy.random.Generator,
             out: numpy.ndarray | None = None) -> numpy.ndarray:
        """A sample, with given random numbers; CHW.

        Without a transform the whole image, uint8.  Raises as :meth:`read`.
        """
        def choose(width: int, height: int) -> Crop:
            if self.transform is None:
                return Crop((0, 0, width, height), (height, width))
            return self.transform.plan(width, height, rng)
        try:
            pixels = self.decoder.decode(self._file(index), choose)
        except ImageError as error:
            # A decoder does not know the path.
            raise ImageError(self.table.path(index), error.reason) from error
        if self.transform is None:
            return numpy.ascontiguousarray(pixels.transpose(2, 0, 1))
        return self.transform.finish(pixels, out)

    def _file(self, index: int) -> bytes:
        """A sample's file, from the cache or read and kept there."""
        if self.cache is not None and (kept := self.cache.get(index)):
            return kept
        with open(self.table.path(index), 'rb') as file:
            data = file.read()
        if self.cache is not None:
            self.cache.put(index, data)
        return data

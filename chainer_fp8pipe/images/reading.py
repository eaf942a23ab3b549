"""Finds the files of a folder, keeps them in memory, reads and transforms one.

    ROOT/CLASS/*.JPEG

The random numbers of a sample depend on the seed, the epoch and the sample
alone, not on the process that reads it or on the time.
"""
# Names of files are one block of bytes, which worker processes share, rather
# than a million strings in each.  The cache, in shared memory too:
#
#     header | one entry per sample: start, size, height, width | the bytes
#
# Height and width are 0 where a file is kept and not its pixels.  The process
# that first reads a sample adds it.  A sample that does not fit is not kept,
# and none is evicted: every sample is used once in an epoch, so an evicted
# one would be needed sooner than the new one.
from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy

from .decoding import Decoder, ImageError, crop_and_resize
from .memory import Segment
from .transforms import Crop, Transform

#: What names of images end with, in small or capital letters.
SUFFIXES = ('.jpeg', '.jpg', '.png')

#: What a cache keeps: the files' bytes, the whole images' pixels, nothing.
CacheKind = Literal['memory', 'decoded'] | None


class FileTable:
    """The files of a folder, and the class of each.

    Args:
        root: The folder.
        classes: Names of its folders, in the order of the labels.
        ends: int64, one per file: where its name ends in ``names``.
        labels: int32, one per file: index of its class.
        names: uint8: all names inside ``root``, one after the other.
    """

    def __init__(self, root: str, classes: list[str], ends: numpy.ndarray,
                 labels: numpy.ndarray, names: numpy.ndarray) -> None:
        self.root, self.classes = root, classes
        self.ends, self.labels, self.names = ends, labels, names

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        name = self.names[start:self.ends[index]].tobytes()
        return os.path.join(self.root, os.fsdecode(name))

    def share(self) -> Segment:
        """New shared memory that holds the paths, for :meth:`open`."""
        segment = Segment.create(8 * len(self) + len(self.names))
        there = self.open(segment, self.root, len(self))
        there.ends[:], there.names[:] = self.ends, self.names
        return segment

    @classmethod
    def open(cls, segment: Segment, root: str, files: int) -> FileTable:
        """A table in shared memory, without labels and classes."""
        size = segment.size - 8 * files
        return cls(root, [], segment.array(0, (files,), numpy.int64),
                   numpy.empty(0, numpy.int32),
                   segment.array(8 * files, (size,), numpy.uint8))


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
    names = [os.fsencode(os.path.join(folder, name))
             for folder, files in zip(classes, found, strict=True)
             for name in files]
    return FileTable(
        root, classes,
        numpy.cumsum([len(name) for name in names], dtype=numpy.int64),
        numpy.repeat(numpy.arange(len(classes), dtype=numpy.int32),
                     [len(files) for files in found]),
        numpy.frombuffer(b''.join(names), numpy.uint8))


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


# --- the cache ---------------------------------------------------------------

_HEADER = 8     # bytes; how many are given out
_ENTRY = 4      # numbers of int64 in an entry
_RESERVED = -1  # in place of a start: a process is writing the sample
_ALIGNMENT = 16


class Cache:
    """Bytes or pixels of samples in the shared memory of :meth:`create`.

    All entries are read and written under a lock on the memory, which the
    kernel releases when a process ends, even by SIGKILL.  To close another
    descriptor of the memory would release it too.
    """

    def __init__(self, segment: Segment, samples: int) -> None:
        self.segment, self._samples = segment, samples
        self._used = segment.array(0, (1,), numpy.int64)
        self._entries = segment.array(_HEADER, (samples, _ENTRY), numpy.int64)
        self._start = _overhead(samples)
        self.budget = segment.size - self._start
        self._threads = threading.Lock()    # the kernel sees one process
        self._owner = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.segment, self._samples)

    @classmethod
    def create(cls, samples: int, budget: int) -> Cache:
        """An empty cache of ``budget`` bytes, and 32 more per sample."""
        return cls(Segment.create(_overhead(samples) + budget), samples)

    def get(self, index: int) -> numpy.ndarray | None:
        """A read-only view of what is kept; None if nothing is.

        The memory stays as long as the view.
        """
        with self._locked():
            start, size, height, width = self._entries[index].tolist()
        if start <= 0:
            return None
        kept = self.segment.array(
            start, (height, width, 3) if height else (size,), numpy.uint8)
        kept.flags.writeable = False
        return kept

    def put(self, index: int, data: numpy.ndarray) -> bool:
        """Keeps a file's bytes or an image's pixels, (H, W, 3); uint8 both.

        Returns:
            Whether they fit; also if another process keeps them, or is about
            to.
        """
        size = data.nbytes
        with self._locked():
            if self._entries[index, 0]:     # another process was faster
                return True
            start = int(self._used[0])
            if start + size > self.budget:
                return False
            self._used[0] = start - (-size // _ALIGNMENT * _ALIGNMENT)
            self._entries[index, 0] = _RESERVED
        # Without the lock, as copying takes long.  A process that is killed
        # here leaves a hole, not half a sample: the entry is written last,
        # and until then others read the file.
        start += self._start
        self.segment.array(start, data.shape, numpy.uint8)[...] = data
        shape = data.shape[:2] if data.ndim == 3 else (0, 0)
        with self._locked():
            self._entries[index] = start, size, *shape
        return True

    def statistics(self) -> tuple[int, int]:
        """Number of samples kept, and their bytes."""
        with self._locked():
            kept = self._entries[:, 0] > 0
            return int(kept.sum()), int(self._entries[kept, 1].sum())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._owner:      # a fork has other threads
            self._owner, self._threads = os.getpid(), threading.Lock()
        with self._threads:
            fcntl.lockf(self.segment.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.segment.fd, fcntl.LOCK_UN)


def _overhead(samples: int) -> int:
    size = _HEADER + samples * _ENTRY * 8
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# --- one sample --------------------------------------------------------------

class Reader:
    """Reads samples of a table; without a transform whole images.

    ``kind`` is what the cache keeps, ``seed`` that of the random numbers.
    """

    def __init__(self, table: FileTable, transform: Transform | None,
                 decoder: Decoder, kind: CacheKind, cache: Cache | None,
                 seed: int) -> None:
        self.table, self.transform, self.decoder = table, transform, decoder
        self.kind, self.cache, self.seed = kind, cache, seed

    def read(self, index: int, epoch: int, out: numpy.ndarray) -> None:
        """Writes a sample, as it is in an epoch, into ``out``.

        Raises:
            ImageError: The image, which the error names, cannot be used.
            OSError: The file cannot be read.
        """
        self.draw(index, numpy.random.default_rng(
            [self.seed, epoch, index]), out)

    def draw(self, index: int, rng: numpy.random.Generator,
             out: numpy.ndarray | None = None) -> numpy.ndarray:
        """A sample, with given random numbers; CHW, in ``out`` if given.

        Without a transform the whole image, uint8.  Raises as :meth:`read`.
        """
        try:
            if self.kind == 'decoded':
                pixels = self._pixels(index)
                pixels = crop_and_resize(pixels, self._plan(
                    pixels.shape[1], pixels.shape[0], rng))
            else:
                data = self._file(index)
                pixels = self.decoder.decode(
                    data, self._plan(*self.decoder.size(data), rng))
        except ImageError as error:
            # A decoder does not know the path.
            raise ImageError(self.table.path(index), error.reason) from error
        if self.transform is None:
            return numpy.ascontiguousarray(pixels.transpose(2, 0, 1))
        return self.transform.finish(pixels, out)

    def kept_bytes(self, index: int) -> int:
        """Bytes that a sample takes in a cache; 0 if it cannot be kept."""
        data = self._read(index)
        if self.kind == 'memory':
            return len(data)
        try:
            width, height = self.decoder.size(data)
        except ImageError:
            return 0
        return 3 * width * height

    def _plan(self, width: int, height: int, rng: numpy.random.Generator
              ) -> Crop:
        if self.transform is None:
            return Crop((0, 0, width, height), (height, width))
        return self.transform.plan(width, height, rng)

    def _pixels(self, index: int) -> numpy.ndarray:
        """The whole image, from the cache or decoded and kept there.

        Also if the image does not fit: a part that is decoded alone can
        have other pixels, and what fits depends on chance.
        """
        assert self.cache is not None
        pixels = self.cache.get(index)
        if pixels is None:
            data = self._read(index)
            width, height = self.decoder.size(data)
            pixels = self.decoder.decode(
                data, Crop((0, 0, width, height), (height, width)))
            self.cache.put(index, pixels)
        return pixels

    def _file(self, index: int) -> bytes:
        """A sample's file, from the cache or read and kept there."""
        if self.cache is None:
            return self._read(index)
        kept = self.cache.get(index)
        if kept is not None:
            return kept.tobytes()
        data = self._read(index)
        self.cache.put(index, numpy.frombuffer(data, numpy.uint8))
        return data

    def _read(self, index: int) -> bytes:
        with open(self.table.path(index), 'rb') as file:
            return file.read()

"""Reads one sample, from its file or the node's cache, and transforms it.

The random numbers of a sample depend on the seed, the epoch and the sample
alone, not on the process that reads it or on the time.
"""
# The cache, in shared memory:
#
#     header | one entry per sample: start, size, height, width | the bytes
#
# Height and width are 0 where a file is kept and not its pixels.  The process
# that first reads a sample adds it.  A sample that does not fit is not kept,
# and none is evicted: every sample is used once in an epoch, so an evicted
# one would be needed sooner than the new one.
from __future__ import annotations

from typing import Literal

import numpy

from .decoding import Decoder, ImageError
from .file_list import FileTable
from .resizing import crop_and_resize
from .segment import FileLock, Segment
from .transforms import Crop, Transform

_USED = 0       # header: bytes that are given out
_HEADER = 8
_ENTRY = 4      # numbers of int64 in an entry
_RESERVED = -1  # in place of a start: a process is writing the sample
_ALIGNMENT = 16


class Cache:
    """Bytes or pixels of samples in the shared memory of :meth:`create`."""

    def __init__(self, segment: Segment, samples: int) -> None:
        self.segment = segment
        self._header = segment.array(0, (1,), numpy.int64)
        self._entries = segment.array(_HEADER, (samples, _ENTRY), numpy.int64)
        self._start = _overhead(samples)
        self.budget = segment.size - self._start
        self._lock = FileLock(segment.fd)

    @classmethod
    def create(cls, samples: int, budget: int) -> Cache:
        """An empty cache of ``budget`` bytes, and 32 more per sample."""
        return cls(Segment.create(_overhead(samples) + budget), samples)

    def get(self, index: int) -> numpy.ndarray | None:
        """A read-only view of what is kept; None if nothing is.

        The memory stays as long as the view, even after :meth:`close`.
        """
        with self._lock:
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
        with self._lock:
            if self._entries[index, 0]:     # another process was faster
                return True
            start = int(self._header[_USED])
            if start + size > self.budget:
                return False
            self._header[_USED] = start - (-size // _ALIGNMENT * _ALIGNMENT)
            self._entries[index, 0] = _RESERVED
        # Without the lock, as copying takes long.  A process that is killed
        # here leaves a hole, not half a sample: the entry is written last,
        # and until then others read the file.
        start += self._start
        self.segment.array(start, data.shape, numpy.uint8)[...] = data
        shape = data.shape[:2] if data.ndim == 3 else (0, 0)
        with self._lock:
            self._entries[index] = start, size, *shape
        return True

    def statistics(self) -> tuple[int, int]:
        """Number of samples kept, and their bytes."""
        with self._lock:
            kept = self._entries[:, 0] > 0
            return int(kept.sum()), int(self._entries[kept, 1].sum())

    def close(self) -> None:
        """Closes the memory."""
        self.segment.close()
        del self._header, self._entries


def _overhead(samples: int) -> int:
    size = _HEADER + samples * _ENTRY * 8
    return -(-size // _ALIGNMENT) * _ALIGNMENT


#: What a cache keeps: the files' bytes, the whole images' pixels, nothing.
CacheKind = Literal['memory', 'decoded'] | None


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
            if self.transform is None:
                pixels = (self._kept_pixels(index) if self.kind == 'decoded'
                          else self._decode_whole(self._file(index)))
                return numpy.ascontiguousarray(pixels.transpose(2, 0, 1))
            return self.transform.finish(self._part(index, rng), out)
        except ImageError as error:
            # A decoder does not know the path.
            raise ImageError(self.table.path(index), error.reason) from error

    def _part(self, index: int, rng: numpy.random.Generator
              ) -> numpy.ndarray:
        """The part of an image that the transform wants, resized."""
        assert self.transform is not None
        if self.kind == 'decoded':
            pixels = self._kept_pixels(index)
            height, width, _ = pixels.shape
            return crop_and_resize(pixels, self.transform.plan(
                width, height, rng))
        data = self._file(index)
        return self.decoder.decode(data, self.transform.plan(
            *self.decoder.size(data), rng))

    def _kept_pixels(self, index: int) -> numpy.ndarray:
        """The whole image, from the cache or decoded and kept there.

        Also if the image does not fit: a part that is decoded alone can
        have other pixels, and what fits depends on chance.
        """
        assert self.cache is not None
        pixels = self.cache.get(index)
        if pixels is None:
            pixels = self._decode_whole(self.file(index))
            self.cache.put(index, pixels)
        return pixels

    def _file(self, index: int) -> bytes:
        """A sample's file, from the cache or read and kept there."""
        if self.cache is None:
            return self.file(index)
        kept = self.cache.get(index)
        if kept is not None:
            return kept.tobytes()
        data = self.file(index)
        self.cache.put(index, numpy.frombuffer(data, numpy.uint8))
        return data

    def _decode_whole(self, data: bytes) -> numpy.ndarray:
        width, height = self.decoder.size(data)
        return self.decoder.decode(
            data, Crop((0, 0, width, height), (height, width)))

    def file(self, index: int) -> bytes:
        """The bytes of a file."""
        with open(self.table.path(index), 'rb') as file:
            return file.read()


def kept_bytes(reader: Reader, index: int) -> int:
    """Bytes that a sample takes in a cache; 0 if it cannot be kept."""
    data = reader.file(index)
    if reader.kind == 'memory':
        return len(data)
    try:
        width, height = reader.decoder.size(data)
    except ImageError:
        return 0
    return 3 * width * height

"""Reads one sample, from its file or the cache, and transforms it.

The random numbers of a sample depend on the seed, the epoch and the sample
alone, not on the process that reads it or on the time.
"""
from __future__ import annotations

from typing import Literal

import numpy

from .bad_image import ImageError
from .cache import Cache
from .decoding.decode import Decoder
from .decoding.resizing import crop_and_resize
from .file_list import FileTable
from .jpeg.jpeg_index import JpegIndex
from .transforms import Crop, Transform

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
        # A user's own decoder may know no indices.
        self._can_index = hasattr(decoder, 'decode_indexed')
        # A file that is read once, or as a whole, needs no index.
        self._indexes = (self._can_index and kind == 'memory'
                         and transform is not None)

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
                          else self._decode_whole(bytes(self._file(index)[0])))
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
        data, codes = self._file(index)
        if codes is not None and self._can_index:
            return self.decoder.decode_indexed(
                data, codes, self.transform.plan(*codes.size, rng))
        data = bytes(data)
        return self.decoder.decode(data, self.transform.plan(
            *self.decoder.size(data), rng))

    def _kept_pixels(self, index: int) -> numpy.ndarray:
        """The whole image, from the cache or decoded and kept there.

        Also if the image does not fit: a part that is decoded alone can
        have other pixels, and what fits depends on chance.
        """
        assert self.cache is not None
        pixels = self.cache.get_pixels(index)
        if pixels is None:
            pixels = self._decode_whole(self.file(index))
            self.cache.put_pixels(index, pixels)
        return pixels

    def _file(self, index: int
              ) -> tuple[bytes | memoryview, JpegIndex | None]:
        """A sample's file, and the index of its codes if there is one."""
        if self.cache is None:
            return self.file(index), None
        kept = self.cache.get(index)
        if kept is None:
            data = self.file(index)
            return data, self._keep(index, data)
        return kept.data, JpegIndex(kept.extra) if kept.extra else None

    def _keep(self, index: int, data: bytes) -> JpegIndex | None:
        """Keeps a file if it fits, with an index if that fits as well."""
        assert self.cache is not None
        codes = None
        if len(data) <= self.cache.room:    # else it would be made for once
            codes = self.codes(data)
        if codes is None or not self.cache.put(index, data, codes.data):
            self.cache.put(index, data)
        return codes

    def _decode_whole(self, data: bytes) -> numpy.ndarray:
        width, height = self.decoder.size(data)
        return self.decoder.decode(
            data, Crop((0, 0, width, height), (height, width)))

    def codes(self, data: bytes) -> JpegIndex | None:
        """An index of a file, if this reader makes use of one."""
        return self.decoder.index(data) if self._indexes else None

    def file(self, index: int) -> bytes:
        """The bytes of a file."""
        with open(self.table.path(index), 'rb') as file:
            return file.read()


def kept_bytes(reader: Reader, index: int) -> int:
    """Bytes that a sample takes in a cache; 0 if it cannot be kept."""
    data = reader.file(index)
    if reader.kind == 'memory':
        codes = reader.codes(data)
        return len(data) + (len(codes.data) if codes else 0)
    try:
        width, height = reader.decoder.size(data)
    except ImageError:
        return 0
    return 3 * width * height

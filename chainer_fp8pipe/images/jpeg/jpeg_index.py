"""An index of a JPEG's codes, with which a part of it becomes a JPEG.

A Huffman code of a JPEG can be found only by reading all codes before it,
and a block's mean (DC) is coded as the difference to the last block's.  An
index is made by reading all codes once.  It says where every 32nd column of
each row of units begins, and which means come before.  With it the codes of a
part are copied, bit by bit, behind a header of the part's size; only the
first means in each row are coded anew.  A decoder then reads the codes of the
part alone, and finds the same coefficients as in the whole file.

Baseline and extended sequential JPEGs (ITU-T T.81) of 8 bits are indexed,
grey or of three components, in one scan, without restart markers; that is,
all but progressive ones in practice.
"""
from __future__ import annotations

import struct
from typing import NamedTuple

from . import _jpeg

#: Pixels between two places that an index knows.  Per 12 bytes of index.
SPACING = 32

# The chroma upsampling looks at neighbours, so that pixels at the edges of a
# part are not those of the whole image.
_MARGIN = 2
# And it does not in images of less than three columns of chroma.
_LEAST_WIDTH = 5

Box = tuple[int, int, int, int]


class JpegPart(NamedTuple):
    """A part of an image.

    Attributes:
        data: A JPEG of it.
        width: In pixels.
        height: In pixels.
        box: Left, top, width and height of the requested box, in pixels of
            the part.
    """

    data: bytes | memoryview
    width: int
    height: int
    box: Box


class JpegIndex:
    """The positions of the codes of one JPEG.

    Args:
        data: :attr:`data` of an index of the same file, which is checked
            when the index is used.

    Attributes:
        data: The index, to be kept: 12 bytes for every 32 columns of a row of
            units (8 or 16 rows of pixels).
        size: Width and height of the image, in pixels.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.size: tuple[int, int] = struct.unpack_from('=HH', data)

    @classmethod
    def of(cls, file: bytes) -> JpegIndex | None:
        """The index of a JPEG; None if damaged or of a kind without one."""
        data = _jpeg.index(file, SPACING)
        return cls(data) if data else None

    def cut(self, file: bytes | memoryview, box: Box,
            shrink: int) -> JpegPart | None:
        """A JPEG of a part, and of as much around it as a decoder needs.

        Args:
            file: The file that this is the index of.
            box: Left, top, width and height, in pixels, inside the image.
            shrink: Factor by which the decoder will shrink: 1, 2, 4 or 8.

        Returns:
            The part; its left and upper edge are multiples of 8.  A decoder
            gives for ``box`` the very pixels that it gives for it in the
            whole image.  None if the index is not of this file.
        """
        left, top, width, height = box
        margin = _MARGIN * shrink
        found = _jpeg.cut(
            file, self.data,
            max(0, min(left - left % shrink - margin,
                       self.size[0] - _LEAST_WIDTH * shrink)),
            max(0, top - top % shrink - margin),
            min(self.size[0], left + width + shrink - 1 + margin),
            min(self.size[1], top + height + shrink - 1 + margin))
        if found is None:
            return None
        data, x, y, w, h = found
        return JpegPart(data, w, h, (left - x, top - y, width, height))

"""The size and kind of an image from the head of its file.

Nothing is decoded.  Faults of a file are found here if they can be, so that
they depend neither on the decoder nor on the part that is decoded.
"""
from __future__ import annotations

import struct
from typing import NamedTuple

from ..bad_image import ImageError

_PNG = b'\x89PNG\r\n\x1a\n'
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = b'\xff\xd9'
# C0 to CF start a frame, but for these three: tables and an extension.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}
#: Baseline, extended sequential and progressive, all with Huffman codes.
USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})


class Header(NamedTuple):
    """The head of a file; the last three numbers are 0 for PNG."""
    width: int              # pixels
    height: int
    kind: str               # 'JPEG' or 'PNG'
    frame: int = 0          # low byte of the frame's marker
    bits: int = 0           # of a sample
    components: int = 0     # of a pixel


def read_header(data: bytes, max_pixels: int) -> Header:
    """Reads the head of an image file.

    Raises:
        ImageError: The file is empty, neither JPEG nor PNG, has no image in
            it or one of more than ``max_pixels`` or, for JPEG, is cut short.
    """
    if not data:
        raise ImageError('', 'the file is empty')
    try:
        if data.startswith(b'\xff\xd8'):
            header = _of_jpeg(data)
        elif data.startswith(_PNG):
            width, height = struct.unpack_from('>II', data, 16)
            header = Header(width, height, 'PNG')
        else:
            raise ImageError('', 'is neither JPEG nor PNG: it starts with '
                             f'{data[:8]!r}')
    except (IndexError, struct.error):
        raise ImageError('', 'is cut short in its header') from None
    if not header.width or not header.height:
        raise ImageError('', f'has no pixels: its header says {header.width} '
                         f'x {header.height}')
    check_pixels(header.width, header.height, max_pixels)
    return header


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raises ImageError if an image has more pixels than are allowed.

    A small file can claim more than there is memory for.
    """
    if width * height > max_pixels:
        raise ImageError(
            '', f'is too large: {width} x {height} pixels, and '
            f'max_pixels={max_pixels:,} are allowed; make it smaller, or '
            'allow more in create_decoder')


def _of_jpeg(data: bytes) -> Header:
    """Walks from marker to marker up to the first scan."""
    header = None
    position = 2
    while True:
        # As decoders do: skips what is no marker, and the bytes that fill.
        position = data.find(b'\xff', position)
        if position < 0:
            raise IndexError
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1
        if marker == 0 or marker in _WITHOUT_LENGTH:
            continue
        if marker in _FRAMES:
            bits, height, width, components = struct.unpack_from(
                '>BHHB', data, position + 2)
            header = Header(width, height, 'JPEG', marker, bits, components)
        if marker in (_START_OF_SCAN, _END_OF_IMAGE[1]):
            break
        position += struct.unpack_from('>H', data, position)[0]
    if header is None or marker != _START_OF_SCAN:
        raise ImageError('', 'is a JPEG without an image')
    # No coded pixel contains this marker; a thumbnail in front of the scan
    # may.  A decoder that stops below the part that is wanted would not see.
    if data.rfind(_END_OF_IMAGE, position) < 0:
        raise ImageError('', 'is cut short: the end of the JPEG is missing')
    return header

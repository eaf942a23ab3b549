"""Texts that travel on a channel beside arrays: descriptions and failures.

A text is cut into frames, so that a receiver's buffer holds whatever comes.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator

FRAME = 1024        # bytes of the longest frame

# A filler says nothing; see :mod:`.channel`.
DESCRIPTION, FAILURE, FILLER = 1, 2, 3

_HEAD = struct.Struct('<BBH')       # kind, whether more follow, bytes of text
_ROOM = FRAME - _HEAD.size - 1      # one byte is kept for padding


def frames(kind: int, text: bytes, unlike: int) -> Iterator[bytes]:
    """Cuts a text of any length.

    No frame is ``unlike`` bytes long: a message of this length would be
    taken for arrays.  ``kind`` is one of the three above.
    """
    for start in range(0, max(len(text), 1), _ROOM):
        part = text[start:start + _ROOM]
        more = start + _ROOM < len(text)
        frame = _HEAD.pack(kind, more, len(part)) + part
        yield frame + b'\0' * (len(frame) == unlike)


class Assembly:
    """Puts frames together again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, frame: bytes) -> tuple[int, bytes] | None:
        """Kind and text if ``frame`` was the last of them, else None."""
        kind, more, length = _HEAD.unpack_from(frame)
        self._parts.append(frame[_HEAD.size:_HEAD.size + length])
        if more:
            return None
        text = b''.join(self._parts)
        self._parts.clear()
        return kind, text

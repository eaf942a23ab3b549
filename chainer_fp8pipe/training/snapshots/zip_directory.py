"""The directory of a zip file, believed only where all of it agrees.

Python's ``zipfile`` finds what it can in a file.  A snapshot is read more
narrowly: its members are stored, not compressed, they follow each other
without a gap from the first byte on, and the directory and each member's own
header say the same.  So every byte of the file belongs to one thing, no two
members share any, and no size is believed that the file has not got.

The format: PKWARE, APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64).
"""
from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_LOCAL = struct.Struct('<4s5H3I2H')
_CENTRAL = struct.Struct('<4s6H3I5H2I')
_END = struct.Struct('<4s4H2IH')
_LOCATOR = struct.Struct('<4sIQI')
_END_64 = struct.Struct('<4sQ2H2I4Q')
_IS_IN_EXTRA = 0xffffffff       # a size or offset that zip64's field has
_UTF8 = 0x800                   # flag: the name is UTF-8
_NEWEST = 45                    # version of the format: zip64


class DamagedSnapshot(ValueError):
    """A file that is no whole snapshot, in words."""


class Member(NamedTuple):
    """A member of the file."""

    name: str       # without .npy
    start: int      # of its data in the file
    size: int       # of its data, in bytes
    crc: int        # CRC-32 of its data


class _Central(NamedTuple):
    """What the directory says of a member."""

    name: bytes
    flags: int
    crc: int
    size: int
    offset: int


def read_directory(file: BinaryIO) -> list[Member]:
    """All members of a zip file, in their order in the file.

    Raises:
        DamagedSnapshot: The file is not a zip file, or not one as snapshots
            are.
    """
    start, size, count = _ends(file)
    # The directory is in the file, which bounds what is read here.
    entries = list(_entries(_bytes_at(file, start, size), count))
    members, position = [], 0
    for entry in entries:
        if entry.offset != position:
            raise DamagedSnapshot('its members do not follow each other')
        member = _member(file, entry)
        position = member.start + member.size
        members.append(member)
    if position != start:
        raise DamagedSnapshot('its directory does not follow its members')
    if len({member.name for member in members}) < count:
        raise DamagedSnapshot('two of its members have the same name')
    return members


def _ends(file: BinaryIO) -> tuple[int, int, int]:
    """Start and size of the directory, and the number of its entries."""
    length = file.seek(0, os.SEEK_END)
    place = length - _END.size
    if place < 0:
        raise DamagedSnapshot('it is too short, its end is missing')
    signature, disk, first, here, count, size, start, comment = _END.unpack(
        _bytes_at(file, place, _END.size))
    if signature != b'PK\5\6' or comment:
        raise DamagedSnapshot('its end is missing')
    before = place - _LOCATOR.size - _END_64.size
    if before >= 0 and _bytes_at(
            file, place - _LOCATOR.size, 4) == b'PK\6\7':
        found = start, size, count
        place, (start, size, count) = before, _ends_64(file, before)
        for small, large in zip(found, (start, size, count), strict=True):
            if small not in (large, min(large, _IS_IN_EXTRA),
                             min(large, 0xffff)):
                raise DamagedSnapshot('its two ends do not agree')
    elif here != count:
        raise DamagedSnapshot('its end does not agree with itself')
    if disk or first or start + size != place or (
            count * _CENTRAL.size > size):
        raise DamagedSnapshot('its end does not agree with its length')
    return start, size, count


def _ends_64(file: BinaryIO, place: int) -> tuple[int, int, int]:
    signature, disk, where, disks = _LOCATOR.unpack(
        _bytes_at(file, place + _END_64.size, _LOCATOR.size))
    (mark, rest, _, version, this, first, here, count, size,
     start) = _END_64.unpack(_bytes_at(file, place, _END_64.size))
    if (disk or where != place or disks != 1 or mark != b'PK\6\6'
            or rest != _END_64.size - 12 or version != _NEWEST or this
            or first or here != count):
        raise DamagedSnapshot('its zip64 end does not agree with itself')
    return start, size, count


def _entries(directory: bytes, count: int) -> Iterator[_Central]:
    """The entries of the directory, which they must fill."""
    place = 0
    for _ in range(count):
        if place + _CENTRAL.size > len(directory):
            raise DamagedSnapshot('its directory is cut off')
        (signature, _, version, flags, method, _, _, crc, packed, size, name,
         extra, comment, disk, _, _, offset) = _CENTRAL.unpack_from(
            directory, place)
        place += _CENTRAL.size
        if signature != b'PK\1\2' or comment or disk:
            raise DamagedSnapshot('an entry of its directory is none')
        _check_kind(version, flags, method)
        texts = directory[place:place + name + extra]
        place += name + extra
        if len(texts) != name + extra:
            raise DamagedSnapshot('its directory is cut off')
        size, packed, offset = _widened(
            texts[name:], [size, packed, offset])
        if packed != size:
            raise DamagedSnapshot('a member has two sizes')
        yield _Central(texts[:name], flags, crc, size, offset)
    if place != len(directory):
        raise DamagedSnapshot('its directory has more than its entries')


def _member(file: BinaryIO, entry: _Central) -> Member:
    """A member, whose own header must say what the directory says."""
    (signature, version, flags, method, _, _, crc, packed, size, name,
     extra) = _LOCAL.unpack(_bytes_at(file, entry.offset, _LOCAL.size))
    if signature != b'PK\3\4':
        raise DamagedSnapshot('a member is not where the directory says')
    _check_kind(version, flags, method)
    texts = _bytes_at(file, entry.offset + _LOCAL.size, name + extra)
    size, packed = _widened(texts[name:], [size, packed])
    if (texts[:name], flags, crc, size, packed) != (
            entry.name, entry.flags, entry.crc, entry.size, entry.size):
        raise DamagedSnapshot(
            f'{_text(entry)} is another thing in its directory')
    return Member(_text(entry).removesuffix('.npy'),
                  entry.offset + _LOCAL.size + name + extra, size, crc)


def _check_kind(version: int, flags: int, method: int) -> None:
    if method or flags & ~_UTF8 or version > _NEWEST:
        raise DamagedSnapshot(
            'a member is compressed or encrypted, which a snapshot never is')


def _widened(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers of 32 bits, of which zip64's field has the larger ones."""
    places = [place for place, number in enumerate(numbers)
              if number == _IS_IN_EXTRA]
    if not places and not extra:
        return numbers
    form = struct.Struct(f'<2H{len(places)}Q')
    if len(extra) != form.size:
        raise DamagedSnapshot('a member has a field that no snapshot has')
    kind, length, *values = form.unpack(extra)
    if kind != 1 or length != form.size - 4:
        raise DamagedSnapshot('a member has a field that no snapshot has')
    numbers = list(numbers)
    for place, value in zip(places, values, strict=True):
        numbers[place] = value
    return numbers


def _text(entry: _Central) -> str:
    try:
        text = entry.name.decode('utf-8' if entry.flags & _UTF8 else 'ascii')
    except UnicodeDecodeError:
        text = ''
    if not text.endswith('.npy'):
        raise DamagedSnapshot('a member is not named as an array is')
    return text


def _bytes_at(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    found = file.read(size)
    if len(found) != size:
        raise DamagedSnapshot('it is cut off')
    return found

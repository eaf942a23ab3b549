"""The file of a snapshot.

An ordinary ``.npz``: ``all/KEY`` is a value as the first rank that has it has
it, ``rank3/KEY`` the same where rank 3 differs, ``meta/KEY`` about the job.
``meta/has`` says which rank had which key: element (r, k) for rank r and the
k-th ``all/`` of the file.  A value that is no array of numbers or texts is
JSON, below ``json/all/KEY`` or ``json/rank3/KEY``.

``meta/format`` comes first.  ``meta/digests`` has a digest of each member
before it, as the ranks had the values; ``meta/complete``, the last, a digest
of those and of the names: the mark that nothing is missing.  Older versions
wrote no such members, and pickled what is JSON now; only zip's CRC tells
whether their files are whole.

Keys of a model name its layers as the whole model does, so each layer of a
pipeline is in the file once, and Chainer's ``load_npz`` finds a model below
``all/trainer/updater/model:main/`` however it was cut.
"""
from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import os
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from typing import NamedTuple

import numpy

from . import pickled_values
from .array_header import LONGEST, ArrayHeader, header_of, parse_header
from .zip_directory import DamagedSnapshot, Member, read_directory

#: What precedes the name of a value that is JSON.
JSON = 'json/'
_ALL = 'all/'
_FORMAT = 2
_FIRST, _LAST = 'meta/format', ('meta/digests', 'meta/complete')
_NEEDED = {'meta/has', 'meta/communicator'}
_VALUE = re.compile(r'(json/)?(all|rank(?:0|[1-9]\d{0,8}))/(.*)', re.DOTALL)
_DIGEST = 16                # bytes
_PIECE = 1 << 20            # bytes that are read or written at once
_UNFINISHED = 'snapshot.partial'

_LOCK = threading.Lock()
_IN_USE: set[str] = set()   # temporary names


class SnapshotIndex(NamedTuple):
    """The keys of a snapshot."""

    path: str                   # of the file
    communicator: str           # the names of the job's communicators
    keys: list[str]             # of all ranks
    has: numpy.ndarray          # bool (ranks, keys): which rank had which
    digests: dict[str, bytes]   # of members, by name; empty in old files

    @property
    def ranks(self) -> int:
        """How many ranks the job had."""
        return len(self.has)

    def of_rank(self, rank: int) -> list[str]:
        """The keys that a rank had, in the order of the file."""
        return [key for key, has in zip(self.keys, self.has[rank],
                                        strict=True) if has]

    def member_of(self, key: str, rank: int | None = None) -> str:
        """The name of the first rank's value, or of a rank's own."""
        name = (_ALL if rank is None else f'rank{rank}/') + key
        return JSON + name if JSON + name in self.digests else name


class Content:
    """An open snapshot; one value at a time is in memory."""

    def __init__(self, path: str, file: BufferedReader) -> None:
        self._file = file
        self._members = {member.name: member
                         for member in read_directory(file)}
        names = list(self._members)
        if not set(names) >= _NEEDED:
            raise ValueError('it was not written by the Snapshot extension '
                             'of this version of chainer_fp8pipe')
        digests = self._digests(names)
        self.index = SnapshotIndex(path, *self._keys(names), digests)

    def has_own(self, rank: int, key: str) -> bool:
        """Whether a rank's value differs from the first rank's."""
        return self.index.member_of(key, rank) in self._members

    def check(self) -> None:
        """Reads all of the file and compares it with its digests.

        Raises:
            DamagedSnapshot: The file is not whole.
        """
        for name, member in self._members.items():
            header, crc = self._header(member)
            state = _started(header.dtype, header.shape)
            for piece in self._pieces(member, header.size):
                crc = zlib.crc32(piece, crc)
                state.update(piece)
            _compare_crc(member, crc)
            if self.index.digests.get(name, state.digest()) != (
                    state.digest()):
                raise DamagedSnapshot(f'{name} has another digest')
            if header.dtype.hasobject:
                self._read(name)

    def read(self, key: str, rank: int | None = None) -> numpy.ndarray:
        """The first rank's value, or a rank's own; JSON as its text.

        Raises:
            ValueError: The file is damaged.
        """
        with explained(self.index.path):
            return self._read(self.index.member_of(key, rank))

    def _read(self, name: str) -> numpy.ndarray:
        member = self._members[name]
        header, crc = self._header(member)
        if header.dtype.hasobject:
            program = b''.join(map(bytes, self._pieces(member, header.size)))
            _compare_crc(member, zlib.crc32(program, crc))
            return pickled_values.unpickled(program)
        # Its size was compared with the file's.
        value = numpy.empty(
            header.shape, header.dtype,
            order='F' if header.by_columns else 'C')
        if value.nbytes != header.data:     # '<U0', which NumPy makes '<U1'
            value[...] = ''
        data = value.reshape(-1, order='A').view(numpy.uint8).data
        self._file.seek(member.start + header.size)
        place = 0
        while place < header.data:
            count = self._file.readinto(data[place:place + _PIECE])
            if not count:
                raise DamagedSnapshot(f'{name} is cut off')
            crc = zlib.crc32(data[place:place + count], crc)
            place += count
        _compare_crc(member, crc)
        return value

    def _header(self, member: Member) -> tuple[ArrayHeader, int]:
        """The header, and its CRC."""
        self._file.seek(member.start)
        head = self._file.read(min(LONGEST, member.size))
        header = parse_header(head)
        if header.dtype.hasobject:
            if self._is_new() or not member.name.startswith(('all/', 'rank')):
                raise DamagedSnapshot(f'{member.name} is a pickle')
            if member.size > pickled_values.LARGEST:
                raise DamagedSnapshot(f'{member.name} is too large a pickle')
        elif header.size + header.data != member.size:
            raise DamagedSnapshot(
                f'{member.name} has the shape {header.shape} of '
                f'{header.dtype}, but not its size')
        elif header.by_columns and self._is_new():
            raise DamagedSnapshot(f'{member.name} is in another order')
        return header, zlib.crc32(head[:header.size])

    def _pieces(self, member: Member, start: int) -> Iterator[memoryview]:
        self._file.seek(member.start + start)
        piece = memoryview(bytearray(min(_PIECE, member.size)))
        left = member.size - start
        while left:
            count = self._file.readinto(piece[:left])
            if not count:
                raise DamagedSnapshot(f'{member.name} is cut off')
            yield piece[:count]
            left -= count

    def _is_new(self) -> bool:
        return next(iter(self._members)) == _FIRST

    def _digests(self, names: list[str]) -> dict[str, bytes]:
        """The digests of a new file, whose mark must be there."""
        if not self._is_new():
            if {_FIRST, *_LAST} & set(names):
                raise DamagedSnapshot('its first member is missing')
            return {}
        found = self._read(_FIRST)
        if found.shape or found.dtype.kind != 'i' or found != _FORMAT:
            raise NewerSnapshot('it was written by another version of '
                                'chainer_fp8pipe, which has another format')
        if tuple(names[-2:]) != _LAST:
            raise DamagedSnapshot('the mark that it is complete is missing')
        table, mark = map(self._read, _LAST)
        if table.dtype != numpy.uint8 or table.shape != (
                len(names) - 2, _DIGEST):
            raise DamagedSnapshot('its digests are not one for each member')
        digests = [row.tobytes() for row in table]
        if mark.tobytes() != _mark(names[:-2], digests):
            raise DamagedSnapshot('its mark that it is complete is wrong')
        return dict(zip(names, digests, strict=False))

    def _keys(self, names: list[str]
              ) -> tuple[str, list[str], numpy.ndarray]:
        """Names of communicators, keys, and which rank had which."""
        communicator, has = map(self._read, ('meta/communicator', 'meta/has'))
        keys: list[str] = []
        own: list[tuple[int, str]] = []
        for name in set(names) - _NEEDED - {_FIRST, *_LAST}:
            if not _VALUE.fullmatch(name):
                raise DamagedSnapshot(f'{name} is no name of a value')
        for name in names:
            if (match := _VALUE.fullmatch(name)) is None:
                continue
            if match[2] == 'all':
                keys.append(match[3])
            else:
                own.append((int(match[2][4:]), match[3]))
        known = {key: number for number, key in enumerate(keys)}
        if (communicator.shape or communicator.dtype.kind != 'U'
                or has.dtype != bool or has.ndim != 2 or not len(has)
                or has.shape[1] != len(keys) or len(known) != len(keys)
                or len(set(own)) != len(own)
                or not all(key in known and rank < len(has)
                           and has[rank, known[key]] for rank, key in own)
                or not has.any(0).all()):
            raise DamagedSnapshot('its names do not agree with meta/has')
        return str(communicator), keys, has


class NewerSnapshot(ValueError):
    """A file that is whole, but that this version cannot read."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[Content]:
    """Opens a snapshot.

    Raises:
        DamagedSnapshot: The file is damaged, or no snapshot.
        ValueError: It is another kind of file, or of a newer version.
    """
    with contextlib.ExitStack() as stack:
        with explained(path):
            content = Content(path, stack.enter_context(open(path, 'rb')))
        yield content


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Names the file in the error about it, and what to do."""
    try:
        yield
    except DamagedSnapshot as error:
        raise DamagedSnapshot(
            f'{path} is damaged or no snapshot ({error}); resume from an '
            'older one, or from the directory, of which the newest whole one '
            'is taken') from error
    except ValueError as error:
        raise type(error)(f'{path} cannot be gone on from: {error}') from (
            error)


def write(path: str, members: Iterable[tuple[str, numpy.ndarray, bytes]],
          check: Callable[[], None] = lambda: None) -> None:
    """Writes a file; what was at ``path`` before is replaced at the very end.

    When this returns, file and name are on the disk.

    Args:
        path: Of the file.
        members: Names, values and digests, written as they come.
        check: Called before each megabyte; what it raises ends the writing,
            and nothing is left of it.
    """
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    with _temporary_name(directory) as temporary:
        try:
            with open(temporary, 'wb') as file:
                with zipfile.ZipFile(file, 'w') as archive:
                    for name, value in marked(members):
                        _write_member(archive, name, value, check)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    _sync_directory(directory)


@contextlib.contextmanager
def _temporary_name(directory: str) -> Iterator[str]:
    """The same each time, so that a killed run leaves no more than one.

    Another one while a thread of this process writes to that.
    """
    first = os.path.join(os.path.realpath(directory), _UNFINISHED)
    with _LOCK:
        name = next(name for name in itertools.chain(
            [first], (f'{first}.{number}' for number in itertools.count(1)))
            if name not in _IN_USE)
        _IN_USE.add(name)
    try:
        yield name
    finally:
        with _LOCK:
            _IN_USE.discard(name)


def remove_unfinished(directory: str) -> None:
    """Removes what killed runs have left of snapshots in a directory."""
    pattern = os.path.join(glob.escape(os.path.realpath(directory)),
                           f'{_UNFINISHED}*')
    with _LOCK:
        for name in set(glob.glob(pattern)) - _IN_USE:
            with contextlib.suppress(OSError):
                os.remove(name)


def marked(members: Iterable[tuple[str, numpy.ndarray, bytes]]
           ) -> Iterator[tuple[str, numpy.ndarray]]:
    """All members of a file: those given, format, digests and mark."""
    first = numpy.array(_FORMAT)
    names, digests = [_FIRST], [digest(first)]
    yield _FIRST, first
    for name, value, found in members:
        names.append(name)
        digests.append(found)
        yield name, value
    yield _LAST[0], numpy.frombuffer(
        b''.join(digests), numpy.uint8).reshape(-1, _DIGEST)
    yield _LAST[1], numpy.frombuffer(_mark(names, digests), numpy.uint8)


def digest(value: numpy.ndarray) -> bytes:
    """A digest of an array of numbers or texts, its dtype and its shape."""
    found = _started(value.dtype, value.shape)
    found.update(_bytes_of(value))
    return found.digest()


def plan(tables: Sequence[dict[str, bytes]]
         ) -> tuple[list[list[tuple[str, str]]], numpy.ndarray]:
    """Decides which rank sends which values, by the digests of all ranks.

    Returns, for each rank, the prefixes and keys that come from it, and the
    array ``meta/has``.
    """
    first: dict[str, bytes] = {}
    parts: list[list[tuple[str, str]]] = []
    for rank, table in enumerate(tables):
        parts.append([
            (f'rank{rank}/' if key in first else _ALL, key)
            for key, value in table.items() if first.get(key) != value])
        first = {**table, **first}
    order = [key for part in parts for prefix, key in part if prefix == _ALL]
    has = [[key in table for key in order] for table in tables]
    return parts, numpy.array(has, bool).reshape(len(tables), len(order))


def _write_member(archive: zipfile.ZipFile, name: str, value: numpy.ndarray,
                  check: Callable[[], None]) -> None:
    with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        member.write(header_of(value))
        data = _bytes_of(value)
        # In pieces, between which other threads go on.
        for start in range(0, len(data), _PIECE):
            check()
            member.write(data[start:start + _PIECE])


def _sync_directory(directory: str) -> None:
    """Makes a file's new name last; not every system can."""
    with contextlib.suppress(OSError):
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _compare_crc(member: Member, crc: int) -> None:
    if crc != member.crc:
        raise DamagedSnapshot(f'{member.name} has another CRC')


def _started(dtype: numpy.dtype, shape: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(f'{dtype.str} {shape}'.encode(),
                           digest_size=_DIGEST)


def _bytes_of(value: numpy.ndarray) -> memoryview:
    return numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data


def _mark(names: Sequence[str], digests: Sequence[bytes]) -> bytes:
    found = hashlib.blake2b(repr(list(names)).encode(), digest_size=_DIGEST)
    found.update(b''.join(digests))
    return found.digest()

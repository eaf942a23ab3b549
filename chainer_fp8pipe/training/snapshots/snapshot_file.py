"""The file of a snapshot.

An ordinary ``.npz``: ``all/KEY.npy`` is a value as the first rank that has it
has it, ``rank3/KEY.npy`` the same where rank 3 differs.  A value that is no
array of numbers or texts is JSON, and its name ends in ``.json``.  The last
member, ``meta/manifest.json``, lists the others: where in the file their data
are, dtype, shape, a digest of these and the data, and which ranks had them.
zip's comment, the last bytes of the file, says where the manifest is, and has
a digest of all bytes that are no value's.  So each byte is covered by one
digest, and a file without its end is none.

The package's own reader needs neither zip's directory nor NumPy's headers: it
believes the manifest, whose numbers it compares with the length of the file
before it takes memory for a value.

Keys of a model name its layers as the whole model does, so each layer of a
pipeline is in the file once, and Chainer's ``load_npz`` finds a model below
``all/trainer/updater/model:main/`` however it was cut.
"""
from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy

from .json_values import is_plain

_ALL = 'all/'
_FORMAT = 3
_MANIFEST = 'meta/manifest.json'
_NAME = re.compile(r'(all|rank(?:0|[1-9]\d{0,8}))/(.*)', re.DOTALL)
_DIGEST = 16                # bytes
# What the file ends with: a mark, start and size of the manifest, a digest.
_END = struct.Struct(f'<8s2Q{_DIGEST}s')
_MARK = b'snapshot'
_PIECE = 1 << 20            # bytes that are read or written at once
_UNFINISHED = 'snapshot.partial'

_LOCK = threading.Lock()
_IN_USE: set[str] = set()   # temporary names


class DamagedSnapshot(ValueError):
    """A file that is no whole snapshot, in words."""


class SavedValue(NamedTuple):
    """A value as the file has it."""

    array: numpy.ndarray    # of numbers or texts, or the bytes of JSON
    is_json: bool = False


class ValueEntry(NamedTuple):
    """What is known of a value without it."""

    dtype: str              # NumPy's; 'json'
    shape: tuple[int, ...]
    digest: bytes

    @property
    def is_json(self) -> bool:
        """Whether the value is JSON, of which ``shape`` has the length."""
        return self.dtype == 'json'

    @property
    def array_dtype(self) -> numpy.dtype:
        """Of the array that holds it."""
        return numpy.dtype('u1' if self.is_json else self.dtype)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.array_dtype.itemsize * math.prod(self.shape)

    def empty(self) -> numpy.ndarray:
        """An array that can hold it."""
        return numpy.empty(self.shape, self.array_dtype)


def entry_of(value: SavedValue) -> ValueEntry:
    """Computes the digest of a value, its dtype and its shape."""
    array = value.array
    dtype = 'json' if value.is_json else array.dtype.str
    found = _started(dtype, array.shape)
    found.update(bytes_of(array))
    return ValueEntry(dtype, array.shape, found.digest())


class SnapshotIndex(NamedTuple):
    """The keys of a snapshot."""

    path: str                   # of the file
    communicator: str           # the names of the job's communicators
    ranks: int                  # that the job had
    #: Which ranks had a key, for the keys of all; None: all ranks.
    owners: dict[str, list[int] | None]
    #: By names of members, without their endings.
    entries: dict[str, ValueEntry]

    @property
    def keys(self) -> list[str]:
        """Of all ranks."""
        return list(self.owners)

    def of_rank(self, rank: int) -> list[str]:
        """The keys that a rank had, in the order of the file."""
        return [key for key, ranks in self.owners.items()
                if ranks is None or rank in ranks]

    def has_own(self, rank: int, key: str) -> bool:
        """Whether a rank's value differs from the first rank's."""
        return f'rank{rank}/{key}' in self.entries

    def is_same_everywhere(self, key: str) -> bool:
        """Whether all ranks that had a value had the same."""
        return not any(self.has_own(rank, key)
                       for rank in self.owners[key] or range(self.ranks))


class Content:
    """An open snapshot; one value at a time is in memory.

    Raises:
        DamagedSnapshot: The file is damaged, or no snapshot of this version.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._file = file
        length = file.seek(0, os.SEEK_END)
        if length < _END.size:
            raise DamagedSnapshot('its end is missing')
        mark, start, size, digest = _END.unpack(
            self._bytes_at(length - _END.size, _END.size))
        if mark != _MARK:
            raise DamagedSnapshot(
                'its end is missing, or it was not written by the Snapshot '
                'extension of this version of chainer_fp8pipe')
        if start + size > length:
            raise DamagedSnapshot('its manifest is not in it')
        try:
            self.index, self._starts = _parsed(
                path, json.loads(self._bytes_at(start, size)), start)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError,
                SyntaxError, OverflowError, RecursionError) as error:
            raise DamagedSnapshot(f'its manifest is wrong: {error}') from None
        if self._structure(length) != digest:
            raise DamagedSnapshot('what is around its values has another '
                                  'digest')

    def check(self) -> None:
        """Reads all values and compares them with their digests.

        Raises:
            DamagedSnapshot: The file is not whole.
        """
        with explained(self.index.path):
            for name, entry in self.index.entries.items():
                found = _started(entry.dtype, entry.shape)
                for piece in self._pieces(self._starts[name], entry.size):
                    found.update(piece)
                if found.digest() != entry.digest:
                    raise DamagedSnapshot(f'{name} has another digest')

    def read(self, key: str, rank: int | None = None) -> numpy.ndarray:
        """The first rank's value, or a rank's own; JSON as its bytes.

        Raises:
            DamagedSnapshot: The file is damaged.
        """
        name = (_ALL if rank is None else f'rank{rank}/') + key
        with explained(self.index.path):
            entry = self.index.entries[name]
            array, place = entry.empty(), 0
            data = bytes_of(array)
            for piece in self._pieces(self._starts[name], entry.size):
                data[place:place + len(piece)] = piece
                place += len(piece)
            if entry_of(SavedValue(array, entry.is_json)) != entry:
                raise DamagedSnapshot(f'{name} has another digest')
            return array

    def _structure(self, length: int) -> bytes:
        """A digest of the bytes that are no value's, but the last ones."""
        return _structure_digest(
            [(self._starts[name], entry.size)
             for name, entry in self.index.entries.items()],
            length, self._pieces)

    def _pieces(self, start: int, size: int) -> Iterator[bytes]:
        self._file.seek(start)
        while size:
            piece = self._file.read(min(size, _PIECE))
            if not piece:
                raise DamagedSnapshot('it is cut off')
            yield piece
            size -= len(piece)

    def _bytes_at(self, start: int, size: int) -> bytes:
        return b''.join(self._pieces(start, size))


def _parsed(path: str, manifest: Any, end: int
            ) -> tuple[SnapshotIndex, dict[str, int]]:
    """The index of a file, and where each member's data start.

    ``end`` is where the manifest starts: values are before it.
    """
    if manifest['format'] != _FORMAT:
        raise ValueError(
            f'it has format {manifest["format"]}, and this version of '
            f'chainer_fp8pipe reads format {_FORMAT}')
    ranks, position = manifest['ranks'], 0
    entries: dict[str, ValueEntry] = {}
    starts: dict[str, int] = {}
    owners: dict[str, list[int] | None] = {}
    own: list[tuple[int, str]] = []
    for name, start, dtype, shape, digest, had in manifest['members']:
        entry = ValueEntry(str(dtype), tuple(shape), bytes.fromhex(digest))
        _check_entry(name, entry)
        # No two members share a byte, and no size is believed that the file
        # has not got.
        if name in entries or start < position or start + entry.size > end:
            raise ValueError(f'{name} is not where it says')
        entries[name], starts[name] = entry, start
        position = start + entry.size
        prefix, key = _NAME.fullmatch(name).groups()    # type: ignore
        if prefix == 'all':
            owners[key] = None if had is None else list(had)
        else:
            own.append((int(prefix[4:]), key))
    for rank, key in own:
        had = owners[key]
        if rank >= ranks or had is not None and rank not in had:
            raise ValueError(f'rank {rank} has a {key} that it has not')
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f'there are {ranks} ranks')
    return SnapshotIndex(path, str(manifest['communicator']), ranks, owners,
                         entries), starts


def _check_entry(name: str, entry: ValueEntry) -> None:
    dtype, shape = entry.array_dtype, entry.shape
    if (not is_plain(dtype) or dtype.itemsize == 0
            or not (entry.is_json or dtype.str == entry.dtype)
            or not all(type(size) is int and size >= 0 for size in shape)
            or entry.is_json and len(shape) != 1):
        raise ValueError(f'{name} has a dtype or shape that no value has')


@contextlib.contextmanager
def opened(path: str) -> Iterator[Content]:
    """Opens a snapshot.

    Raises:
        DamagedSnapshot: The file is damaged, or no snapshot of this version.
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


class Member(NamedTuple):
    """A value that is to be written."""

    name: str
    value: SavedValue
    entry: ValueEntry
    #: Which ranks had it; None: all, or it is a rank's own.
    ranks: list[int] | None = None


def write(path: str, members: Iterable[Member], communicator: str, ranks: int,
          check: Callable[[], None] = lambda: None) -> None:
    """Writes a file; what was at ``path`` before is replaced at the very end.

    When this returns, file and name are on the disk.

    Args:
        path: Of the file.
        members: Written as they come.
        communicator: The names of the job's communicators.
        ranks: How many the job has.
        check: Called before each megabyte; what it raises ends the writing,
            and nothing is left of it.
    """
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    with _temporary_name(directory) as temporary:
        try:
            with open(temporary, 'w+b') as file:
                _write_archive(file, members, {
                    'format': _FORMAT, 'communicator': communicator,
                    'ranks': ranks}, check)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    _sync_directory(directory)


def _write_archive(file: BinaryIO, members: Iterable[Member],
                   manifest: dict[str, Any], check: Callable[[], None]
                   ) -> None:
    table: list[Any] = []
    data: list[tuple[int, int]] = []
    with zipfile.ZipFile(file, 'w') as archive:
        for name, value, entry, ranks in members:
            start = _write_member(archive, name, value, check)
            data.append((start, entry.size))
            table.append((name, start, entry.dtype, entry.shape,
                          entry.digest.hex(), ranks))
        text = json.dumps({**manifest, 'members': table},
                          separators=(',', ':')).encode('ascii')
        start = _write_bytes(archive, _MANIFEST, b'', text, check)
        archive.comment = _END.pack(_MARK, start, len(text), bytes(_DIGEST))
    length = file.seek(0, os.SEEK_END)

    def pieces(start: int, size: int) -> Iterator[bytes]:
        file.seek(start)
        yield file.read(size)
    digest = _structure_digest(data, length, pieces)
    file.seek(length - _DIGEST)
    file.write(digest)


def _write_member(archive: zipfile.ZipFile, name: str, value: SavedValue,
                  check: Callable[[], None]) -> int:
    """Writes a value; returns where its data start in the file."""
    if value.is_json:
        return _write_bytes(archive, f'{name}.json', b'',
                            bytes_of(value.array), check)
    return _write_bytes(archive, f'{name}.npy', _header(value.array),
                        bytes_of(value.array), check)


def _write_bytes(archive: zipfile.ZipFile, name: str, header: bytes,
                 data: Any, check: Callable[[], None]) -> int:
    with archive.open(name, 'w', force_zip64=True) as member:
        member.write(header)
        start = archive.fp.tell()                       # type: ignore
        # In pieces, between which other threads go on.
        for place in range(0, len(data), _PIECE):
            check()
            member.write(data[place:place + _PIECE])
    return start


def _header(value: numpy.ndarray) -> bytes:
    """NumPy's header of an array in C order (NEP 1, version 1.0).

    The array's bytes start at a multiple of 64 from the header's start.
    """
    text = (f"{{'descr': {value.dtype.str!r}, 'fortran_order': False, "
            f"'shape': {value.shape!r}, }}").encode()
    text += b' ' * (-(10 + len(text) + 1) % 64) + b'\n'
    return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text


def _structure_digest(data: Iterable[tuple[int, int]], length: int,
                      pieces: Callable[[int, int], Iterator[bytes]]) -> bytes:
    """A digest of all bytes but those of the data, and the digest's own.

    Args:
        data: Where they start, and their sizes, in the order of the file.
        length: Of the file.
        pieces: Gives the bytes from a start on.
    """
    found, position = hashlib.blake2b(digest_size=_DIGEST), 0
    for start, size in (*data, (length - _DIGEST, 0)):
        for piece in pieces(position, start - position):
            found.update(piece)
        position = start + size
    return found.digest()


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


def plan(tables: Sequence[dict[str, ValueEntry]]
         ) -> list[list[tuple[str, str, list[int] | None]]]:
    """Decides which rank sends which values, by the entries of all ranks.

    Returns, for each rank, the prefixes and keys that come from it, and which
    ranks have the key; None: all, or the value is the rank's own.
    """
    owners: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for key in table:
            owners.setdefault(key, []).append(rank)
    parts: list[list[tuple[str, str, list[int] | None]]] = []
    for rank, table in enumerate(tables):
        part: list[tuple[str, str, list[int] | None]] = []
        for key, entry in table.items():
            first = owners[key][0]
            if first == rank:
                part.append((_ALL, key, None if len(owners[key]) == len(
                    tables) else owners[key]))
            elif tables[first][key] != entry:
                part.append((f'rank{rank}/', key, None))
        parts.append(part)
    return parts


def _sync_directory(directory: str) -> None:
    """Makes a file's new name last; not every system can."""
    with contextlib.suppress(OSError):
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _started(dtype: str, shape: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(f'{dtype} {shape}'.encode(), digest_size=_DIGEST)


def bytes_of(value: numpy.ndarray) -> memoryview:
    """The bytes of an array in C order, in its memory if it has that."""
    return numpy.asarray(value, order='C').reshape(-1).view(numpy.uint8).data

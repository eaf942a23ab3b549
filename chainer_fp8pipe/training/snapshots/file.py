"""The file of a snapshot: an ``.npz`` with a manifest, whole or refused."""
# A zip archive that NumPy opens as any other.  ``all/KEY.npy`` is a value as
# the first rank that has it has it, ``rank3/KEY.npy`` the same where rank 3
# differs.  What is no array of numbers or texts is JSON, kept as an array of
# dtype V1, which no other value has.  The last member, the manifest, says of
# each other one its dtype, shape and digest, and which ranks had the key.
#
# No value is a pickle, so nothing in a file is run.  A header must say what
# the manifest says, and the member must have as many bytes as that takes,
# before memory is allocated.  Each value is compared with its digest, the
# manifest with zip's CRC: bytes that neither covers (dates of members,
# padding) change nothing that is read.
#
# The file gets its name when all of it is on the disk, so a crash leaves the
# older file and at most a temporary one, which the next run removes.
#
# Keys of a model name its layers as the whole model does, so each layer of a
# pipeline is in the file once, and Chainer's ``load_npz`` finds a model below
# ``all/trainer/updater/model:main/`` however it was cut.
from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from numpy.lib import format as npy

from .json_values import is_plain

_FORMAT = 4
_MANIFEST = 'meta/manifest.json'
_PIECE = 1 << 20            # bytes that are written at once
_UNFINISHED = 'snapshot.partial'
#: Of an array that holds the bytes of JSON.
JSON = numpy.dtype('V1')

_LOCK = threading.Lock()
_IN_USE: set[str] = set()   # temporary names


class DamagedSnapshot(ValueError):
    """A file that is no whole snapshot, in words."""


class Entry(NamedTuple):
    """What is known of a value without it."""

    dtype: str              # NumPy's
    shape: tuple[int, ...]
    digest: str

    @property
    def size(self) -> int:
        """Bytes."""
        return numpy.dtype(self.dtype).itemsize * math.prod(self.shape)

    def empty(self) -> numpy.ndarray:
        """An array that can hold it."""
        return numpy.empty(self.shape, self.dtype)


def entry_of(array: numpy.ndarray) -> Entry:
    """Computes the entry of a value."""
    dtype, shape = array.dtype.str, array.shape
    found = hashlib.blake2b(f'{dtype} {shape}'.encode(), digest_size=16)
    found.update(bytes_of(array))
    return Entry(dtype, shape, found.hexdigest())


def bytes_of(array: numpy.ndarray) -> memoryview:
    """The bytes of an array in C order, in its memory if it has that."""
    return numpy.asarray(array, order='C').reshape(-1).view(numpy.uint8).data


class SnapshotIndex(NamedTuple):
    """The keys of a snapshot."""

    path: str                   # of the file
    communicator: str           # the names of the job's communicators
    ranks: int                  # that the job had
    owners: dict[str, list[int]]    # which ranks had a key
    entries: dict[str, Entry]       # by names of members

    @property
    def keys(self) -> list[str]:
        """Of all ranks."""
        return list(self.owners)

    def of_rank(self, rank: int) -> list[str]:
        """The keys that a rank had."""
        return [key for key, ranks in self.owners.items() if rank in ranks]

    def name(self, key: str, rank: int | None = None) -> str:
        """The member with a rank's value; None: with the first rank's."""
        own = f'rank{rank}/{key}'
        return own if own in self.entries else f'all/{key}'

    def is_same_everywhere(self, key: str) -> bool:
        """Whether all ranks that had a value had the same."""
        return not any(f'rank{rank}/{key}' in self.entries
                       for rank in self.owners[key])


class Content:
    """An open snapshot; one value at a time is in memory.

    Raises:
        DamagedSnapshot: The file is damaged, or no snapshot of this version.
        OSError: It cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with self._explained():
            self._length = os.stat(path).st_size
            self._zip = zipfile.ZipFile(path)
            self.index = self._parsed(json.loads(self._zip.read(_MANIFEST)))

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: Any) -> None:
        self._zip.close()

    def check(self) -> None:
        """Reads all values and compares them with their digests."""
        for name in self.index.entries:
            self.read(name)

    def read(self, name: str) -> numpy.ndarray:
        """The value of a member."""
        entry = self.index.entries[name]
        with self._explained(), self._zip.open(f'{name}.npy') as member:
            info = self._zip.getinfo(f'{name}.npy')
            if npy.read_magic(member) != (1, 0):
                raise ValueError(f'{name} has another header')
            shape, is_fortran, dtype = npy.read_array_header_1_0(member)
            if ((dtype.str, shape, is_fortran) != (*entry[:2], False)
                    or info.compress_type != zipfile.ZIP_STORED
                    or info.file_size != member.tell() + entry.size
                    or info.file_size > self._length):
                raise ValueError(f'{name} is not what the manifest says')
            array = entry.empty()
            read = 0 if not entry.size else member.readinto(     # type: ignore
                bytes_of(array))
            if read != entry.size or member.read(1):
                raise ValueError(f'{name} is cut off')
            if entry_of(array) != entry:
                raise ValueError(f'{name} has another digest')
            return array

    def _parsed(self, manifest: Any) -> SnapshotIndex:
        if manifest['format'] != _FORMAT:
            raise ValueError(
                f'it has format {manifest["format"]}, and this version of '
                f'chainer_fp8pipe reads format {_FORMAT}')
        entries, ranks = {}, int(manifest['ranks'])
        for name, (dtype, shape, digest) in manifest['members'].items():
            kind = numpy.dtype(dtype)
            if (not (is_plain(kind) or kind == JSON) or not kind.itemsize
                    or not all(type(size) is int and 0 <= size <= self._length
                               for size in shape)):
                raise ValueError(f'{name} is no value of a snapshot')
            entries[name] = Entry(dtype, tuple(shape), digest)
        owners = {key: [int(rank) for rank in had]
                  for key, had in manifest['owners'].items()}
        expected = {f'all/{key}' for key in owners} | {
            f'rank{rank}/{key}' for key, had in owners.items()
            for rank in had if f'rank{rank}/{key}' in entries}
        if entries.keys() != expected or {
                f'{name}.npy' for name in entries} | {_MANIFEST} != set(
                self._zip.namelist()):
            raise ValueError('it lacks values, or has others')
        return SnapshotIndex(self._path, str(manifest['communicator']), ranks,
                             owners, entries)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Names the file in the error about it, and what to do."""
        try:
            yield
        # A damaged archive makes zipfile raise almost anything.
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            reason = ('it was not written by the Snapshot extension of '
                      'chainer_fp8pipe' if isinstance(error, KeyError)
                      else f'{error}')
            raise DamagedSnapshot(
                f'{self._path} is damaged or no snapshot ({reason}); resume '
                'from an older one, or from the directory, of which the '
                'newest whole one is taken') from error


class Member(NamedTuple):
    """A value that is to be written."""

    name: str
    array: numpy.ndarray
    entry: Entry


def write(path: str, members: Iterable[Member], communicator: str, ranks: int,
          owners: dict[str, list[int]],
          check: Callable[[], None] = lambda: None) -> None:
    """Writes a file; what was at ``path`` before is replaced at the very end.

    When this returns, file and name are on the disk.

    Args:
        path: Of the file.
        members: Written as they come.
        communicator: The names of the job's communicators.
        ranks: How many the job has.
        owners: Which ranks have a key.
        check: Called before each megabyte; what it raises ends the writing,
            and nothing is left of it.
    """
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    table = {}
    with _temporary_name(directory) as temporary:
        try:
            with open(temporary, 'wb') as file:
                with zipfile.ZipFile(file, 'w') as archive:
                    for name, array, entry in members:
                        _write_member(archive, name, array, check)
                        table[name] = entry
                    archive.writestr(_MANIFEST, json.dumps({
                        'format': _FORMAT, 'communicator': communicator,
                        'ranks': ranks, 'owners': owners, 'members': table}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    with contextlib.suppress(OSError):      # not every system can
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _write_member(archive: zipfile.ZipFile, name: str, array: numpy.ndarray,
                  check: Callable[[], None]) -> None:
    with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        npy.write_array_header_1_0(
            member, {**npy.header_data_from_array_1_0(array),
                     'fortran_order': False})
        data = bytes_of(array)
        # In pieces, between which other threads go on.
        for place in range(0, len(data), _PIECE):
            check()
            member.write(data[place:place + _PIECE])


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


def plan(tables: Sequence[dict[str, Entry]]
         ) -> tuple[dict[str, list[int]], list[list[str]]]:
    """Decides which rank sends which values, by the entries of all ranks.

    Returns:
        Which ranks have a key, and for each rank the names of the members
        that come from it.
    """
    owners: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for key in table:
            owners.setdefault(key, []).append(rank)
    return owners, [
        [f'all/{key}' if owners[key][0] == rank else f'rank{rank}/{key}'
         for key, entry in table.items()
         if owners[key][0] == rank or tables[owners[key][0]][key] != entry]
        for rank, table in enumerate(tables)]

"""The file of a snapshot: an ``.npz`` with a manifest, whole or refused."""
# A zip archive that NumPy opens as any other.  ``all/KEY.npy`` is a value as
# the first rank that has it has it, ``rank3/KEY.npy`` the same where rank 3
# differs.  What is no array of numbers or texts (None, and lists, tuples and
# dictionaries, which extensions save) is JSON, kept as an array of dtype V1,
# which no other value has.  The last member, the manifest, has a digest of
# each other one, and says which ranks had the key.
#
# No value is a pickle, so nothing in a file is run.  A member must have as
# many bytes as its header says, and the file as many as the member, before
# memory is allocated.  Each value is compared with its digest, the manifest
# with zip's CRC: bytes that neither covers (dates of members, padding) change
# nothing that is read.
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
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy
from numpy.lib import format as npy

_FORMAT = 5
_MANIFEST = 'meta/manifest.json'
_PIECE = 1 << 20            # bytes that are written at once
_UNFINISHED = 'snapshot.partial'
_NUMBERS = itertools.count()

State = dict[str, numpy.ndarray]


class DamagedSnapshot(ValueError):
    """A file that is no whole snapshot, in words."""


class SnapshotIndex(NamedTuple):
    """What is known of a snapshot without its values."""

    path: str                       # of the file
    communicator: str               # the names of the job's communicators
    ranks: int                      # that the job had
    owners: dict[str, list[int]]    # which ranks had a key
    digests: dict[str, str]         # by names of members

    def of_rank(self, rank: int) -> set[str]:
        """The keys that a rank had."""
        return {key for key, ranks in self.owners.items() if rank in ranks}

    def name(self, key: str, rank: int | None) -> str:
        """The member with a rank's value; None: with the first rank's."""
        own = f'rank{rank}/{key}'
        return own if own in self.digests else f'all/{key}'

    def is_same_everywhere(self, key: str) -> bool:
        """Whether all ranks that had a value had the same."""
        return all(self.name(key, rank) == f'all/{key}'
                   for rank in self.owners[key])


def digest_of(array: numpy.ndarray) -> str:
    """BLAKE2b, 128 bits, of a value's dtype, shape and bytes."""
    found = hashlib.blake2b(f'{array.dtype.str} {array.shape}'.encode(),
                            digest_size=16)
    found.update(bytes_of(array))
    return found.hexdigest()


def bytes_of(array: numpy.ndarray) -> memoryview:
    """The bytes of an array in C order, in its memory if it has that."""
    return numpy.asarray(array, order='C').reshape(-1).view(numpy.uint8).data


# --- writing -----------------------------------------------------------------

def write(path: str, members: Iterable[tuple[str, numpy.ndarray, str]],
          communicator: str, ranks: int, owners: dict[str, list[int]]) -> None:
    """Writes a file; what was at ``path`` before is replaced at the very end.

    When this returns, file and name are on the disk.

    Args:
        path: Of the file; its directory is made if there is none.
        members: Names, arrays and digests, written as they come.
        communicator: As in :class:`SnapshotIndex`.
        ranks: As there.
        owners: As there.
    """
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(
        directory, f'{_UNFINISHED}.{os.getpid()}.{next(_NUMBERS)}')
    about = {'format': _FORMAT, 'communicator': communicator, 'ranks': ranks,
             'owners': owners}
    try:
        with open(temporary, 'wb') as file:
            with zipfile.ZipFile(file, 'w') as archive:
                digests = {}
                for name, array, digest in members:
                    _write_member(archive, name, array)
                    digests[name] = digest
                archive.writestr(_MANIFEST, json.dumps(
                    {**about, 'digests': digests}))
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


def _write_member(archive: zipfile.ZipFile, name: str, array: numpy.ndarray
                  ) -> None:
    with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        npy.write_array_header_1_0(
            member, {**npy.header_data_from_array_1_0(array),
                     'fortran_order': False})
        data = bytes_of(array)
        # In pieces, between which other threads go on.
        for place in range(0, len(data), _PIECE):
            member.write(data[place:place + _PIECE])


def remove_unfinished(directory: str) -> None:
    """Removes what killed runs have left of snapshots in a directory."""
    for name in glob.glob(os.path.join(glob.escape(directory),
                                       f'{_UNFINISHED}*')):
        with contextlib.suppress(OSError):
            os.remove(name)


# --- reading -----------------------------------------------------------------

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
        for name in self.index.digests:
            self.read(name)

    def read(self, name: str) -> numpy.ndarray:
        """The value of a member."""
        with self._explained(), self._zip.open(f'{name}.npy') as member:
            info = self._zip.getinfo(f'{name}.npy')
            if npy.read_magic(member) != (1, 0):
                raise ValueError(f'{name} has another header')
            shape, is_fortran, dtype = npy.read_array_header_1_0(member)
            size = dtype.itemsize * math.prod(shape)
            if (not (is_plain(dtype) or dtype == JSON) or is_fortran
                    or not dtype.itemsize or min(shape, default=0) < 0
                    or info.compress_type != zipfile.ZIP_STORED
                    or info.file_size != member.tell() + size
                    or info.file_size > self._length):
                raise ValueError(f'{name} is not as long as it says')
            array = numpy.empty(shape, dtype)
            # NumPy refuses a view of no bytes' memory; zipfile's annotations
            # do not say that its members have readinto().
            if size and member.readinto(    # type: ignore[attr-defined]
                    bytes_of(array)) != size or member.read(1):
                raise ValueError(f'{name} is cut off')
            if digest_of(array) != self.index.digests[name]:
                raise ValueError(f'{name} has another digest')
            return array

    def _parsed(self, manifest: Any) -> SnapshotIndex:
        if manifest['format'] != _FORMAT:
            raise ValueError(
                f'it has format {manifest["format"]}, and this version of '
                f'chainer_fp8pipe reads format {_FORMAT}')
        digests = dict(manifest['digests'])
        owners = {key: [int(rank) for rank in had]
                  for key, had in manifest['owners'].items()}
        names = {f'all/{key}' for key in owners} | digests.keys() & {
            f'rank{rank}/{key}' for key, had in owners.items()
            for rank in had}
        if digests.keys() != names or {_MANIFEST} | {
                f'{name}.npy' for name in names} != set(self._zip.namelist()):
            raise ValueError('it lacks values, or has others')
        return SnapshotIndex(self._path, str(manifest['communicator']),
                             int(manifest['ranks']), owners, digests)

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
                'from another one, or from the directory') from error


# --- values that are no arrays of numbers ------------------------------------
# A list is a list in JSON, and what JSON has not is a dictionary with one key:
# {"tuple": [...]}, {"dict": [...]} with tuples of key and value; {"number":
# ["<f4", [], hex]} and {"array": ["<f4", [1], hex]} for NumPy's.

JSON = numpy.dtype('V1')
#: Bytes of JSON of a value.  Python's objects take some twenty times that.
LARGEST = 1 << 20
#: Parts of a value: an update waits while they are looked at.
MOST_PARTS = 1 << 16


def is_plain(dtype: numpy.dtype) -> bool:
    """Whether a dtype is of numbers, texts or times, and nothing else."""
    return dtype.kind in 'biufcSUmM' and numpy.dtype(dtype.str) == dtype


def prepared(state: State, copies: State | None = None) -> State:
    """The values of a state as the file has them: plain arrays, or JSON.

    Args:
        state: Arrays by their keys.
        copies: If given, arrays are copied, so that they may change
            afterwards: into those of the last time, where they fit, as the
            system takes several times as long to give new memory.  Those of
            this time are left here.

    Raises:
        TypeError: A value cannot be saved; the key is named.
    """
    values: State = {}
    for key, value in state.items():
        if not is_plain(value.dtype):
            try:
                value = numpy.frombuffer(to_json(
                    value if value.shape else value[()]), JSON)
            except TypeError as error:
                raise TypeError(
                    f'{key} cannot be saved: {error}; serialize arrays, '
                    'numbers, texts, and lists and dictionaries of them'
                    ) from None
        elif copies is None:
            value = numpy.asarray(value, order='C')
        elif (key in copies and (copies[key].shape, copies[key].dtype) == (
                value.shape, value.dtype)):
            copies[key][...] = value
            value = copies[key]
        else:
            value = numpy.array(value, order='C')
        # NumPy's files know no empty texts.
        values[key] = value if value.dtype.itemsize else value.astype(
            f'{value.dtype.kind}1')
    if copies is not None:
        copies.clear()
        copies.update(values)
    return values


def value_of(array: numpy.ndarray) -> numpy.ndarray:
    """The value of a state, given what :func:`prepared` made of it."""
    return (object_array(from_json(array.tobytes()))
            if array.dtype == JSON else array)


def object_array(value: Any) -> numpy.ndarray:
    """A value in an array of objects, without dimensions."""
    array = numpy.empty((), object)
    array[()] = value
    return array


def to_json(value: Any) -> bytes:
    """The text of a value.

    Raises:
        TypeError: A part of it is of another kind than those above, it has
            more than :data:`MOST_PARTS`, or the text is longer than
            :data:`LARGEST`.
    """
    try:
        text = json.dumps(_encoded(value, itertools.count(1)),
                          separators=(',', ':')).encode()
    except RecursionError:
        raise TypeError('it is nested too deeply') from None
    if len(text) > LARGEST:
        raise TypeError(
            f'it takes {len(text)} bytes as JSON, of at most {LARGEST}')
    return text


def _encoded(value: Any, parts: Iterator[int]) -> Any:
    if next(parts) > MOST_PARTS:
        raise TypeError(f'it has more than {MOST_PARTS} parts')
    kind = type(value)      # a subclass would come back as another class
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item, parts) for item in value]
    if kind in (tuple, dict):
        return {kind.__name__: [_encoded(item, parts) for item in (
            value.items() if kind is dict else value)]}
    if isinstance(value, (numpy.generic, numpy.ndarray)) and is_plain(
            value.dtype):
        if 2 * value.nbytes > LARGEST:
            raise TypeError(f'an array in it has {value.nbytes} bytes')
        return {'array' if kind is numpy.ndarray else 'number': [
            value.dtype.str, value.shape, value.tobytes().hex()]}
    # Its text could be long, and take long.
    raise TypeError(f'it has an object of class {kind.__name__}')


def from_json(text: bytes) -> Any:
    """The value; the inverse of :func:`to_json`.

    Raises:
        ValueError: The text is none of :func:`to_json`'s.
    """
    try:
        if len(text) > LARGEST:
            raise ValueError('it is too long')
        return json.loads(text, object_hook=_decoded)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"a value is no JSON of a snapshot's: {error}"
                         ) from None


def _decoded(value: dict[str, Any]) -> Any:
    (kind, content), = value.items()
    if kind in ('tuple', 'dict'):
        return (tuple if kind == 'tuple' else dict)(content)
    name, shape, text = content
    if kind not in ('number', 'array') or not is_plain(numpy.dtype(name)):
        raise ValueError(f'there is no {kind} of {name}')
    array = numpy.frombuffer(bytes.fromhex(text), name).reshape(shape)
    return array[()] if kind == 'number' else array.copy()

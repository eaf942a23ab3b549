"""The files of a snapshot, one of each rank: whole, or refused."""
# A snapshot is a folder, ``snapshot_iter_100.ranks``, with a file of each
# rank, ``rank0of4.npz``, as ``numpy.savez`` writes it.  Nothing is sent: on
# hosts that share no disk each keeps the files of its own ranks, but to go on
# with other ranks they must see one.
#
# A file gets its name when all of it is on the disk.  A snapshot is whole when
# the files of all ranks are there and have the same identity.  The archive has
# a checksum of each value, and the manifest their keys.  None is a pickle, as
# Chainer's load_npz expects it; the manifest tells it, and no pickle is read.
from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy

from ...report.record import written_whole

_FORMAT, _MANIFEST = 13, 'job/manifest'
#: What Chainer's serializers have for None.
NONE = numpy.asarray(None)

State = dict[str, numpy.ndarray]


class DamagedSnapshot(ValueError):
    """A snapshot that is not whole, or a file that is none of one."""


class Manifest(NamedTuple):
    """What is known of a file without its values."""

    path: str
    rank: int
    ranks: int
    identity: str               # what the files of one snapshot have in common
    is_none: dict[str, bool]    # by key, of all values


def iteration_of(folder: str) -> int:
    """The iteration of a snapshot, by its name; -1: it is something else."""
    found = re.fullmatch(r'snapshot_iter_(\d+)\.ranks',
                         os.path.basename(os.path.normpath(folder)))
    return int(found[1]) if found else -1


def name_of(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f'rank{rank}of{ranks}.npz'


def files_in(folder: str) -> list[str]:
    """The names of ranks' files that this host sees, by rank."""
    return sorted((name for name in glob.glob('*', root_dir=folder)
                   if re.fullmatch(r'rank\d+of\d+\.npz', name)),
                  key=lambda name: int(name[4:name.index('of')]))


def find_snapshots(directory: str) -> list[str]:
    """The snapshots in a directory, whole or not, oldest iteration first."""
    return sorted((folder for folder in glob.glob(os.path.join(
        glob.escape(directory), '*')) if iteration_of(folder) >= 0
        and files_in(folder)), key=iteration_of)


def write(folder: str, state: State, rank: int, ranks: int, identity: str
          ) -> None:
    """Writes a rank's file; what was there before is replaced at the end."""
    os.makedirs(folder, exist_ok=True)
    values: dict[str, Any] = {**state, _MANIFEST: as_json({
        'format': _FORMAT, 'rank': rank, 'ranks': ranks,
        'identity': identity, 'is_none': {
            key: value.dtype == object for key, value in state.items()}})}
    with written_whole(os.path.join(folder, name_of(rank, ranks)), 'wb'
                       ) as file:
        numpy.savez(file, **values)
        file.flush()
        os.fsync(file.fileno())


def as_json(value: Any) -> numpy.ndarray:
    """What Python has in place of arrays; bytes that no number is."""
    return numpy.frombuffer(json.dumps(value).encode(), 'V1')


def manifest_of(path: str) -> Manifest:
    """Opens a file; ValueError: it is damaged, or of another version."""
    with _opened(path) as archive:
        about = json.loads(_value(archive, _MANIFEST).tobytes())
        number = about.pop('format')
    if number != _FORMAT:
        raise ValueError(f'{os.path.dirname(path)} has format {number}, and '
                         'this version of chainer_fp8pipe reads format '
                         f'{_FORMAT}; go on with the version that wrote it, '
                         'or move it away')
    return Manifest(path, **about)


def read(manifest: Manifest, keys: Iterable[str]) -> State:
    """Values of a file, compared with their checksums; errors as above."""
    with _opened(manifest.path) as archive:
        return {key: NONE if manifest.is_none[key] else _value(archive, key)
                for key in keys}


def _value(archive: Any, key: str) -> numpy.ndarray:
    with archive.zip.open(f'{key}.npy') as member:
        value = numpy.lib.format.read_array(member, allow_pickle=False)
        if member.read():       # at whose end the checksum is compared
            raise ValueError(f'{key} is longer than it says')
    return value


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with open(path, 'rb') as file, numpy.load(
                file, allow_pickle=False) as archive:
            yield archive
    # A damaged archive makes zipfile raise almost anything, also OSError
    # without a number.
    except Exception as error:
        if isinstance(error, OSError) and error.errno and error.filename:
            raise
        raise DamagedSnapshot(f'{path} is damaged or no file of a snapshot '
                              f'({error})') from error

"""The files of a snapshot, one of each rank: whole, or passed over."""
# A snapshot is a folder, ``snapshot_iter_100.ranks``, with a file of each
# rank, ``rank0of4.npz``, a zip archive that NumPy opens as any other.  No rank
# waits for another one to write, and nothing is sent: on hosts that share no
# disk each keeps the files of its own ranks.  The price: to go on with other
# ranks, hosts must see one disk, as a rank then reads others' files.
#
# A file gets its name when all of it is on the disk.  A snapshot is whole when
# the files of all ranks are there and have the same identity, which is at the
# very end of each file, so that a crash between the first and the last one
# leaves no snapshot.  The manifest in a file has a digest of each value.  No
# value is a pickle, so nothing in a file is run.
#
# Keys are those of Chainer's ``save_npz(path, trainer)``, and below ``job/``
# what that leaves out: ``load_npz`` reads the model, or the whole trainer.
from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import re
import threading
import uuid
import zipfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
from numpy.lib import format as npy

_FORMAT = 6
_FOLDER = 'snapshot_iter_{}.ranks'
_MANIFEST = 'job/manifest.json'
_UNFINISHED = 'snapshot.partial'
_PIECE = 1 << 20            # bytes that are written at once
_IDENTITY = 32              # letters at the end of a file

State = dict[str, numpy.ndarray]


class DamagedSnapshot(ValueError):
    """A file that is no whole file of a snapshot."""


class Manifest(NamedTuple):
    """What is known of a file without its values."""

    path: str
    rank: int
    ranks: int
    communicator: str           # the names of the job's communicators
    digests: dict[str, str]     # by key


def new_identity() -> str:
    """What the files of one snapshot, and no other, have in common."""
    return uuid.uuid4().hex


def folder_of(directory: str, iteration: int) -> str:
    """Where the files of a snapshot are."""
    return os.path.join(directory, _FOLDER.format(iteration))


def file_of(folder: str, rank: int, ranks: int) -> str:
    """The file of a rank."""
    return os.path.join(folder, f'rank{rank}of{ranks}.npz')


def find_snapshots(directory: str) -> list[str]:
    """The snapshots in a directory, oldest iteration first.

    Whether they are whole :func:`resume` finds out.
    """
    return sorted((path for path in glob.glob(os.path.join(
        glob.escape(directory), '*')) if iteration_of(path) >= 0),
        key=iteration_of)


def iteration_of(folder: str) -> int:
    """The iteration of a snapshot, by its name; -1: it is something else."""
    found = re.fullmatch(re.escape(_FOLDER).replace(r'\{\}', r'(\d+)'),
                         os.path.basename(os.path.normpath(folder)))
    return int(found[1]) if found else -1


def identities(folder: str) -> list[tuple[int, int, str]]:
    """Rank, number of ranks and identity of each file in a folder.

    Those that cannot be read are left out.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(folder), 'rank*.npz')):
        name = re.fullmatch(r'rank(\d+)of(\d+)\.npz', os.path.basename(path))
        with contextlib.suppress(OSError, ValueError), open(path, 'rb') as one:
            if name and one.seek(-_IDENTITY, os.SEEK_END):
                found.append((int(name[1]), int(name[2]),
                              one.read().decode('ascii')))
    return found


def remove_others(folder: str, ranks: int, identity: str) -> None:
    """Removes files of a folder that are not of this snapshot."""
    for rank, number, other in identities(folder):
        if (number, other) != (ranks, identity):
            with contextlib.suppress(OSError):
                os.remove(file_of(folder, rank, number))


def rename(folder: str, ending: str) -> None:
    """Sets a snapshot aside; of all ranks that call it the first one does."""
    for number in itertools.count():
        try:
            os.rename(folder, f'{folder}{ending}' + f'.{number}' * bool(
                number))
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        return


def remove_unfinished(directory: str) -> None:
    """Removes what killed runs have left of snapshots in a directory."""
    for name in glob.glob(os.path.join(glob.escape(directory),
                                       f'{_UNFINISHED}*')):
        with contextlib.suppress(OSError):
            os.remove(name)


# --- writing -----------------------------------------------------------------

def write(folder: str, state: State, rank: int, ranks: int, identity: str,
          communicator: str) -> None:
    """Writes a rank's file; what was there before is replaced at the end.

    When this returns, file and names are on the disk.
    """
    directory = os.path.dirname(folder) or '.'
    os.makedirs(directory, exist_ok=True)
    # Beside the folder, where the launcher removes it, too.
    temporary = os.path.join(directory, f'{_UNFINISHED}.rank{rank}.'
                             f'{os.getpid()}.{threading.get_ident()}')
    try:
        with open(temporary, 'wb') as file:
            with zipfile.ZipFile(file, 'w') as archive:
                archive.comment = identity.encode()
                digests = {}
                for key, value in state.items():
                    digests[key] = digest_of(value)
                    _write_member(archive, key, value)
                archive.writestr(_MANIFEST, json.dumps({
                    'format': _FORMAT, 'rank': rank, 'ranks': ranks,
                    'communicator': communicator, 'digests': digests}))
            file.flush()
            os.fsync(file.fileno())
        os.makedirs(folder, exist_ok=True)
        os.replace(temporary, file_of(folder, rank, ranks))
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
            os.rmdir(folder)        # if it has no other file
        raise
    for one in folder, directory:
        with contextlib.suppress(OSError):      # not every system can
            number = os.open(one, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def _write_member(archive: zipfile.ZipFile, key: str, value: numpy.ndarray
                  ) -> None:
    with archive.open(f'{key}.npy', 'w', force_zip64=True) as member:
        npy.write_array_header_1_0(
            member, {**npy.header_data_from_array_1_0(value),
                     'fortran_order': False})
        data = _bytes_of(value)
        # In pieces, between which other threads go on.
        for place in range(0, len(data), _PIECE):
            member.write(data[place:place + _PIECE])


def digest_of(value: numpy.ndarray) -> str:
    """BLAKE2b, 128 bits, of a value's dtype, shape and bytes."""
    found = hashlib.blake2b(f'{value.dtype.str} {value.shape}'.encode(),
                            digest_size=16)
    found.update(_bytes_of(value))
    return found.hexdigest()


def _bytes_of(value: numpy.ndarray) -> memoryview:
    """The bytes of an array in C order, in its memory if it has that."""
    return numpy.asarray(value, order='C').reshape(-1).view(numpy.uint8).data


# --- reading -----------------------------------------------------------------

def manifest_of(path: str) -> Manifest:
    """Opens a file.

    Raises:
        DamagedSnapshot: It is damaged, or of another version.
        OSError: It cannot be read.
    """
    with _explained(path), zipfile.ZipFile(path) as archive:
        about: dict[str, Any] = json.loads(archive.read(_MANIFEST))
        if (number := about.pop('format')) != _FORMAT:
            raise ValueError(
                f'it has format {number}, and this version of chainer_fp8pipe '
                f'reads format {_FORMAT}')
        return Manifest(path, **about)


def read(manifest: Manifest, keys: Iterable[str]) -> State:
    """Values of a file, compared with their digests; errors as above."""
    found = {}
    with _explained(manifest.path), zipfile.ZipFile(manifest.path) as archive:
        for key in keys:
            with archive.open(f'{key}.npy') as member:
                found[key] = npy.read_array(member, allow_pickle=False)
            if digest_of(found[key]) != manifest.digests[key]:
                raise ValueError(f'{key} has another digest')
    return found


@contextlib.contextmanager
def _explained(path: str) -> Any:
    """Names the file in the error about it."""
    try:
        yield
    # A damaged archive makes zipfile raise almost anything, also OSError
    # without a number.
    except Exception as error:
        if isinstance(error, OSError) and error.errno and error.filename:
            raise
        raise DamagedSnapshot(f'{path} is damaged or no file of a snapshot '
                              f'({error})') from error

"""The file of a snapshot.

An ordinary ``.npz``: ``all/KEY`` is a value as the first rank that has it has
it, ``rank3/KEY`` the same where rank 3 differs, ``meta/KEY`` about the job.
``meta/has`` says which rank had which key: element (r, k) for rank r and the
k-th ``all/`` of the file.

Keys of a model name its layers as the whole model does, so each layer of a
pipeline is in the file once, and Chainer's ``load_npz`` finds a model below
``all/trainer/updater/model:main/`` however it was cut.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

_ALL = 'all/'


class SnapshotIndex(NamedTuple):
    """The keys of a snapshot."""

    path: str               # of the file
    communicator: str       # the names of the job's communicators
    keys: list[str]         # of all ranks
    has: numpy.ndarray      # bool (ranks, keys): which rank had which

    @property
    def ranks(self) -> int:
        """How many ranks the job had."""
        return len(self.has)

    def of_rank(self, rank: int) -> list[str]:
        """The keys that a rank had, in the order of the file."""
        return [key for key, has in zip(self.keys, self.has[rank],
                                        strict=True) if has]


class Content:
    """An open snapshot; one value at a time is in memory."""

    def __init__(self, path: str, archive: Any) -> None:
        self._archive = archive
        self._members = set(archive.files)
        needed = {'meta/has', 'meta/communicator'}
        if not needed <= self._members:
            raise ValueError(f'{path} was not written by the Snapshot '
                             'extension of this version of chainer_fp8pipe')
        self.index = SnapshotIndex(
            path, str(self._read('meta/communicator')),
            [name[len(_ALL):] for name in archive.files
             if name.startswith(_ALL)], self._read('meta/has'))

    def has_own(self, rank: int, key: str) -> bool:
        """Whether a rank's value differs from the first rank's."""
        return f'rank{rank}/{key}' in self._members

    def read(self, key: str, rank: int | None = None) -> numpy.ndarray:
        """The first rank's value, or a rank's own.

        Raises:
            ValueError: The file is damaged.
        """
        return self._read((_ALL if rank is None else f'rank{rank}/') + key)

    def _read(self, name: str) -> numpy.ndarray:
        with _explained(self._archive.zip.filename):
            return self._archive[name]


@contextlib.contextmanager
def opened(path: str) -> Iterator[Content]:
    """Opens a snapshot; raises ValueError if the file is damaged or none."""
    with contextlib.ExitStack() as stack:
        with _explained(path):
            archive = stack.enter_context(
                numpy.load(path, allow_pickle=True))
            if not hasattr(archive, 'files'):
                raise ValueError('a single array')
        yield Content(path, archive)


def write(path: str, members: Iterable[tuple[str, numpy.ndarray]]) -> None:
    """Writes a file; what was at ``path`` before is replaced at the very end.

    ``members`` are names and values, written as they come.
    """
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    # A name of its own, so that a killed run leaves no more than one.
    temporary = os.path.join(directory, 'snapshot.partial')
    try:
        with open(temporary, 'wb') as file:
            with zipfile.ZipFile(file, 'w') as archive:
                for name, value in members:
                    with archive.open(f'{name}.npy', 'w',
                                      force_zip64=True) as member:
                        numpy.lib.format.write_array(member, value,
                                                     allow_pickle=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def digest(value: numpy.ndarray) -> bytes:
    """A digest of a value with its dtype and shape."""
    found = hashlib.blake2b(f'{value.dtype} {value.shape}'.encode(),
                            digest_size=16)
    if value.dtype == object:
        found.update(pickle.dumps(value.tolist()))
    else:
        flat = numpy.ascontiguousarray(value).reshape(-1)
        found.update(flat.view(numpy.uint8).data)
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


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns any error inside into one that says the file is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f'{path} is damaged or no snapshot ({error}); resume from an '
            'older one') from error

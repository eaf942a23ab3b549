"""States of all ranks to the file and back, through rank 0.

Rank 0 alone touches the file.  Values travel only to and from the ranks that
have or need them.  What a rank is sent it compares with the digests of the
file, which the ranks computed that had the values.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from .json_values import from_json, object_array
from .snapshot_file import (
    Content,
    DamagedSnapshot,
    SavedValue,
    SnapshotIndex,
    bytes_of,
    entry_of,
)
from .snapshot_writing import SnapshotWriting, prepared

State = dict[str, numpy.ndarray]


def write(comm: MPI.Comm, path: str, state: State, communicator: str) -> None:
    """Writes all ranks' states, and waits; call it on all ranks.

    ``communicator`` is the names of the job's communicators.

    Raises:
        RuntimeError: Rank 0 could not write, or a value cannot be saved; on
            all ranks.
    """
    values = raise_together(comm, lambda: prepared(state))
    writing = SnapshotWriting(comm, path, values, communicator)
    wait_until(writing.step)
    writing.free()
    if writing.problem:
        raise RuntimeError(writing.problem)


def read(comm: MPI.Comm, content: Content | None, index: SnapshotIndex,
         wanted: numpy.ndarray, is_own: Callable[[str], bool]) -> State:
    """Reads this rank's values from the file; call it on all ranks.

    Args:
        comm: The ranks.
        content: The open file on rank 0, None elsewhere.
        index: The file's, on all ranks.
        wanted: bool array: whether this rank wants each of the index's keys.
        is_own: Whether each rank takes its own value of a key, where it had
            another than the first rank.

    Raises:
        ValueError: The file is damaged, or a value was on its way; on all
            ranks.
    """
    wishes = comm.gather(wanted)
    problem = None
    if content is not None and wishes is not None:
        found, problem = _serve(comm, content, index.keys,
                                numpy.array(wishes), is_own)
    else:
        common = comm.bcast(None)
        found = {index.keys[number]: comm.bcast(None) if common[number]
                 else comm.recv(source=0)
                 for number in numpy.flatnonzero(wanted).tolist()}
    return raise_together(comm, lambda: _restored(found, index, problem),
                          error=ValueError)


def _restored(found: dict[str, Any], index: SnapshotIndex,
              problem: Exception | None) -> State:
    """The values that were sent with the names of their members."""
    if problem is not None:
        raise problem
    state = {}
    for key, answer in found.items():
        if answer is None:      # rank 0 has the problem
            continue
        name, array = answer
        entry = index.entries[name]
        if entry_of(SavedValue(array, entry.is_json)) != entry:
            raise DamagedSnapshot(
                f'{index.path}: {name} came with other bits than it was saved '
                'with; look at memory and disk of rank 0, and resume again')
        if entry.is_json:
            array = object_array(from_json(bytes(bytes_of(array))))
        state[key] = array
    return state


def _serve(comm: MPI.Comm, content: Content, keys: Sequence[str],
           wishes: numpy.ndarray, is_own: Callable[[str], bool]
           ) -> tuple[dict[str, Any], Exception | None]:
    """Rank 0's part of :func:`read`: its own values, and the error.

    ``wishes`` is a bool array (ranks, keys).
    """
    own = numpy.array([[is_own(key) and content.index.has_own(rank, key)
                        for key in keys] for rank in range(comm.size)], bool)
    # What every rank takes, such as all of a data-parallel model.
    common = comm.bcast(wishes.all(0) & ~own.any(0))
    problem: Exception | None = None

    def answer(key: str, rank: int | None = None) -> Any:
        """After an error None: the others wait for all their values."""
        nonlocal problem
        if problem is None:
            try:
                return ('all/' if rank is None else f'rank{rank}/') + key, (
                    content.read(key, rank))
            except Exception as error:
                problem = error
        return None

    found: dict[str, Any] = {}
    for number, key in enumerate(keys):
        takers = numpy.flatnonzero(wishes[:, number]).tolist()
        first = None if own[takers, number].all() else answer(key)
        for rank in takers:
            value: Any = answer(key, rank) if own[rank, number] else first
            if rank == 0:
                found[key] = value
            elif not common[number]:
                comm.send(value, rank)
        if common[number]:
            comm.bcast(first)
    return found, problem

"""States of all ranks to the file and back, through rank 0.

Rank 0 alone touches the file.  Values travel one by one, and only to and from
the ranks that have or need them, so that no rank ever holds more than its own
state and one value.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy
from mpi4py import MPI

from ...mpi.agreement import raise_together
from . import snapshot_file
from .optimizer_state import State
from .snapshot_file import Content


def write(comm: MPI.Comm, path: str, state: State, communicator: str) -> None:
    """Writes all ranks' states; call it on all ranks.

    ``communicator`` is the names of the job's communicators.

    Raises:
        RuntimeError: Rank 0 could not write, or a value cannot be pickled;
            on all ranks.
    """
    tables = comm.gather(raise_together(comm, lambda: {
        key: snapshot_file.digest(value) for key, value in state.items()}))
    if tables is None:
        for _, key in comm.scatter(None):
            comm.send(state[key], 0)
        raise_together(comm, lambda: None)
        return
    parts, has = snapshot_file.plan(tables)
    comm.scatter(parts)
    # What the other ranks send, in their order.
    arrivals = ((prefix + key, comm.recv(source=rank))
                for rank, part in enumerate(parts) if rank
                for prefix, key in part)
    own = [(prefix + key, state[key]) for prefix, key in parts[0]]
    meta = [('meta/has', has),
            ('meta/communicator', numpy.asarray(communicator))]
    problem: Exception | None = None
    try:
        snapshot_file.write(path, itertools.chain(own, arrivals, meta))
    except Exception as error:
        problem = error
    for _ in arrivals:      # or the others would wait in send for ever
        pass
    raise_together(comm, lambda: _raise(problem))


def read(comm: MPI.Comm, content: Content | None, keys: Sequence[str],
         wanted: numpy.ndarray, exact: bool) -> State:
    """Reads this rank's values from the file; call it on all ranks.

    Args:
        comm: The ranks.
        content: The open file on rank 0, None elsewhere.
        keys: All keys of the file.
        wanted: bool array: whether this rank wants each.
        exact: Where ranks had different values, take this rank's own.

    Raises:
        ValueError: The file is damaged, on all ranks.
    """
    wishes = comm.gather(wanted)
    problem = None
    if content is not None and wishes is not None:
        state, problem = _serve(comm, content, keys, numpy.array(wishes),
                                exact)
    else:
        common = comm.bcast(None)
        state = {keys[number]: comm.bcast(None) if common[number]
                 else comm.recv(source=0)
                 for number in numpy.flatnonzero(wanted).tolist()}
    raise_together(comm, lambda: _raise(problem), error=ValueError)
    return state


def _serve(comm: MPI.Comm, content: Content, keys: Sequence[str],
           wishes: numpy.ndarray, exact: bool
           ) -> tuple[State, Exception | None]:
    """Rank 0's part of :func:`read`: its own state, and the error.

    ``wishes`` is a bool array (ranks, keys).
    """
    own = numpy.array([[exact and content.has_own(rank, key) for key in keys]
                       for rank in range(comm.size)], bool)
    # What every rank takes, such as all of a data-parallel model.
    common = comm.bcast(wishes.all(0) & ~own.any(0))
    problem: Exception | None = None

    def value_of(key: str, rank: int | None = None) -> Any:
        """After an error None: the others wait for all their values."""
        nonlocal problem
        if problem is None:
            try:
                return content.read(key, rank)
            except Exception as error:
                problem = error
        return None

    state: State = {}
    for number, key in enumerate(keys):
        takers = numpy.flatnonzero(wishes[:, number]).tolist()
        first = None if own[takers, number].all() else value_of(key)
        for rank in takers:
            value: Any = value_of(key, rank) if own[rank, number] else first
            if rank == 0:
                state[key] = value
            elif not common[number]:
                comm.send(value, rank)
        if common[number]:
            comm.bcast(first)
    return state, problem


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem

"""Groups of consecutive ranks, or of tiles of a two-dimensional torus.

Ying et al., "Image Classification at Supercomputer Scale" (2018), section on
distributed batch normalisation: ranks of a tile are neighbours in both
directions.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy
from mpi4py import MPI

from .agreement import check_same
from .group import state_of
from .shapes import divisors, torus_shape


def split_groups(comm: Any, group_size: int | None = None,
                 tile: Sequence[int] | None = None,
                 shape: Sequence[int] | None = None) -> MPI.Comm:
    """The group that this rank belongs to; call it on all ranks.

    Args:
        comm: The ranks: a communicator of mpi4py's or ChainerMN's.
        group_size: This many consecutive ranks are a group; it must divide
            the number of ranks.
        tile: Instead of it, the rows and columns of a group on the torus of
            all ranks, which are numbered row by row.
        shape: Rows and columns of that torus.  By default as
            ``algorithm='torus2d'`` chooses it: a node is a row where there
            are several nodes of several ranks; else as nearly square as can
            be.

    Returns:
        The communicator of this rank's group, in the order of ``comm``.  It
        is kept with ``comm`` and freed with it; equal calls return the same
        one, until a rank of it gives up.  Without ``group_size`` and
        ``tile``, all ranks are one group.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: The sizes do not fit, or are not the same on all ranks;
            on all ranks.  The message says which fit.
    """
    comm = ranks_of(comm)
    arguments = {'group_size': _plain(group_size), 'tile': _plain(tile),
                 'shape': _plain(shape)}
    # Gathered before they are checked, so that all find the same fault.
    check_same(comm.allgather(arguments), 'all ranks must make the same '
               'groups', str)
    if tile is None:
        _must_divide(comm.size, arguments)
        torus = 1, comm.size
        size = 1, arguments['group_size'] or comm.size
    else:
        torus = arguments['shape'] or torus_shape(comm.size, _per_node(comm))
        _must_fit(comm.size, arguments, torus)
        size = arguments['tile']
    row, column = divmod(comm.rank, torus[1])
    group = row // size[0] * (torus[1] // size[1]) + column // size[1]
    groups = state_of(comm).groups
    if (torus, size) in groups and comm.allreduce(
            bool(state_of(groups[torus, size]).problem), MPI.LOR):
        del groups[torus, size]
    if (torus, size) not in groups:
        groups[torus, size] = comm.Split(group, comm.rank)
    return groups[torus, size]


def ranks_of(comm: Any) -> MPI.Comm:
    """mpi4py's communicator in one of ChainerMN's, or as it was given.

    Raises:
        TypeError: It is something else.
    """
    found = getattr(comm, 'mpi_comm', comm)
    if not isinstance(found, MPI.Comm):
        raise TypeError(
            "groups are made of the ranks of a communicator, mpi4py's or "
            f"ChainerMN's, not of a {type(comm).__name__}; of a ProcessGrid "
            'pass its data axis: grid.data')
    return found


def _plain(value: Any) -> Any:
    """Integers, tuples of them, None; the repr of anything else."""
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, (tuple, list, numpy.ndarray)):
            return tuple(map(_plain, value))
        return None if value is None else repr(value)


def _must_divide(ranks: int, arguments: dict[str, Any]) -> None:
    group_size, shape = arguments['group_size'], arguments['shape']
    if shape is not None:
        raise ValueError(f'shape={shape} is of the torus of a tile; pass '
                         'tile=(rows, columns), too')
    if group_size is not None and group_size not in divisors(ranks):
        raise ValueError(
            f'group_size={group_size} does not divide the {ranks} ranks; it '
            f'can be {_listed(divisors(ranks))}')


def _must_fit(ranks: int, arguments: dict[str, Any], torus: Any) -> None:
    group_size, tile = arguments['group_size'], arguments['tile']
    if group_size is not None:
        raise ValueError(f'group_size={group_size} and tile={tile} are two '
                         'ways to make groups; pass one of them')
    if not _is_pair(torus) or torus[0] * torus[1] != ranks:
        shapes = [(rows, ranks // rows) for rows in divisors(ranks)]
        raise ValueError(f'shape={torus} is no torus of the {ranks} ranks; '
                         f'it can be {_listed(shapes)}')
    rows, columns = map(divisors, torus)
    if not _is_pair(tile) or tile[0] not in rows or tile[1] not in columns:
        raise ValueError(
            f'tile={tile} does not fit into the torus of {torus[0]} x '
            f'{torus[1]} ranks; it can have {_listed(rows)} rows and '
            f'{_listed(columns)} columns')


def _is_pair(value: Any) -> bool:
    return (isinstance(value, tuple) and len(value) == 2
            and all(isinstance(item, int) and item > 0 for item in value))


def _listed(values: Sequence[Any]) -> str:
    *some, last = map(str, values)
    return f'{", ".join(some)} or {last}' if some else last


def _per_node(comm: MPI.Comm) -> int:
    """Ranks of each node; 0 if they are not equally many."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    sizes = set(comm.allgather(node.size))
    node.Free()
    return sizes.pop() if len(sizes) == 1 else 0

"""Groups of ranks: of consecutive ones, or of tiles of a torus.

Ying et al., "Image Classification at Supercomputer Scale" (2018), section on
distributed batch normalisation: ranks of a tile are neighbours in both
directions.
"""
from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from .agreement import Signature, agree, all_values
from .finalizing import HeldRequest, keep_forever
from .placement import divisors, torus_shape
from .ranks import kept_with, nodes_of, once
from .waiting import wait_until


@dataclasses.dataclass
class _State:
    """Of all Group objects of a communicator; kept with it."""

    tags: int = 0           # Group objects so far
    #: Why one failed; its messages may still be on their way.
    problem: str = ''


def _state_of(comm: MPI.Comm) -> _State:
    return once(comm, 'groups', _State)


class Group:
    """Ranks that gather a few numbers, and hear when one of them gives up.

    A copy, also a deep one, is the same object: a model and its copies talk
    to the same ranks.

    Args:
        comm: mpi4py's communicator, of these ranks only.  All of them make
            the group.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank
        self._state = _state_of(comm)
        # Tag of the message that gives up this group alone.
        self._state.tags += 1
        self._tag = self._state.tags
        self._problem = ''

    def gather(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """Every rank's numbers, the same bits on all ranks.

        Args:
            numbers: float64 of shape (n,); n is the same on all ranks.

        Returns:
            float64 of shape (ranks, n).

        Raises:
            RuntimeError: A rank has given up, in this group or in another
                one of the same ranks.
        """
        everyone = numpy.empty((self.size, numbers.size))
        if self.size == 1:
            everyone[0] = numbers
            return everyone
        self._must_go_on()
        self._wait(HeldRequest(self._comm.Iallgather(numbers, everyone),
                               numbers, everyone).test)
        return everyone

    def gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's object, by pickle; hears of failures as :meth:`gather`.
        """
        if self.size == 1:
            return [thing]
        self._must_go_on()
        return all_values(self._comm, thing, self._wait)

    def give_up(self, text: str) -> None:
        """Tells the others that this rank will not answer any more.

        Their present or next :meth:`gather` raises with this text.
        """
        if not self._problem:
            self._problem = self._state.problem = text
            for rank in range(self.size):
                if rank != self.rank:
                    keep_forever(self._comm.isend(text, rank, self._tag))

    def _must_go_on(self) -> None:
        if not self._problem and self._state.problem:
            self._problem = (f'other messages of these ranks were given up '
                             f'({self._state.problem}); make the model anew')
        if self._problem:
            raise RuntimeError(self._problem)

    def _wait(self, done: Callable[[], bool]) -> None:
        # MPI's own wait would keep the core from other ranks.
        wait_until(lambda: done() or self._hears_of_failure())
        self._must_go_on()

    def _hears_of_failure(self) -> bool:
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            text = self._comm.recv(source=status.source, tag=self._tag)
            self._problem = (f'rank {status.source} of the group gave up: '
                             f'{text}')
            self._state.problem = self._problem
        return bool(self._problem)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __copy__(self) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a model with grouped batch normalisation cannot be pickled: its '
            'groups are of this job; save it with chainer.serializers, or '
            'pickle the model that create_grouped_bn_model was given')


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
            ``algorithm='torus2d'`` chooses it (:func:`torus_shape`).

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
    # Compared before they are checked, so that all find the same fault.
    agree(comm, Signature({name: str(value) for name, value
                           in arguments.items()}),
          remedy='All ranks must make the same groups.')
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
    name = 'group', torus, size
    found = kept_with(comm).get(name)
    if found is not None and comm.allreduce(
            bool(_state_of(found).problem), MPI.LOR):
        del kept_with(comm)[name]
    return once(comm, name, lambda: comm.Split(group, comm.rank))


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


def _per_node(comm: MPI.Comm) -> int:
    """Ranks of each node; 0 if they are not equally many."""
    sizes = set(Counter(nodes_of(comm)).values())
    return sizes.pop() if len(sizes) == 1 else 0


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

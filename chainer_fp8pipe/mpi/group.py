"""Ranks that gather a few numbers, and hear when one of them gives up."""
from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from .forever import keep_forever
from .waiting import wait_until


@dataclasses.dataclass
class GroupState:
    """Groups and failures kept with a communicator, and freed with it."""

    #: Its groups, each made once: MPI libraries have room for some 2,000.
    groups: dict[Any, MPI.Comm] = dataclasses.field(default_factory=dict)
    tags: int = 0           # Group objects so far
    #: Why one failed; its messages may still be on their way.
    problem: str = ''


def _free(comm: Any, key: int, state: GroupState) -> None:
    for group in state.groups.values():
        group.Free()


_STATE = MPI.Comm.Create_keyval(delete_fn=_free)


def state_of(comm: MPI.Comm) -> GroupState:
    """The state of a communicator, made at the first call."""
    state: Any = comm.Get_attr(_STATE)
    if state is None:
        state = GroupState()
        comm.Set_attr(_STATE, state)
    return state


class Group:
    """Ranks that gather a few numbers of each.

    A copy, also a deep one, is the same object: a model and its copies talk
    to the same ranks.

    Args:
        comm: mpi4py's communicator, of these ranks only.  All of them make
            the group.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank
        self._state = state_of(comm)
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
        if not self._problem and self._state.problem:
            self._problem = (f'other messages of these ranks were given up '
                             f'({self._state.problem}); make the model anew')
        everyone = numpy.empty((self.size, numbers.size))
        if self.size == 1:
            everyone[0] = numbers
            return everyone
        if not self._problem:
            request = self._comm.Iallgather(numbers, everyone)
            # MPI's own wait would keep the core from other ranks.
            wait_until(lambda: request.Test() or self._hears_of_failure())
            if self._problem:
                keep_forever((request, numbers, everyone))
        if self._problem:
            raise RuntimeError(self._problem)
        return everyone

    def give_up(self, text: str) -> None:
        """Tells the others that this rank will not answer any more.

        Their present or next :meth:`gather` raises with this text.
        """
        if not self._problem:
            self._problem = self._state.problem = text
            for rank in range(self.size):
                if rank != self.rank:
                    keep_forever(self._comm.isend(text, rank, self._tag))

    def _hears_of_failure(self) -> bool:
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            text = self._comm.recv(source=status.source, tag=self._tag)
            self._problem = (f'rank {status.source} of the group gave up: '
                             f'{text}')
            self._state.problem = self._problem
        return bool(self._problem)

    def gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's object, by pickle."""
        return self._comm.allgather(thing)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __copy__(self) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a model with grouped batch normalisation cannot be pickled: its '
            'groups are of this job; save it with chainer.serializers, or '
            'pickle the model that create_grouped_bn_model was given')

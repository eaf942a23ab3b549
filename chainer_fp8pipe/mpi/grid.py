"""Divides the ranks of a job: on a grid of stages and replicas, in groups."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from ..report.quantities import counted
from .agreement import Meeting, agree
from .finalizing import HeldRequest, keep_forever
from .placement import divisors, pipelines
from .ranks import free_with_kept, kept_with, nodes_of, once
from .waiting import wait_until
from .watch import watch
from .world import enter_world


class ProcessGrid:
    """Divides the ranks of a job into pipelines and replicas of each stage.

    Example::

        grid = ProcessGrid(comm, pipeline=2)
        model = Net().stage(grid)
        data = create_communicator('fp8', mpi_comm=grid.data)

    Make it on all ranks, with the same arguments.  As many pipelines as
    possible are inside nodes: ranks that can share memory.

    Args:
        comm: The ranks: a communicator of mpi4py's or of ChainerMN's.
        pipeline: Ranks of one pipeline, i.e. stages; it must divide the
            number of ranks.  1 is plain data parallelism.

    Attributes:
        comm: mpi4py's communicator of all ranks, as it was given.
        pipeline: That of this rank's pipeline; the rank in it is the stage.
        data: That of the replicas of this rank's stage; the rank in it is
            the replica.
        stage_index: This rank's stage.
        stages: How many there are.
        replica_index: This rank's replica of the model.
        replicas: How many there are.
        is_freed: Whether :meth:`free` was called.
        ranks: ``ranks[stage][replica]`` is the rank there.
        nodes: ``nodes[rank]`` is the number of that rank's node.

    Raises:
        ValueError: An argument is wrong, or not the same on all ranks; on
            all ranks.
        StartError: Of several processes each is alone, says MPI.
    """

    def __init__(self, comm: Any, pipeline: int) -> None:
        enter_world()
        self.is_freed = False
        self.comm = ranks_of(comm)
        _agree_on(self.comm, 'pipeline', pipeline)
        if not _divides(pipeline, self.comm.size):
            raise ValueError(
                f'pipeline={pipeline!r} does not divide the {self.comm.size} '
                f'ranks; it can be {_listed(divisors(self.comm.size))}')
        self.nodes = nodes_of(self.comm)
        lines = pipelines(self.nodes, int(pipeline))
        self.ranks = list(zip(*lines, strict=True))
        self.stages, self.replicas = len(self.ranks), len(lines)
        self.stage_index, self.replica_index = next(
            (stage, row.index(self.comm.rank))
            for stage, row in enumerate(self.ranks) if self.comm.rank in row)
        watch(self.comm, self._role())
        self.pipeline: MPI.Comm = self.comm.Split(self.replica_index,
                                                  self.stage_index)
        self.data: MPI.Comm = self.comm.Split(self.stage_index,
                                              self.replica_index)

    def free(self) -> None:
        """Frees the communicators of both axes; call it on all ranks.

        MPI has room for some 2,000.
        """
        self.is_freed = True
        free_with_kept(self.pipeline)
        free_with_kept(self.data)

    def __str__(self) -> str:
        return (f'{self.comm.size} ranks on '
                f'{counted(len(set(self.nodes)), "node")}: '
                f'{counted(self.stages, "stage")} x '
                f'{counted(self.replicas, "replica")}')

    def __repr__(self) -> str:
        return (f'<ProcessGrid: rank {self.comm.rank} is stage '
                f'{self.stage_index} of {self.stages}, replica '
                f'{self.replica_index} of {self.replicas}>')

    def _role(self) -> str:
        """This rank's part in a message about its death."""
        if self.stages == 1:
            return ''
        return f'stage {self.stage_index}' + (
            f' of replica {self.replica_index}' if self.replicas > 1 else '')


def grid_of(comm: Any) -> ProcessGrid:
    """The grid of ranks that are one pipeline; a grid as it is."""
    if isinstance(comm, ProcessGrid):
        return comm
    ranks = ranks_of(comm)
    return once(ranks, 'one pipeline',
                lambda: ProcessGrid(ranks, pipeline=ranks.size))


def split_groups(comm: Any, group_size: int | None = None) -> MPI.Comm:
    """The group that this rank belongs to; call it on all ranks.

    Args:
        comm: The ranks: a communicator of mpi4py's or ChainerMN's.
        group_size: This many consecutive ranks are a group; it must divide
            the number of ranks.  None: all of them are one.

    Returns:
        The communicator of this rank's group, in the order of ``comm``.  It
        is kept with ``comm`` and freed with it; equal calls return the same
        one, until a rank of it gives up.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: The size does not fit, or is not the same on all ranks;
            on all ranks.
    """
    comm = ranks_of(comm)
    _agree_on(comm, 'group_size', group_size)
    size = comm.size if group_size is None else group_size
    if not _divides(size, comm.size):
        raise ValueError(f'group_size={size!r} does not divide the '
                         f'{comm.size} ranks; it can be '
                         + _listed(divisors(comm.size)))
    name = 'group', int(size)
    found = kept_with(comm).get(name)
    if found is not None and comm.allreduce(
            bool(_state_of(found).problem), MPI.LOR):
        del kept_with(comm)[name]
    return once(comm, name, lambda: comm.Split(comm.rank // size, comm.rank))


def ranks_of(comm: Any) -> MPI.Comm:
    """mpi4py's communicator in one of ChainerMN's, or as it was given.

    Raises:
        TypeError: It is something else.
    """
    found = getattr(comm, 'mpi_comm', comm)
    if not isinstance(found, MPI.Comm):
        raise TypeError(
            'comm must be a communicator of mpi4py or ChainerMN, not a '
            f'{type(comm).__name__}; of a ProcessGrid pass its data axis: '
            'grid.data')
    return found


# --- a group that gathers ----------------------------------------------------

@dataclasses.dataclass
class _State:
    """What all Group objects of a communicator share; kept with it."""

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
        return Meeting(self._comm, self._wait).say(thing)

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
            'a model with grouped batch normalisation cannot be pickled; save '
            'it with chainer.serializers, or pickle the model that '
            'create_grouped_bn_model was given')


# --- arguments ---------------------------------------------------------------

def _agree_on(comm: MPI.Comm, name: str, value: Any) -> None:
    """Before it is checked, so that all ranks find the same fault."""
    if isinstance(value, numpy.integer):
        value = int(value)
    agree(comm, {name: repr(value)}, remedy='All ranks must give the same.')


def _divides(value: Any, size: int) -> bool:
    return (isinstance(value, (int, numpy.integer))
            and not isinstance(value, bool) and value in divisors(size))


def _listed(values: Sequence[int]) -> str:
    *some, last = map(str, values)
    return f'{", ".join(some)} or {last}' if some else last

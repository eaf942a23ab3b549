"""Divides the ranks of a job: on a grid of stages and replicas, in groups."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from . import divisors
from .agreement import Meeting, agree
from .finalizing import keep_forever
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

    Make it on all ranks, with the same arguments.  Ranks of a node, which can
    share memory, are neighbours in a pipeline.

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

    Raises:
        ValueError: An argument is wrong, or not the same on all ranks; on
            all ranks.
        StartError: Of several processes each is alone, says MPI.
    """

    def __init__(self, comm: Any, pipeline: int) -> None:
        enter_world()
        self.is_freed = False
        self.comm = comm = ranks_of(comm)
        self.stages = stages = _divisor(comm, 'pipeline', pipeline)
        self.replicas = comm.size // stages
        watch(comm)
        order = sorted(range(comm.size), key=nodes_of(comm).__getitem__)
        self.ranks = [order[stage::stages] for stage in range(stages)]
        self.replica_index, self.stage_index = place = divmod(
            order.index(comm.rank), stages)
        self.pipeline: MPI.Comm = comm.Split(*place)
        self.data: MPI.Comm = comm.Split(*reversed(place))

    def free(self) -> None:
        """Frees the communicators of both axes; call it on all ranks."""
        self.is_freed = True
        free_with_kept(self.pipeline)
        free_with_kept(self.data)


def grid_of(comm: Any) -> ProcessGrid:
    """The grid of ranks that are one pipeline; a grid as it is."""
    if isinstance(comm, ProcessGrid):
        return comm
    ranks = ranks_of(comm)
    return once(ranks, 'one pipeline',
                lambda: ProcessGrid(ranks, pipeline=ranks.size))


def group_of(comm: Any, group_size: int | None = None) -> Group:
    """The group of consecutive ranks that this one belongs to.

    It is kept with ``comm`` and freed with it; equal calls return the same
    one, until a rank of it gives up.  Call it on all ranks; raises ValueError
    on all of them where the size does not divide their number.
    """
    comm = ranks_of(comm)
    size = _divisor(comm, 'group_size',
                    comm.size if group_size is None else group_size)
    name = 'group', size
    if comm.allreduce(name in kept_with(comm)
                      and bool(kept_with(comm)[name].problem), MPI.LOR):
        del kept_with(comm)[name]
    return once(comm, name, lambda: Group(comm.Split(comm.rank // size)))


def ranks_of(comm: Any) -> MPI.Comm:
    """mpi4py's communicator in one of ChainerMN's, or as it was given."""
    found = getattr(comm, 'mpi_comm', comm)
    if not isinstance(found, MPI.Intracomm) or not found:
        raise TypeError(
            'comm must be a communicator of mpi4py or ChainerMN, not a '
            f'{type(comm).__name__}; of a ProcessGrid pass its data axis: '
            'grid.data')
    return found


def ranks_in(comm: Any) -> MPI.Comm:
    """The same, or of a grid all ranks; None: of the whole job."""
    return MPI.COMM_WORLD if comm is None else comm.comm if isinstance(
        comm, ProcessGrid) else ranks_of(comm)


def _divisor(comm: MPI.Comm, name: str, value: Any) -> int:
    """An argument, agreed upon before it is checked."""
    if isinstance(value, numpy.integer):
        value = int(value)
    agree(comm, {name: repr(value)}, remedy='All ranks must give the same.')
    if type(value) is not int or value not in divisors(comm.size):
        *some, last = map(str, divisors(comm.size))
        raise ValueError(
            f'{name}={value!r} does not divide the {comm.size} ranks; it can '
            'be ' + (f'{", ".join(some)} or ' if some else '') + last)
    return value


class Group:
    """Ranks that gather something, and hear when one of them gives up.

    A copy, also a deep one, is the same object: a model and its copies talk
    to the same ranks.  ``comm`` becomes the group's.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self.problem = comm, ''
        self.size, self.rank = comm.size, comm.rank
        self._meeting = Meeting(comm, self._wait)

    def gather(self, thing: Any) -> list[Any]:
        """Every rank's object; raises RuntimeError if a rank gives up."""
        self._must_go_on()
        return self._meeting.say(thing)

    def give_up(self, text: str) -> None:
        """Tells the others that this rank will not answer any more.

        Their present or next :meth:`gather` raises with this text.
        """
        if not self.problem:
            self.problem = text
            text = f'rank {self.rank} of the group gave up: {text}'
            for rank in {*range(self.size)} - {self.rank}:
                keep_forever(self.comm.isend(text, rank))

    def Free(self) -> None:
        """As that of a communicator."""
        if not self.problem:    # a later one would find messages that are left
            self.comm.Free()

    def _wait(self, done: Callable[[], bool]) -> None:
        def hears() -> bool:
            if self.comm.Iprobe():
                self.problem = self.comm.recv()
            return bool(self.problem)
        wait_until(lambda: done() or hears())
        if not done():
            self._must_go_on()

    def _must_go_on(self) -> None:
        if self.problem:
            raise RuntimeError(f'{self.problem}; make the model anew')

    def __deepcopy__(self, memo: Any = None) -> Group:
        return self
    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            'a model with grouped batch normalisation cannot be pickled; save '
            'it with chainer.serializers, or pickle the model that '
            'create_grouped_bn_model was given')

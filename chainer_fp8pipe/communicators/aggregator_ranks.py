"""A communicator of workers whose last ranks only sum (paper 003).

Tanaka et al. put the sum into the network: a node between the workers adds
frames as they arrive and sends the mean back while the rest still comes.
Here this node is a rank, on a host of its own or, better, one that has more
links or a faster one than a worker.
"""
from __future__ import annotations

from mpi4py import MPI

from ..allreduce.aggregator import (
    WorkerComm,
    dismiss,
    has_aggregators,
    serve,
)
from ..mpi.agreement import Signature, agree
from ..mpi.waiting import world_ranks
from .codec_communicator import CodecCommunicator
from .options import ExchangeOptions

# Ranks of COMM_WORLD that serve, or have served and are gone.
_aggregators: set[int] = set()


class AggregatedCommunicator(CodecCommunicator):
    """The communicator of the workers.

    ``finalize`` lets the aggregators leave; so does the end of the program.
    """

    def split(self, color: int, key: int) -> CodecCommunicator:
        """Raises an error: the aggregators serve all workers together.

        Raises:
            ValueError: Always; the message says what to do.
        """
        raise ValueError(
            f'the aggregators serve all {self.size} workers together; make '
            'a part of them a communicator without: create_communicator('
            'name, mpi_comm=comm.mpi_comm.Split(color, key))')


class UnfitOptions(ValueError):
    """The options do not fit the workers; the aggregators have left."""


def divide(mpi_comm: MPI.Comm, name: str, options: ExchangeOptions
           ) -> AggregatedCommunicator | None:
    """Makes the last ranks aggregators; call it on all ranks.

    Returns:
        The communicator, on a worker.  On an aggregator None, as soon as
        the workers are done.

    Raises:
        ValueError: Options differ between ranks, or leave no worker, or
            some rank has aggregators already; on all ranks.
        UnfitOptions: On all workers, while aggregators return.
    """
    agree(mpi_comm, Signature({'communicator': f'{name} {options}'}),
          # One of them would serve here, and be missed there.
          'this rank already works with aggregators, of another '
          'communicator; finalize() that first' if has_aggregators() else '',
          remedy='Pass the same name and options on all ranks.')
    count = mpi_comm.size - options.aggregators
    if count < 1:
        raise ValueError(
            f'aggregators={options.aggregators} leaves no worker of '
            f'{mpi_comm.size} ranks; start more, or pass at most '
            f'aggregators={mpi_comm.size - 1}' if mpi_comm.size > 1 else
            "algorithm='aggregator' needs 2 ranks at least; start more")
    everyone = mpi_comm.Dup()
    if everyone.rank >= count:
        everyone.Split(MPI.UNDEFINED)
        serve(everyone)
        return None
    workers = WorkerComm(everyone.Split(0, everyone.rank))
    workers.everyone = everyone
    try:
        communicator = AggregatedCommunicator(workers, name, options)
    except ValueError as error:
        # As all workers have found.
        dismiss(everyone, count)
        workers.Free()
        raise UnfitOptions(str(error)) from error
    communicator._owns_mpi_comm = True
    return communicator


def refuse_parts(mpi_comm: MPI.Comm) -> None:
    """Raises an error unless these are all ranks of the job.

    Aggregators never come back to the program, and whoever has more to do
    with them than this communicator would wait for ever: the stages of a
    pipeline, for example, of which this is the data axis.

    Raises:
        ValueError: They are not; on all ranks.
    """
    if mpi_comm.size < MPI.COMM_WORLD.size:
        raise ValueError(
            "algorithm='aggregator' takes its aggregators away from the "
            'whole job, so it needs all ranks of it: mpi_comm has '
            f'{mpi_comm.size} of {MPI.COMM_WORLD.size}; leave mpi_comm out, '
            'or choose another algorithm')


def remember_aggregators(mpi_comm: MPI.Comm, workers: int) -> None:
    """Notes the ranks of which no communicator can be made any more."""
    _aggregators.update(world_ranks(mpi_comm)[workers:])


def refuse_aggregators(mpi_comm: MPI.Comm) -> None:
    """Raises an error instead of waiting for ranks that are aggregators.

    Raises:
        ValueError: There are some in ``mpi_comm``.
    """
    if not _aggregators:
        return
    found = sorted(_aggregators.intersection(world_ranks(mpi_comm)))
    if found:
        raise ValueError(
            f'{"ranks" if found[1:] else "rank"} '
            f'{", ".join(map(str, found))} of the job only sum'
            f'{"" if found[1:] else "s"} for the workers of an earlier '
            "communicator (algorithm='aggregator') and cannot take part in "
            'another one; pass its mpi_comm: mpi_comm=comm.mpi_comm')

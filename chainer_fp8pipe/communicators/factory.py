"""``create_communicator``: every communicator by its name."""
# With algorithm='aggregator' the last ranks only sum (paper 003), each best on
# a host with more links or faster ones than a worker's.  Such a rank never
# comes back to the program: whoever had more to do with it, as the stages of a
# pipeline, would wait for ever, and is refused.
from __future__ import annotations

from typing import Any

import chainermn
from mpi4py import MPI

from ..allreduce.aggregator import (
    WorkerComm,
    dismiss,
    has_aggregators,
    serve,
)
from ..mpi.agreement import agree
from ..mpi.waiting import world_ranks
from ..mpi.watch import updates, watch
from ..mpi.world import enter_world
from .codec_communicator import CodecCommunicator
from .options import FAMILIES, Options, make_options

#: ChainerMN's own communicators, and the options they take.
CHAINERMN = {
    'naive': (), 'flat': (), 'non_cuda_aware': (), 'dummy': (),
    'pure_nccl': ('allreduce_grad_dtype', 'batched_copy'),
}

# chainermn.create_communicator may come to point here (``run``).
_create_chainermn_communicator = chainermn.create_communicator
# Ranks of COMM_WORLD that serve, or have served and are gone.
_aggregators: set[int] = set()


def create_communicator(name: str = 'fp8', mpi_comm: MPI.Comm | None = None,
                        **options: Any) -> Any:
    """Makes a communicator for data-parallel training.

    Call it on all ranks.  From then on, an uncaught exception ends the whole
    job, with its traceback.

    Args:
        name: ``'fp8'`` (nearest rounding, float32 sums, error feedback),
            ``'fp8_paper'`` (truncation, fp8 sums, no error feedback),
            ``'int4'`` (32 gradients share a scale), ``'bfloat16'``,
            ``'float16'``, ``'float32'``, or one of ChainerMN's: ``'naive'``,
            ``'flat'``, ``'non_cuda_aware'``, ``'pure_nccl'``, ``'dummy'``.
        mpi_comm: The ranks; default ``MPI.COMM_WORLD``.
        options: See :class:`~.options.Options`; for ChainerMN's own,
            ChainerMN's.

    Returns:
        A ChainerMN communicator.  With ``algorithm='aggregator'`` only workers
        get one.  On the last ranks this function sums until the workers are
        done, and then ends the program as ``sys.exit(0)`` does.

    Raises:
        ValueError: Unknown name or option, or a value that is not allowed;
            the message lists what is.
        TypeError: ``mpi_comm`` is no communicator of mpi4py.
        StartError: Of several processes that have been started each is
            alone, says MPI (a ``RuntimeError``).

    .. admonition:: Example

        >>> import chainer_fp8pipe
        >>> comm = chainer_fp8pipe.create_communicator('fp8', warmup=50)
        >>> comm.size
        1
    """
    enter_world()        # first, or others wait for an error here
    if name not in [*FAMILIES, *CHAINERMN]:     # whatever it is
        raise ValueError(f'no communicator is called {name!r}; choose from: '
                         f'{", ".join([*FAMILIES, *CHAINERMN])}')
    if mpi_comm is not None and (
            not isinstance(mpi_comm, MPI.Intracomm) or not mpi_comm):
        raise TypeError("mpi_comm must be an mpi4py intracommunicator, not "
                        f'{mpi_comm!r}')
    mpi_comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    _refuse_aggregators(mpi_comm)
    if name in CHAINERMN:
        return _chainermns(name, mpi_comm, options)
    checked = make_options(name, options)
    if checked.algorithm != 'aggregator':
        watch(mpi_comm)
        return CodecCommunicator(mpi_comm, checked)
    if mpi_comm.size < MPI.COMM_WORLD.size:
        raise ValueError(
            "algorithm='aggregator' needs all ranks of the job: mpi_comm has "
            f'{mpi_comm.size} of {MPI.COMM_WORLD.size}; leave mpi_comm out, '
            'or choose another algorithm')
    watch(mpi_comm)
    communicator = with_aggregators(mpi_comm, checked)
    if communicator is None:
        raise SystemExit(0)
    return communicator


def _chainermns(name: str, mpi_comm: MPI.Comm, options: dict[str, Any]
                ) -> Any:
    unknown = sorted(set(options) - set(CHAINERMN[name]))
    if unknown:
        known = ', '.join(CHAINERMN[name]) or 'none'
        raise ValueError(f'communicator {name!r} has no option '
                         f'{unknown[0]!r}; its options are: {known}')
    watch(mpi_comm)
    try:
        made = _create_chainermn_communicator(name, mpi_comm, **options)
    except RuntimeError as error:
        if name == 'naive':
            raise
        raise RuntimeError(
            f"{error} Take 'fp8' or, for float32, 'naive'; under run and "
            'launch: --communicator naive') from error
    kind: Any = made.__class__

    class Counting(kind):
        """Counts updates, so that a job that stands still is noticed.

        What is split off such a communicator is of the class, too.
        """

        def multi_node_mean_grad(self, model: Any, *args: Any,
                                 **kwargs: Any) -> None:
            super().multi_node_mean_grad(model, *args, **kwargs)
            updates.finished((id(self), id(model)))

        def bcast_data(self, model: Any) -> None:
            super().bcast_data(model)
            updates.broadcast()
    # Snapshots have the name of the communicator.
    Counting.__name__ = Counting.__qualname__ = kind.__name__
    made.__class__ = Counting
    return made


# --- aggregators -------------------------------------------------------------

def with_aggregators(mpi_comm: MPI.Comm, options: Options
                     ) -> CodecCommunicator | None:
    """Makes the last ranks aggregators; call it on all ranks.

    Returns:
        The communicator of the workers, on a worker; ``finalize`` lets the
        aggregators leave, and so does the end of the program.  On an
        aggregator None, as soon as the workers are done.

    Raises:
        ValueError: Options differ between ranks, or leave no worker, or
            some rank has aggregators already; on all ranks.  Or they do not
            fit the workers; on these, while aggregators return.
    """
    agree(mpi_comm, options.described(),
          # One of them would serve here, and be missed there.
          'this rank already works with aggregators, of another '
          'communicator; finalize() that first' if has_aggregators() else '',
          remedy='Pass the same name and options on all ranks.')
    count = mpi_comm.size - options.aggregators
    if count < 1:
        raise ValueError(
            f'aggregators={options.aggregators} leaves no worker of '
            f'{mpi_comm.size} ranks; start more, or pass fewer')
    _aggregators.update(world_ranks(mpi_comm)[count:])
    everyone = mpi_comm.Dup()
    if everyone.rank >= count:
        everyone.Split(MPI.UNDEFINED)
        serve(everyone)
        return None
    workers = WorkerComm(everyone.Split(0, everyone.rank))
    workers.everyone = everyone
    try:
        return CodecCommunicator(workers, options, owns_mpi_comm=True)
    except ValueError:      # as all workers have found
        dismiss(everyone, count)
        workers.Free()
        raise


def _refuse_aggregators(mpi_comm: MPI.Comm) -> None:
    """Raises an error instead of waiting for ranks that are aggregators."""
    found = sorted(_aggregators.intersection(world_ranks(mpi_comm)))
    if found:
        raise ValueError(
            f'these ranks of the job only sum for the workers of another '
            f'communicator: {", ".join(map(str, found))}; pass '
            'mpi_comm=comm.mpi_comm of that one')

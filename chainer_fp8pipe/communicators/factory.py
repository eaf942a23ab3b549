"""``create_communicator``: every communicator by its name."""
from __future__ import annotations

from typing import Any

import chainermn
from mpi4py import MPI

from ..mpi.abort import enter_world
from ..mpi.watch import updates, watch
from . import aggregator_ranks
from .codec_communicator import CodecCommunicator
from .options import FAMILIES, make_options

#: ChainerMN's own communicators, and the options they take.
CHAINERMN = {
    'naive': (), 'flat': (), 'non_cuda_aware': (), 'dummy': (),
    'pure_nccl': ('allreduce_grad_dtype', 'batched_copy'),
}

# chainermn.create_communicator may come to point here (``run``).
_create_chainermn_communicator = chainermn.create_communicator


def create_communicator(name: str = 'fp8', mpi_comm: MPI.Comm | None = None,
                        **options: Any) -> Any:
    """Makes a communicator for data-parallel training.

    Call it on all ranks.  From then on, an exception that nobody catches
    ends the whole job, with its traceback, instead of leaving the other
    ranks waiting.

    Args:
        name: ``'fp8'`` (nearest rounding, float32 sums, error feedback),
            ``'fp8_paper'`` (truncation, fp8 sums, no error feedback),
            ``'int4'``, ``'int5'`` (32 gradients share a scale), ``'float16'``,
            ``'float32'``, or one of ChainerMN's: ``'naive'``,
            ``'flat'``, ``'non_cuda_aware'``, ``'pure_nccl'``, ``'dummy'``.
        mpi_comm: The ranks; default ``MPI.COMM_WORLD``.
        options: See :class:`~.options.ExchangeOptions` and
            :class:`~.options.Fp8Options`, :class:`~.options.BlockOptions` and
            :class:`~.options.Int4Options`; for ChainerMN's own, ChainerMN's.

    Returns:
        A ChainerMN communicator.  With ``algorithm='aggregator'`` it is one
        of the workers only; on the other ranks, the last ones, this function
        sums for them until they are done, and then ends the program as
        ``sys.exit(0)`` does.

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
    if name not in FAMILIES and name not in CHAINERMN:
        raise ValueError(f'no communicator is called {name!r}; choose from: '
                         f'{", ".join([*FAMILIES, *CHAINERMN])}')
    if mpi_comm is not None and not isinstance(mpi_comm, MPI.Comm):
        raise TypeError("mpi_comm must be an mpi4py communicator, not "
                        f'{mpi_comm!r}')
    mpi_comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    aggregator_ranks.refuse_aggregators(mpi_comm)
    if name in FAMILIES:
        return _create(mpi_comm, name, options)
    unknown = sorted(set(options) - set(CHAINERMN[name]))
    if unknown:
        known = ', '.join(CHAINERMN[name]) or 'none'
        raise ValueError(f'communicator {name!r} has no option '
                         f'{unknown[0]!r}; its options are: {known}')
    watch(mpi_comm)
    made = _create_chainermn_communicator(name, mpi_comm, **options)
    made.__class__ = _counting(made.__class__)
    return made


def _counting(kind: Any) -> Any:
    """A class of ChainerMN's whose communicators count updates.

    So that a job that stands still is noticed.  What is split off such a
    communicator is of the class, too.
    """
    class Counting(kind):
        def multi_node_mean_grad(self, model: Any, *args: Any,
                                 **kwargs: Any) -> None:
            super().multi_node_mean_grad(model, *args, **kwargs)
            updates.finished((id(self), id(model)))
    # Snapshots have the name of the communicator.
    Counting.__name__ = Counting.__qualname__ = kind.__name__
    return Counting


def _create(mpi_comm: MPI.Comm, name: str, given: dict[str, Any]
            ) -> CodecCommunicator:
    options = make_options(name, given)
    workers = mpi_comm.size
    if options.algorithm == 'aggregator':
        aggregator_ranks.refuse_parts(mpi_comm)
        workers -= options.aggregators
    watch(mpi_comm, f'aggregator {mpi_comm.rank - workers}'
          if mpi_comm.rank >= workers else '')
    if workers == mpi_comm.size:
        return CodecCommunicator(mpi_comm, name, options)
    try:
        communicator = aggregator_ranks.divide(mpi_comm, name, options)
    except aggregator_ranks.UnfitOptions:       # aggregators have left
        aggregator_ranks.remember_aggregators(mpi_comm, workers)
        raise
    if communicator is None:
        raise SystemExit(0)
    aggregator_ranks.remember_aggregators(mpi_comm, workers)
    return communicator

"""Collective operations that a model's own forward starts."""
# A call of a new form is run on made-up values: an operation of several ranks
# would wait for ever there, or meet another one.  The two batch normalisations
# over ranks are answered as if every rank had sent the same; every other
# operation is refused.  The methods of ChainerMN's communicators and of
# `Group` are replaced while there is a `Recorder`.  Those of mpi4py's, in C,
# cannot be: a link must not keep one; one in a module is not seen.
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chainer
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
from mpi4py import MPI

from ..intercept.function_calls import Interceptor, current
from ..intercept.patching import Patch
from ..mpi.grid import Group
from .placeholder import user_line

#: Those of ChainerMN that no recorded call may start.
_REFUSED = (
    'allreduce', 'allgather', 'alltoall', 'gather', 'bcast', 'scatter',
    'send', 'recv', 'send_obj', 'recv_obj', 'bcast_obj', 'gather_obj',
    'allreduce_obj', 'bcast_data')


class Answering(Interceptor):
    """Answers operations in a recorded pass."""

    #: The ranks over which the model is to be cut.
    pipeline: Any = None

    def communicate(self, name: str, comm: Any,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        """See :meth:`.Interceptor.communicate`.

        Raises:
            ValueError: The operation is none of a batch normalisation, or of
                several stages of the pipeline.
        """
        if answer is None:
            raise ValueError(
                f'{user_line()}: {name}() in forward is an operation of '
                'several ranks, each of which makes other calls of the model; '
                'of these only MultiNodeBatchNormalization and '
                'GroupedBatchNormalization can be cut. Average over replicas '
                'outside of the model')
        pipeline = self.pipeline or MPI.COMM_SELF
        if MPI.Group.Intersection(comm.group, pipeline.group).size > 1:
            raise ValueError(
                f'{user_line()}: a batch normalisation over several stages of '
                'the pipeline, of which one does this call; use a communicator'
                ' of its replicas: create_communicator(..., '
                'mpi_comm=grid.data)')
        return answer()


def refuse_plain(model: chainer.Link) -> None:
    """Raises ValueError if a link keeps a communicator of mpi4py's."""
    for path, link in model.namedlinks():
        for name, value in vars(link).items():
            if isinstance(value, MPI.Intracomm) and (
                    value != MPI.COMM_NULL and value.size > 1):
                raise ValueError(
                    f'link {path} keeps a communicator of several ranks in '
                    f'{name!r}, on which forward would wait for ever; keep '
                    'its rank and size, or a communicator of ChainerMN')


def _mean(comm: Any, sendbuf: Any, recvbuf: Any) -> None:
    if sendbuf is not None:
        recvbuf[...] = sendbuf


def _mean_nccl(comm: Any, sendbuf: Any, recvbuf: Any, n_elems: int,
               dtype: Any, stream: Any = None) -> None:
    recvbuf.array(n_elems, dtype=dtype)[...] = sendbuf.array(
        n_elems, dtype=dtype)


def _patch(owner: Any, name: str, answer: Callable | None) -> Patch:
    def operate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        interceptor = current()
        comm = self.comm if owner is Group else self.mpi_comm
        if interceptor is None or comm.size == 1:
            return original(self, *args, **kwargs)
        return interceptor.communicate(
            name, comm,
            answer and functools.partial(answer, self, *args, **kwargs),
            functools.partial(original, self, *args, **kwargs))
    return Patch(owner, name, operate)


#: Have interceptors see operations.
PATCHES = (
    *(_patch(MpiCommunicatorBase, name, None) for name in _REFUSED),
    _patch(MpiCommunicatorBase, '_multi_node_mean', _mean),
    _patch(PureNcclCommunicator, '_multi_node_mean_nccl', _mean_nccl),
    _patch(Group, 'gather', lambda group, thing: [thing] * group.size))

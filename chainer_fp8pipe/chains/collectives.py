"""Collective operations that a model's own forward starts."""
# Forward is recorded, and a call of a form that was not seen before is run on
# made-up values: an operation of several ranks would wait for ever there, or
# meet another one.  The two batch normalisations over ranks are known, and are
# answered then as if every rank had sent the same; every other operation is
# refused.  The methods of ChainerMN's communicators and of `Group` are
# replaced while there is a `Recorder`; for mpi4py's, which are in C, one that
# refuses stands in attributes of links.  A communicator that forward finds
# elsewhere, in a module, is not seen.
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.pure_nccl_communicator import (
    PureNcclCommunicator,
)
from mpi4py import MPI

from ..intercept.function_calls import current
from ..intercept.patching import Patch
from ..mpi.grid import Group
from .placeholder import user_line

#: What mpi4py's communicators say without the other ranks.
_QUIET = frozenset(('rank', 'size', 'Get_rank', 'Get_size', 'name', 'Get_name',
                    'group', 'Get_group', 'handle'))
#: Those of ChainerMN that no recorded call may start.
_REFUSED = (
    'allreduce', 'allgather', 'alltoall', 'gather', 'bcast', 'scatter',
    'send', 'recv', 'send_obj', 'recv_obj', 'bcast_obj', 'gather_obj',
    'allreduce_obj', 'bcast_data')


def answered(name: str, comm: MPI.Comm, answer: Callable[[], Any] | None,
             pipeline: MPI.Comm | None) -> Any:
    """The result of an operation to which all ranks have sent the same.

    Args:
        name: Of the operation.
        comm: Its ranks.
        answer: See :meth:`.Interceptor.communicate`.
        pipeline: Over which the model is to be cut; None: unknown.

    Raises:
        ValueError: It is none of a batch normalisation, or of several stages.
    """
    if answer is None:
        raise ValueError(
            f'{user_line()}: {name}() in forward is an operation of several '
            'ranks, each of which makes other calls of the model; of these '
            'only MultiNodeBatchNormalization and GroupedBatchNormalization '
            'can be cut. Average over replicas outside of the model')
    groups = [one.Get_group() for one in (comm, pipeline or MPI.COMM_SELF)]
    groups.append(MPI.Group.Intersection(*groups))
    several = groups[-1].size > 1
    for group in groups:
        group.Free()
    if several:
        raise ValueError(
            f'{user_line()}: a batch normalisation over several stages of '
            'the pipeline, of which one does this call; use a communicator '
            'of its replicas: create_communicator(..., mpi_comm=grid.data)')
    return answer()


def hold(owner: Any) -> None:
    """Has interceptors see operations as long as an object lives."""
    for patch in _PATCHES:
        patch.hold(owner)


def _mean(comm: Any, sendbuf: Any, recvbuf: Any) -> None:
    if sendbuf is not None:
        recvbuf[...] = sendbuf


def _mean_nccl(comm: Any, sendbuf: Any, recvbuf: Any, n_elems: int,
               dtype: Any, stream: Any = None) -> None:
    recvbuf.array(n_elems, dtype=dtype)[...] = sendbuf.array(
        n_elems, dtype=dtype)


def _patch(owner: Any, name: str, answer: Callable | None) -> Patch:
    def make(original: Any) -> Any:
        def operate(self: Any, *args: Any, **kwargs: Any) -> Any:
            interceptor = current()
            comm = self._comm if owner is Group else self.mpi_comm
            if interceptor is None or comm.size == 1:
                return original(self, *args, **kwargs)
            return interceptor.communicate(
                name, comm,
                answer and functools.partial(answer, self, *args, **kwargs),
                functools.partial(original, self, *args, **kwargs))
        return operate
    return Patch(owner, name, make)


_PATCHES = (
    *(_patch(MpiCommunicatorBase, name, None) for name in _REFUSED),
    _patch(MpiCommunicatorBase, '_multi_node_mean', _mean),
    _patch(PureNcclCommunicator, '_multi_node_mean_nccl', _mean_nccl),
    _patch(Group, 'gather', lambda group, numbers: numbers[None].repeat(
        group.size, axis=0)),
    _patch(Group, 'gather_objects', lambda group, thing: [thing] * group.size))


class _Refusing(MPI.Intracomm):
    def __getattribute__(self, name: str) -> Any:
        if name in _QUIET or name.startswith('__'):
            return super().__getattribute__(name)
        return answered(name, self, None, None)


@contextlib.contextmanager
def refusing(links: Mapping[str, chainer.Link]) -> Iterator[None]:
    """A block in which mpi4py's communicators in links refuse operations."""
    found = [(vars(link), name, value) for link in links.values()
             for name, value in vars(link).items()
             if isinstance(value, MPI.Intracomm) and value != MPI.COMM_NULL
             and value.size > 1]
    for own, name, comm in found:
        own[name] = _Refusing(comm)
    try:
        yield
    finally:
        for own, name, comm in found:
            own[name] = comm

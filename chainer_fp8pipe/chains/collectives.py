"""Collective operations that a model's own forward starts."""
# A trace runs on one rank, its measurements run a call several times, and a
# rehearsal goes through forward on one rank for all of them: an operation of
# several ranks would wait for ever, or meet another one.  So a call that is
# measured gets an answer at once, as if every rank had sent the same; and
# between calls, where forward would go on with an answer that no other rank
# has, operations are refused.
#
# The methods of ChainerMN's communicators and of `Group` are replaced while
# there is a `Tracer`; mpi4py's own are in C, so that in attributes of links a
# communicator of mpi4py's that refuses everything stands in for the real one.
# One that forward finds elsewhere, in a module, is not seen.
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
_QUIET = frozenset((
    'rank', 'size', 'Get_rank', 'Get_size', 'name', 'Get_name', 'group',
    'Get_group', 'topology', 'Get_topology', 'is_inter', 'is_intra',
    'Is_inter', 'Is_intra', 'handle'))


class Operation(NamedTuple):
    """A collective operation that is about to begin.

    Attributes:
        name: Of the method.
        comm: The ranks.
        answer: Gives what would come if all ranks had sent the same; None:
            nobody knows.
        between: Whether ranks may be answered so between calls, too.
    """

    name: str
    comm: MPI.Comm
    answer: Callable[[], Any] | None
    between: bool

    def answered(self, original: Callable[[], Any], inside: bool,
                 pipeline: MPI.Comm | None = None) -> Any:
        """The operation's result, without asking the other ranks.

        Args:
            original: Does the operation.
            inside: Whether a call does it that one rank runs as a whole.
            pipeline: The ranks over which the model is to be cut, each of
                which does other calls.

        Raises:
            ValueError: In training, ranks would wait for each other.
        """
        if self.comm.size == 1:
            return original()
        where = f'{user_line()}: {self.name}() in forward'
        if not inside and not self.between:
            raise ValueError(
                f'{where} is a collective operation between functions; ranks '
                'go through forward one by one, too, and would wait for each '
                'other. Do it inside of a function, on arrays, or mark the '
                'function around it: chainer_fp8pipe.atomic(function)')
        if self.answer is None:
            raise ValueError(
                f'{where} needs a value of another rank, and cannot be '
                'traced; leave messages between stages to partition(), and '
                'only reduce or gather arrays between replicas')
        if pipeline is not None and _meet(self.comm, pipeline):
            raise ValueError(
                f'{where} is of several stages of the pipeline, of which one '
                'does this call; use a communicator of its replicas: '
                'create_communicator(..., mpi_comm=grid.data)')
        return self.answer()


def _meet(one: MPI.Comm, other: MPI.Comm) -> bool:
    """Whether communicators have more than one rank in common."""
    groups = [one.Get_group(), other.Get_group()]
    groups.append(MPI.Group.Intersection(*groups))
    try:
        return groups[-1].size > 1
    finally:
        for group in groups:
            group.Free()


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


#: Answers of ChainerMN's methods; None: unknown, as of objects, which Python
#: would go on with on all ranks.
_ANSWERS: Mapping[str, Callable | None] = {
    'allreduce': lambda comm, x: x * comm.size,
    'allgather': lambda comm, x: (x,) * comm.size,
    'alltoall': lambda comm, xs: (xs[comm.rank],) * comm.size,
    'gather': lambda comm, x, root=0: (
        (x,) * comm.size if comm.rank == root else None),
    '_multi_node_mean': _mean, 'bcast': None, 'scatter': None, 'send': None,
    'recv': None, 'send_obj': None, 'recv_obj': None, 'bcast_obj': None,
    'gather_obj': None, 'allreduce_obj': None, 'bcast_data': None}


def _patch(owner: Any, name: str, answer: Callable | None,
           between: bool = False) -> Patch:
    def make(original: Any) -> Any:
        def operate(self: Any, *args: Any, **kwargs: Any) -> Any:
            interceptor = current()
            if interceptor is None:
                return original(self, *args, **kwargs)
            return interceptor.communicate(Operation(
                name, self._comm if between else self.mpi_comm,
                answer and functools.partial(answer, self, *args, **kwargs),
                between), functools.partial(original, self, *args, **kwargs))
        return operate
    return Patch(owner, name, make)


_PATCHES = (
    *(_patch(MpiCommunicatorBase, name, answer)
      for name, answer in _ANSWERS.items()),
    _patch(PureNcclCommunicator, '_multi_node_mean_nccl', _mean_nccl),
    _patch(Group, 'gather', lambda group, numbers: numbers[None].repeat(
        group.size, axis=0), between=True),
    _patch(Group, 'gather_objects', lambda group, thing: [thing] * group.size,
           between=True))


class _Refusing:
    def __getattribute__(self, name: str) -> Any:
        if name in _QUIET or name.startswith('__'):
            return super().__getattribute__(name)
        raise ValueError(
            f"{user_line()}: forward uses {name} of mpi4py's communicator, "
            'which other ranks may not answer; use a communicator of '
            "ChainerMN's, inside of functions")


@functools.lru_cache(None)
def _refusing(kind: Any) -> Any:
    return type('Refusing', (_Refusing, kind), {})


@contextlib.contextmanager
def refusing(links: Mapping[str, chainer.Link]) -> Iterator[None]:
    """A block in which mpi4py's communicators in links refuse operations."""
    found = [(vars(link), name, value) for link in links.values()
             for name, value in vars(link).items()
             if isinstance(value, MPI.Comm) and value != MPI.COMM_NULL
             and value.size > 1]
    for own, name, comm in found:
        kind: Any = type(comm)
        own[name] = _refusing(kind)(comm)
    try:
        yield
    finally:
        for own, name, comm in found:
            own[name] = comm

"""Which rank has which parameters and running values, and how they get there.
"""
# A parameter stays where the example has put it.  Links with running values
# are on one chunk for good, as nobody could say whose values count.  Between
# steps ranks may fetch the whole model, for code that calls it.
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..mpi.agreement import raise_together
from ..mpi.waiting import wait_until
from .attributes import Names
from .deferred import draw, pass_by, settle, take_away
from .measure import PLAIN
from .placeholder import is_placeholder
from .plan import PartitionPlan

together = functools.partial(raise_together, error=ValueError)


class Placement:
    """The ranks of parameters and running values.

    Args:
        chunks: The chunks that use a parameter, its home's first, by its
            path.
        keepers: The chunk of the links that keep running values, by path.

    Attributes:
        used: The paths of the parameters of each chunk.
        ranks: The ranks of the pipeline that have a parameter, by its path;
            its home comes first.
        ties: The same of the parameters on several ranks.
        own: The parameters that have values on this rank, by path.
    """

    def __init__(self, names: Names, plan: PartitionPlan, grid: Any,
                 chunks: Mapping[str, tuple[int, ...]],
                 keepers: Mapping[str, int]) -> None:
        self.names, self._plan, self._grid = names, plan, grid
        self.chunks, self._keepers = chunks, keepers
        self.used = {chunk: sorted(name for name, of in chunks.items()
                                   if chunk in of)
                     for chunk in range(len(plan.cuts) + 1)}
        self.ranks = {name: tuple(dict.fromkeys(
            chunk % plan.stages for chunk in of))
            for name, of in chunks.items()}
        self.ties = {name: ranks for name, ranks in self.ranks.items()
                     if len(ranks) > 1}
        self.own = self._always = {
            name: parameter for name, parameter in names.parameters.items()
            if grid.stage_index in self.ranks[name]}

    def distribute(self) -> None:
        """Gives each rank its own parameters' values, and no others.

        Values are those of the first rank, which draws what is yet to be
        drawn; so are the persistent values of links.
        """
        # As in serial training: what gets its shape in forward is drawn last.
        # A parameter that its link makes in forward has no values yet.
        names, comm = self.names, self._grid.comm
        self._send(comm, dict.fromkeys(comm.bcast([name for name in sorted(
            names.parameters, key=lambda name: names.shaped.index(name) + 1
            if name in names.shaped else 0)
            if names.parameters[name]._data[0] is not None]), 0))
        _share_persistent(names, comm, () if comm.rank else names.links)

    def fetch(self) -> None:
        """Gives all ranks the whole model, until :meth:`give_back`.

        Call it on all ranks of the pipeline, between steps.

        Raises:
            ValueError: A value cannot be sent; on all ranks.
        """
        comm, self.own = self._grid.pipeline, self.names.parameters
        try:
            self._send(comm, {
                name: ranks[0] for name, ranks in self.ranks.items()
                if self.own[name]._data[0] is not None
                and len(ranks) < comm.size})
            _share_persistent(self.names, comm, [
                path for path, chunk in self._keepers.items()
                if chunk % self._plan.stages == comm.rank])
        except BaseException:
            self.give_back()
            raise

    def _send(self, comm: MPI.Comm, roots: Mapping[str, int]) -> None:
        """Gives parameters' values, one after the other, to their ranks."""
        values = self._sent(comm.rank, roots)
        # A rank's error with one value is raised when all ask for the next.
        while (one := together(comm, lambda: next(values, None))) is not None:
            host, root = one
            if comm.size > 1:
                wait_until(comm.Ibcast([host.reshape(-1).view(numpy.uint8),
                                        MPI.BYTE], root).Test)

    def _sent(self, rank: int, roots: Mapping[str, int]
              ) -> Iterator[tuple[numpy.ndarray, int]]:
        """Gives memory for each value that is sent, and the rank with it.

        When it goes on, the value has come.
        """
        for name, root in roots.items():
            parameter = self.names.parameters[name]
            if is_placeholder(parameter._data[0]):
                if rank == root:
                    draw(parameter)
                elif self.own is self._always:  # it is yet to be drawn
                    pass_by(parameter)
            array = parameter._data[0]
            host = numpy.empty(array.shape, array.dtype)
            if rank == root:
                host[...] = chainer.backends.cuda.to_cpu(array)
            yield host, root
            if name not in self.own:
                take_away(name, parameter)
            elif is_placeholder(array):
                settle(parameter, parameter._initial_device.send(host))
            else:
                _write(host, array)

    def give_back(self) -> None:
        """Leaves placeholders of what was fetched."""
        for name in self.own.keys() - self._always.keys():
            take_away(name, self.names.parameters[name])
        self.own = self._always

    def is_own(self, link: chainer.Link, name: str) -> bool:
        """Whether this rank saves and loads an attribute of a link."""
        value = vars(link).get(name)
        if isinstance(value, chainer.Parameter):
            return self.names.of(value) in self.own
        me, path = self._grid.stage_index, self.names.of(link)
        return path is not None and (
            self._keepers.get(path, me) % self._plan.stages == me)

    def check(self) -> None:
        """Raises ValueError if a parameter was replaced since the cut."""
        for path, parameter in self.names.parameters.items():
            link, _, name = path.rpartition('/')
            if vars(self.names.links[link or '/']).get(name) is not parameter:
                raise ValueError(
                    f'parameter {path} was replaced after partition(); change '
                    'its array, or call partition() afterwards')
            array = parameter._data[0]
            if array is not None and (      # or its link makes it, in forward
                    path in self.own) == is_placeholder(array):
                raise ValueError(
                    f'parameter {path} has '
                    + 'no ' * (path in self.own)
                    + f'values on stage {self._grid.stage_index}; change '
                    'parameters on the rank that has them only, or use '
                    'chainer.serializers.load_npz')


def _share_persistent(names: Names, comm: MPI.Comm, paths: Iterable[str]
                      ) -> None:
    """Gives all ranks the persistent values of this rank's links."""
    def read() -> list[tuple[str, str, Any]]:
        found = [(path, name, getattr(names.links[path], name))
                 for path in paths
                 for name in sorted(names.links[path]._persistent)]
        return [(path, name, value if isinstance(value, PLAIN) else
                 chainer.backends.cuda.to_cpu(value))
                for path, name, value in found
                if isinstance(value, (*PLAIN, *chainer.get_array_types()))]
    everyone = comm.allgather(together(comm, read))

    def write() -> None:
        everyone[comm.rank] = []
        for path, name, value in itertools.chain(*everyone):
            link = names.links[path]
            now = getattr(link, name)
            if not isinstance(value, numpy.ndarray):
                setattr(link, name, value)
            elif now is None:
                setattr(link, name, link.device.send(value))
            else:
                _write(value, now)
    together(comm, write)


def _write(host: numpy.ndarray, array: Any) -> None:
    array[...] = chainer.backend.get_array_module(array).asarray(host)

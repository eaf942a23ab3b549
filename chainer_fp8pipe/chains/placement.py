"""Decides on which chunk and rank calls, parameters and averages are."""
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
from . import nested
from .attributes import Names
from .deferred import Drawing, draw, settle, take_away
from .layout import Layout
from .measure import PLAIN
from .placeholder import is_placeholder
from .plan import PartitionPlan

together = functools.partial(raise_together, error=ValueError)
#: So many layouts are kept.
_LAYOUTS = 512


class Placement:
    """The chunks and ranks of calls, parameters and running values.

    Attributes:
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        chunks: The chunks that use a parameter, its home's first, by its
            path; of these three there are none before :meth:`place`.
        ranks: The ranks of the pipeline that have a parameter, in this order.
        own: The parameters that have values on this rank, by path.
    """

    def __init__(self, names: Names, plan: PartitionPlan, grid: Any) -> None:
        self.names, self._plan, self._grid = names, plan, grid
        self.keepers: dict[str, int] = {}
        self.place({})
        self._layouts: dict[Any, Layout] = {}

    # --- calls ---------------------------------------------------------------

    def layout_of(self, program: Any) -> Layout:
        """The layout of a program.

        Raises:
            ValueError: The calls of a link with running values would be on
                two chunks, or a call where its parameter is not.
        """
        key = program.key()
        if key not in self._layouts:
            if len(self._layouts) > _LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._lay_out(program)
        return self._layouts[key]

    def _lay_out(self, program: Any) -> Layout:
        made = functools.partial(Layout, program, self._plan.order,
                                 self._plan.cuts, self.keepers)
        known, layout = set(self.keepers), made()
        for call, chunk in zip(program.calls, layout.chunks, strict=True):
            for name in set(call.whole) - known:
                self.keepers[name] = max(chunk, self.keepers.get(name, 0))
        if len(self.keepers) > len(known):
            # Programs that only read these values may do so elsewhere.
            self._layouts.clear()
            layout = made()
        for call, chunk in zip(program.calls, layout.chunks, strict=True):
            for name in (*call.whole, *call.reads):
                if self.keepers.get(name, chunk) != chunk:
                    raise ValueError(
                        f'link {name} keeps running values, and its calls '
                        'would be on two ranks for inputs of this form; make '
                        'the partition with such an example')
        for name, chunks in layout.holders.items():
            for stage in {chunk % self._plan.stages for chunk in chunks}:
                if stage not in self.ranks.get(name, (stage,)):
                    raise ValueError(
                        f'this batch needs parameter {name} on stage {stage}, '
                        'which has not got it; make the partition with such '
                        'an example')
        return layout

    # --- parameters and running values ---------------------------------------

    def place(self, chunks: Mapping[str, tuple[int, ...]]) -> None:
        """Has parameters, by path, stay on chunks, of which one is first."""
        self.chunks = chunks
        self.ranks = {name: tuple(dict.fromkeys(
            chunk % self._plan.stages for chunk in of))
            for name, of in chunks.items()}
        self.own = self._always = {
            name: self.names.parameters[name]
            for name, ranks in self.ranks.items()
            if self._grid.stage_index in ranks}

    def on_chunk(self, chunk: int) -> list[str]:
        """The paths of the parameters that a chunk uses."""
        return sorted(name for name, of in self.chunks.items() if chunk in of)

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """The ranks of the parameters on several ones, by path."""
        return {name: ranks for name, ranks in self.ranks.items()
                if len(ranks) > 1}

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
                if self.own[name]._data[0] is not None})
            _share_persistent(self.names, comm, [
                path for path, chunk in self.keepers.items()
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
            # All ranks draw these values, so that NumPy's generator is the
            # same on all of them afterwards.
            if is_placeholder(parameter._data[0]) and (
                    rank == root or self.own is self._always
                    and not isinstance(parameter.initializer, Drawing)):
                draw(parameter)
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
            self.keepers.get(path, me) % self._plan.stages == me)

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
    arrays = chainer.get_array_types()
    everyone = comm.allgather(together(comm, lambda: [
        (path, name, nested.mapped(value, chainer.backends.cuda.to_cpu))
        for path in paths for name in sorted(names.links[path]._persistent)
        if isinstance(value := getattr(names.links[path], name),
                      (*PLAIN, *arrays))]))

    def write() -> None:
        for path, name, value in itertools.chain(*everyone):
            link = names.links[path]
            now = getattr(link, name)
            if isinstance(now, arrays) and isinstance(value, numpy.ndarray):
                _write(value, now)
            else:
                setattr(link, name, nested.mapped(value, link.device.send))
    together(comm, write)


def _write(host: numpy.ndarray, array: Any) -> None:
    array[...] = chainer.backend.get_array_module(array).asarray(host)

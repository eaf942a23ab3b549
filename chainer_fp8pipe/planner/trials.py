"""Trains copies of a model in some ways, and times their updates."""
# Each way trains copies of model and optimizer with the updater that would
# train them, and the script's own data.  What comes once is not timed: a
# codec's warm-up, the parameters of the first update, and the connections and
# memory of the first exchange.  A machine that others use changes its pace:
# all blocks of all turns count.
#
# A rank that fails in the middle of an update leaves the others in an exchange
# that no one can end.  It waits some seconds for them to fail as well, and
# goes on with them if they do; if not, it ends all ranks with its error.
from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import chainermn
import numpy
from chainer.training.updaters import StandardUpdater
from chainermn.communicators.communicator_base import CommunicatorBase
from mpi4py import MPI

from ..chains import nested
from ..chains.partition import partition
from ..communicators import create_communicator
from ..communicators.options import without_warmup
from ..mpi.agreement import is_raised_by_all, raise_together
from ..mpi.grid import Group, ProcessGrid
from ..mpi.ranks import once
from ..mpi.waiting import wait_until
from ..mpi.world import fail_all, shown
from ..training.unmodified.job import Divided
from ..training.updater import PipelineUpdater
from .job_plan import Trial, Way

#: Blocks of updates that are timed, of so many updates at most.
_BLOCKS, _MOST = 5, 20
#: Further turns of those that exceed the fastest by this share at most.
_TURNS, _NEAR = 3, 0.5
#: Updates that a trial takes at least, for whether there is time for it.
_FEWEST = 5
#: Seconds that a rank waits for others to fail as it did.
_PATIENCE = 10.0


class Example:
    """A batch of a converter's; ValueError if arrays differ in length."""

    def __init__(self, batch: Any) -> None:
        self._leaves, self._tree = nested.leaves(batch)
        shapes = [nested.array_of(leaf).shape for leaf in self._leaves]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or sizes & {(), (0,)}:
            raise ValueError(
                'the arrays of the example must all have the samples of one '
                'batch as their first axis, not '
                + ', '.join(map(str, shapes)))
        self.samples: int = sizes.pop()[0]

    def of(self, samples: int) -> Any:
        """A batch of so many samples; repeated where there are fewer."""
        return nested.rebuilt(self._tree, [
            chainer.backend.get_array_module(array).concatenate(
                [array] * -(-samples // self.samples))[:samples]
            for array in map(nested.array_of, self._leaves)])


class Trained(NamedTuple):
    """Updater, optimizer and batch of a script; trials change copies of them.
    """

    updater: Any        # StandardUpdater; its iterator is used up
    optimizer: Any      # Chainer's own
    example: Example    # a batch, or a part of one
    batch: int          # samples of all ranks together
    #: Whether the first rank reads for all of them, as for scripts without
    #: ChainerMN; if not, each rank reads its own part.
    is_shared: bool = False

    @property
    def model(self) -> Any:
        """The whole model, as it is written; it returns its loss."""
        return self.optimizer.target

    def copied(self) -> Any:
        """A copy of the optimizer, set up with a copy of the model."""
        return copy.deepcopy(self.optimizer, communicators_in(self.model))

    def share(self, replicas: int, micro_batches: int = 1) -> Any:
        """As many samples as a replica's micro-batch has."""
        return self.example.of(
            max(1, -(-self.batch // replicas // micro_batches)))


def communicators_in(model: Any) -> dict[int, Any]:
    """By identity, what links talk to other ranks with, as copies do, too."""
    return {id(value): value for link in model.links()
            for value in vars(link).values()
            if isinstance(value, (MPI.Comm, CommunicatorBase, Group))}


class Trials:
    """Tries ways, on all ranks, and knows what they took.

    ``run`` tries one; ``left`` gives the seconds that are, equal on all ranks.
    """

    def __init__(self, run: Callable[[Way], Sequence[float]],
                 say: Callable[[str], object],
                 left: Callable[[], float] = lambda: math.inf) -> None:
        self._run, self._say, self._left = run, say, left
        #: Ways and what they took, in the order of trials.
        self.found: list[tuple[Way, Trial]] = []
        self.remarks: list[str] = []        # why ways were not tried
        self._blocks: dict[str, list[float]] = {}

    def fastest(self) -> float:
        """Seconds of an update; 0 before the first trial."""
        return min((one.seconds for _, one in self.found), default=0.0)

    def add(self, way: Way, again: str = '') -> bool:
        """Tries a way, unless the time is over; whether that has worked.

        A way that was tried is passed over, except ``again``.
        """
        if str(way) in self._blocks and not again:
            return False
        try:
            if self._left() < _FEWEST * self.fastest():
                raise ValueError('the time was over')
            self._say(f'trying {way}')
            blocks = self._blocks[str(way)] = [
                *self._blocks.get(str(way), ()), *self._run(way)]
        except ValueError as error:
            self.remarks.append(f'{way} was not tried{again}: {error}')
            return False
        low, median, high = numpy.percentile(blocks, (25, 50, 75))
        self.found = [one for one in self.found if one[0] != way] + [(
            way, Trial(str(way), float(median), float(
                (high - low) / 2 / median / math.sqrt(len(blocks)))))]
        return True

    def again(self) -> None:
        """Tries those that came close to the fastest in further turns."""
        for _ in range(_TURNS):
            most = (1 + _NEAR) * self.fastest()
            near = [way for way, one in self.found if one.seconds <= most]
            # The last one first, so that a slow minute does not always hit it.
            for way in reversed(near * (len(near) > 1)):
                if self._left() < 2 * _FEWEST * most or not self.add(
                        way, ' again'):
                    return


def try_way(way: Way, trained: Trained, comm: MPI.Comm, seconds: float
            ) -> list[float]:
    """Seconds of an update of a copy, in each of some blocks of updates.

    Which may take so many seconds.  One process is the first rank; the others
    wait without taking a core.  Raises ValueError on all if one has failed.
    """
    here = comm if way.ranks == comm.size else MPI.COMM_SELF
    found: list[float] = []

    def act() -> None:
        update = _updater(way, trained, here, stack).update
        update()        # sends parameters
        update()        # the first exchange
        found.extend(_blocks_of(update, here, seconds))
    with contextlib.ExitStack() as stack:
        together(comm,
                 act if here is comm or comm.rank == 0 else lambda: None)
    return comm.bcast(found)


def together(comm: MPI.Comm, action: Callable[[], Any]) -> None:
    """Does ``action``, in which ranks communicate.

    Raises ValueError on all ranks if it has failed on one.
    """
    meeting = once(comm, 'trials', comm.Dup)    # others may be in `comm`
    problem, reason, end = '', None, math.inf
    try:
        action()
    except Exception as error:
        problem, reason = f'{type(error).__name__}: {error}', error
        if not is_raised_by_all(error):
            end = time.monotonic() + _PATIENCE
    arrived = meeting.Ibarrier()
    wait_until(lambda: arrived.Test() or time.monotonic() > end)
    if reason is not None and not arrived.Test():   # others wait for it
        fail_all(reason, shown(reason))
    for text in filter(None, meeting.allgather(problem)):
        raise ValueError(text.removeprefix('ValueError: '))


def _blocks_of(update: Callable[[], Any], comm: MPI.Comm, seconds: float
               ) -> list[float]:
    """Seconds of an update, of the slowest rank, in each of some blocks."""
    def block(count: int) -> float:
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(count):
            update()
        return comm.allreduce((time.perf_counter() - begin) / count, MPI.MAX)
    found = [block(1), block(1)]
    if (one := min(found)) * _BLOCKS > seconds:
        return found
    each = max(1, min(_MOST, int(seconds / _BLOCKS / max(one, 1e-4))))
    return [block(each) for _ in range(_BLOCKS)]


def grid_of_stages(comm: MPI.Comm, stages: int) -> ProcessGrid:
    """The same for each call."""
    return once(comm, f'grid of {stages} stages',
                lambda: ProcessGrid(comm, pipeline=stages))


def _updater(way: Way, trained: Trained, comm: MPI.Comm,
             stack: contextlib.ExitStack) -> Any:
    """What would train the model, until the stack is left."""
    grid, cut = grid_of_stages(comm, way.stages), way.cut
    optimizer = raise_together(comm, trained.copied)
    updater = trained.updater
    iterator = updater.get_iterator('main')
    # Of a script without ChainerMN, replicas are pipelines of one stage.
    is_divided = cut is not None or trained.is_shared and comm.size > 1
    if is_divided:
        part = partition(
            optimizer.target, trained.share(way.replicas, way.micro_batches),
            grid, plan=cut, micro_batches=way.micro_batches)
        if optimizer.target is not part:
            optimizer.setup(part)
    if way.replicas > 1:
        communicator = create_communicator(
            way.communicator, comm if cut is None else grid.data,
            **{**way.options, **without_warmup(way.communicator)})
        if hasattr(communicator, 'finalize'):
            stack.callback(communicator.finalize)
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, communicator)
    if not is_divided:
        return StandardUpdater(iterator, optimizer, updater.converter,
                               input_device=updater.input_device)
    if grid.stage_index == 0 and grid.replicas > 1:
        iterator = Divided(iterator, grid.data)
    return PipelineUpdater(
        iterator, optimizer, grid, micro_batches=way.micro_batches,
        schedule=cut.schedule if cut else '1f1b',
        converter=updater.converter, device=updater.input_device)

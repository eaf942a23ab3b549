"""Trains copies of a model in several ways, and takes the fastest."""
# A formula does not see everything that makes a real update slow: reading the
# data, a thread that competes for the interpreter, other load, caches, what
# MPI does.  So each way trains copies of model and optimizer, hooks and frozen
# parameters included, with the updater that would train them, and with the
# script's own iterator and converter where there is a script.  What comes once
# is not timed: a codec's warm-up is left out, the first update sends
# parameters, the first exchange connects ranks and gets memory.
#
# A machine that others use changes its pace: ways that came close to the
# fastest are tried again in further turns, and all blocks of all turns count.
# Two ways are equally fast if they differ by less than both are uncertain.
#
# A rank that fails in the middle of an update leaves the others in an exchange
# that no one can end.  It waits some seconds for them to fail as well, and
# goes on with them if they do; if not, it ends all ranks with its error.
from __future__ import annotations

import contextlib
import copy
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import chainermn
import numpy
from chainer.training.updaters import StandardUpdater
from chainermn.communicators.communicator_base import CommunicatorBase
from mpi4py import MPI

from ..chains.measure import memory_traced
from ..chains.partition import partition
from ..communicators.options import without_warmup
from ..mpi.agreement import is_raised_by_all, raise_together
from ..mpi.grid import Group
from ..mpi.ranks import once
from ..mpi.tracebacks import shown
from ..mpi.waiting import wait_until
from ..mpi.world import end_all_ranks
from ..pipeline.randomness import preserved
from ..training.updater import PipelineUpdater
from .example import Data, Example, Repeating
from .job_plan import Trial, Way, communicator_of, cut_as, grid_of_stages

#: Blocks of updates that are timed, of so many updates at most.
_BLOCKS, _MOST = 5, 20
#: Ways are equally fast within this share, however certain both are, and
#: never beyond that one.
_EQUAL, _APART = 0.03, 0.1
#: Further turns, and the most ways that are tried again in them: those that
#: exceed the fastest by this share at most.  One that takes twice as long in
#: its first two updates that count is timed no more.
_TURNS, _FINALISTS, _NEAR, _FAR = 3, 5, 0.5, 2.0
#: Updates that a trial takes at least, for whether there is time for it.
_FEWEST = 5
#: Seconds that a rank waits for others to fail as it did.
_PATIENCE = 10.0


class Trained(NamedTuple):
    """What is trained.

    Attributes:
        model: The whole model; it stays as it is.
        optimizer: Set up with it, or not yet; it stays as it is.
        example: Samples of the data.
        batch: Samples of an update, of all ranks together.
        data: A script's; None: the example again and again.
        memory: Bytes of arrays that a rank may use; None: no limit, and they
            are not measured.
    """

    model: Any
    optimizer: Any
    example: Example
    batch: int
    data: Data | None = None
    memory: float | None = None

    def copied(self) -> Any:
        """A copy of the optimizer, set up with a copy of the model."""
        memo = communicators_in(self.model)
        if self.optimizer.target is self.model:
            return copy.deepcopy(self.optimizer, memo)
        clone = copy.copy(self.optimizer)
        clone.hyperparam = copy.copy(self.optimizer.hyperparam)
        return clone.setup(copy.deepcopy(self.model, memo))

    def share(self, replicas: int, micro_batches: int = 1) -> Any:
        """As many samples as a replica's micro-batch has."""
        return self.example.of(
            max(1, -(-self.batch // replicas // micro_batches)))


class Blocks(NamedTuple):
    """Seconds of an update in each block, and bytes of the fullest rank.

    ``problem`` says why there are none.  All are the same on all ranks.
    """

    seconds: tuple[float, ...] = ()
    memory: float = 0.0
    problem: str = ''


def communicators_in(model: Any) -> dict[int, Any]:
    """By identity, what links talk to other ranks with.

    A copy of a model talks to the same ranks.
    """
    return {id(value): value for link in model.links()
            for value in vars(link).values()
            if isinstance(value, (MPI.Comm, CommunicatorBase, Group))}


class Trials:
    """Tries ways, and knows what they took.

    Args:
        run: Tries a way, on all ranks; is given the seconds of an update from
            which on it need not go on.
        say: Is told what is being tried.
        left: Seconds in which ways may be tried; the same on all ranks.
    """

    def __init__(self, run: Callable[[Way, float], Blocks],
                 say: Callable[[str], None],
                 left: Callable[[], float] = lambda: math.inf) -> None:
        self._run, self._say, self._left = run, say, left
        self._found: dict[str, tuple[Way, Blocks]] = {}
        #: Why ways were not tried.
        self.remarks: list[str] = []

    def add(self, way: Way) -> None:
        """Tries a way, unless the time is over or it was tried."""
        fastest = min(map(self._median, self._found), default=0.0)
        if str(way) in self._found:
            return
        if self._found and self._left() < _FEWEST * fastest:
            self.remarks.append(f'{way} was not tried: the time was over')
            return
        self._say(f'trying {way}')
        blocks = self._run(way, _FAR * fastest or math.inf)
        if blocks.problem:
            self.remarks.append(f'{way} was not tried: {blocks.problem}')
        else:
            self._found[str(way)] = way, blocks

    def again(self) -> None:
        """Tries those that came close to the fastest in further turns."""
        for _ in range(_TURNS):
            ranked = sorted(self._found, key=self._median)[:_FINALISTS]
            near = [name for name in ranked if self._median(name) <= (
                self._median(ranked[0]) * (1 + _NEAR))]
            # The last one first, so that a slow minute does not always hit it.
            for name in reversed(near * (len(near) > 1)):
                if self._left() < 2 * _FEWEST * self._median(name):
                    return
                self._say(f'trying {name} again')
                way, before = self._found[name]
                more = self._run(way, math.inf)
                self._found[name] = way, Blocks(
                    before.seconds + more.seconds,
                    max(before.memory, more.memory))

    def table(self) -> list[tuple[Way, Trial]]:
        """What the ways took, the fastest first."""
        return sorted(((way, trial_of(way, blocks))
                       for way, blocks in self._found.values()),
                      key=lambda one: one[1].seconds)

    def fastest(self, ways: Iterable[Way]) -> Way | None:
        """Of some that may have been tried; None: none was."""
        tried = [way for way in ways if str(way) in self._found]
        return min(tried, key=lambda way: self._median(str(way)),
                   default=None)

    def _median(self, name: str) -> float:
        return float(numpy.median(self._found[name][1].seconds))


def trial_of(way: Way, blocks: Blocks) -> Trial:
    """Median of the blocks, and how uncertain it is."""
    low, median, high = numpy.percentile(blocks.seconds, (25, 50, 75))
    return Trial(str(way), float(median), float(
        (high - low) / 2 / median / math.sqrt(len(blocks.seconds))),
        blocks.memory)


def preferred(table: Sequence[tuple[Way, Trial]], as_it_is: Way | None = None
              ) -> Way:
    """The way to take: of the fastest the script's own, or the simplest.

    Args:
        table: What ways took.
        as_it_is: How the script trains; None: nobody knows.
    """
    best = min((trial for _, trial in table), key=lambda one: one.seconds)
    equal = [way for way, trial in table if trial.seconds <= best.seconds * (
        1 + max(_EQUAL, min(best.spread, trial.spread, _APART)))]
    return as_it_is if as_it_is in equal else min(equal, key=Way.simplicity)


# --- one way ----------------------------------------------------------------

def try_way(way: Way, trained: Trained, comm: MPI.Comm,
            seconds: float = 1.0, limit: float = math.inf) -> Blocks:
    """Trains a copy of the model in a way for some updates.

    Call it on all ranks.  If the way is one process, the first rank trains
    with the whole batch, and the others wait without taking a core.

    Args:
        way: To train.
        trained: Model, optimizer and data.
        comm: All ranks.
        seconds: That the timed updates may take.
        limit: Seconds of an update from which on it need not go on.
    """
    here = comm if way.ranks == comm.size else MPI.COMM_SELF
    found: tuple[float, ...] = ()
    memory = 0.0
    done: list[Callable[[], Any]] = []

    def act() -> None:
        nonlocal found, memory
        with undisturbed():
            with _most_bytes(trained.memory) as bytes_:
                updater = _updater(way, trained, here, done)
                if trained.memory is not None:      # while it is built, a
                    tracemalloc.reset_peak()        # model may be whole
                updater.update()        # sends parameters
                updater.update()        # the first exchange
            memory = here.allreduce(bytes_[0], MPI.MAX)
            found = blocks_of(updater.update, here, seconds, limit)
    problem = together(
        comm, act if here is comm or comm.rank == 0 else lambda: None)
    if problem:
        return Blocks(problem=problem)
    for finish in done:
        finish()
    found, memory = comm.bcast((found, memory))
    if trained.memory is not None and memory > trained.memory:
        return Blocks(problem=f'a rank takes {memory:.3g} of '
                      f'{trained.memory:.3g} bytes')
    return Blocks(found, memory)


def together(comm: MPI.Comm, action: Callable[[], Any]) -> str:
    """Does ``action``, in which ranks communicate; call it on all ranks.

    If others do not come to an end, a rank that fails ends all of them.

    Returns:
        Why it has failed on a rank, the same on all ranks; '' if on none.
    """
    meeting = once(comm, 'trials', comm.Dup)    # others may be in `comm`
    problem = ''
    try:
        action()
        wait_until(meeting.Ibarrier().Test)
    except Exception as error:
        problem = f'{type(error).__name__}: {error}'
        end = math.inf if is_raised_by_all(error) else (
            time.monotonic() + _PATIENCE)
        arrived = meeting.Ibarrier()
        wait_until(lambda: arrived.Test() or time.monotonic() > end)
        if not arrived.Test():      # no one may catch it: others wait for it
            end_all_ranks(f'\nrank {comm.rank} of {comm.size} failed, ending '
                          f'all:\n{shown(error)}', 1)
    return next(filter(None, meeting.allgather(problem)), '')


def blocks_of(update: Callable[[], Any], comm: MPI.Comm, seconds: float,
              limit: float = math.inf,
              clock: Callable[[], float] = time.perf_counter
              ) -> tuple[float, ...]:
    """Seconds of an update, of the slowest rank, in each of some blocks.

    Args:
        update: Makes one, on all ranks.
        comm: All ranks; they make equally many updates.
        seconds: That all blocks may take; there are two at least.
        limit: Seconds of an update from which on two are enough.
        clock: Gives seconds.
    """
    def block(count: int) -> float:
        comm.Barrier()
        begin = clock()
        for _ in range(count):
            update()
        return comm.allreduce((clock() - begin) / count, MPI.MAX)
    found = block(1), block(1)
    one = min(found)
    if one > limit or one * _BLOCKS > seconds:
        return found
    each = max(1, min(_MOST, int(seconds / _BLOCKS / max(one, 1e-4))))
    return tuple(block(each) for _ in range(_BLOCKS))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Gives Python's and NumPy's generators their states back."""
    state = random.getstate()
    try:
        with preserved():
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _most_bytes(limit: float | None) -> Iterator[list[float]]:
    """Bytes of arrays and objects that were made in the block, at most."""
    found = [0.0]
    if limit is None:
        yield found
        return
    with memory_traced():
        before, _ = tracemalloc.get_traced_memory()
        yield found
        found[0] = float(tracemalloc.get_traced_memory()[1] - before)


def _updater(way: Way, trained: Trained, comm: MPI.Comm,
             done: list[Callable[[], Any]]) -> Any:
    """What would train the model; adds what is to be done afterwards."""
    grid = grid_of_stages(comm, way.stages)
    optimizer = raise_together(comm, trained.copied)
    data = trained.data
    if data is None:
        data = Data(Repeating(trained.share(way.replicas)))
    # Of a script without ChainerMN, replicas are pipelines of one stage.
    is_divided = way.cut is not None or data.is_shared and comm.size > 1
    if is_divided:
        example = trained.share(way.replicas, way.micro_batches)
        part = (partition(optimizer.target, example, grid, micro_batches=1)
                if way.cut is None else
                cut_as(way.cut, optimizer.target, example, grid))
        if optimizer.target is not part:
            optimizer.setup(part)
    if way.replicas > 1:
        communicator = communicator_of(way, comm, **without_warmup(
            way.communicator))
        if hasattr(communicator, 'finalize'):
            done.append(communicator.finalize)
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, communicator)
    iterator, given = data.of_rank(grid), {
        'converter': data.converter, 'device': data.device}
    if is_divided:
        return PipelineUpdater(
            iterator, optimizer, grid, micro_batches=way.micro_batches,
            schedule=way.cut.schedule if way.cut else '1f1b', **given)
    given['input_device'] = given.pop('device')
    return StandardUpdater(iterator, optimizer, **given)

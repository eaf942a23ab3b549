"""Runs the most promising ways for some updates, and takes the fastest."""
# A formula does not see everything that makes a real update slow: reading the
# data, a thread that competes for the interpreter, other load, caches, what
# MPI does.  So the ways that it puts first are tried on copies of model and
# optimizer, hooks and frozen parameters included, with the updaters that would
# train them, and with the script's own iterator and converter where there is a
# script.  ChainerMN's own naive and one process alone are tried beside them,
# as nobody should take more machinery than pays.  Codecs are tried without
# their warm-up, in which they would be float32.
#
# A machine that others use changes its pace: ways that came close to the
# fastest are tried again in further turns, and all blocks of all turns count.
# Two ways that differ by less than their spread are equally fast.  Of those
# the exact codec is taken before others, and then the simplest way.
from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainermn
import numpy
from chainer.training.updaters import StandardUpdater
from mpi4py import MPI

from ..chains.measured_optimizer import set_up_anew
from ..communicators.options import without_warmup
from ..mpi.agreement import raise_together
from ..mpi.waiting import wait_until
from ..pipeline.randomness import preserved
from ..planning.job_plan import Configuration, JobPlan, Timing
from ..training.replica_updater import ReplicaUpdater
from ..training.updater import PipelineUpdater
from .example import Data, Example, Repeating
from .planned_job import PlannedJob, shapes_of

#: Updates that are not timed (the first one sends parameters only), blocks of
#: those that are, and updates of a block at most.
_WARM_UP, _BLOCKS, _MOST = 3, 4, 20
#: Seconds of an update from which on fewer are made.
_LONG = 0.3
#: Medians that differ by less are equal, whatever their spread was.
_EQUAL = 0.03
#: Further turns, and the most ways that are tried again in them: those whose
#: median exceeds the fastest's by this share at most.  A way is left after its
#: second update if that exceeds the fastest's by this share twice.
_TURNS, _FINALISTS, _NEAR = 2, 4, 0.4
#: So many ways are tried whatever the time; others until the time is over by
#: so many seconds.
_FEWEST, _OVERTIME = 2, 6.0


class Trained(NamedTuple):
    """What is trained.

    Attributes:
        model: The whole model; it stays as it is.
        optimizer: Set up with it, or not yet; it stays as it is.
        example: Samples of the data.
        batch: Samples of an update, of all ranks together.
        data: A script's; None: the example again and again.
    """

    model: Any
    optimizer: Any
    example: Example
    batch: int
    data: Data | None = None

    def copied(self) -> Any:
        """A copy of the optimizer, set up with a copy of the model."""
        if self.optimizer.target is self.model:
            return copy.deepcopy(self.optimizer)
        return set_up_anew(self.optimizer, copy.deepcopy(self.model))


#: Seconds of blocks of updates, or, the same on all ranks, why there are none.
Blocks = list[float] | str


def try_all(ways: Sequence[Configuration], run: Callable[
        [Configuration, float], Blocks], say: Callable[[str], None],
            left: Callable[[], float] = lambda: math.inf
            ) -> tuple[list[tuple[Configuration, Timing]], list[str]]:
    """Tries ways, and those that come close to the fastest again.

    Args:
        ways: In any order; best the fastest first.
        run: Tries one, on all ranks; is given the seconds of an update from
            which on it need not go on; the same on all ranks.
        say: Is told what is being tried.
        left: Seconds in which ways may be tried; the same on all ranks.

    Returns:
        Ways with what they took, and why others could not be tried.
    """
    found: dict[int, list[float]] = {}
    problems = []

    def median(number: int) -> float:
        return float(numpy.median(found[number]))
    for number, way in enumerate(ways):
        if number >= _FEWEST and left() < -_OVERTIME:
            problems.append(f'{way} was not tried: the time was over')
            continue
        say(f'trying {way}')
        blocks = run(way, (1 + _NEAR) ** 2 * min(
            map(median, found), default=math.inf))
        if isinstance(blocks, str):
            problems.append(f'{way} was not tried: {blocks}')
        else:
            found[number] = blocks
    for _ in range(_TURNS):
        ranked = sorted(found, key=median)
        near = [number for number in ranked[:_FINALISTS]
                if median(number) <= median(ranked[0]) * (1 + _NEAR)]
        # The last one first, so that a slow minute does not always hit it.
        for number in reversed(near * (len(near) > 1)):
            if left() < 0:
                break
            say(f'trying {ways[number]} again')
            blocks = run(ways[number], math.inf)
            if not isinstance(blocks, str):
                found[number] = found[number] + blocks
    return [(ways[number], timing_of(ways[number], blocks))
            for number, blocks in found.items()], problems


def timing_of(way: Configuration, blocks: Sequence[float]) -> Timing:
    """Median and spread of blocks."""
    low, median, high = numpy.percentile(blocks, (25, 50, 75))
    return Timing(str(way), float(median), float((high - low) / 2 / median))


def preferred(trials: Sequence[tuple[Configuration, Timing]]
              ) -> Configuration:
    """The way to take: the simplest of the fastest."""
    best = min((trial for _, trial in trials), key=lambda one: one.seconds)
    return min((way for way, trial in trials if trial.seconds <= (
        best.seconds * (1 + max(_EQUAL, best.spread, trial.spread)))),
        key=Configuration.simplicity)


def try_way(way: Configuration, trained: Trained, comm: MPI.Comm,
            seconds: float = 1.5, limit: float = math.inf) -> Blocks:
    """Trains a copy of the model in a way for some updates.

    Call it on all ranks.  If the way is for one process, the first one trains
    with the whole batch, and the others wait without taking a core.

    Args:
        way: To run the job.
        trained: Model, optimizer and data.
        comm: All ranks.
        seconds: That the timed updates may take.
        limit: Seconds of an update from which on one is enough.
    """
    found: list[float] = []
    problem, done = '', list[Callable[[], Any]]()
    here = comm if way.stages * way.replicas == comm.size else MPI.COMM_SELF
    if here is comm or comm.rank == 0:
        try:
            with preserved():
                updater = _updater(way, trained, here, done)
                found = blocks_of(updater.update, here, seconds, limit)
        except Exception as error:
            problem = f'{type(error).__name__}: {error}'
    if here is not comm:        # nobody asks for messages meanwhile
        wait_until(comm.Ibarrier().Test)
    problem = next(filter(None, comm.allgather(problem)), '')
    if not problem:
        for finish in done:
            finish()
    return problem or comm.bcast(found)


def _updater(way: Configuration, trained: Trained, comm: MPI.Comm,
             done: list[Callable[[], Any]]) -> Any:
    """What would train the model; adds what is to be done afterwards."""
    job = PlannedJob(JobPlan(way, comm.size, trained.batch,
                             shapes_of(trained.model)), trained.example)
    optimizer = raise_together(comm, trained.copied)
    if way.stages > 1:
        part = job.partition(optimizer.target, comm=comm)
        if optimizer.target is not part:
            optimizer.setup(part)
    if way.replicas > 1:
        communicator = job.communicator(
            comm, **without_warmup(way.codec))
        done.append(communicator.finalize)
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, communicator)
    grid, data = job.grid(comm), trained.data
    if data is None or comm.size == 1 and not data.is_shared:
        # A script's data are a rank's share then.
        data = Data(Repeating(trained.example.of(max(
            way.micro_batches, -(-trained.batch // way.replicas)))))
    iterator, converter = data.of_rank(grid), data.converter
    if way.stages > 1:
        return PipelineUpdater(
            iterator, optimizer, grid, schedule=way.schedule,
            micro_batches=way.micro_batches, converter=converter)
    if data.is_shared and comm.size > 1:
        return ReplicaUpdater(iterator, optimizer, comm, converter=converter)
    return StandardUpdater(iterator, optimizer, converter=converter)


def blocks_of(update: Callable[[], Any], comm: MPI.Comm, seconds: float,
              limit: float = math.inf,
              clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of an update, of the slowest rank, in each of some blocks.

    Args:
        update: Makes one, on all ranks.
        comm: All ranks; they make equally many updates.
        seconds: That all blocks may take.
        limit: Seconds of an update from which on one is enough.
        clock: Gives seconds.
    """
    def measured(count: int) -> float:
        comm.Barrier()
        begin = clock()
        for _ in range(count):
            update()
        return comm.allreduce((clock() - begin) / count, MPI.MAX)
    update()                # sends parameters, gets memory
    one = measured(1)
    if one > limit:
        return [one]
    if one < _LONG:
        for _ in range(_WARM_UP - 2):
            update()
        one = measured(1)
    most = min(_MOST, math.floor(seconds / _BLOCKS / max(one, 1e-4)))
    return [measured(max(1, most)) for _ in range(
        _BLOCKS if one < _LONG else 2)]

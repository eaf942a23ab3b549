"""Runs the most promising ways for some updates, and takes the fastest.

A prediction does not see everything that makes a real update slow: a thread
that competes for the interpreter, other load, caches, what MPI does.  So the
ways that are predicted to be the fastest are tried on copies of the model, by
the same calls that train it: ChainerMN's optimizer or a
:class:`.PipelineUpdater`.  ChainerMN's own ``naive`` and one process alone are
tried beside them, as nobody should take more machinery than pays.

Two ways that differ by less than their spread are equally fast.  Of those the
exact codec is taken before others, and then the simplest way.
"""
from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import chainermn
import numpy
from mpi4py import MPI

from ..mpi.waiting import wait_until
from ..pipeline.randomness import preserved
from ..planning.job.choices import Candidate
from ..planning.job.configuration import Configuration, simplicity
from ..planning.job.job_plan import Trial
from ..training.updaters.pipeline_updater import PipelineUpdater
from .example import Example, Repeating, as_it_is, call_with

#: Ways that are tried, beside ``naive`` and one process.
MOST = 5
#: Of a way: updates that are not timed (the first one sends parameters only),
#: and blocks of those that are.
_WARM_UP, _BLOCKS = 3, 5
#: Medians that differ by less are equal, whatever their spread was.
_EQUAL = 0.05


def promising(candidates: Sequence[Candidate]) -> list[Configuration]:
    """The ways to try, of all that fit.

    Args:
        candidates: The fastest first.

    Returns:
        The fastest, each with another layout, codec or overlap; and the
        simplest one, plain replicas in float32, where it is possible.
    """
    kinds: dict[tuple, Configuration] = {}
    for one in candidates:
        way = one.configuration
        if one.step is not None:
            kinds.setdefault((way.stages, way.codec if way.replicas > 1
                              else '', way.overlap), way)
    found = list(kinds.values())
    plain = [way for way in found if simplicity(way)[:2] == (False, 0)]
    tried = found[:MOST]
    return tried + [way for way in plain[:1] if way not in tried]


def preferred(trials: Sequence[tuple[Configuration, Trial]]) -> int:
    """The index of the way to take: the simplest of the fastest."""
    best = min((trial for _, trial in trials), key=lambda one: one.seconds)
    equal = [number for number, (_, trial) in enumerate(trials)
             if trial.seconds <= best.seconds * (
                 1 + max(_EQUAL, best.spread, trial.spread))]
    return min(equal, key=lambda number: simplicity(trials[number][0]))


def try_way(way: Configuration, job: Any, model: Any, optimizer: Any,
            example: Example, batch: int, comm: MPI.Comm,
            seconds: float = 1.5) -> Trial | str:
    """Trains a copy of the model in a way for some updates.

    Call it on all ranks.

    Args:
        way: To run the job.
        job: The :class:`.PlannedJob` of it.
        model: The whole model; it stays as it is.
        optimizer: It stays as it is.
        example: Samples of the data.
        batch: Samples of an update, of all ranks together.
        comm: All ranks.
        seconds: That the timed updates may take.

    Returns:
        What it took; or, the same on all ranks, why it cannot be tried.
    """
    found: Any = None
    problem, done = '', None
    try:
        with preserved():
            update, done = (_pipeline if way.stages > 1 else _replicas)(
                way, job, model, optimizer, example, batch, comm)
            found = _timed(update, comm, seconds)
    except Exception as error:
        problem = f'{type(error).__name__}: {error}'
    problem = next(filter(None, comm.allgather(problem)), '')
    if done is not None and not problem:
        done()
    return problem or Trial(str(way), *found)


def try_one_process(model: Any, optimizer: Any, example: Example,
                    batch: int, comm: MPI.Comm, seconds: float = 1.5
                    ) -> Trial | str:
    """Trains a copy of the model on rank 0 with the whole batch.

    Call it on all ranks; the others wait without taking a core.
    """
    found: Any = None
    if comm.rank == 0:
        try:
            with preserved():
                clone = _set_up(optimizer, copy.deepcopy(model))
                arrays = example.of(batch)
                found = Trial('one process', *_timed(
                    lambda: clone.update(
                        lambda: call_with(clone.target, arrays)),
                    MPI.COMM_SELF, seconds))
        except Exception as error:
            found = f'{type(error).__name__}: {error}'
    # The others must not ask for messages while rank 0 computes.
    wait_until(comm.Ibarrier().Test)
    return comm.bcast(found)


def _replicas(way: Configuration, job: Any, model: Any, optimizer: Any,
              example: Example, batch: int, comm: MPI.Comm
              ) -> tuple[Callable[[], Any], Callable[[], Any]]:
    communicator = job.communicator(comm)
    clone = chainermn.create_multi_node_optimizer(
        _set_up(optimizer, copy.deepcopy(model)), communicator)
    share = batch // comm.size + (comm.rank < batch % comm.size)
    arrays = example.of(max(1, share))
    return (lambda: clone.update(lambda: call_with(clone.target, arrays)),
            communicator.finalize)


def _pipeline(way: Configuration, job: Any, model: Any, optimizer: Any,
              example: Example, batch: int, comm: MPI.Comm
              ) -> tuple[Callable[[], Any], Callable[[], Any]]:
    grid = job.grid(comm)
    part = job.partition(copy.deepcopy(model), comm=comm)
    clone = _set_up(optimizer, part)
    communicator = None
    if way.replicas > 1:
        communicator = job.communicator(comm)
        clone = chainermn.create_multi_node_optimizer(clone, communicator)
    samples = max(way.micro_batches, batch // way.replicas)
    updater = PipelineUpdater(
        Repeating(example.of(samples)), clone, grid, converter=as_it_is,
        micro_batches=way.micro_batches, schedule=way.schedule)
    return (updater.update,
            communicator.finalize if communicator else lambda: None)


def _set_up(optimizer: Any, model: Any) -> Any:
    clone = copy.copy(optimizer)
    clone.hyperparam = copy.copy(optimizer.hyperparam)
    return clone.setup(model)


def _timed(update: Callable[[], Any], comm: MPI.Comm, seconds: float
           ) -> tuple[float, float]:
    """Median and spread of an update's seconds, the slowest rank's."""
    for _ in range(_WARM_UP):
        update()
    begin = time.perf_counter()
    update()
    # All ranks make equally many updates.
    one = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
    each = max(1, min(20, math.floor(seconds / _BLOCKS / max(one, 1e-4))))
    blocks = []
    for _ in range(_BLOCKS):
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(each):
            update()
        blocks.append(comm.allreduce(
            (time.perf_counter() - begin) / each, MPI.MAX))
    low, median, high = numpy.percentile(blocks, (25, 50, 75))
    return float(median), float((high - low) / 2 / median)

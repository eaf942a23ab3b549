"""Times passes and calls of a model as training runs them.

A call that is timed alone misses Python, the graph and caches.  So a copy of
the model is trained for some steps: by plain Chainer, as replicas do, and as a
pipeline of one stage, whose calls are timed one by one
(:mod:`~chainer_fp8pipe.chains.profiling.laps`).
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ..chains.partition import partition
from ..chains.partitioned import check_result
from ..chains.profiling.laps import Laps, clock_of
from ..pipeline.randomness import preserved
from ..planning.job.job_profile import Figure
from ..training.updaters.pipeline_updater import PipelineUpdater
from .example import Example, Repeating, as_it_is, call_with
from .turns import Work, in_turns


class InSitu(NamedTuple):
    """Seconds of a batch in training, of the processor."""

    forward: float
    backward: float
    spread: float


class InTraining(NamedTuple):
    """Seconds of training with batches of both sizes.

    Attributes:
        plain: Of plain passes, for each size.
        laps: Of each call's forward and backward, by its number, for each
            size; [] for a model that cannot be cut.
        step: Of a step of a pipeline beside its calls.
        micro_batch: That each of its micro-batches adds.
    """

    plain: list[InSitu]
    laps: Sequence[dict[int, tuple[float, float]]] = ()
    step: Figure = Figure(0.0)
    micro_batch: Figure = Figure(0.0)


def measured_in_training(model: Any, example: Example, sizes: Sequence[int],
                         divisible: bool) -> InTraining:
    """Trains copies of a model on this rank for some steps.

    Args:
        model: It stays as it is.
        example: Of the samples.
        sizes: Samples of the larger batch and of the smaller one.
        divisible: Whether the model can be cut, so that calls are timed.
    """
    plain = copy.deepcopy(model)
    works = [plain_pass(plain, example.of(size)) for size in sizes]
    if not divisible:
        return InTraining(in_situ(in_turns(works)))
    alone = MPI.COMM_SELF.Dup()
    try:
        staged = partition(copy.deepcopy(model), example.of(sizes[1]), alone,
                           micro_batches=1)
        steps = [_Steps(staged, example.of(size * count), count, alone)
                 for size, count in ((sizes[0], 1), (sizes[1], 1),
                                     (sizes[1], 4))]
        found = in_turns([*works, *steps])
    finally:
        alone.Free()
    return InTraining(
        in_situ(found[:2]),
        [one.laps(of) for one, of in zip(steps[::2], found[2::2],
                                         strict=True)],
        *overheads(*(one.beside_calls(of) for one, of in zip(
            steps[1:], found[3:], strict=True))))


def in_situ(found: Sequence[numpy.ndarray]) -> list[InSitu]:
    """Medians of plain passes, float64[rounds, 2], for each size."""
    return [InSitu(float(forward), float(backward),
                   Figure.of(one.sum(axis=1).tolist()).spread)
            for one in found for forward, backward in [
                numpy.median(one, axis=0)]]


def overheads(one: numpy.ndarray, four: numpy.ndarray
              ) -> tuple[Figure, Figure]:
    """Seconds of a step, and of a micro-batch, beside their calls.

    Args:
        one: Seconds of steps beside the calls, with one micro-batch.
        four: The same with four.
    """
    each = Figure.of(numpy.maximum(four - one, 0.0) / 3)
    return (Figure.of(numpy.maximum(one - each.value, 0.0)), each)


def plain_pass(model: Any, batch: Any) -> Work:
    """A pass as an optimizer's ``update(lossfun, ...)`` makes it, timed."""
    now = clock_of(model.device)

    def work() -> tuple[float, float]:
        with preserved():
            start = now()
            loss = call_with(model, batch)
            middle = now()
            check_result(loss)
            model.cleargrads()
            loss.backward()
            return middle - start, now() - middle
    return work


class _Steps:
    """Steps of a pipeline of one stage: the whole, and the laps of calls.

    Args:
        model: Partitioned.
        batch: Of a step.
        micro_batches: Of a step.
        comm: Of this rank.
    """

    def __init__(self, model: Any, batch: Any, micro_batches: int,
                 comm: MPI.Comm) -> None:
        optimizer = chainer.optimizers.SGD(0.0)
        optimizer.setup(model)
        model.partition.optimizer = None
        self._updater = PipelineUpdater(
            Repeating(batch), optimizer, comm, micro_batches=micro_batches,
            schedule='1f1b', converter=as_it_is, device=model.device)
        self._model, self._count = model, micro_batches
        self._now = clock_of(model.device)
        self._numbers: list[int] = []

    def __call__(self) -> list[float]:
        """The whole step, then each call's forward and backward lap."""
        passes = self._model.partition.passes
        passes.laps = laps = Laps(self._model.device)
        start = self._now()
        self._updater.update()
        whole = self._now() - start
        passes.laps = None
        medians = laps.medians()
        self._numbers = sorted(medians)
        return [whole, *(lap for number in self._numbers
                         for lap in medians[number])]

    def laps(self, found: numpy.ndarray) -> dict[int, tuple[float, float]]:
        """Seconds of each call, by number."""
        medians = numpy.median(found[:, 1:], axis=0).tolist()
        return dict(zip(self._numbers, zip(medians[::2], medians[1::2],
                                           strict=True), strict=True))

    def beside_calls(self, found: numpy.ndarray) -> numpy.ndarray:
        """Seconds of each step beside its calls."""
        return found[:, 0] - self._count * found[:, 1:].sum(axis=1)

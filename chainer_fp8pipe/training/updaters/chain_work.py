"""Micro-batches of a partitioned Chain: all ranks see the whole batch."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ...chains import nested
from ...chains.counting import count_labels
from ...chains.part import ChainPart
from ...chains.program import Program
from ...chains.trace import OBSERVER
from ...mpi.broadcast import broadcast_arrays
from ...pipeline.channels import Channels
from ...pipeline.grid import ProcessGrid
from ...pipeline.loss import LossHead
from ...pipeline.splitting import bounds
from ...pipeline.tape import Arrays
from .batch import Batch
from .together import Opened


class ChainWork:
    """What the ranks of a partitioned Chain do with a batch.

    Args:
        model: What :func:`~chainer_fp8pipe.chains.partition.partition`
            returned.
        grid: All ranks.
        loss_weight: ``loss_weight(*batch)``: how much a micro-batch counts;
            None: the labels that the loss does not ignore, or else samples.
    """

    def __init__(self, model: Any, grid: ProcessGrid,
                 loss_weight: Callable | None) -> None:
        self._model, self._grid = model, grid
        self._partition = model.partition
        self._loss_weight = loss_weight
        self.head = LossHead(_given, {}, float)
        self.chunks = model.plan.chunks
        self.layers = 0
        self._programs: list[Program] = []
        self._calls: list[Callable] = []
        self._weights: list[float] = []
        self.method: Callable | None = None

    def blocks(self, statistics: Any) -> dict[int, list[ChainPart]]:
        """This rank's parts of the model, by number of chunk."""
        return {chunk: [block] for chunk, block
                in self._partition.blocks().items()}

    def prepare(self, opened: Opened, parts: int, step: str) -> str:
        """All ranks get the batch, and a trace for each form of input.

        Returns:
            What went wrong, on all ranks of the pipeline; '' if nothing.
        """
        problem = self._partition.problem()
        form, arrays = self._share(opened.batch)
        if any(self._grid.pipeline.allgather(bool(problem))):
            return problem or 'the model was changed on another rank'
        places = bounds(opened.samples, parts)
        function = self._function(step)
        resumed = self._partition.passes.resume()
        before, after = self._programs, []
        calls = []
        try:
            for number, (start, end) in enumerate(places):
                args, kwargs = nested.rebuilt(
                    form, [array[start:end] for array in arrays])
                state = (before[number].after
                         if resumed and number < len(before) else None)
                after.append(self._partition.program(
                    step, function, args, kwargs, state))
                calls.append(functools.partial(function, *args, **kwargs))
            weights = self._count(calls, after, [
                end - start for start, end in places], step)
        except Exception as error:  # the same on all ranks
            return str(error)
        self._programs, self._calls, self._weights = after, calls, weights
        return ''

    def deal(self, opened: Opened, channels: Channels, parts: int,
             step: str) -> tuple[list[Arrays], list[Any], list[float]]:
        """As :meth:`.LayerWork.deal`; nothing is sent any more."""
        self._partition.passes.begin(self._programs, self._calls)
        inputs: list[Arrays] = [()] * len(self._calls)
        first = inputs if self._grid.stage_index == 0 else []
        if self._grid.stage_index < self._grid.stages - 1:
            return first, [], []
        return first, self._weights, self._weights

    def names(self) -> list[str]:
        """Of what the model reports."""
        return list(dict.fromkeys(
            name for program in self._programs for name in program.reporters))

    def sums(self) -> tuple[list[float], list[float]]:
        """Weighted sums of what is reported here, and the weights' sums."""
        passes = self._partition.passes
        sums, totals = [], []
        for name in self.names():
            pairs = [(weight, reports[name]) for weight, reports
                     in zip(self._weights, passes.reports, strict=True)
                     if name in reports]
            sums.append(sum(weight * value for weight, value in pairs))
            totals.append(sum(weight for weight, _ in pairs))
        return sums, totals

    def tied(self) -> dict[int, tuple[int, ...]]:
        """Parameters on several ranks, by id, with their stages."""
        part = self._partition
        return {id(part.own[name]): stages
                for name, stages in part.ties.items() if name in part.own}

    def end(self) -> None:
        """Ends a step."""
        self._partition.passes.end()

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self._partition.passes.forget()

    # --- details ------------------------------------------------------------

    def _function(self, step: str) -> Callable:
        if step != 'predict':
            return self._model
        assert self.method is not None
        return self.method

    def _share(self, batch: Batch | None) -> tuple[Any, list[Any]]:
        """The batch on all ranks, where the model is."""
        form, host = None, None
        if batch is not None:
            leaves, form = nested.leaves(batch.arguments())
            host = [numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(
                nested.array_of(leaf))) for leaf in leaves]
        form, host = broadcast_arrays(self._grid.pipeline, form, host)
        device = self._model.device
        return form, [device.send(array) for array in host]

    def _count(self, calls: list[Callable], programs: list[Program],
               sizes: list[int], step: str) -> list[float]:
        """How much each micro-batch counts in the mean."""
        if step == 'predict':
            return [0.0] * len(sizes)
        if self._loss_weight is not None:
            return [float(self._loss_weight(*call.args, **call.keywords))
                    for call in calls]
        return count_labels(self._partition, calls, programs, sizes)


def recompute_of(model: Any, recompute: Any) -> Any:
    """Which chunks run forward twice: as asked for, or as planned."""
    return (model.plan.recompute if recompute == 'no stage' else recompute)


def report(model: Any, means: dict[str, float]) -> None:
    """Reports means for the links that have reported parts of them."""
    links = model.partition.names.links
    for name, value in means.items():
        path, found, key = name.partition(OBSERVER)
        if found:
            chainer.report({key: value}, links[path])
        else:
            chainer.report({name: value})


def _given(loss: chainer.Variable, weight: float) -> chainer.Variable:
    return loss

"""Micro-batches of a ``Divisible``: inputs first, targets last.

And whether the stages of all ranks make up one ``Divisible``.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ..channel.channel import Receiver, Sender
from ..mpi.grid import ProcessGrid
from ..pipeline.block import Arrays
from ..pipeline.channels import Channels
from ..pipeline.layer_block import LayerBlock, as_tuple
from ..pipeline.loss import LossHead
from ..pipeline.micro_batches import bounds, concatenated
from .batch import Batch, Opened
from .reported import Report, Reports


class LayerWork:
    """What the ranks of a pipeline of layers do with a batch.

    The arguments are as for :class:`.PipelineUpdater`.
    """

    def __init__(self, model: Any, grid: ProcessGrid, loss_fun: Callable,
                 metrics: Mapping[str, Callable],
                 loss_weight: Callable | None) -> None:
        self._model, self._grid = model, grid
        self.head = LossHead(loss_fun, metrics, loss_weight)
        self.chunks = len(model.pieces)
        self.layers = model.total
        self.changed = False        # layers stay where they are

    def blocks(self, statistics: Any) -> dict[int, list[LayerBlock]]:
        """This rank's layers, by number of chunk."""
        model = self._model
        return {self._grid.stage_index + position * self._grid.stages: [
            LayerBlock(layer, first=not layer[0], statistics=statistics,
                       initial_seed=model.seed, xp=model.xp)
            for layer in piece]
            for position, piece in enumerate(model.pieces)}

    def batch(self, arrays: Any, label_key: Any = -1,
              progress: tuple[float, ...] = (0.0,) * 4) -> Batch:
        """Inputs and target of a converted batch, a tuple or dictionary."""
        if isinstance(arrays, dict):
            if label_key not in arrays:
                known = ', '.join(map(repr, arrays))
                raise ValueError(f'a batch has {known} but no target; name '
                                 f'it by label_key, not {label_key!r}')
            arrays = dict(arrays)
            target = arrays.pop(label_key)
            return Batch(tuple(arrays.values()), target, progress)
        arrays = list(as_tuple(arrays))
        if len(arrays) < 2:
            raise ValueError('an example has no target; it must be a tuple '
                             'of one input or more and the target')
        try:
            target = arrays.pop(label_key)
        except (IndexError, TypeError):
            raise ValueError(f'an example has {len(arrays)} elements, and '
                             f'none is label_key={label_key!r}') from None
        return Batch(tuple(arrays), target, progress)

    def deal(self, opened: Opened, channels: Channels,
             step: str) -> tuple[list[Arrays], list[Any], list[float]]:
        """Inputs where the model begins, targets where the loss is.

        Returns inputs, targets and weights of the micro-batches.
        """
        parts = len(opened.sizes)
        places = bounds(sum(opened.sizes), parts)
        inputs: list[Arrays] = []
        target: Any = None
        if opened.batch is not None:
            target = opened.batch.target
            # Without inputs the first layer says what is wrong.
            inputs = list(zip(*[
                _cut(array, places) for array in opened.batch.inputs],
                strict=True)) or [()] * parts
        if step == 'predict':
            return inputs, [], []
        # From the first rank to the last, which computes the loss.
        if isinstance(channels.targets, Sender):
            channels.targets.send((target,))
        elif isinstance(channels.targets, Receiver):
            channels.targets.expect(1)
            target, = channels.targets.receive()
        if self._grid.stage_index < self._grid.stages - 1:
            return inputs, [], []
        targets = _cut(target, places)
        return inputs, targets, self.head.count(targets)

    def choose(self, method: str | None) -> str:
        """What predictions call: all layers, without a name."""
        if method is not None:
            raise ValueError(
                f'method={method!r} is for a model that partition() has cut; '
                'a Divisible predicts with all its layers')
        return ''

    def joined(self, parts: list[Arrays], sizes: list[int], xp: Any
               ) -> Arrays:
        """The outputs of all micro-batches, on the last stage."""
        return concatenated(parts, sizes, xp)

    def formed(self, outputs: Arrays) -> Any:
        """What a prediction returns: an array, or a tuple of several."""
        return outputs if len(outputs) > 1 else outputs[0]

    def reported(self) -> Reports:
        """Loss and metrics, which the last stage has computed."""
        if self._grid.stage_index < self._grid.stages - 1:
            return {}
        return {name: Report('number', self.head.sums[name],
                             self.head.totals[name])
                for name in self.head.names}

    def report(self, means: dict[str, Any]) -> dict[str, Any]:
        """Reports means of loss and metrics for the model."""
        chainer.report(dict(means), self._model)
        return means

    # --- layers stay where they are, and share nothing ----------------------

    has_ties = False

    def shared(self, batch: Batch) -> tuple[Any, list[Any]]:
        return None, []

    def rehearse(self, *_: Any) -> None:
        pass

    def prepare(self, *_: Any) -> None:
        pass

    def tied(self) -> dict[int, tuple[int, ...]]:
        return {}

    def end(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def forget(self) -> None:
        pass


def _cut(array: Any, places: list[tuple[int, int]]) -> list[Any]:
    return [array[start:end] for start, end in places]


def layout_problem(model: Any, grid: ProcessGrid) -> str:
    """Returns why the ranks' stages do not make a model; '' if they do.

    ``model`` is this rank's stage.  Call this on all ranks.
    """
    everyone = grid.comm.allgather(
        (grid.stage_index, model.total, model.bounds))
    total, *others = sorted({total for _, total, _ in everyone})
    if others:
        totals = ' and '.join(map(str, [total, *others]))
        return f'the models have {totals} layers on different ranks'
    chunks: dict[int, tuple[int, int, int]] = {}
    for rank, (stage, _, cut) in enumerate(everyone):
        for position, (start, end) in enumerate(cut):
            chunk = stage + position * grid.stages
            other, *known = chunks.setdefault(chunk, (rank, start, end))
            if known != [start, end]:
                return (f'rank {rank} has layers {start} to {end - 1} where '
                        f'its replica, rank {other}, has {known[0]} to '
                        f'{known[1] - 1}')
    next_layer = 0
    for number in range(max(chunks) + 1):
        if number not in chunks:
            return 'the ranks have different numbers of chunks'
        rank, start, end = chunks[number]
        if start != next_layer:
            return (f'rank {rank} starts at layer {start} but layer '
                    f'{next_layer} is to follow')
        next_layer = end
    if next_layer != total:
        return (f'rank {rank} ends at layer {next_layer - 1} but the model '
                f'has {total} layers')
    return ''

"""Micro-batches of a ``Divisible``: inputs first, targets last."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from ...mpi.grid import ProcessGrid
from ...pipeline.channels import Channels
from ...pipeline.layer_block import LayerBlock
from ...pipeline.loss import LossHead
from ...pipeline.micro_batches import bounds
from ...pipeline.randomness import Place
from ...pipeline.tape import Arrays
from .together import Opened, Sums


class LayerWork:
    """What the ranks of a pipeline of layers do with a batch.

    Args:
        model: This rank's stage, a ``Divisible``.
        grid: All ranks.
        loss_fun: ``loss_fun(*outputs, target)``, a mean.
        metrics: Name to function of the same arguments.
        loss_weight: How much a micro-batch's target counts; None: guess.
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

    def deal(self, opened: Opened, channels: Channels, parts: int,
             step: str) -> tuple[list[Arrays], list[Any], list[float]]:
        """Inputs where the model begins, targets where the loss is.

        Args:
            opened: The step.
            channels: To the other ranks.
            parts: How many micro-batches there will be.
            step: ``'train'``, ``'evaluate'`` or ``'predict'``.

        Returns:
            Inputs, targets and weights of the micro-batches.
        """
        places = bounds(opened.samples, parts)
        inputs = [] if opened.batch is None else [
            tuple(array[start:end] for array in opened.batch.inputs)
            for start, end in places]
        if step == 'predict':
            return inputs, [], []
        grid, target = self._grid, cast(Any, None)
        is_first = grid.stage_index == 0
        is_last = grid.stage_index == grid.stages - 1
        if is_first:
            assert opened.batch is not None
            target = opened.batch.target
            if not is_last:
                channels.send_targets(target)
        if not is_last:
            return inputs, [], []
        if not is_first:
            target = channels.receive_targets()
        targets = [target[start:end] for start, end in places]
        return inputs, targets, self.head.count(targets)

    def choose(self, method: str | None) -> str:
        """What predictions call: all layers, without a name.

        Raises:
            ValueError: A name was given.
        """
        if method is not None:
            raise ValueError(
                f'method={method!r} is for a model that partition() has cut; '
                'a Divisible predicts with all its layers')
        return ''

    def joined(self, parts: list[Arrays], sizes: list[int], xp: Any
               ) -> Arrays:
        """The outputs of all micro-batches, on the last stage."""
        return tuple(xp.concatenate(column)
                     for column in zip(*parts, strict=True))

    def formed(self, outputs: Arrays) -> Any:
        """What a prediction returns: an array, or a tuple of several."""
        return outputs if len(outputs) > 1 else outputs[0]

    def prepare(self, opened: Opened, parts: int, step: str,
                places: list[Place]) -> str:
        """Nothing is to be done together before the work."""
        return ''

    def sums(self) -> Sums:
        """Weighted sums of what is reported, and the weights' sums."""
        if self._grid.stage_index < self._grid.stages - 1:
            return dict.fromkeys(self.head.names, (0.0, 0.0))
        return {name: (self.head.sums[name], self.head.totals[name])
                for name in self.head.names}

    def recomputed(self, now: frozenset[int]) -> frozenset[int]:
        """As before."""
        return now

    def tied(self) -> dict[int, tuple[int, ...]]:
        """Layers on two ranks share nothing."""
        return {}

    def follow_plan(self, plan: Any, optimizer: Any) -> bool:
        """Layers are where ``stage`` has put them."""
        return False

    def adapt(self, optimizer: Any) -> bool:
        """Nothing changes after an update."""
        return False

    def end(self) -> None:
        """Ends a step."""

    def forget(self) -> None:
        """Drops what a failed step has left."""

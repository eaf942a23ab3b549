"""Passes of layers, timed one by one as a stage runs them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer

from ...chains.profiling.laps import clock_of
from ...intercept.unchecked_calls import unchecked
from ...pipeline.batch_statistics import BatchStatistics
from ...pipeline.block import AnyTape, Arrays
from ...pipeline.gradient_sums import GradientSums
from ...pipeline.layer_block import LayerBlock
from ...pipeline.layers import Layer, blame
from ...pipeline.loss import LossHead
from ...pipeline.randomness import Place

#: Of the one micro-batch.
PLACE = Place(0, 0, 0, 0)


class LayerPasses:
    """Layers, one after the other, for one micro-batch.

    Args:
        layers: With their numbers.
        seed: Of the model's initial values.
        device: Chainer's.
    """

    def __init__(self, layers: Sequence[Layer], seed: int, device: Any
                 ) -> None:
        self._now = clock_of(device)
        self._statistics, self._sums = BatchStatistics(), GradientSums()
        self._blocks = [LayerBlock(
            layer, first=not layer[0], statistics=self._statistics,
            initial_seed=seed, xp=device.xp) for layer in layers]
        self._tapes: list[AnyTape] = []

    @property
    def wants(self) -> tuple[bool, ...]:
        """For each output, whether backward needs its gradient."""
        return self._tapes[-1].wants

    def forward(self, inputs: Arrays, wanted: tuple[bool, ...] | None
                ) -> tuple[Arrays, list[float]]:
        """Outputs, and the seconds of each layer."""
        arrays, seconds = inputs, []
        self._statistics.next_micro_batch()
        before = self._now()
        with self._statistics:
            for block in self._blocks:
                with blame(block.name, 0):
                    tape, arrays = block.record(0, arrays, wanted, PLACE)
                wanted = tape.wants
                self._tapes.append(tape)
                before, start = self._now(), before
                seconds.append(before - start)
        # Averages stay as they are.
        self._statistics.forget()
        return arrays, seconds

    def backward(self, gradients: Arrays, defer: bool = False
                 ) -> list[float]:
        """The seconds of each layer; with ``defer``, of weights alone."""
        found = []
        self._sums.begin(self._blocks, None)
        before = self._now()
        for block in reversed(self._blocks):
            tape = self._tapes.pop()
            with blame(f'the backward pass of {block.name}', 0), unchecked():
                gradients = tape.backward(gradients, self._sums, defer)
                if defer:
                    before = self._now()
                    tape.backward_weight(self._sums)
            del tape
            self._sums.through(block)
            self._sums.settle([block])
            before, start = self._now(), before
            found.append(before - start)
        # Functions may use links of the model itself.
        self._sums.forget()
        return found[::-1]

    def laps(self, batch: Arrays, head: LossHead) -> list[float]:
        """Seconds of each layer forward and backward, then the loss's."""
        outputs, forward = self.forward(batch[:-1], None)
        loss, gradients = loss_laps(head, outputs, batch[-1], self._now)
        return [seconds for both in zip(forward, self.backward(gradients),
                                        strict=True)
                for seconds in both] + list(loss)


def loss_laps(head: LossHead, outputs: Arrays, target: Any,
              now: Callable[[], float]) -> tuple[tuple[float, float], Arrays]:
    """Seconds of the loss forward and backward; its gradients."""
    head.begin([target], [1.0], 1.0, None)
    start = now()
    head.forward(0, outputs, PLACE)
    middle = now()
    gradients = head.backward(0)
    return (middle - start, now() - middle), gradients


def made_up_gradients(outputs: Arrays) -> Arrays:
    """Of the outputs' shapes and dtypes."""
    return tuple(
        chainer.backend.get_array_module(output).full_like(output, .01)
        if output.dtype.kind == 'f' else None for output in outputs)

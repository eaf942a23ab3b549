"""What has been sent early of an update that is under way."""
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import chainer
import numpy

from ..codecs import Tensors
from ..exchange.buckets import Bucket
from ..exchange.exchange import Transfer
from ..exchange.gradients import flat_float32
from .send_order import Slice


@dataclasses.dataclass
class InFlight:
    """What is known of the update that is under way.

    Attributes:
        values: Parameters' arrays, by name; empty while nothing is sent
            early.
        loss_scale: The factor of the gradients; None for none.
        missing: By the bucket's number, names of gradients that are not
            final yet.
        arrays: Gradients that are final.
        handed: How many slices, in their order, are of complete buckets.
        todo: Those of them that are not sent yet, each with the event that
            a GPU reaches when it has computed them; None for the CPU.
        begun: How many slices have been sent.
        sent: By the bucket's number, what is on its way.
        frozen: Gradients that must not be changed now.
        announced: They are reported by whoever computes them, and nobody
            else can change them.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float | None = None
    missing: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    handed: int = 0
    todo: collections.deque[tuple[Slice, Any]] = dataclasses.field(
        default_factory=collections.deque)
    begun: int = 0
    sent: dict[int, Transfer] = dataclasses.field(default_factory=dict)
    frozen: list[numpy.ndarray] = dataclasses.field(default_factory=list)
    announced: bool = False

    @property
    def factor(self) -> float:
        """Of the gradients that are sent."""
        return 1.0 if self.loss_scale is None else self.loss_scale

    def hand(self, order: Sequence[Slice], buckets: Sequence[Bucket],
             gradient: Any) -> bool:
        """Finds slices that can be sent; whether there are any.

        Args:
            order: Of all slices.
            buckets: By number.
            gradient: The one that has just become final.
        """
        before = self.handed
        while self.handed < len(order) and self.missing.get(
                order[self.handed].bucket) == set():
            part = order[self.handed]
            if not self.announced:
                self._freeze(self.arrays[name]
                             for name in buckets[part.bucket])
            self.handed += 1
            self.todo.append((part, _computed(gradient)))
        return self.handed > before

    def tensors(self, names: Bucket) -> Tensors:
        """A bucket that is complete."""
        return Tensors(
            names, [flat_float32(self.arrays[name]) for name in names],
            [flat_float32(self.values[name]) for name in names],
            self.factor)

    def thaw(self) -> None:
        """Lets gradients be changed again."""
        for array in self.frozen:
            array.flags.writeable = True
        self.frozen.clear()

    def _freeze(self, arrays: Iterable[Any]) -> None:
        # Whoever changes a gradient in place now is told so.
        for array in arrays:
            if isinstance(array, numpy.ndarray) and array.flags.writeable:
                array.flags.writeable = False
                self.frozen.append(array)


def _computed(array: Any) -> Any:
    """An event behind all that the GPU was told so far; None for NumPy."""
    if isinstance(array, numpy.ndarray):
        return None
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()

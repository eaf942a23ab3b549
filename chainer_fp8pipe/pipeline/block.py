"""A block, which a stage runs as one: a layer, or a part of a Chain."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import chainer

from .randomness import Place

Arrays = tuple[Any, ...]        # of arrays; None where there is none

AnyTape = Any       # a Tape, or a class with the same methods


class Block(Protocol):
    """A part of a model that a chunk runs, one micro-batch at a time."""

    @property
    def name(self) -> str:
        """The block's name in messages."""

    def record(self, micro_batch: int, inputs: Arrays,
               wanted: tuple[bool, ...] | None, place: Place
               ) -> tuple[AnyTape, Arrays]:
        """Runs forward; returns the tape for backward and the outputs.

        Args:
            micro_batch: Its number in the step.
            inputs: Arrays that cross the boundary before the block.
            wanted: For each input whether its gradient is of use; None for
                the first block of a chunk, which decides itself.
            place: Where in the training the block runs.
        """

    def infer(self, micro_batch: int, inputs: Arrays,
              place: Place) -> Arrays:
        """Runs forward only; returns the outputs."""

    def params(self) -> Iterable[chainer.Parameter]:
        """The parameters that the block uses on this rank."""

    def links(self) -> Iterable[chainer.Link]:
        """All links of the block."""

"""The batch of a step: as the first stage reads it, and as all know it."""
from __future__ import annotations

from typing import Any, NamedTuple

from ..pipeline.block import Arrays


class Batch(NamedTuple):
    """What the first stage of a pipeline reads for one step."""

    inputs: Arrays
    target: Any         # for the loss; None where there is none
    #: Numbers about the iterator, for the other stages.
    progress: tuple[float, ...] = (0.0,) * 4
    #: Names of the inputs, where they are keyword arguments.
    keys: tuple[str, ...] | None = None

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments that ``StandardUpdater`` would call a model with."""
        if self.keys is None:
            return self.inputs, {}
        return (), dict(zip(self.keys, self.inputs, strict=True))

    def samples(self) -> int:
        """How many samples there are; raises if that is not clear."""
        arrays = self.inputs if self.target is None else (
            *self.inputs, self.target)
        for array in arrays:
            if not hasattr(array, 'shape'):
                raise TypeError(
                    f'a batch holds a {type(array).__name__}, not an array; '
                    'have the converter make arrays of inputs and target')
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            raise ValueError(f'the arrays of a batch have {lengths} samples; '
                             'they must have equally many')
        if not lengths[0]:
            raise ValueError('a batch without samples')
        return lengths[0]


class Opened(NamedTuple):
    """What all ranks know of a step's batch."""

    batch: Batch | None             # None but on the first stage
    sizes: list[int]                # of the micro-batches
    first_sample: int               # index in the batch of all replicas
    progress: tuple[float, ...]     # of the first stage's iterator
    tree: Any                       # of the arguments
    parts: list[list[Any]]          # the arrays of each micro-batch

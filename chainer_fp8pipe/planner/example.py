"""The data with which ways to train are tried."""
from __future__ import annotations

from typing import Any, NamedTuple

import chainer

from ..chains import nested
from ..training.unmodified.dividing import Divided


class Example:
    """A batch as a converter gives it, whole or its first samples.

    Raises ValueError if not all its arrays have equally many.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves, self._tree = nested.leaves(batch)
        shapes = [nested.array_of(leaf).shape for leaf in self._leaves]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or sizes & {(), (0,)}:
            raise ValueError(
                'the arrays of the example must all have the samples of one '
                'batch as their first axis, not '
                + ', '.join(map(str, shapes)))
        self.samples: int = sizes.pop()[0]

    def of(self, samples: int) -> Any:
        """A batch of so many samples; repeated where there are fewer."""
        return nested.rebuilt(self._tree, [
            chainer.backend.get_array_module(array).concatenate(
                [array] * -(-samples // self.samples))[:samples]
            for array in map(nested.array_of, self._leaves)])


class Repeating(chainer.dataset.Iterator):
    """Gives one batch again and again."""

    epoch, is_new_epoch = 0, False
    epoch_detail, previous_epoch_detail = 0.0, 0.0

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __next__(self) -> Any:
        return self._batch
    next = __next__


@chainer.dataset.converter()
def as_it_is(batch: Any, device: Any) -> Any:
    """A converter for batches of :class:`Repeating`."""
    return batch


class Data(NamedTuple):
    """What ways to train are tried with."""

    iterator: Any               # gives batches; a script's own one is used up
    converter: Any = as_it_is
    #: Whether the first rank reads for all of them, as for scripts without
    #: ChainerMN; if not, each rank reads its own part.
    is_shared: bool = False
    device: Any = None          # of the inputs; None: as the converter says

    def of_rank(self, grid: Any) -> Any:
        """The iterator of this rank, of a grid of stages and replicas."""
        if grid.stage_index or grid.replicas == 1 or not self.is_shared:
            return self.iterator
        return Divided(self.iterator, grid.data)

"""The data with which ways to train are tried."""
from __future__ import annotations

from typing import Any, NamedTuple

import chainer

from ..chains import nested
from ..training.unmodified.dividing import Divided


class Example:
    """A batch, whole or its first samples.

    Args:
        batch: Arrays as a converter gives them: one, a tuple or a dictionary.

    Raises:
        ValueError: Not all arrays have equally many samples.
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
        def cut(array: Any) -> Any:
            xp = chainer.backend.get_array_module(array)
            return xp.concatenate(
                [array] * -(-samples // self.samples))[:samples]
        return nested.rebuilt(self._tree, [
            cut(nested.array_of(leaf)) for leaf in self._leaves])


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
    """What ways to train are tried with.

    Attributes:
        iterator: Gives batches; a script's own one is used up.
        converter: Of the updater.
        is_shared: Whether the first rank reads for all of them, as for
            scripts without ChainerMN; if not, each rank reads its own part.
        device: Of the inputs; None: as the converter gives them.
    """

    iterator: Any
    converter: Any = as_it_is
    is_shared: bool = False
    device: Any = None

    def of_rank(self, grid: Any) -> Any:
        """The iterator of this rank, of a grid of stages and replicas."""
        if grid.stage_index or grid.replicas == 1 or not self.is_shared:
            return self.iterator
        return Divided(self.iterator, grid.data)

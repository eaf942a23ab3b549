"""The data with which a model is measured and tried."""
from __future__ import annotations

import time
from typing import Any, NamedTuple

import chainer
from chainer.dataset import convert

from ..chains import nested
from ..training.unmodified.dividing import divided

#: The smaller batch has this part of the larger one's samples, unless a
#: micro-batch is smaller than the larger one anyway.
_SMALLER = 4


class Example:
    """A batch, whole or its first samples.

    Args:
        batch: Arrays as a converter gives them: one, a tuple or a dictionary.

    Raises:
        ValueError: Not all arrays have equally many samples.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves, self._tree = nested.leaves(batch)
        sizes = {nested.array_of(leaf).shape[:1] for leaf in self._leaves}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(
                'the arrays of the example must all have the samples of one '
                'batch as their first axis, not '
                + ', '.join(str(nested.array_of(leaf).shape)
                            for leaf in self._leaves))
        self.samples: int = sizes.pop()[0]
        if not self.samples:
            raise ValueError('the example has no sample')

    def sizes(self, micro_batch: int) -> tuple[int, int]:
        """Samples of the two batches with which a model is measured.

        Args:
            micro_batch: Samples of a small micro-batch.

        Returns:
            All, and fewer unless there is only one.
        """
        few = min(max(1, micro_batch), self.samples)
        if few == self.samples and self.samples > 1:
            few = max(1, self.samples // _SMALLER)
        return self.samples, few

    def of(self, samples: int) -> Any:
        """A batch of so many samples; repeated where there are fewer."""
        def cut(array: Any) -> Any:
            times = -(-samples // self.samples)
            xp = chainer.backend.get_array_module(array)
            return xp.concatenate([array] * times)[:samples]
        return nested.rebuilt(self._tree, [
            cut(nested.array_of(leaf)) for leaf in self._leaves])


def call_with(model: Any, batch: Any) -> Any:
    """What the model returns for a batch: its loss."""
    args, kwargs = nested.arguments_of(batch)
    return model(*args, **kwargs)


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


class Endless(chainer.dataset.Iterator):
    """A script's iterator, begun anew where it ends."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        try:
            return self._iterator.next()
        except StopIteration:
            self._iterator.reset()
            return self._iterator.next()
    next = __next__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def finalize(self) -> None:
        """Leaves the script's iterator open."""


class Data(NamedTuple):
    """What ways to run a job are tried with.

    Attributes:
        iterator: Gives batches, again and again.
        converter: Of the updater.
        is_shared: Whether the first rank reads for all of them, as for
            scripts without ChainerMN; if not, each rank reads its own part.
    """

    iterator: Any
    converter: Any = as_it_is
    is_shared: bool = False

    def of_rank(self, grid: Any) -> Any:
        """The iterator of this rank, of a grid of stages and replicas."""
        if grid.stage_index or grid.replicas == 1 or not self.is_shared:
            return self.iterator
        return divided(self.iterator, grid.data)

    def seconds(self) -> float:
        """In which a batch is read and converted, the fastest of some.

        The first batches of an iterator that reads ahead come at once.
        """
        found = []
        for _ in range(4):
            begin = time.perf_counter()
            convert._call_converter(self.converter, self.iterator.next(),
                                    None)
            found.append(time.perf_counter() - begin)
        return min(found[1:])

"""The batch with which a model is measured, and how a model gets it."""
from __future__ import annotations

from typing import Any

import chainer

from ..chains import nested

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

    @property
    def sample_bytes(self) -> float:
        """Of a sample."""
        return sum(nested.array_of(leaf).nbytes
                   for leaf in self._leaves) / self.samples

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
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


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

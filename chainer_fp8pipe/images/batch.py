"""Batches: lists for Chainer that are parts of whole arrays."""
from __future__ import annotations

from typing import Any

import chainer
import numpy

from .workers.pinned import PinnedMemory


class Batch(list):
    """A list of ``(image, label)``, which are parts of two whole arrays.

    Chainer's own ``concat_examples`` copies the items of the list;
    :func:`batch_arrays` takes the arrays without a copy.  Nothing writes to
    them as long as anything refers to them.  Copies and pickles are plain
    lists.

    Attributes:
        images: Shape (samples, C, H, W).
        labels: int32, shape (samples,).
        memory: Holds the images.
    """

    def __init__(self, images: numpy.ndarray, labels: numpy.ndarray,
                 memory: PinnedMemory) -> None:
        super().__init__(zip(images, labels, strict=True))
        self.images, self.labels, self.memory = images, labels, memory

    def __reduce__(self) -> Any:
        return list, (list(self),)


@chainer.dataset.converter()
def batch_arrays(batch: Any, device: Any = None) -> Any:
    """A converter that takes a :class:`Batch` without a copy.

    For ``StandardUpdater(iterator, optimizer, converter=batch_arrays)`` and
    evaluators.  Images go to a GPU from pinned memory.  Other batches are
    left to ``concat_examples``.

    Args:
        batch: Of an :class:`~chainer_fp8pipe.images.ImageIterator`.
        device: Chainer's device; None leaves the arrays where they are.

    Returns:
        Images (samples, C, H, W) and labels (samples,), int32.
    """
    if not isinstance(batch, Batch):
        return chainer.dataset.concat_examples(batch, device)
    if device is None:
        return batch.images, batch.labels
    if isinstance(device, chainer.backend.GpuDevice):
        return (batch.memory.send(batch.images, device),
                device.send(batch.labels))
    return device.send((batch.images, batch.labels))

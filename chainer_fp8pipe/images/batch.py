"""Batches: lists for Chainer, and whole arrays for who wants no copy."""
from __future__ import annotations

from typing import Any

import chainer
import numpy

from .workers.pinned import PinnedMemory


class Batch(list):
    """A list of ``(image, label)``, which are parts of two whole arrays.

    Chainer's own ``concat_examples`` copies what is in the list;
    :func:`batch_arrays` takes the arrays as they are.  They stay as they are
    for as long as anything refers to them.  A copy, or what is pickled, is
    a plain list.

    Args:
        images: Shape (samples, C, H, W).
        labels: int32, shape (samples,).
        memory: Where the images are.

    Attributes:
        images: As given.
        labels: As given.
        memory: As given.
    """

    def __init__(self, images: numpy.ndarray, labels: numpy.ndarray,
                 memory: PinnedMemory) -> None:
        super().__init__(zip(images, labels, strict=True))
        self.images, self.labels, self.memory = images, labels, memory

    def __reduce__(self) -> Any:
        return list, (list(self),)


@chainer.dataset.converter()
def batch_arrays(batch: Any, device: Any = None) -> Any:
    """A converter that takes a :class:`Batch` as it is.

    For ``StandardUpdater(iterator, optimizer, converter=batch_arrays)`` and
    evaluators.  On the CPU nothing is copied.  To a GPU the images go from
    memory that is pinned.  Other batches are left to ``concat_examples``.

    Args:
        batch: Of an :class:`~chainer_fp8pipe.images.ImageIterator`.
        device: Chainer's device; None leaves the arrays where they are.

    Returns:
        Images (samples, C, H, W) and labels (samples,), int32, on the
        device.
    """
    if not isinstance(batch, Batch):
        return chainer.dataset.concat_examples(batch, device)
    if device is None:
        return batch.images, batch.labels
    if isinstance(device, chainer.backend.GpuDevice):
        return (batch.memory.send(batch.images, device),
                device.send(batch.labels))
    return device.send((batch.images, batch.labels))

"""The iterator over a folder's images, with batches read ahead."""
from __future__ import annotations

import logging
from collections import deque
from typing import Any, Literal

import chainer
import numpy

from . import shards
from .decoding import ImageError
from .reading import Reader
from .worker import Outcome, attempt
from .workers import Failure, Loader

_log = logging.getLogger(__name__)


class Batch(list):
    """A list of ``(image, label)``, which are parts of two whole arrays.

    Chainer's own ``concat_examples`` copies the items of the list;
    :func:`batch_arrays` takes the arrays without a copy.  Nothing writes to
    them as long as anything refers to them.  Copies and pickles are plain
    lists.

    Attributes:
        images: Shape (samples, C, H, W).
        labels: int32, shape (samples,).
    """

    def __init__(self, images: numpy.ndarray, labels: numpy.ndarray
                 ) -> None:
        super().__init__(zip(images, labels, strict=True))
        self.images, self.labels = images, labels

    def __reduce__(self) -> Any:
        return list, (list(self),)


@chainer.dataset.converter()
def batch_arrays(batch: Any, device: Any = None) -> Any:
    """A converter that takes a :class:`Batch` without a copy.

    For ``StandardUpdater(iterator, optimizer, converter=batch_arrays)`` and
    evaluators.  Other batches are left to ``concat_examples``.

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
    return device.send((batch.images, batch.labels))


class ImageIterator(chainer.dataset.Iterator):
    """Made by :meth:`ImageFolder.iterator`.

    All ranks go through an epoch together: each global batch is divided over
    them, so that each sample comes once in an epoch, on one rank, and every
    rank makes as many batches.  The batches of an epoch differ by one sample
    at most.

    A batch is never empty: if none of its images can be used, it is one good
    image of another batch of this rank in the same epoch, cropped as there.

    A snapshot holds the position in the epoch, which is the same on all
    ranks, so that a run goes on from it with any number of ranks and of
    workers; and the counts of images left out on the rank that saved it.

    Attributes:
        batch_size: Most samples of a batch on this rank.
        epoch: Finished epochs.
        is_new_epoch: Whether the last batch finished one.
        skipped: How often this rank left out an image that cannot be used.
        substituted: Batches of this rank that are an image of another batch,
            as none of their own could be used.
    """

    def __init__(self, reader: Reader, ranks: tuple[int, int], batch: int,
                 workers: int, prefetch: int, repeat: bool, shuffle: bool,
                 on_error: Literal['skip', 'raise']) -> None:
        self._loader: Loader | None = None      # for __del__, on an error
        self.batch_size, self.repeat = batch, repeat
        self._reader, self._on_error = reader, on_error
        self._rank, self._ranks = ranks
        self._who = f'rank {self._rank}'
        self._samples = len(reader.table)
        self._shuffle = shuffle
        if self._samples < self._ranks:
            raise ValueError(
                f'{self._samples} images are less than one for each of the '
                f'{self._ranks} ranks; use at most {self._samples} ranks')
        # Without workers nothing is read before it is wanted.
        self._ahead = prefetch if workers else 0
        self._skipped = Skipped(self._rank, self._samples)
        self._order: tuple[int, numpy.ndarray] = -1, numpy.empty(0)
        self._loader = Loader(
            reader, shards.largest_part(self._samples, batch, self._ranks),
            workers, self._ahead + 1)
        self.is_new_epoch: bool
        self._previous: float
        # The loader's requests: their global batch, and this rank's samples.
        self._steps: deque[tuple[shards.GlobalBatch, numpy.ndarray]] = deque()
        self._start(shards.EpochPosition(), False, -1.0)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def current_position(self) -> int:
        """Samples of this epoch that were used, over all ranks."""
        return self._position.used

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / self._samples

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous < 0 else self._previous

    @property
    def batches_per_epoch(self) -> int:
        """The same on every rank and in every epoch."""
        return shards.batches_left(self._samples, self.batch_size, self._ranks)

    @property
    def skipped(self) -> int:
        return self._skipped.images

    @property
    def substituted(self) -> int:
        return self._skipped.substituted

    @property
    def worker_pids(self) -> list[int]:
        """The process number of each worker."""
        return self._loader.pids if self._loader else []

    def __next__(self) -> Batch:
        loader = self._running()
        if self._position.epoch and not self.repeat:
            raise StopIteration
        try:
            return self._next(loader)
        except BaseException:
            self.finalize()
            raise

    next = __next__

    def reset(self) -> None:
        """Starts again with the first epoch.

        Raises:
            RuntimeError: The iterator was finalized, or a worker has died.
        """
        self._start(shards.EpochPosition(), False, -1.0)

    def finalize(self) -> None:
        """Ends the workers and frees the memory; the iterator is over."""
        if self._loader is not None:
            loader, self._loader = self._loader, None
            loader.close()

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the position in the epochs, and the skipped images.

        Counts are loaded by the rank that saved them; others keep their own.

        Raises:
            ValueError: The state is of other images or another seed.
            RuntimeError: The position changes, but the iterator was
                finalized, or a worker has died.
        """
        for name, here in (('samples', self._samples),
                           ('seed', self._reader.seed),
                           ('shuffle', int(self._shuffle))):
            there = serializer(name, here)
            if there is not None and there != here:
                raise ValueError(
                    f'the iterator was saved with {name}={there}, but here '
                    f'{name}={here}; resume with the same images, seed and '
                    'order')
        epoch = int(serializer('epoch', self.epoch))
        used = int(serializer('current_position', self.current_position))
        new = bool(serializer('is_new_epoch', self.is_new_epoch))
        previous = float(serializer('previous_epoch_detail', self._previous))
        position = shards.EpochPosition(epoch, used)
        if position != self._position:
            self._start(position, new, previous)
        self.is_new_epoch, self._previous = new, previous
        self._skipped.serialize(serializer)

    def _start(self, position: shards.EpochPosition, new: bool,
               previous: float) -> None:
        """Goes on at a position."""
        try:
            self._running().cancel()
        except BaseException:
            self.finalize()
            raise
        self._steps.clear()
        self._position = self._requested = position
        self.is_new_epoch, self._previous = new, previous

    def _running(self) -> Loader:
        """The loader, if the iterator is not over."""
        if self._loader is None:
            raise RuntimeError('the iterator was finalized, or has failed; '
                               'make another')
        return self._loader

    def _next(self, loader: Loader) -> Batch:
        while len(self._steps) <= self._ahead and (
                self.repeat or not self._requested.epoch):
            step = shards.next_step(self._requested, self._samples,
                                    self.batch_size, self._ranks)
            indices = self._indices(step)
            self._steps.append((step, indices))
            self._requested = step.after
            loader.request(step.epoch, indices)
        step, indices = self._steps.popleft()
        loaded = loader.take()
        for failure in loaded.failures:
            self._fail(failure)
        images, used = loaded.images, indices[loaded.good]
        if not len(used):
            images, used = self._substitute(step)
        self._previous = self.epoch_detail
        self._position = step.after
        self.is_new_epoch = not step.after.used
        return Batch(images, self._reader.table.labels[used])

    def _substitute(self, step: shards.GlobalBatch
                    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The next good image of this rank's epoch, and its number."""
        transform = self._reader.transform
        assert transform is not None
        images = numpy.empty((1, *transform.shape), transform.dtype)
        for other in shards.others(step, self._samples, self.batch_size,
                                   self._ranks):
            for sample in self._indices(other).tolist():
                outcome, reason = attempt(self._reader, sample, step.epoch,
                                          images[0])
                if outcome == Outcome.DONE:
                    self._skipped.substituted += 1
                    return images, numpy.array([sample])
                if outcome != Outcome.IMAGE:
                    self._fail(Failure(sample, outcome, reason))
        raise ImageError('', f'{self._who}: no image of its share of '
                         f'epoch {step.epoch} can be used; the log names '
                         'those of the batch')

    def _indices(self, step: shards.GlobalBatch) -> numpy.ndarray:
        """This rank's samples of a step."""
        if self._order[0] != step.epoch:
            self._order = step.epoch, shards.epoch_order(
                self._samples, self._reader.seed, step.epoch, self._shuffle)
        return self._order[1][shards.part(step, self._rank, self._ranks)]

    def _fail(self, failure: Failure) -> None:
        """Leaves a sample out, or raises what happened to it."""
        path = self._reader.table.path(failure.sample)
        if failure.outcome == Outcome.FILE:
            raise OSError(f'{self._who}: {path} was found, but cannot be '
                          f'read: {failure.reason}')
        if failure.outcome == Outcome.OTHER:
            raise RuntimeError(f'{self._who}: {path}: {failure.reason}')
        if self._on_error == 'raise':
            raise ImageError(path, f'{failure.reason} ({self._who})')
        self._skipped.add(failure.sample, path, failure.reason)


class Skipped:
    """Images, of ``samples`` on all ranks, that a rank could not use.

    They are counted, named in the log once, and saved in snapshots.
    """

    def __init__(self, rank: int, samples: int) -> None:
        self.images = 0             # how often one was left out
        self.substituted = 0        # batches that are an image of another
        self._rank = rank
        self._named = numpy.zeros(samples, bool)    # in the log already

    def add(self, sample: int, path: str, reason: str) -> None:
        """Counts an image, and names it in the log if it is new."""
        self.images += 1
        if not self._named[sample]:
            self._named[sample] = True
            _log.warning('rank %d: skipped %s: %s', self._rank, path, reason)

    def serialize(self, serializer: Any) -> None:
        """Saves or loads counts and logged images.

        One rank's snapshot may be loaded on all ranks: only the rank of the
        same number takes over its counts.
        """
        rank = serializer('rank', self._rank)
        images = serializer('skipped', self.images)
        substituted = serializer('substituted', self.substituted)
        if rank == self._rank:
            self.images, self.substituted = images, substituted
        # Bits, as a snapshot's arrays should have the same shape each time.
        named = serializer('named', numpy.packbits(self._named))
        self._named |= numpy.unpackbits(
            named, count=len(self._named)).astype(bool)

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
from .workers import BAD_FILE, BAD_IMAGE, DONE, MISTAKE, Loader, attempt

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

    Each sample comes once in an epoch, on one rank.  Every rank makes equally
    many batches; their sizes differ by one sample at most.  A batch without a
    usable image has one good image of another batch of this rank and epoch.

    A snapshot holds the position in the epoch, which all ranks share, and the
    counts of images left out on the rank that saved it.

    Attributes:
        batch_size: Most samples of a batch on this rank.
        batches_per_epoch: The same on every rank and in every epoch.
        epoch: Finished epochs.
        current_position: Samples of this epoch that were used, over all
            ranks.
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
        self._samples = len(reader.table)
        self._shuffle = shuffle
        if self._samples < self._ranks:
            raise ValueError(
                f'{self._samples} images are less than one for each of the '
                f'{self._ranks} ranks; use at most {self._samples} ranks')
        self.batches_per_epoch = shards.batches_left(
            self._samples, batch, self._ranks)
        # Without workers nothing is read before it is wanted.
        self._ahead = prefetch if workers else 0
        self.skipped = self.substituted = 0
        self._named = numpy.zeros(self._samples, bool)  # in the log already
        self._order: tuple[int, numpy.ndarray] = -1, numpy.empty(0)
        self._loader = Loader(
            reader, shards.largest_part(self._samples, batch, self._ranks),
            workers, self._ahead + 1)
        # The loader's requests: epoch, start and stop, this rank's samples.
        self._requests: deque[tuple[int, int, int, numpy.ndarray]] = deque()
        self.is_new_epoch, self._previous = False, -1.0
        self._start((0, 0))

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / self._samples

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous < 0 else self._previous

    @property
    def worker_pids(self) -> list[int]:
        """The process number of each worker."""
        return self._loader.pids if self._loader else []

    def __next__(self) -> Batch:
        loader = self._running()
        if self.epoch and not self.repeat:
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
        self._start((0, 0))
        self.is_new_epoch, self._previous = False, -1.0

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
        position = (int(serializer('epoch', self.epoch)),
                    int(serializer('current_position',
                                   self.current_position)))
        new = bool(serializer('is_new_epoch', self.is_new_epoch))
        previous = float(serializer('previous_epoch_detail', self._previous))
        if position != (self.epoch, self.current_position):
            self._start(position)
        self.is_new_epoch, self._previous = new, previous
        # One rank's snapshot may be loaded on all ranks.
        rank = serializer('rank', self._rank)
        skipped = serializer('skipped', self.skipped)
        substituted = serializer('substituted', self.substituted)
        if rank == self._rank:
            self.skipped, self.substituted = skipped, substituted
        # Bits, as a snapshot's arrays should have the same shape each time.
        named = serializer('named', numpy.packbits(self._named))
        self._named |= numpy.unpackbits(
            named, count=self._samples).astype(bool)

    def _start(self, position: tuple[int, int]) -> None:
        """Goes on at a position: finished epochs, samples used."""
        try:
            self._running().cancel()
        except BaseException:
            self.finalize()
            raise
        self._requests.clear()
        self.epoch, self.current_position = self._requested = position

    def _running(self) -> Loader:
        """The loader, if the iterator is not over."""
        if self._loader is None:
            raise RuntimeError('the iterator was finalized, or has failed; '
                               'make another')
        return self._loader

    def _next(self, loader: Loader) -> Batch:
        while len(self._requests) <= self._ahead and (
                self.repeat or not self._requested[0]):
            epoch, start = self._requested
            stop = shards.batch_stop(start, self._samples, self.batch_size,
                                     self._ranks)
            samples = self._part(epoch, start, stop)
            loader.request(epoch, samples)
            self._requests.append((epoch, start, stop, samples))
            self._requested = self._behind(epoch, stop)
        epoch, start, stop, samples = self._requests.popleft()
        images, good, failures = loader.take()
        for failure in failures:
            self._fail(*failure)
        samples = samples[good]
        if not len(samples):
            images, samples = self._substitute(epoch, start, stop)
        self._previous = self.epoch_detail
        self.epoch, self.current_position = self._behind(epoch, stop)
        self.is_new_epoch = not self.current_position
        return Batch(images, self._reader.table.labels[samples])

    def _behind(self, epoch: int, stop: int) -> tuple[int, int]:
        """The position after a batch."""
        return (epoch + 1, 0) if stop == self._samples else (epoch, stop)

    def _part(self, epoch: int, start: int, stop: int) -> numpy.ndarray:
        """This rank's samples of a global batch."""
        if self._order[0] != epoch:
            self._order = epoch, shards.epoch_order(
                self._samples, self._reader.seed, epoch, self._shuffle)
        return self._order[1][shards.part(start, stop, self._rank,
                                          self._ranks)]

    def _substitute(self, epoch: int, start: int, stop: int
                    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The next good image of this rank's epoch, and its number."""
        transform = self._reader.transform
        assert transform is not None
        images = numpy.empty((1, *transform.shape), transform.dtype)
        for other in shards.other_batches(start, stop, self._samples,
                                          self.batch_size, self._ranks):
            for sample in self._part(epoch, *other).tolist():
                outcome, reason = attempt(self._reader, sample, epoch,
                                          images[0])
                if outcome == DONE:
                    self.substituted += 1
                    return images, numpy.array([sample])
                if outcome != BAD_IMAGE:
                    self._fail(sample, outcome, reason)
        raise ImageError('', f'rank {self._rank}: no image of its share of '
                         f'epoch {epoch} can be used; the log names those of '
                         'the batch')

    def _fail(self, sample: int, outcome: int, reason: str) -> None:
        """Leaves a sample out, or raises what happened to it."""
        path, who = self._reader.table.path(sample), f'rank {self._rank}'
        if outcome == BAD_FILE:
            raise OSError(f'{who}: {path} was found, but cannot be read: '
                          f'{reason}')
        if outcome == MISTAKE:
            raise RuntimeError(f'{who}: {path}: {reason}')
        if self._on_error == 'raise':
            raise ImageError(path, f'{reason} ({who})')
        self.skipped += 1
        if not self._named[sample]:
            self._named[sample] = True
            _log.warning('%s: skipped %s: %s', who, path, reason)

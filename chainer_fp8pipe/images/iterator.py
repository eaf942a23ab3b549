"""The iterator over a folder's images, with batches read ahead by threads."""
# A thread per image in work: files are read, JPEGs are decoded and pixels are
# resized outside of the interpreter's lock (decoding.py), so threads keep as
# many cores busy as processes would.  They share the rank's memory and end
# with it: no shared ring, no messages, no pickled transforms, no orphans, and
# no fork after MPI has started.
from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import chainer
import numpy

from . import shards
from .decoding import ImageError
from .reading import Reader

_log = logging.getLogger(__name__)


class Batch(list):
    """A list of ``(image, label)``, which are parts of two whole arrays.

    Chainer's own ``concat_examples`` copies the items of the list;
    :func:`batch_arrays` takes the arrays without a copy, as long as the list
    has its first items.  Copies and pickles are plain lists.

    Attributes:
        images: Shape (samples, C, H, W).
        labels: int32, shape (samples,).
    """

    def __init__(self, images: numpy.ndarray, labels: numpy.ndarray
                 ) -> None:
        super().__init__(zip(images, labels, strict=True))
        self.images, self.labels = images, labels
        self._items = tuple(self)

    @property
    def is_changed(self) -> bool:
        """Whether items were added, taken out, exchanged or moved."""
        return len(self) != len(self._items) or any(
            one is not other for one, other in zip(self, self._items,
                                                   strict=True))

    def __reduce__(self) -> Any:
        return list, (list(self),)


@chainer.dataset.converter()
def batch_arrays(batch: Any, device: Any = None) -> Any:
    """A converter that takes a :class:`Batch` without a copy.

    For ``StandardUpdater(iterator, optimizer, converter=batch_arrays)`` and
    evaluators.  Other and changed batches are left to ``concat_examples``.

    Args:
        batch: Of an :class:`~chainer_fp8pipe.images.ImageIterator`.
        device: Chainer's device; None leaves the arrays where they are.

    Returns:
        Images (samples, C, H, W) and labels (samples,), int32.
    """
    if not isinstance(batch, Batch) or batch.is_changed:
        return chainer.dataset.concat_examples(batch, device)
    arrays = batch.images, batch.labels
    return arrays if device is None else device.send(arrays)


#: A place in a batch whose sample could not be read, and why.
_Failure = tuple[int, Exception]


class _Request(NamedTuple):
    """A batch that is being read."""
    stop: int                   # position in the epoch behind it
    epoch: int
    samples: numpy.ndarray      # this rank's
    images: numpy.ndarray
    tasks: list[Future[list[_Failure]]]


def _read(reader: Reader, epoch: int, samples: numpy.ndarray,
          images: numpy.ndarray, places: range) -> list[_Failure]:
    """Reads some samples of a batch."""
    failures = []
    for place in places:
        try:
            reader.read(int(samples[place]), epoch, images[place])
        except Exception as error:
            failures.append((place, error))
    return failures


class ImageIterator(chainer.dataset.Iterator):
    """Made by :meth:`ImageFolder.iterator`.

    Each sample comes once in an epoch, on one rank.  Every rank makes equally
    many batches; their sizes differ by one sample at most.  A snapshot holds
    the position in the epoch, which all ranks share.

    Attributes:
        batch_size: Most samples of a batch on this rank.
        batches_per_epoch: The same on every rank and in every epoch.
        epoch: Finished epochs.
        current_position: Samples of this epoch that were used, over all
            ranks.
        is_new_epoch: Whether the last batch finished one.
        skipped: How often this rank left out an image that cannot be used,
            since it was started.
    """

    def __init__(self, reader: Reader, ranks: tuple[int, int], batch: int,
                 workers: int, prefetch: int, repeat: bool, shuffle: bool,
                 on_error: Literal['skip', 'raise']) -> None:
        self._pool: ThreadPoolExecutor | None = None    # for __del__
        self._requests: deque[_Request] = deque()
        self.batch_size, self.repeat = batch, repeat
        self._reader, self._on_error = reader, on_error
        self._rank, self._ranks = ranks
        self._samples = len(reader.table.labels)
        self._shuffle = shuffle
        if self._samples < self._ranks:
            raise ValueError(
                f'{self._samples} images are less than one for each of the '
                f'{self._ranks} ranks; use at most {self._samples} ranks')
        self.batches_per_epoch = shards.batches_left(
            self._samples, batch, self._ranks)
        # Without workers nothing is read before it is wanted.
        self._workers, self._ahead = max(1, workers), prefetch * bool(workers)
        self.skipped = 0
        self._named: set[int] = set()       # in the log already
        self._order: tuple[int, numpy.ndarray] = -1, numpy.empty(0)
        self._pool = ThreadPoolExecutor(self._workers, 'images')
        self.reset()

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / self._samples

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous < 0 else self._previous

    def __next__(self) -> Batch:
        pool = self._running()
        if self.epoch and not self.repeat:
            raise StopIteration
        try:
            return self._next(pool)
        except BaseException:
            self.finalize()
            raise

    next = __next__

    def reset(self) -> None:
        """Starts again with the first epoch.

        Raises:
            RuntimeError: The iterator was finalized.
        """
        self._start((0, 0))
        self.is_new_epoch, self._previous = False, -1.0

    def finalize(self) -> None:
        """Ends the threads; the iterator is over."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            self._requests.clear()
            pool.shutdown(cancel_futures=True)

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the position in the epochs.

        Raises:
            ValueError: The state is of other images or another seed.
            RuntimeError: The position changes, but the iterator was
                finalized.
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

    def _start(self, position: tuple[int, int]) -> None:
        """Goes on at a position: finished epochs, samples used."""
        self._running()
        for request in self._requests:
            for task in request.tasks:
                task.cancel()
        self._requests.clear()
        self.epoch, self.current_position = self._requested = position

    def _running(self) -> ThreadPoolExecutor:
        """The threads, if the iterator is not over."""
        if self._pool is None:
            raise RuntimeError('the iterator was finalized, or has failed; '
                               'make another')
        return self._pool

    def _next(self, pool: ThreadPoolExecutor) -> Batch:
        while len(self._requests) <= self._ahead and (
                self.repeat or not self._requested[0]):
            self._request(pool, *self._requested)
        stop, epoch, samples, images, tasks = self._requests.popleft()
        good = numpy.ones(len(samples), bool)
        for task in tasks:
            for place, error in task.result():
                self._fail(int(samples[place]), error)
                good[place] = False
        if not good.any():
            raise ImageError('', f'rank {self._rank}: no image of a batch of '
                             f'{len(samples)} can be used; the log names them')
        self._previous = self.epoch_detail
        self.epoch, self.current_position = self._behind(epoch, stop)
        self.is_new_epoch = not self.current_position
        labels = self._reader.table.labels[samples]
        return Batch(images, labels) if good.all() else Batch(
            images[good], labels[good])

    def _request(self, pool: ThreadPoolExecutor, epoch: int, start: int
                 ) -> None:
        """Has the next batch read."""
        transform = self._reader.transform
        assert transform is not None
        stop = shards.batch_stop(start, self._samples, self.batch_size,
                                 self._ranks)
        if self._order[0] != epoch:
            self._order = epoch, shards.epoch_order(
                self._samples, self._reader.seed, epoch, self._shuffle)
        samples = self._order[1][shards.part(start, stop, self._rank,
                                             self._ranks)]
        images = numpy.empty((len(samples), *transform.shape),
                             transform.dtype)
        # Small tasks, so that all threads finish a batch together.
        size = max(1, len(samples) // (8 * self._workers))
        self._requests.append(_Request(stop, epoch, samples, images, [
            pool.submit(_read, self._reader, epoch, samples, images, range(
                first, min(first + size, len(samples))))
            for first in range(0, len(samples), size)]))
        self._requested = self._behind(epoch, stop)

    def _behind(self, epoch: int, stop: int) -> tuple[int, int]:
        """The position after a batch."""
        return (epoch + 1, 0) if stop == self._samples else (epoch, stop)

    def _fail(self, sample: int, error: Exception) -> None:
        """Leaves a sample out, or raises what happened to it."""
        path, who = self._reader.table.path(sample), f'rank {self._rank}'
        if isinstance(error, ImageError) and self._on_error == 'skip':
            self.skipped += 1
            if sample not in self._named:
                self._named.add(sample)
                _log.warning('%s: skipped %s: %s', who, path, error.reason)
            return
        if isinstance(error, ImageError):
            raise ImageError(path, f'{error.reason} ({who})') from error
        if isinstance(error, OSError):
            raise OSError(f'{who}: {path} was found, but cannot be read: '
                          f'{type(error).__name__}: {error}') from error
        raise RuntimeError(f'{who}: {path}: {type(error).__name__}: {error}'
                           ) from error

"""The iterator over a folder's images, with batches read ahead by threads."""
# Files are read, JPEGs are decoded and pixels are resized outside of the
# interpreter's lock (decoding.py), so threads keep as many cores busy as
# processes would.  They share the rank's memory and end with it: no shared
# ring, no messages, no pickled transforms, no orphans, and no fork after MPI
# has started.
from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy

from . import shards
from .decoding import ImageError

if TYPE_CHECKING:
    from .folder import ImageFolder

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


class Plan(NamedTuple):
    """What is read, by whom."""

    batch: int              # samples of a batch on this rank, at most
    rank: int
    ranks: int
    workers: int            # threads
    prefetch: int           # batches that they read ahead
    repeat: bool
    shuffle: bool
    skips: bool             # leaves out what cannot be decoded


#: Finished epochs, and samples of the present one that were used.
_Position = tuple[int, int]
#: Samples that could not be read, and why.
_Failures = list[tuple[int, Exception]]


class _Request(NamedTuple):
    """A batch that is being read."""

    behind: _Position
    samples: numpy.ndarray      # this rank's
    images: numpy.ndarray
    tasks: list[Future[_Failures]]


def _requests(folder: ImageFolder, plan: Plan, pool: ThreadPoolExecutor,
              position: _Position) -> Iterator[_Request]:
    """Has batches read from a position on, and gives the oldest ones."""
    count, transform = len(folder), folder.transform
    order, asked = (-1, numpy.empty(0)), deque[_Request]()

    def read(epoch: int, samples: numpy.ndarray, images: numpy.ndarray
             ) -> _Failures:
        failures = []
        for place, sample in enumerate(samples.tolist()):
            try:
                folder.read(sample, epoch, images[place])
            except Exception as error:
                failures.append((sample, error))
        return failures
    try:
        while True:
            while len(asked) <= plan.prefetch and (
                    plan.repeat or not position[0]):
                epoch, start = position
                if order[0] != epoch:
                    order = epoch, shards.epoch_order(count, folder.seed,
                                                      epoch, plan.shuffle)
                stop = shards.batch_stop(start, count, plan.batch, plan.ranks)
                samples = order[1][shards.part(start, stop, plan.rank,
                                               plan.ranks)]
                images = numpy.empty((len(samples), *transform.shape),
                                     transform.dtype)
                position = (epoch, stop) if stop < count else (epoch + 1, 0)
                # Small tasks, so that all threads finish a batch together.
                size = max(1, len(samples) // (8 * plan.workers))
                asked.append(_Request(position, samples, images, [
                    pool.submit(read, epoch, samples[first:first + size],
                                images[first:first + size])
                    for first in range(0, len(samples), size)]))
            yield asked.popleft()
    finally:
        for task in (task for request in asked for task in request.tasks):
            task.cancel()


class ImageIterator(chainer.dataset.Iterator):
    """Made by :meth:`ImageFolder.iterator`.

    Each sample comes once in an epoch, on one rank.  Every rank makes equally
    many batches; their sizes differ by one sample at most.  A snapshot holds
    the position in the epoch, which all ranks share.

    Attributes:
        batches_per_epoch: The same on every rank and in every epoch.
        epoch: Finished epochs.
        current_position: Samples of this epoch that were used, over all
            ranks.
        is_new_epoch: Whether the last batch finished one.
    """

    epoch: int
    current_position: int
    is_new_epoch: bool
    _previous: float
    _batches: Iterator[_Request]
    _pool: ThreadPoolExecutor | None = None     # for __del__

    def __init__(self, folder: ImageFolder, plan: Plan) -> None:
        self._folder, self._plan, samples = folder, plan, len(folder)
        shards.batch_stop(0, samples, plan.batch, plan.ranks)
        self.batches_per_epoch = shards.batches_left(
            samples, plan.batch, plan.ranks)
        self._skipped: Counter[int] = Counter()     # by sample
        self._pool = ThreadPoolExecutor(plan.workers, 'images')
        self.reset()

    @property
    def batch_size(self) -> int:
        """Most samples of a batch on this rank."""
        return self._plan.batch

    @property
    def repeat(self) -> bool:
        """Whether it goes on after the first epoch."""
        return self._plan.repeat

    @property
    def skipped(self) -> int:
        """How often this rank left out an image that cannot be used."""
        return self._skipped.total()

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / len(self._folder)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous < 0 else self._previous

    def __next__(self) -> Batch:
        self._check_running()
        if self.epoch and not self.repeat:
            raise StopIteration
        try:
            request = next(self._batches)
            batch = self._finished(request)
        except BaseException:
            self.finalize()
            raise
        self._previous = self.epoch_detail
        self.epoch, self.current_position = request.behind
        self.is_new_epoch = not self.current_position
        return batch

    next = __next__

    def reset(self) -> None:
        """Starts again with the first epoch.

        Raises:
            RuntimeError: The iterator was finalized.
        """
        self._go_to((0, 0))
        self.is_new_epoch, self._previous = False, -1.0

    def finalize(self) -> None:
        """Ends the threads; the iterator is over."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            self._batches = iter(())
            pool.shutdown(cancel_futures=True)

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the position in the epochs.

        Raises:
            ValueError: The state is of other images or another seed.
            RuntimeError: The position changes, but the iterator was
                finalized.
        """
        for name, here in (('samples', len(self._folder)),
                           ('seed', self._folder.seed),
                           ('shuffle', int(self._plan.shuffle))):
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
            self._go_to(position)
        self.is_new_epoch, self._previous = new, previous

    def _go_to(self, position: _Position) -> None:
        self._batches = _requests(self._folder, self._plan,
                                  self._check_running(), position)
        self.epoch, self.current_position = position

    def _check_running(self) -> ThreadPoolExecutor:
        if self._pool is None:
            raise RuntimeError('the iterator was finalized, or has failed; '
                               'make another')
        return self._pool

    def _finished(self, request: _Request) -> Batch:
        """A batch that was read, without what had to be left out."""
        _, samples, images, tasks = request
        bad = [sample for task in tasks for sample, error in task.result()
               if self._fail(sample, error)]
        good = ~numpy.isin(samples, bad)
        if not good.any():
            raise ImageError('', f'rank {self._plan.rank}: no image of a '
                             f'batch of {len(samples)} can be used; the log '
                             'names them')
        labels = self._folder.labels[samples]
        return Batch(images[good], labels[good]) if bad else Batch(
            images, labels)

    def _fail(self, sample: int, error: Exception) -> bool:
        """True: it is left out; raises what must not be."""
        path, who = self._folder.path(sample), f'rank {self._plan.rank}'
        if isinstance(error, ImageError):
            if not self._plan.skips:
                raise ImageError(path, f'{error.reason} ({who})') from error
            self._skipped[sample] += 1
            if self._skipped[sample] == 1:
                _log.warning('%s: skipped %s: %s', who, path, error.reason)
            return True
        kind, said = (OSError, ' was found, but cannot be read') if isinstance(
            error, OSError) else (RuntimeError, '')
        raise kind(f'{who}: {path}{said}: {type(error).__name__}: {error}'
                   ) from error

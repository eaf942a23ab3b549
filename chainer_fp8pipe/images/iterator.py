"""The iterator over a folder's images, with batches read ahead by threads."""
# Files are read, JPEGs are decoded and pixels are resized outside of the
# interpreter's lock (decoding.py), so threads keep as many cores busy as
# processes would, and need no messages and no fork after MPI has started.
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import chainer
import numpy

if TYPE_CHECKING:
    from .folder import ImageFolder


# --- the samples of each batch on each rank, from the position alone

# An epoch is one order of all samples, from the seed and the epoch's number.
# It is cut into global batches, and each of these into one part per rank.  So
# every rank makes as many batches, and a run goes on at any sample, also with
# other ranks or another batch size.  No sample is left out or repeated.  Those
# that are left take the n batches that they need, whose sizes differ by one at
# most, on a rank too.

def epoch_order(samples: int, seed: int, epoch: int,
                shuffle: bool = True) -> numpy.ndarray:
    """The order of all samples in one epoch: int64, shape (samples,)."""
    if not shuffle:
        return numpy.arange(samples)
    words = [number >> shift & 0xffffffff
             for number in (seed, epoch) for shift in (0, 32)]
    # Not a Generator: NumPy may change the numbers that those draw.
    return numpy.random.RandomState(words).permutation(samples)


def batches_left(rest: int, batch: int, ranks: int) -> int:
    """Batches that the last ``rest`` samples of an epoch make on each rank.

    As few as batches of ``batch`` samples allow, but no more than leave a
    sample for each rank in each of them.
    """
    return max(1, min(-(-rest // (batch * ranks)), rest // ranks))


def batch_stop(start: int, samples: int, batch: int, ranks: int) -> int:
    """Where the global batch ends that begins at a place of an epoch.

    Args:
        start: Samples of the epoch that were used.
        samples: In the epoch.
        batch: Samples of a batch on one rank, at most.  Only where this is 1
            and the ranks do not divide the samples, there can be 2.
        ranks: How many there are.

    Raises:
        ValueError: There is not a sample for each rank.
    """
    rest = samples - start
    if rest < ranks:
        raise ValueError(
            f'the epoch has {rest} sample{"s" * (rest != 1)} left, too few '
            f'for {ranks} ranks; finish it with as many ranks as it was begun '
            f'with, or use at most {max(1, rest)} ranks')
    return start + -(-rest // batches_left(rest, batch, ranks))


def part(start: int, stop: int, rank: int, ranks: int) -> slice:
    """The slice of the epoch's order that a rank has of a global batch."""
    size = stop - start
    return slice(start + size * rank // ranks,
                 start + size * (rank + 1) // ranks)


# --- batches

@chainer.dataset.converter()
def batch_arrays(batch: Any, device: Any = None) -> Any:
    """A converter that takes the images of a batch without a copy.

    For ``StandardUpdater(iterator, optimizer, converter=batch_arrays)`` and
    evaluators.  Batches of other iterators, and those that were changed, are
    left to Chainer's ``concat_examples``, which copies.

    Args:
        batch: Of an :class:`~chainer_fp8pipe.images.ImageIterator`.
        device: Chainer's device; None leaves the arrays where they are.

    Returns:
        Images (samples, C, H, W) and labels (samples,), int32.
    """
    try:        # whether the images are the rows of one array, in its order
        whole = batch[0][0].base
        is_whole = all(     # the same memory, shape, strides and type
            image.__array_interface__ == row.__array_interface__
            for (image, _), row in zip(batch, whole, strict=True))
    except (AttributeError, LookupError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        return chainer.dataset.concat_examples(batch, device)
    arrays = whole, numpy.array([label for _, label in batch])
    return arrays if device is None else device.send(arrays)


def _requests(folder: ImageFolder, pool: ThreadPoolExecutor, epoch: int,
              start: int, batch: int, prefetch: int, repeat: bool,
              shuffle: bool) -> Iterator[Any]:
    """Has batches read from a position on, and gives the oldest ones.

    Each with the position behind it, its samples of this rank, their images,
    and the tasks that write these.
    """
    asked, order = deque[Any](), None
    count, transform = len(folder), folder.transform
    try:
        while True:
            while len(asked) <= prefetch and (repeat or not epoch):
                if order is None or not start:
                    order = epoch_order(count, folder.seed, epoch, shuffle)
                stop = batch_stop(start, count, batch, folder.ranks)
                samples = order[part(start, stop, folder.rank, folder.ranks)]
                images = numpy.empty((len(samples), *transform.shape),
                                     transform.dtype)
                tasks = [
                    pool.submit(folder.read, sample, (epoch, sample), image)
                    for sample, image in zip(samples.tolist(), images,
                                             strict=True)]
                epoch, start = (epoch, stop) if stop < count else (
                    epoch + 1, 0)
                asked.append(((epoch, start), samples, images, tasks))
            yield asked.popleft()
    finally:        # what was read ahead of a reset is not needed
        for *_, tasks in asked:
            for task in tasks:
                task.cancel()


class ImageIterator(chainer.dataset.Iterator):
    """Made by :meth:`ImageFolder.iterator`.

    Each sample comes once in an epoch, on one rank.  Every rank makes equally
    many batches; their sizes differ by one sample at most.  A snapshot holds
    the position in the epoch, which all ranks share.

    Attributes:
        batch_size: Most samples of a batch on this rank.
        repeat: Whether it goes on after the first epoch.
        epoch: Finished epochs.
        current_position: Samples of this epoch that were used, over all
            ranks.
        is_new_epoch: Whether the last batch finished one.
    """

    epoch: int
    _batches: Iterator[Any]
    _pool: ThreadPoolExecutor | None = None     # for __del__

    def __init__(self, folder: ImageFolder, batch: int, workers: int,
                 prefetch: int, repeat: bool, shuffle: bool) -> None:
        self._folder, self.batch_size, self.repeat = folder, batch, repeat
        self._prefetch, self._shuffle = prefetch, shuffle
        batch_stop(0, len(folder), batch, folder.ranks)     # or raises
        self._pool = ThreadPoolExecutor(workers, 'images')
        self.reset()

    @property
    def batches_per_epoch(self) -> int:
        """The same on every rank and in every epoch."""
        return batches_left(len(self._folder), self.batch_size,
                            self._folder.ranks)

    @property
    def epoch_detail(self) -> float:
        """Epochs so far, with the fraction of the present one."""
        return self.epoch + self.current_position / len(self._folder)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous < 0 else self._previous

    def __next__(self) -> list[tuple[numpy.ndarray, numpy.int32]]:
        self._running()
        if self.epoch and not self.repeat:
            raise StopIteration
        try:
            behind, samples, images, tasks = next(self._batches)
            for task in tasks:
                task.result()
        except BaseException:
            self.finalize()
            raise
        self._previous = self.epoch_detail
        self.epoch, self.current_position = behind
        self.is_new_epoch = not self.current_position
        return list(zip(images, self._folder.labels[samples], strict=True))

    next = __next__

    def reset(self) -> None:
        """Starts again with the first epoch.

        Raises:
            RuntimeError: The iterator was finalized.
        """
        self._go_to(0, 0)
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
            self._go_to(*position)
        self.is_new_epoch, self._previous = new, previous

    def _go_to(self, epoch: int, position: int) -> None:
        self._batches = _requests(
            self._folder, self._running(), epoch, position, self.batch_size,
            self._prefetch, self.repeat, self._shuffle)
        self.epoch, self.current_position = epoch, position

    def _running(self) -> ThreadPoolExecutor:
        if self._pool is None:
            raise RuntimeError('the iterator was finalized, or has failed; '
                               'make another')
        return self._pool

"""How fast the images go through, and who waits for them."""
import time

from chainer_fp8pipe import batch_arrays

import chainer
import numpy
from chainer.training import StandardUpdater, extension
from mpi4py import MPI


class TimedUpdater(StandardUpdater):
    """An updater that looks at the clock.

    Attributes:
        images: That this rank has trained with.
        seconds: In updates, waiting included.
        waited: Seconds until batches were there.
    """

    def __init__(self, iterator, optimizer, device):
        super().__init__(iterator, optimizer, batch_arrays, device=device)
        self.images, self.seconds, self.waited = 0, 0.0, 0.0

    def update_core(self):
        start = time.perf_counter()
        batch = self.get_iterator('main').next()
        self.waited += time.perf_counter() - start
        optimizer = self.get_optimizer('main')
        optimizer.update(optimizer.target,
                         *self.converter(batch, self.input_device))
        self.images += len(batch)
        self.seconds += time.perf_counter() - start


class InputReport(extension.Extension):
    """Reports ``images/s``, ``input_s`` and ``skipped``, for all ranks.

    They are of the updates since the last report: images of all ranks per
    second, the seconds that the rank waited for batches which waited
    longest, and images left out, also of the validation set.  Add it on all
    ranks, with the trigger of ``LogReport``.

    Args:
        updater: A :class:`TimedUpdater`.
        iterators: The ``ImageIterator`` of each set.
        comm: The ranks.
    """

    priority = extension.PRIORITY_EDITOR
    default_name = 'InputReport'

    def __init__(self, updater, iterators, comm):
        self._updater, self._iterators = updater, iterators
        self._comm = comm.mpi_comm
        self._last = self._now()

    def __call__(self, trainer):
        now = self._now()
        since, self._last = now - self._last, now
        images, skipped = self._comm.allreduce(since[:2])
        longest = numpy.empty(2)
        self._comm.Allreduce(since[2:].copy(), longest, MPI.MAX)
        seconds, waited = longest
        chainer.report({'images/s': images / seconds, 'input_s': waited,
                        'skipped': int(skipped)})

    def serialize(self, serializer):
        """A snapshot holds what has not been reported yet."""
        since = serializer('since', self._now() - self._last)
        if isinstance(serializer, chainer.Deserializer):
            self._last = self._now() - since

    def _now(self):
        return numpy.array([
            self._updater.images,
            sum(iterator.skipped for iterator in self._iterators),
            self._updater.seconds, self._updater.waited])

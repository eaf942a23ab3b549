"""Accuracy on all validation images, exactly."""
import contextlib

from chainer_fp8pipe import batch_arrays

import chainer
import chainer.links as L
import numpy
from chainer.training import extensions
from mpi4py import MPI


class Evaluation(extensions.Evaluator):
    """Reports ``val/loss``, ``val/top1`` and ``val/top5``.

    Each image counts once, whatever batches and ranks it is divided into.
    Running statistics of batch normalisation become the mean of the ranks'.

    Args:
        iterator: Over this rank's share of the images.
        model: A :class:`~classifier.Classifier`.
        comm: The ranks.
        average: A ``MovingAverage``, to evaluate with its weights; or None.
        device: Of the model; None is the CPU.
    """

    def __init__(self, iterator, model, comm, average, device):
        super().__init__(iterator, model, batch_arrays, device)
        self._comm, self._average = comm, average

    def evaluate(self):
        with self.weights():
            return self._evaluate()

    @contextlib.contextmanager
    def weights(self):
        """A ``with`` block in which the model is what is evaluated.

        Enter it on all ranks.
        """
        with (self._average.weights() if self._average
              else contextlib.nullcontext()):
            share_statistics(self.get_target('main'), self._comm)
            yield

    def _evaluate(self):
        iterator, model = self.get_iterator('main'), self.get_target('main')
        iterator.reset()
        sums = numpy.zeros(4)
        with chainer.no_backprop_mode():
            for batch in iterator:
                arrays = self.converter(batch, self.device)
                sums += len(batch), *model.score(*arrays)
        images, *totals = self._comm.mpi_comm.allreduce(sums)
        return {f'val/{name}': total / images for name, total in zip(
            ('loss', 'top1', 'top5'), totals, strict=True)}


def share_statistics(model, comm):
    """Makes the running statistics of batch normalisation the ranks' mean.

    In one message, and from the host, so that any MPI will do.  Call it on
    all ranks.
    """
    arrays = [array for link in model.links()
              if isinstance(link, L.BatchNormalization)
              for array in (link.avg_mean, link.avg_var)]
    if not arrays or comm.size == 1:
        return
    flat = numpy.concatenate([chainer.backends.cuda.to_cpu(array).ravel()
                              for array in arrays]).astype(numpy.float64)
    comm.mpi_comm.Allreduce(MPI.IN_PLACE, flat)
    flat /= comm.size
    start = 0
    for array in arrays:
        part = flat[start:start + array.size].reshape(array.shape)
        array[...] = chainer.backend.get_array_module(array).asarray(part)
        start += array.size

"""A network with its loss, and what is counted of its answers."""
import functools

from chainer_fp8pipe.images.transforms import Normalise
from chainer_fp8pipe.training.losses import smoothed_cross_entropy

import chainer
import numpy

_AUXILIARY = 0.3        # what the loss of an auxiliary classifier counts


class Classifier(chainer.Chain):
    """Normalises images, and reports loss and top-1 accuracy.

    Images come as bytes, a quarter of the memory and of the way to a GPU,
    and become floats here, of the type that Chainer is configured for.

    Args:
        predictor: One of ``models``.
        smoothing: Of labels, in training.
    """

    def __init__(self, predictor, smoothing):
        super().__init__()
        with self.init_scope():
            self.predictor = predictor
        self._normalise = Normalise(
            dtype=chainer.get_dtype(map_mixed16=numpy.float16))
        self._loss = functools.partial(smoothed_cross_entropy,
                                       smoothing=smoothing)

    def forward(self, images, labels):
        """The loss of a batch.

        Args:
            images: (N, 3, H, W), uint8.
            labels: (N,), int32.
        """
        y, *auxiliary = self._scores(images)
        loss = self._loss(y, labels)
        for scores in auxiliary:
            loss += _AUXILIARY * self._loss(scores, labels)
        chainer.report({'loss': loss, 'top1': hits(y, labels, 1).mean()},
                       self)
        return loss

    def score(self, images, labels):
        """Sums over a batch: plain cross entropy, and top-1 and top-5 hits.

        Returns:
            An array of three.
        """
        y, = self._scores(images)
        count = len(labels)
        loss = smoothed_cross_entropy(y, labels, smoothing=0)
        return [count * float(loss.array), *(
            int(hits(y, labels, among).sum()) for among in (1, 5))]

    def _scores(self, images):
        scores = self.predictor(self._normalise(images))
        return scores if isinstance(scores, tuple) else (scores,)


def hits(y, labels, among):
    """Whether each label is among the so many highest scores.

    Of equal scores the first is the highest; NaN is above all others.

    Args:
        y: Variable of shape (N, K).
        labels: (N,), integers.
        among: How many.

    Returns:
        bool, shape (N,).
    """
    xp, y, labels = y.xp, y.array, labels[:, None]
    own = xp.take_along_axis(y, labels, axis=1)
    is_before = xp.arange(y.shape[1]) < labels
    ahead = ~(y <= own) | (y == own) & is_before
    return ahead.sum(axis=1) < among

"""Losses that Chainer lacks."""
from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import numpy

from ..intercept.function_calls import current


def smoothed_cross_entropy(x: Any, t: Any, smoothing: float = 0.1,
                           ignore_label: int = -1) -> chainer.Variable:
    """Softmax cross entropy with label smoothing, in float32.

    The target of a sample is ``1 - smoothing`` for its label plus
    ``smoothing / K`` for each of the K classes (Szegedy et al., *Rethinking
    the Inception Architecture*, 2016, section 7).  Chainer's
    ``softmax_cross_entropy`` takes such targets without ``ignore_label``, and
    returns the loss of float16 scores in float16.

    Args:
        x: Scores, shape (N, K) or (N, K, ...), any floating dtype.
        t: Labels, integers, shape (N) or (N, ...).
        smoothing: From 0, which is plain cross entropy, to below 1.
        ignore_label: Samples with this label do not count.

    Returns:
        The mean over the samples that count, a scalar; float32, or float64
        for float64 scores.  0 if no sample counts.

    Raises:
        ValueError: ``smoothing`` is out of its range, shapes do not fit, or
            a label is no class.
    """
    if not 0 <= smoothing < 1:
        raise ValueError('smoothing must be at least 0 and less than 1, not '
                         f'{smoothing!r}')
    x = chainer.as_variable(x)
    labels = t.array if isinstance(t, chainer.Variable) else t
    if x.ndim < 2 or x.shape[:1] + x.shape[2:] != labels.shape:
        raise ValueError(f'labels of shape {labels.shape} do not fit scores '
                         f'of shape {x.shape}; they must be '
                         f'{x.shape[:1] + x.shape[2:]}')
    if labels.dtype.kind not in 'iu':
        raise ValueError(f'labels must be integers, not {labels.dtype}')
    if x.dtype == numpy.float16:
        x = F.cast(x, numpy.float32)
    if not smoothing:       # whose zeros times infinity would be NaN
        return F.softmax_cross_entropy(x, t, ignore_label=ignore_label)
    if (interceptor := current()) is not None:
        interceptor.leave_out(t, ignore_label)
    classes = x.shape[1]
    with chainer.using_device(x.device):
        xp, counts = x.xp, labels != ignore_label
        wrong = counts & ((labels < 0) | (labels >= classes))
        # On a GPU a look at the labels would wait for it.
        if (xp is numpy or chainer.is_debug()) and wrong.any():
            raise ValueError(
                f'label {labels[wrong][0]} is none of the {classes} classes '
                f'and not ignore_label={ignore_label}')
        own = xp.arange(classes).reshape(
            1, classes, *[1] * (x.ndim - 2)) == xp.expand_dims(labels, 1)
        targets = ((1 - smoothing) * own.astype(x.dtype) + smoothing / classes
                   ) * xp.expand_dims(counts, 1)
        count = xp.maximum(counts.sum(), 1).astype(x.dtype)
        # Not even an infinite score of an ignored sample counts.
        x = F.where(xp.broadcast_to(xp.expand_dims(counts, 1), x.shape),
                    x, xp.zeros(x.shape, x.dtype))
        targets = targets.astype(x.dtype, copy=False)
    return -F.sum(F.log_softmax(x, axis=1) * targets) / count

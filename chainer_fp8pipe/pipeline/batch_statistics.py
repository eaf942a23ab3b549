"""Running statistics of batch normalisation, as if a batch came whole.

Each micro-batch is normalised with its own mean and variance.  The running
averages are updated once per batch, with the mean and the variance of the
whole batch, which follow from those of its parts (Chan, Golub, LeVeque:
parallel variance).
"""
from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from chainer.link_hooks import SpectralNormalization
from chainer.links import BatchNormalization, BatchRenormalization


class BatchStatistics(chainer.LinkHook):
    """Gathers statistics in blocks of :meth:`counting`, as a link hook.

    Batch renormalisation, which reads its averages, is as Chainer has it.
    """

    name = 'BatchStatistics of chainer_fp8pipe'

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, int, int], list[tuple]] = {}
        self._uses: collections.Counter[Any] = collections.Counter()
        self._before: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def counting(self, chunk: int = 0,
                 here: Callable[[Any], bool] = lambda link: True
                 ) -> Iterator[None]:
        """A block of a micro-batch in a chunk; links count if ``here(link)``.
        """
        self._uses.clear()
        self._chunk, self._here = chunk, here
        with self:
            yield

    def forward_preprocess(self, args: Any) -> None:
        link = args.link
        if not _counts(link):
            return
        if link.avg_mean is None:
            link._initialize_params(tuple(
                length for axis, length in enumerate(_input(args).shape)
                if axis not in link.axis))
        self._before.append(
            (link, link.avg_mean, link.avg_var, link.decay, link.N))
        # Has Chainer put this micro-batch's own values into the averages.
        link.avg_mean = link.xp.zeros_like(link.avg_mean)
        link.avg_var = link.xp.zeros_like(link.avg_var)
        link.decay, link.N = 0.0, 0

    def forward_postprocess(self, args: Any) -> None:
        link = args.link
        if not _counts(link):
            return
        if self._here(link):
            # A link that normalises over several ranks knows how many.
            count = getattr(link, 'group_elements', 0) or (
                _input(args).size // max(link.avg_mean.size, 1))
            self.note(link, self._chunk, self._uses[link], count,
                      link.avg_mean, link.avg_var, link.N > 0)
            self._uses[link] += 1
        self._restore()

    def note(self, link: Any, chunk: int, use: int, count: int, mean: Any,
             variance: Any, finetuned: bool) -> None:
        """Notes a micro-batch's elements of each channel, mean and variance.

        ``use`` counts those of the link in this chunk and micro-batch.  The
        variance is the unbiased one.
        """
        self._parts.setdefault((link, chunk, use), []).append((
            count, mean.astype(numpy.float64),
            variance.astype(numpy.float64) / _unbiased(count), finetuned))

    def finish(self) -> None:
        """Updates the running averages at the end of a step."""
        for (link, *_), parts in self._parts.items():
            total = sum(count for count, *_ in parts)
            mean = sum(count * part for count, part, *_ in parts) / total
            variance = sum(count * (part + (centre - mean) ** 2)
                           for count, centre, part, _ in parts) / total
            decay = link.decay
            if parts[-1][-1]:
                link.N += 1
                decay = 1.0 - 1.0 / link.N
            for average, now in ((link.avg_mean, mean),
                                 (link.avg_var, variance * _unbiased(total))):
                average *= decay
                average += ((1 - decay) * now).astype(average.dtype)
        self.forget()

    def forget(self) -> None:
        """Drops the statistics of a failed step."""
        self._parts.clear()
        while self._before:
            self._restore()

    def _restore(self) -> None:
        link, link.avg_mean, link.avg_var, link.decay, link.N = (
            self._before.pop())


def why_once(link: chainer.Link) -> str:
    """Why a link must not run forward twice for a batch; '' if it may."""
    if isinstance(link, BatchRenormalization):
        return ('batch renormalisation, which reads its running averages in '
                'the forward pass')
    # The public attribute makes an empty dictionary where there is none.
    if any(isinstance(hook, SpectralNormalization)
           for hook in (link._local_link_hooks or {}).values()):
        return ('spectral normalisation, whose vectors move on with every '
                'forward pass')
    return ''


def _counts(link: Any) -> bool:
    return (isinstance(link, BatchNormalization)
            and not isinstance(link, BatchRenormalization)
            and chainer.config.train and not chainer.config.in_recomputing)


def _input(args: Any) -> Any:
    return args.args[0] if args.args else args.kwargs['x']


def _unbiased(count: int) -> float:
    """Chainer's running variance is the unbiased one."""
    return count / max(count - 1.0, 1.0)

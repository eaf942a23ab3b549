"""What micro-batches add up to: a batch's loss, reports and statistics."""
# A mean over a batch is not the mean of its micro-batches' means where one is
# shorter or labels are ignored.  So each micro-batch is weighted by its number
# of samples, or of labels that are not ignored.
#
# Chainer takes anything for a report.  Numbers, arrays, and pairs of a number
# and its weight (see `DictSummary`) have a mean; of anything else the last one
# counts, as it would if the batch had not been divided.
#
# Running averages of batch normalisations move once per batch, by mean and
# variance of the whole batch, which follow from those of its parts (Chan,
# Golub, LeVeque: "Algorithms for computing the sample variance", 1983).
from __future__ import annotations

import collections
import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
from chainer.link_hooks import SpectralNormalization
from chainer.links import BatchNormalization, BatchRenormalization

from ..intercept.function_calls import Interceptor

# --- weights and loss --------------------------------------------------------

def checked_weight(value: Any) -> float:
    """A micro-batch's weight as a float, or ValueError."""
    weight = float(getattr(value, 'array', value))
    if not 0 <= weight < math.inf:
        raise ValueError(f'the weight of a micro-batch is {weight}; '
                         'loss_weight must give finite numbers of at least 0')
    return weight


def weights_of(labels: Sequence[Sequence[tuple[int, int]]],
               sizes: Sequence[int], replicas: int = 1
               ) -> tuple[list[float], str]:
    """How much each micro-batch counts in the mean loss, and the unit.

    That is its number of labels that count, if a loss may leave some out,
    else of samples, of which ``sizes`` has the numbers.  ``labels`` has, for
    each micro-batch and each such loss, how many count (-1: unknown), and how
    many are left out.  Replicas have batches of their own, and one unit.

    Raises:
        ValueError: Several losses leave out labels, and not equally many.
    """
    samples = [float(size) for size in sizes], 'samples'
    every = [one for several in labels for one in several]
    if not every or len(sizes) == replicas == 1:
        return samples
    if any(count < 0 for count, _ in every):
        raise ValueError(
            'a loss ignores some of the labels that the model computes '
            'itself; pass loss_weight=, a function of the batch, to '
            'PipelineUpdater')
    if len({len(several) for several in labels}) == 1 and all(
            len({count for count, _ in several}) == 1 for several in labels):
        return [float(several[0][0]) for several in labels], 'labels'
    if not any(left for _, left in every):
        return samples
    raise ValueError(
        'several losses ignore different numbers of labels; pass '
        'loss_weight=, a function of the batch, to PipelineUpdater')


# --- reports -----------------------------------------------------------------

class Report(NamedTuple):
    """The reports of one name, added up."""

    #: ``'number'``, ``'pair'``, ``'other'``, or the dtype of an array's mean.
    kind: str
    total: Any          # the weighted sum in float64; the other
    weight: float       # the sum of the weights
    variable: str = ''  # the dtype of what was a variable

    def plus(self, new: Report) -> Report:
        """With a later report of the same name."""
        if self.kind == new.kind != 'other' and (
                numpy.shape(self.total) == numpy.shape(new.total)):
            return new._replace(total=self.total + new.total,
                                weight=self.weight + new.weight)
        return new

    def mean(self) -> Any:
        """Returns the value that the batch reports."""
        if self.kind == 'other':
            return self.total
        mean = self.total / (self.weight or 1.0)
        return (mean if self.kind == 'number' else (mean, self.weight)
                if self.kind == 'pair' else mean.astype(self.kind))


#: What a rank has to say to the means, by name.
Reports = dict[str, Report]


def add(reports: Reports, name: str, new: Report) -> None:
    """Adds a later report of a name to the earlier ones."""
    reports[name] = reports[name].plus(new) if name in reports else new


def of_all(everyone: Iterable[Reports]) -> Reports:
    """The reports of all ranks, added up in their order."""
    found: Reports = {}
    for reports in everyone:
        for name, report in reports.items():
            add(found, name, report)
    return found


def report_of(value: Any, weight: float) -> Report:
    """The report of a value with a weight in the mean."""
    kind = 'number'
    dtype = (value.dtype.str if isinstance(value, chainer.Variable)
             and value.dtype.kind == 'f' else '')
    if isinstance(value, tuple) and len(value) == 2 and all(
            _array(one).ndim == 0 and _array(one).dtype.kind in 'biuf'
            for one in value):
        value, weight, kind = value[0], float(_array(value[1])), 'pair'
    array = _array(value)
    if array.dtype.kind not in 'biuf':
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f'{value!r:.80} is reported, and cannot be sent to the other '
                f'ranks: {error}; report numbers, arrays or texts') from error
        return Report('other', value, 1.0)
    # What counts nothing may be not a number.
    total = (weight * array.astype(float) if weight
             else numpy.zeros(array.shape))
    if array.ndim == 0:
        return Report(kind, float(total), weight, dtype)
    return Report(array.dtype.str if array.dtype.kind == 'f' else 'f8', total,
                  weight, dtype)


def _array(value: Any) -> numpy.ndarray:
    """A NumPy array of anything; of dtype object if it is no number."""
    value = getattr(value, 'array', value)      # of a variable
    if isinstance(value, chainer.get_array_types()):
        return chainer.backends.cuda.to_cpu(value)
    return numpy.array(value) if isinstance(
        value, (bool, int, float, numpy.generic)) else numpy.empty((), object)


# --- running statistics ------------------------------------------------------

class BatchStatistics(Interceptor):
    """Gathers what batch normalisations find, and moves their averages.

    Of links that are called, or recorded, in blocks of :meth:`counting`.
    Batch renormalisation, which reads its averages, is as Chainer has it.
    """

    def __init__(self) -> None:
        #: Whether a link's averages are here.
        self.here: Callable[[Any], bool] = lambda link: True
        self._parts: dict[tuple[Any, int, int], list[tuple]] = {}
        self._found: dict[Any, list[tuple]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def counting(self, chunk: int = 0) -> Iterator[None]:
        """A block of a micro-batch in a chunk, which counts if it succeeds."""
        found = self._found = collections.defaultdict(list)
        yield
        for link, parts in found.items():
            for use, part in enumerate(parts):
                self._parts.setdefault((link, chunk, use), []).append(part)

    def call_link(self, link: Any, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        """See :meth:`.Interceptor.call_link`."""
        if not isinstance(link, BatchNormalization) or isinstance(
                link, BatchRenormalization) or (
                not chainer.config.train or chainer.config.in_recomputing):
            return original(link, *args, **kwargs)
        x = args[0] if args else kwargs['x']
        if link.avg_mean is None:
            link._initialize_params(tuple(
                length for axis, length in enumerate(x.shape)
                if axis not in link.axis))
        before = link.avg_mean, link.avg_var, link.decay, link.N
        # Has Chainer put this micro-batch's own values into the averages.
        link.avg_mean = link.xp.zeros_like(link.avg_mean)
        link.avg_var = link.xp.zeros_like(link.avg_var)
        link.decay, link.N = 0.0, 0
        try:
            result = original(link, *args, **kwargs)
            # Elements of each channel; a link that normalises over several
            # ranks has an array, into which it writes how many.
            count = getattr(link, 'group_elements', x.size // max(
                link.avg_mean.size, 1))
            self._found[link].append((
                count, link.avg_mean, link.avg_var, link.N > 0))
            return result
        finally:
            link.avg_mean, link.avg_var, link.decay, link.N = before

    def check(self, link: Any) -> None:
        """Raises ValueError for a look at averages that have yet to move."""
        if link in self._found:
            raise ValueError(
                f'the running averages of a {type(link).__name__} are read '
                'after forward has moved them, which a pipeline does at the '
                'end of the update; read them before')

    def finish(self) -> None:
        """Updates the running averages at the end of a step."""
        for (link, *_), parts in self._parts.items():
            if not self.here(link):
                continue
            decay = link.decay
            if parts[-1][-1]:
                link.N += 1
                decay = 1.0 - 1.0 / link.N
            # Chainer's variances are unbiased ones.
            move((link.avg_mean, link.avg_var), decay,
                 sum(int(count) for count, *_ in parts), *joined([
                     (int(count), mean.astype(float),
                      variance.astype(float) / _unbiased(int(count)))
                     for count, mean, variance, _ in parts]))
        self.forget()

    def forget(self) -> None:
        """Drops the statistics of a failed step."""
        self._parts.clear()


def joined(parts: Sequence[tuple[float, Any, Any]]) -> tuple[Any, Any]:
    """Mean and variance of a whole: of its parts, also their lengths."""
    total = sum(count for count, *_ in parts)
    mean = sum(count * one for count, one, _ in parts) / total
    return mean, sum(count * (variance + (one - mean) ** 2)
                     for count, one, variance in parts) / total


def move(averages: tuple[Any, Any], decay: float, count: int, mean: Any,
         variance: Any) -> None:
    """Moves Chainer's running averages, of which one is unbiased."""
    for average, now in zip(averages, (mean, variance * _unbiased(count)),
                            strict=True):
        average *= decay
        average += chainer.backend.get_array_module(average).asarray(
            ((1 - decay) * now).reshape(average.shape), average.dtype)


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


def _unbiased(count: int) -> float:
    """How much larger an unbiased variance is."""
    return count / max(count - 1.0, 1.0)

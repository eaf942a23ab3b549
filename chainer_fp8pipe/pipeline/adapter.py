"""What a pipeline's ranks do with a batch: in common, and for layers."""
# A Chain that returns its loss is known by what it has called: all ranks see
# the whole batch, and record it (`chains.adapter`).  Of a list of layers each
# rank has some, and needs no more than these: inputs stay on the first stage,
# and targets are for a loss that is an argument of the pipeline.
# Both end in parts for a `Stage`, a weight for each micro-batch, and reports
# of which the means are taken.
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import chainer.functions as F

from ..mpi.grid import ProcessGrid
from .backprop import Arrays
from .layers import LayersPart, as_tuple
from .means import Report, Reports, add, checked_weight, report_of
from .randomness import Place
from .schedules import bounds


class Batch(NamedTuple):
    """The batch of one step, which the first stage reads."""

    #: What all ranks get, in whole: a Chain's arguments, or the target.
    arrays: list[Any] = []
    #: How a Chain's arguments are made of these.
    tree: Any = None
    #: What stays on the first stage: the inputs of layers.
    inputs: list[Any] = []
    samples: int = 0
    #: How far the iterator is, for the other stages.
    progress: dict[str, Any] = {}
    step: str = ''              # what the first stage is about to do
    ended: bool = False         # the data have
    micro_batches: int = 0
    first_sample: int = 0       # index in the batch of all replicas

    @property
    def sizes(self) -> list[int]:
        """Of the micro-batches."""
        return [end - start for start, end in bounds(
            self.samples, self.micro_batches)]

    def rows(self, columns: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The parts of arrays, or of lists, that each micro-batch has."""
        return [tuple([column[start:end] for column in columns])
                for start, end in bounds(self.samples, self.micro_batches)]


def samples_of(arrays: list[Any], lists: bool = False) -> int:
    """How many rows the arrays, or items the lists, of a batch have."""
    for array in arrays:
        if not getattr(array, 'shape', ()) and not (
                lists and isinstance(array, (list, tuple))):
            raise TypeError(
                f'a batch holds a {type(array).__name__}, not an array'
                + ' or a list with an item a sample' * lists
                + '; have the converter make arrays of inputs and target')
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(f'the arrays of a batch have {lengths} samples; '
                         'they must have equally many, 1 or more')
    return lengths[0]


class Adapter:
    """What the ranks of a pipeline do with a batch.

    It has this rank's part of the model and the options of
    :class:`.PipelineUpdater`, and raises TypeError or ValueError for what
    they cannot be.  A step calls ``batch``, :meth:`rehearse`, ``reported``
    and ``report``, in this order; a prediction :meth:`joined` and ``formed``
    in place of the last two.
    """

    chunks: int                         # of each rank
    layout: Any = None                  # where layers are cut
    #: Of the micro-batches in the loss, on the last stage at least.
    weights: list[float] = []
    unit: str                           # of these

    def __init__(self, model: Any, grid: ProcessGrid,
                 loss_weight: Callable | None) -> None:
        self._model, self._grid = model, grid
        self._is_last = grid.stage_index == grid.stages - 1
        self._loss_weight = loss_weight
        self.unit = 'what loss_weight says' if loss_weight else 'samples'

    def tied(self) -> dict[int, tuple[int, ...]]:
        """This rank's parameters on several ranks: their stages, by id."""
        return {}

    def rehearse(self, step: str, batch: Batch, places: list[Place]) -> Any:
        """Prepares the batch and its weights; what all ranks must have found.
        """

    def weigh(self) -> list[float]:
        """The weights of the micro-batches, when all of them are prepared."""
        return self.weights

    def found_later(self) -> Any:
        """As :meth:`rehearse` returns, of what was prepared after it."""

    def explain(self) -> None:
        """Raises an error that says what ranks have found differently."""

    def joined(self, parts: list[Arrays], sizes: list[int]) -> Arrays:
        """The outputs of all micro-batches, one after the other."""
        for arrays, size in zip(parts, sizes, strict=True):
            for array in arrays:
                if array.shape[:1] != (size,):
                    raise ValueError(
                        f'an output has shape {array.shape} for a '
                        f'micro-batch of {size}; it must have a row for each '
                        'sample')
        return tuple(self._model.xp.concatenate(column)
                     for column in zip(*parts, strict=True))

    def mean_of(self, losses: list[Arrays]) -> Report:
        """The mean of the losses of all micro-batches."""
        found = Report('number', 0.0, 0.0)
        for weight, (loss,) in zip(self.weights, losses, strict=True):
            found = found.plus(report_of(loss.item(), weight))
        return found

    def end(self, failed: str = '') -> None:
        """Ends a step, or one that has failed, and drops what it has left.

        ``failed``: the step; or ``'before'``, of which :meth:`rehearse` is
        taken back.
        """


def _softmax_loss(y: Any, t: Any, ignore_label: int = -1) -> Any:
    """Softmax cross entropy, which reports the accuracy, too."""
    chainer.report({'accuracy': F.accuracy(y, t)})
    return F.softmax_cross_entropy(y, t, ignore_label=ignore_label)


class _Reporter(chainer.Reporter):
    """Takes what is reported by any link under the name that it gives."""

    def report(self, values: Any, observer: Any = None) -> None:
        super().report(values)


class LayersAdapter(Adapter):
    """Adapts the pipeline to layers, which are cut where it was told.

    Without ``loss_weight`` labels count but those of the argument
    ``ignore_label`` of ``loss_func``.
    """

    def __init__(self, model: Any, grid: ProcessGrid,
                 loss_weight: Callable | None = None,
                 loss_func: Callable | None = None) -> None:
        super().__init__(model, grid, loss_weight)
        self._loss_func: Any = (
            _softmax_loss if loss_func in (None, F.softmax_cross_entropy)
            else loss_func)
        ignored: Any = None     # the label that it says its mean leaves out
        with contextlib.suppress(TypeError, ValueError, KeyError):
            options = inspect.signature(self._loss_func).parameters
            if 'normalize' not in options or options['normalize'].default:
                ignored = options['ignore_label'].default
        self._counts_all = loss_weight is ignored is None
        self._weight: Callable = loss_weight or (
            len if ignored is None else lambda target: (
                target != ignored).sum())
        self.chunks = len(model.bounds)
        self.layout = model.layout or model.bounds
        if model.bounds != self.layout[grid.stage_index::grid.stages]:
            raise ValueError(
                f'stage {grid.stage_index} of {grid.stages} has {model!r}; '
                'cut the model for these ranks: stage(comm)')

    def parts(self) -> dict[int, LayersPart]:
        """This rank's parts of the model, by number of chunk."""
        found = {
            self._grid.stage_index + position * self._grid.stages:
            LayersPart(piece, self._model.xp, self._model.foreign)
            for position, piece in enumerate(self._model.pieces)}
        self._end = found.get(self._grid.stages * self.chunks - 1)
        return found

    def choose(self, method: str | None) -> str:
        """What predictions call: all layers, without a name."""
        if method is not None:
            raise ValueError(
                f'method={method!r} is for a model that partition() has cut; '
                'a Divisible predicts with all its layers')
        return ''

    def batch(self, arrays: Any, with_target: bool = True) -> Batch:
        """Inputs, and the target, of a converted batch."""
        columns = list(as_tuple(arrays))
        inputs = columns[:-1] if with_target else columns
        if isinstance(arrays, dict) or not inputs:
            raise ValueError(
                'a batch of a Divisible is a tuple of inputs and, last, the '
                'target; have the converter make one of '
                + (f'{", ".join(map(repr, arrays))}, by name'
                   if isinstance(arrays, dict) else f'{len(columns)} arrays'))
        return Batch(columns[len(inputs):], inputs=inputs,
                     samples=samples_of(columns))

    def rehearse(self, step: str, batch: Batch, places: list[Place]) -> Any:
        """See :meth:`.Adapter.rehearse`; weights are where the loss is."""
        self.weights = []
        if self._end:
            self._end.loss = None
        if self._end and step != 'predict':
            self._end.loss = self.loss
            self.begin([one for one, in batch.rows(list(map(
                self._model.device.send, batch.arrays)))])

    def begin(self, targets: list[Any]) -> None:
        """Weighs the micro-batches by their targets."""
        self._targets = targets
        self._found: Reports = {}
        self.weights = [checked_weight(self._weight(one)) for one in targets]

    def loss(self, calls: Any, micro_batch: int, outputs: tuple
             ) -> tuple[chainer.Variable]:
        """The loss of a micro-batch; notes reports, means over samples."""
        calls.counts_all = self._counts_all
        found: dict[str, Any] = {}
        target = self._targets[micro_batch]
        with _Reporter().scope(found):
            loss = self._loss_func(*outputs, target)
        calls.counts_all = False
        if not isinstance(loss, chainer.Variable) or loss.size != 1:
            raise ValueError(
                f'it returned {type(loss).__name__} of shape '
                f'{getattr(loss, "shape", "unknown")}; it must return a '
                'scalar variable, the mean over a micro-batch')
        for name, value in found.items():
            add(self._found, name, report_of(value, len(target)))
        return (loss,)

    def reported(self, losses: list[Arrays]) -> Reports:
        """The loss, and what it reports, which the last stage knows."""
        return {**self._found, 'loss': self.mean_of(losses)
                } if self._end else {}

    def report(self, found: Reports, variables: bool = False
               ) -> dict[str, Any]:
        """Reports means of the loss and its reports for the model."""
        means = {name: one.mean() for name, one in found.items()}
        chainer.report(dict(means), self._model)
        return means

    def formed(self, outputs: Arrays) -> Any:
        """What a prediction returns: an array, or a tuple of several."""
        return outputs if len(outputs) > 1 else outputs[0]


def adapter_of(optimizer: Any, grid: ProcessGrid, **options: Any) -> Any:
    """The adapter of the model of an optimizer."""
    model = getattr(optimizer, 'target', None)
    make = getattr(getattr(model, 'partition', None), 'adapter', None)
    if make is not None:
        return make(model, grid, **options)
    if hasattr(model, 'pieces'):
        return LayersAdapter(model, grid, **options)
    raise TypeError('the optimizer must be set up with a Divisible '
                    '(optimizer.setup(Net().stage(comm))), or with a model '
                    'that partition(model, example, comm) has cut, not '
                    f'{type(model).__name__}')

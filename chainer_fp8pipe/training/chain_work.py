"""Micro-batches of a model on several ranks, which all see the whole batch.

Of a Chain that returns its loss, and of a list of layers, whose loss is an
argument of the pipeline.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy

from ..chains import nested
from ..chains.layers import Layers
from ..chains.names import OBSERVER
from ..chains.part import ChainPart, MicroBatch
from ..chains.partitioned import Partition
from ..chains.program import StagedTrace
from ..chains.replay import weights
from ..mpi.agreement import raise_together
from ..mpi.grid import ProcessGrid
from ..pipeline.block import Arrays
from ..pipeline.layers import as_tuple
from ..pipeline.loss import LossHead, checked_weight
from ..pipeline.micro_batches import concatenated
from ..pipeline.randomness import Place
from .batch import Batch, Opened
from .reported import Report, Reports, add, report_of

#: The name of the loss that the model returns.
LOSS = '\0loss'
_SAME = ('What a model calls must not depend on the rank; all ranks must see '
         'the same batch and the same settings.')


class ChainWork:
    """What the ranks of a partitioned Chain do with a batch.

    Args:
        model: Has this rank's parameters.
        partition: Of the model.
        grid: The ranks.
        loss_weight: As for :class:`.Pipeline`.
    """

    layers = 0      # before the loss, where that is not the model's

    def __init__(self, model: Any, partition: Partition, grid: ProcessGrid,
                 loss_weight: Callable | None) -> None:
        self._model, self._grid = model, grid
        self._partition = partition
        self._loss_weight = loss_weight
        self.head = LossHead(_given, {}, float)
        self.chunks = partition.plan.chunks
        self._targets: list[Any] = []
        self._micro_batches: list[MicroBatch] = []
        self._trained = 0
        self._weights: list[float] = []
        self._method: Callable | None = None
        #: Whether this rank's parameters are others than they were.
        self.changed = False

    def blocks(self, statistics: Any) -> dict[int, list[ChainPart]]:
        """This rank's parts of the model, by number of chunk."""
        self._partition.passes.statistics = statistics
        return {chunk: [block] for chunk, block
                in self._partition.blocks().items()}

    def choose(self, method: str | None) -> str:
        """Has predictions call a method or child link; its name."""
        names = ['predictor', 'predict'] if method is None else [method]
        for name in names:
            found = getattr(self._model, name, None)
            if callable(found):
                self._method = found
                return name
        kind = type(self._model).__name__
        if method is None:
            raise ValueError(
                f'{kind} has neither a predictor nor a method predict(); '
                "pass method='name' of what returns the output")
        raise ValueError(f'{kind} has no method {method!r}')

    def joined(self, parts: list[Arrays], sizes: list[int], xp: Any
               ) -> Arrays:
        """The outputs of all micro-batches, on the last stage.

        Raises ValueError if an output has not a row for each sample, or the
        micro-batches have different outputs.
        """
        forms = {nested.signature(one.program.form)
                 for one in self._micro_batches}
        if len(forms) > 1:
            raise ValueError('the outputs of the micro-batches differ in '
                             'their form; they cannot be concatenated')
        return concatenated(parts, sizes, xp)

    def formed(self, outputs: Arrays) -> Any:
        """What a prediction returns: arrays in the form of the method's."""
        return nested.rebuilt(self._micro_batches[0].program.form,
                               list(outputs))

    def batch(self, arrays: Any, label_key: Any = None,
              progress: tuple[float, ...] = (0.0,) * 4) -> Batch:
        """All arrays of a converted batch: the model has its loss inside."""
        if isinstance(arrays, dict):
            return Batch(tuple(arrays.values()), None, progress,
                         tuple(arrays))
        return Batch(arrays if isinstance(arrays, tuple) else (arrays,),
                     None, progress)

    def shared(self, batch: Batch) -> tuple[Any, list[Any]]:
        """What all ranks get: a tree of the batch, arrays on the host."""
        arrays, tree = nested.leaves((batch._replace(
            inputs=tuple(map(_host, batch.inputs))).arguments(),
            None if batch.target is None else _host(batch.target)))
        return tree, arrays

    def rehearse(self, step: str, opened: Opened, places: list[Place]
                 ) -> Any:
        """What this rank's share of the micro-batches calls.

        Raises:
            ValueError: The model cannot be run so.
        """
        part = self._partition
        problem = part.problem()
        if problem:
            raise ValueError(problem)
        kept = part.passes.resume(step)
        function = self._function(step)
        self._micro_batches, self._targets = [], []
        for number, (arrays, place) in enumerate(zip(
                opened.parts, places, strict=True)):
            (args, kwargs), target = nested.rebuilt(opened.tree, [
                self._model.device.send(array) for array in arrays])
            self._targets.append(target)
            self._micro_batches.append(MicroBatch(
                function, args, kwargs, place, *kept[number:number + 1]))
        mine: dict[int, Any] = {}
        for number in range(self._grid.stage_index, len(places),
                            self._grid.stages):
            found = part.rehearsed(step, self._micro_batches[number])
            mine[number] = found and (found[0].trace.digest, found[1])
        if self._loss_weight is None or step == 'predict':
            return mine, None
        return mine, [
            checked_weight(self._loss_weight(*args, **kwargs))
            for args, kwargs in (one.arguments()
                                 for one in self._micro_batches)]

    def prepare(self, step: str, opened: Opened, said: list[Any]) -> None:
        """All ranks of the pipeline have a trace for each micro-batch.

        Args:
            step: As it was opened.
            opened: The batch.
            said: What :meth:`rehearse` gave on each rank of the pipeline.

        Raises:
            ValueError: The model cannot be run so, or ranks would make
                different calls; on all ranks of the pipeline.
        """
        part, every_one = self._partition, self._micro_batches
        every = {number: one for share, _ in said
                 for number, one in share.items()}

        def find() -> list[tuple[StagedTrace, Any]]:
            found: list[Any] = []
            for number, one in enumerate(every_one):
                digest, labels = every[number] or ('', None)
                program = part.known(step, one, digest)
                found.append(program and (program, labels))
            return found if all(found) else self._traced(step, found)
        # Whether ranks meet is decided by what all of them have heard: one
        # that fails here alone would leave the others in the meeting.
        found = find() if all(every.values()) else raise_together(
            self._grid.pipeline, find, error=ValueError,
            remedy=_SAME, entries=lambda found: {
                f'what micro-batch {number} calls': program.trace.digest
                for number, (program, _) in enumerate(found)})
        missing: set[tuple[str, int]] = set()
        for one, (program, _) in zip(every_one, found, strict=True):
            one.program = program
            missing |= program.missing
        if missing:
            self._lend(step, missing)
        self._weights = [0.0] * len(every_one)
        if step != 'predict' and not self.layers:
            self._weights = self._agreed([given for _, given in said]) or (
                weights([labels for _, labels in found], opened.sizes,
                        self._grid.replicas if step == 'train' else 1))

    def deal(self, step: str
             ) -> tuple[list[Arrays], list[Any], list[float]]:
        """Inputs where the model begins, targets where the loss is.

        Returns inputs, targets and weights of the micro-batches.
        """
        self._trained += step == 'train'
        self._partition.passes.begin(step, self._micro_batches)
        inputs: list[Arrays] = [()] * len(self._micro_batches)
        first = inputs if self._grid.stage_index == 0 else []
        if self._grid.stage_index < self._grid.stages - 1:
            return first, [], []
        return first, self._weights, self._weights

    def reported(self) -> Reports:
        """What the model has reported here, and its loss."""
        found: Reports = {}
        for weight, one in zip(self._weights, self._micro_batches,
                               strict=True):
            for name, value in one.reports.items():
                add(found, name, report_of(value, weight))
        if self._grid.stage_index == self._grid.stages - 1:
            found[LOSS] = Report('number', self.head.sums['loss'],
                                 self.head.totals['loss'])
        return found

    def report(self, means: dict[str, Any]) -> dict[str, Any]:
        """Reports means for the links that have reported parts of them.

        Returns them with their names in the model; the loss is ``'loss'``.
        """
        named: dict[str, Any] = {}
        for name, value in means.items():
            path, found, key = name.partition(OBSERVER)
            if found:
                chainer.report({key: value},
                               self._partition.names.links[path])
                named[f'{path}/{key}'.lstrip('/')] = value
            elif name != LOSS:
                chainer.report({name: value})
                named[name] = value
        return {'loss': means[LOSS], **named} if LOSS in means else named

    @property
    def has_ties(self) -> bool:
        """Whether a parameter is on several ranks; the same on all."""
        return bool(self._partition.ties)

    def tied(self) -> dict[int, tuple[int, ...]]:
        """Parameters on several ranks, by id, with their stages."""
        part = self._partition
        return {id(part.own[name]): stages
                for name, stages in part.ties.items() if name in part.own}

    def end(self) -> None:
        """Ends a step."""
        self._partition.passes.end()

    def give_back(self) -> None:
        """Takes away parameters that were lent for the step."""
        self.changed = self._partition.give_back() or self.changed

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self.give_back()
        self._partition.passes.forget()

    # --- details ------------------------------------------------------------

    def _function(self, step: str) -> Callable:
        if step != 'predict':
            return self._model
        assert self._method is not None
        return self._method

    def _traced(self, step: str, found: list[Any]) -> list[Any]:
        """A trace for each micro-batch that has none."""
        part = self._partition
        self._tell(step, found)     # raises where warnings are errors
        return [
            # An earlier one of this batch may do.
            known or part.rehearsed(step, one) or part.traced(step, one)
            for one, known in zip(self._micro_batches, found, strict=True)]

    def _tell(self, step: str, found: list[Any]) -> None:
        """Says once that batches of other forms take time."""
        # The second step may begin with state that the first one has left.
        if step == 'train' and self._trained > 2:
            new = sum(one is None for one in found)
            why = self._partition.passes.mismatch
            self._partition.tell_once(
                f'{new} of {len(found)} micro-batches have shapes, or make '
                'the model call what it has not called before, so the model '
                'is traced again; this is said once. ' + (
                    f'Here {why}; where it changes in every batch, compute '
                    'with an array of it' if why else
                    'Where every batch is another, pad sequences to a few '
                    'lengths'))

    def _lend(self, step: str, missing: set[tuple[str, int]]) -> None:
        if step == 'train' and self._grid.replicas > 1:
            name, chunk = min(missing)
            raise ValueError(
                f'this batch needs parameter {name} on '
                f'{self._partition.where(chunk)}, which has not got it; make '
                'the partition with such an example')
        self._partition.lend(missing)
        self.changed = True

    def _agreed(self, given: list[Any]) -> list[float] | None:
        """The weights that the user's function gave on all ranks."""
        for rank, other in enumerate(given):
            for number, (one, two) in enumerate(zip(
                    given[0] or [], other or [], strict=True)):
                if one != two:
                    raise ValueError(
                        f'the loss_weight of micro-batch {number} is {one} '
                        f'on rank 0 but {two} on rank {rank}. {_SAME}')
        return given[0]


class LayersWork(ChainWork):
    """The same for a list of layers: inputs come first, the target last.

    Args:
        model: This rank's layers.
        whole: All layers.
        partition: Of all layers.
        grid: The ranks.
        loss_fun: As for :class:`.Pipeline`.
        metrics: As for :class:`.Pipeline`.
        loss_weight: As for :class:`.Pipeline`.
    """

    def __init__(self, model: Any, whole: Layers, partition: Partition,
                 grid: ProcessGrid, loss_fun: Callable,
                 metrics: Mapping[str, Callable],
                 loss_weight: Callable | None) -> None:
        super().__init__(model, partition, grid, None)
        self._whole, self.layers = whole, len(whole.calls)
        self.head = LossHead(loss_fun, metrics, loss_weight)

    def choose(self, method: str | None) -> str:
        """What predictions call: all layers, without a name."""
        if method is not None:
            raise ValueError(
                f'method={method!r} is for a model that partition() has cut; '
                'a Divisible predicts with all its layers')
        return ''

    def batch(self, arrays: Any, label_key: Any = -1,
              progress: tuple[float, ...] = (0.0,) * 4) -> Batch:
        """Inputs and target of a converted batch, a tuple or dictionary."""
        if isinstance(arrays, dict):
            if label_key not in arrays:
                known = ', '.join(map(repr, arrays))
                raise ValueError(f'a batch has {known} but no target; name '
                                 f'it by label_key, not {label_key!r}')
            arrays = dict(arrays)
            target = arrays.pop(label_key)
            return Batch(tuple(arrays.values()), target, progress)
        arrays = list(as_tuple(arrays))
        if len(arrays) < 2:
            raise ValueError('an example has no target; it must be a tuple '
                             'of one input or more and the target')
        try:
            target = arrays.pop(label_key)
        except (IndexError, TypeError):
            raise ValueError(f'an example has {len(arrays)} elements, and '
                             f'none is label_key={label_key!r}') from None
        return Batch(tuple(arrays), target, progress)

    def deal(self, step: str
             ) -> tuple[list[Arrays], list[Any], list[float]]:
        """See :meth:`ChainWork.deal`."""
        inputs, targets, _ = super().deal(step)
        if step == 'predict' or not targets:
            return inputs, [], []
        return inputs, self._targets, self.head.count(self._targets)

    def reported(self) -> Reports:
        """Loss and metrics, which the last stage has computed."""
        if self._grid.stage_index < self._grid.stages - 1:
            return {}
        return {name: Report('number', self.head.sums[name],
                             self.head.totals[name])
                for name in self.head.names}

    def report(self, means: dict[str, Any]) -> dict[str, Any]:
        """Reports means of loss and metrics for the model."""
        chainer.report(dict(means), self._model)
        return means

    def _function(self, step: str) -> Callable:
        return self._whole


def layout_of(model: Any, grid: ProcessGrid
              ) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Why the ranks' layers do not make a model, '' if they do; the layout.

    That is the start and end of the layers of each chunk.  ``model`` has this
    rank's layers.  Call this on all ranks.
    """
    everyone = grid.comm.allgather(
        (grid.stage_index, model.total, model.bounds))
    total, *others = sorted({total for _, total, _ in everyone})
    if others:
        totals = ' and '.join(map(str, [total, *others]))
        return f'the models have {totals} layers on different ranks', ()
    chunks: dict[int, tuple[int, int, int]] = {}
    for rank, (stage, _, cut) in enumerate(everyone):
        for position, (start, end) in enumerate(cut):
            chunk = stage + position * grid.stages
            other, *known = chunks.setdefault(chunk, (rank, start, end))
            if known != [start, end]:
                return (f'rank {rank} has layers {start} to {end - 1} where '
                        f'its replica, rank {other}, has {known[0]} to '
                        f'{known[1] - 1}'), ()
    next_layer = 0
    for number in range(max(chunks) + 1):
        if number not in chunks:
            return 'the ranks have different numbers of chunks', ()
        rank, start, end = chunks[number]
        if start != next_layer:
            return (f'rank {rank} starts at layer {start} but layer '
                    f'{next_layer} is to follow'), ()
        next_layer = end
    if next_layer != total:
        return (f'rank {rank} ends at layer {next_layer - 1} but the model '
                f'has {total} layers'), ()
    return '', tuple(chunks[number][1:] for number in sorted(chunks))


def _host(array: Any) -> numpy.ndarray:
    return numpy.ascontiguousarray(
        chainer.backends.cuda.to_cpu(nested.array_of(array)))


def _given(loss: chainer.Variable, weight: float) -> chainer.Variable:
    return loss

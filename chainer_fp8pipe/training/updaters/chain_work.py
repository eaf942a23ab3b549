"""Micro-batches of a partitioned Chain: all ranks see the whole batch."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ...chains import nested
from ...chains.names import OBSERVER
from ...chains.part import ChainPart
from ...chains.partitioned import Form
from ...chains.rehearsal import weights
from ...chains.staged_trace import StagedTrace
from ...mpi.agreement import Signature, agree, raise_together
from ...mpi.broadcast import broadcast_arrays
from ...mpi.grid import ProcessGrid
from ...pipeline.block import Arrays
from ...pipeline.channels import Channels
from ...pipeline.loss import LossHead
from ...pipeline.micro_batches import bounds
from ...pipeline.randomness import Place
from .together import Opened, StepBatch, Sums

_SAME = ('What a model calls must not depend on the rank; all ranks must see '
         'the same batch and the same settings.')


class ChainWork:
    """What the ranks of a partitioned Chain do with a batch.

    The methods are those of :class:`.LayerWork`.
    The arguments are as for :class:`.PipelineUpdater`.
    """

    def __init__(self, model: Any, grid: ProcessGrid,
                 loss_weight: Callable | None) -> None:
        self._model, self._grid = model, grid
        self._partition = model.partition
        self._loss_weight = loss_weight
        self.head = LossHead(_given, {}, float)
        self.chunks = model.plan.chunks
        self.layers = 0
        self._programs: list[StagedTrace] = []
        self._last: dict[str, list[StagedTrace]] = {}
        self._calls: list[nested.Fresh] = []
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
        forms = {nested.signature(program.form)
                 for program in self._programs}
        if len(forms) > 1:
            raise ValueError('the outputs of the micro-batches differ in '
                             'their form; they cannot be concatenated')
        for arrays, size in zip(parts, sizes, strict=True):
            for array in arrays:
                if array.shape[:1] != (size,):
                    raise ValueError(
                        f'an output has shape {array.shape} for a '
                        f'micro-batch of {size}; it must have a row for each '
                        'sample')
        return tuple(xp.concatenate(column)
                     for column in zip(*parts, strict=True))

    def formed(self, outputs: Arrays) -> Any:
        """What a prediction returns: arrays in the form of the method's."""
        return nested.rebuilt(self._programs[0].form, list(outputs))

    def batch(self, arrays: Any, label_key: Any,
              progress: tuple[float, ...] = (0.0,) * 4) -> StepBatch:
        """All arrays of a converted batch: the model has its loss inside."""
        if isinstance(arrays, dict):
            return StepBatch(tuple(arrays.values()), None, progress,
                             tuple(arrays))
        return StepBatch(arrays if isinstance(arrays, tuple) else (arrays,),
                         None, progress)

    def prepare(self, opened: Opened, parts: int, step: str,
                places: list[Place]) -> str:
        """All ranks get the batch, and a trace for each micro-batch.

        Returns what went wrong, on all ranks of the pipeline; '' if nothing.
        """
        part, comm = self._partition, self._grid.pipeline
        tree, host = self._share(opened.batch)
        ends = bounds(opened.samples, parts)
        try:
            forms, mine = raise_together(comm, lambda: self._rehearsed(
                step, tree, host, ends, places), error=ValueError)
            said = comm.allgather(mine)
            found, missing = self._agreed(
                lambda: self._known(step, forms, said))
            if not all(found):
                found, missing = self._agreed(
                    lambda: self._traced(step, forms, found))
            if missing and step == 'train' and self._grid.replicas > 1:
                name, chunk = min(missing)
                return (f'this batch needs parameter {name} on '
                        f'{part.where(chunk)}, which has not got it; make '
                        'the partition with such an example')
            if missing:
                part.lend(missing)
                self.changed = True
        except ValueError as error:     # the same on all ranks
            return str(error)
        self._programs = [program for program, _ in found]
        self._last[step] = self._programs
        self._calls = [form.call for form in forms]
        try:
            self._weights = self._weigh(
                [labels for _, labels in found],
                [end - start for start, end in ends], step)
        except ValueError as error:     # the same on all ranks
            return str(error)
        return ''

    def deal(self, opened: Opened, channels: Channels, parts: int,
             step: str) -> tuple[list[Arrays], list[Any], list[float]]:
        """As :meth:`.LayerWork.deal`; nothing is sent any more."""
        self._trained += step == 'train'
        self._partition.passes.begin(step, self._programs, self._calls)
        inputs: list[Arrays] = [()] * len(self._calls)
        first = inputs if self._grid.stage_index == 0 else []
        if self._grid.stage_index < self._grid.stages - 1:
            return first, [], []
        return first, self._weights, self._weights

    def sums(self) -> Sums:
        """Weighted sums of what is reported here, and the weights' sums."""
        found: Sums = {name: (0.0, 0.0) for program in self._programs
                       for name in program.reporters}
        for weight, reports in zip(
                self._weights, self._partition.passes.reports, strict=True):
            for name, value in reports.items():
                part, whole = found[name]
                found[name] = part + weight * value, whole + weight
        return found

    def report(self, means: dict[str, float]) -> None:
        """Reports means for the links that have reported parts of them."""
        links = self._partition.names.links
        for name, value in means.items():
            path, found, key = name.partition(OBSERVER)
            if found:
                chainer.report({key: value}, links[path])
            else:
                chainer.report({name: value})

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

    def _share(self, batch: StepBatch | None) -> tuple[Any, list[Any]]:
        """The batch on all ranks, in host memory."""
        form, host = None, None
        if batch is not None:
            leaves, form = nested.leaves(batch.arguments())
            host = [numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(
                nested.array_of(leaf))) for leaf in leaves]
        form, host = broadcast_arrays(self._grid.pipeline, form, host)
        return form, host

    def _rehearsed(self, step: str, tree: Any, host: list[Any],
                   ends: list[tuple[int, int]], places: list[Place]
                   ) -> tuple[list[Form], dict[int, Any]]:
        """All micro-batches, and what this rank's share of them calls."""
        part = self._partition
        problem = part.problem()
        if problem:
            raise ValueError(problem)
        last = (self._last.get(step, []) if part.passes.resume(step) else [])
        arrays = [self._model.device.send(array) for array in host]
        forms = []
        for number, (start, end) in enumerate(ends):
            args, kwargs = nested.rebuilt(
                tree, [array[start:end] for array in arrays])
            before = last[number].after if number < len(last) else None
            forms.append(Form(self._function(step), args, kwargs, before,
                              places[number]))
        mine: dict[int, Any] = {}
        for number in range(self._grid.stage_index, len(ends),
                            self._grid.stages):
            found = part.rehearsed(step, forms[number])
            mine[number] = found and (found[0].trace.digest, found[1])
        return forms, mine

    def _known(self, step: str, forms: list[Form],
               said: list[dict[int, Any]]) -> list[Any]:
        """The program and labels of each micro-batch; None: it has none."""
        found: list[Any] = []
        every = {number: one for share in said
                 for number, one in share.items()}
        for number, form in enumerate(forms):
            digest, labels = every[number] or ('', None)
            program = self._partition.known(step, form, digest)
            found.append(None if program is None else (program, labels))
        return found

    def _traced(self, step: str, forms: list[Form], found: list[Any]
                ) -> list[Any]:
        """A trace for each micro-batch that has none."""
        part = self._partition
        self._tell(step, found)     # raises where warnings are errors
        return [
            # An earlier one of this batch may do.
            one or part.rehearsed(step, form) or part.traced(step, form)
            for form, one in zip(forms, found, strict=True)]

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

    def _agreed(self, find: Callable[[], list[Any]]
                ) -> tuple[list[Any], set[tuple[str, int]]]:
        """What is found, the same on all ranks, and what ranks lack for it.

        Raises ValueError on all ranks if a rank fails, or ranks would make
        different calls.
        """
        found: list[Any] = []
        missing: set[tuple[str, int]] = set()
        entries, problem = {}, ''
        try:
            found = find()
            for number, one in enumerate(found):
                entries[f'what micro-batch {number} calls'] = (
                    one[0].trace.digest if one else 'new')
                missing |= self._partition.missing(one[0]) if one else set()
        except Exception as error:  # the other ranks must hear of it
            problem = f'{type(error).__name__}: {error}'
        agree(self._grid.pipeline, Signature(entries), problem, _SAME)
        return found, missing

    def _weigh(self, labels: list[Any], sizes: list[int], step: str
               ) -> list[float]:
        """How much each micro-batch counts in the mean."""
        if step == 'predict':
            return [0.0] * len(sizes)
        if self._loss_weight is not None:
            return [float(self._loss_weight(*args, **kwargs)) for args, kwargs
                    in (call.arguments() for call in self._calls)]
        return weights(labels, sizes, self._grid.replicas
                       if step == 'train' else 1)


def _given(loss: chainer.Variable, weight: float) -> chainer.Variable:
    return loss

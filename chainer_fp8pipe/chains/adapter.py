"""Trains, evaluates and predicts batches with a partitioned Chain."""
# All ranks see the whole batch and record its micro-batches: what the model
# calls may depend on the batch.  They compare what they have recorded before
# any of them computes, as a rank that called something else would leave the
# others waiting.
#
# To record a call takes some 8 us, of an encoder of 500 calls 5 % of a step.
# So where a batch begins as one did that was recorded whole, they record its
# first micro-batch before, and the others while they would wait: they are
# compared before the update.  Replicas, whose weights all must know, do not.
from __future__ import annotations

import contextlib
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import chainer
import numpy

from ..mpi.agreement import raise_together
from ..mpi.grid import ProcessGrid
from ..pipeline.adapter import Adapter, Batch, samples_of
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.means import (
    BatchStatistics,
    Reports,
    add,
    checked_weight,
    report_of,
    weights_of,
)
from ..pipeline.meetings import NotTraced
from ..pipeline.randomness import Place, preserved, seed_at
from . import nested
from .attributes import OBSERVER
from .deferred import draw
from .mean_loss import why_no_mean
from .placeholder import (
    PlaceholderError,
    frames_of_users,
    is_placeholder,
)

if TYPE_CHECKING:
    from .partitioned import Partition
    from .program import Program

#: The name of the loss that the model returns.
LOSS = '\0loss'
_SAME = ("A model's calls must not depend on the rank; all ranks must see "
         'the same batch and the same settings.')


class Chunk:
    """The calls of one chunk, see :class:`.Part`."""

    def __init__(self, adapter: ChainAdapter, part: Partition, chunk: int
                 ) -> None:
        self.name = part.name_of(chunk)
        self._adapter, self._chunk = adapter, chunk
        self.parameters: list[chainer.Parameter] = [
            part.names.parameters[name]
            for name in part.placement.on_chunk(chunk)]
        self.statistics = BatchStatistics()     # of all the rank's chunks

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Makes this chunk's calls."""
        program = self._adapter.program(micro_batch)
        # Of links that run as a whole: they are called here.
        with self.statistics.counting(self._chunk):
            return program.run(self._chunk, inputs, self.name,
                               self.statistics)


class _Step:
    """The micro-batches of a step, of a kind: their programs, and the rest.

    ``function`` is called with the arguments in ``batches``.
    """

    def __init__(self, kind: str = '', function: Any = None,
                 batches: Iterable[Any] = (), places: Iterable[Place] = (),
                 sizes: Iterable[int] = ()) -> None:
        self.kind, self.function, self.sizes = kind, function, [*sizes]
        #: What programs are yet to be recorded of.
        self.waiting = [*zip(batches, places, strict=True)]
        self.programs: list[Program] = []
        self.weights: list[float] | None = None     # that loss_weight gives
        #: How many programs the ranks compare before they compute.
        self.compared = 0

    def found(self) -> list[Any]:
        """What ranks must have recorded alike."""
        return [(one.layout.digest, zlib.crc32(
            repr(one.notes.numbers).encode())) for one in self.programs]


class ChainAdapter(Adapter):
    """Adapts the pipeline to a partitioned Chain."""

    def __init__(self, model: Any, grid: ProcessGrid,
                 loss_weight: Callable | None = None,
                 loss_func: Callable | None = None) -> None:
        super().__init__(model, grid, loss_weight)
        part: Partition = model.partition
        self._partition = part
        self._now = _Step()
        for wrong, text in (
                (part.grid is not grid,
                 'the model was cut for other ranks; give PipelineUpdater '
                 'the comm that partition() got'),
                (loss_func not in (None, part.loss_func),
                 'the model was cut with another loss_func; pass this one to '
                 'partition(), which records it')):
            if wrong:
                raise ValueError(text)
        self.chunks = part.plan.chunks
        self._method: Callable | None = None
        # Layouts of the first micro-batch of batches that were trained on.
        self._usual: set[int] = set()
        #: Kinds of batches whose loss was compared with that of parts.
        self._compared: frozenset[str] = frozenset()

    def parts(self) -> dict[int, Chunk]:
        """This rank's parts of the model, by number of chunk."""
        part = self._partition
        self._parts = {chunk: Chunk(self, part, chunk)
                       for chunk in part.chunks}
        return self._parts

    def program(self, micro_batch: int) -> Program:
        """The program of a micro-batch of this step."""
        return self._now.programs[micro_batch]

    @property
    def _statistics(self) -> BatchStatistics:
        return next(iter(self._parts.values())).statistics

    def choose(self, method: str | None) -> str:
        """Has predictions call a method or child link; its name."""
        names = [method] if method else ['predictor', 'predict']
        for name in names:
            self._method = getattr(self._model, name, None)
            if callable(self._method):
                return name
        raise ValueError(
            f'{type(self._model).__name__} has no method {" or ".join(names)}'
            "; pass method='name' of what returns the output")

    def formed(self, outputs: Arrays) -> Any:
        """Puts a prediction's arrays into the form that the method returns."""
        return nested.rebuilt(self._form, list(outputs))

    def batch(self, arrays: Any, with_target: bool = True) -> Batch:
        """All arrays of a converted batch: the model has its loss inside."""
        args, kwargs = both = nested.arguments_of(arrays)
        leaves, tree = nested.leaves(both)
        return Batch(list(map(_host, leaves)), tree, samples=samples_of(
            [*args, *kwargs.values()], lists=True))

    def rehearse(self, step: str, batch: Batch, places: list[Place]) -> Any:
        """Records the micro-batches; what ranks must have recorded alike.

        Raises:
            ValueError: The model cannot be run so.
        """
        part = self._partition
        part.placement.check()
        function: Any = (self._method if step == 'predict'
                         else part.loss_func or self._model)
        args, kwargs = nested.rebuilt(batch.tree, list(map(
            self._model.device.send, batch.arrays)))
        batches = [(part[:len(args)],
                    dict(zip(kwargs, part[len(args):], strict=True)))
                   for part in batch.rows([*args, *kwargs.values()])]
        self.end('elsewhere')
        self._now = now = _Step(step, function, batches, places, batch.sizes)
        part.state.begin(step, part.recorder.atomic)
        # All ranks have all running averages.
        self._statistics.here = lambda link: part.placement.is_own(
            link, 'avg_mean')
        self._record(1)
        is_ahead = (step == 'train' and self._grid.replicas == 1
                    and now.programs[0].layout.digest in self._usual)
        if not is_ahead:
            self._record(len(now.waiting))
        if step == 'predict':
            self._form, *others = [nested.leaves(one.result)[1]
                                   for one in now.programs]
            if any(form != self._form for form in others):
                raise ValueError('the outputs of the micro-batches differ in '
                                 'their form; they cannot be concatenated')
        if self._loss_weight is not None and step != 'predict':
            now.weights = [checked_weight(self._loss_weight(*args, **kwargs))
                           for args, kwargs in batches]
        if step == 'train' and self._loss_weight is None and (
                found := _kinds(batch.arrays, [*args, *kwargs.values()])
                - self._compared):
            self._compared |= found
            if len(batches) * self._grid.replicas > 1:
                # On all ranks: what forward counts must stay alike.
                text = why_no_mean(function, args, kwargs, part.names,
                                   part.state)
                if text and self._is_last and not self._grid.replica_index:
                    line = next(frames_of_users(sys._getframe()))
                    warnings.warn_explicit(text, UserWarning,
                                           line.f_code.co_filename,
                                           line.f_lineno)
        if self._loss_weight is None:       # not that of the last step
            self.unit = 'samples'
        if not is_ahead:
            self.weigh()
        now.compared = len(now.programs)
        return now.found(), now.weights

    def weigh(self) -> list[float]:
        """See :meth:`.Adapter.weigh`."""
        now = self._now
        self._record(len(now.waiting))
        if now.kind == 'predict':
            self.weights = [0.0] * len(now.programs)
        elif now.weights:
            self.weights = now.weights
        else:
            self.weights, self.unit = weights_of(
                [one.notes.labels for one in now.programs], now.sizes,
                self._grid.replicas if now.kind == 'train' else 1)
        return self.weights

    def found_later(self) -> Any:
        """See :meth:`.Adapter.found_later`."""
        return self._now.found()[self._now.compared:]

    def _record(self, count: int) -> None:
        """Records so many of the micro-batches that wait."""
        part, now, names = self._partition, self._now, self._partition.names
        if not count:
            return
        shaped = len(names.shaped)
        with part.recorder.placeholders():
            for both, place in now.waiting[:count]:
                part.state.resume()
                try:
                    program = part.recorder.record(
                        now.function, both, place, self._statistics)
                except PlaceholderError as error:
                    raise NotTraced(str(error)) from error
                finally:
                    del now.waiting[0]
                if now.kind != 'predict':
                    check_result(program.result)
                part.state.note(program)
                now.programs.append(program)
                program.settle(part.placement.layout_of(program), part.chunks)
        if not now.waiting:
            part.state.end()
        for number, name in enumerate(names.shaped):
            if number >= shaped and name in part.placement.own:
                with preserved():       # the same on every replica
                    seed_at(place._replace(
                        iteration=0, first_sample=0, layer=number))
                    draw(names.parameters[name])

    def explain(self) -> None:
        """Raises an error that says which calls differ between ranks."""
        raise_together(self._grid.pipeline, lambda: {
            name: one for index, program in enumerate(self._now.programs)
            for name, one in program.description(
                f' of micro-batch {index}').items()
        } | {'the loss_weight': repr(self._now.weights)}, NotTraced, dict,
            _SAME)

    def reported(self, losses: list[Arrays]) -> Reports:
        """Returns what this rank's model has reported, and the loss."""
        found: Reports = {}
        for weight, one in zip(self.weights, self._now.programs,
                               strict=True):
            for name, value in one.found.items():
                add(found, name, report_of(value, weight))
        if self._is_last:
            found[LOSS] = self.mean_of(losses)
        return found

    def report(self, found: Reports, variables: bool = False
               ) -> dict[str, Any]:
        """Reports means for the links that have reported parts of them.

        Returns them with their names in the model; the loss is ``'loss'``.
        """
        named = {'loss': found.pop(LOSS).mean()} if LOSS in found else {}
        for name, report in found.items():
            path, observed, key = name.partition(OBSERVER)
            value = report.mean()
            shown = chainer.Variable(self._model.xp.asarray(
                value, report.variable)) if (
                    variables and report.variable) else value
            if not observed:
                chainer.report({name: shown})
                named[name] = value
                continue
            link = self._partition.names.links[path]
            chainer.report({key: shown}, link)
            # A script may ask L.Classifier for the loss of the last batch.
            last = vars(link).get(key)
            if is_placeholder(nested.array_of(last)) and (
                    key not in link._params) and (
                    (path, key) not in self._partition.state.kinds):
                vars(link)[key] = chainer.Variable(
                    link.xp.asarray(value, last.dtype))
            named[f'{path}/{key}'.lstrip('/')] = value
        return named

    def tied(self) -> dict[int, tuple[int, ...]]:
        """See :meth:`.Adapter.tied`."""
        placement = self._partition.placement
        return {id(placement.own[name]): stages
                for name, stages in placement.ties.items()
                if name in placement.own}

    def end(self, failed: str = '') -> None:
        """See :meth:`.Adapter.end`."""
        now = self._now
        if not failed and now.programs and now.kind == 'train':
            self._usual.add(now.programs[0].layout.digest)
        if failed == 'before' and now.kind:
            self._partition.state.undo()
            self._statistics.forget()
        elif failed == 'train':
            # What forward counts elsewhere is to be the same on all ranks.
            with contextlib.suppress(Exception), preserved():
                self._record(len(now.waiting))
            self._partition.state.undo()
        for program in now.programs:
            program.forget()
        self._now = _Step()


def _kinds(arrays: list[Any], given: list[Any]) -> frozenset[str]:
    """Kinds of samples in a batch: a loss may count some kinds only."""
    return frozenset(kind for kind, is_there in (
        ('any', True),
        ('left out', any(not (array if array.dtype.kind == 'b' else array >= 0
                              ).all() for array in arrays
                         if array.dtype.kind in 'ib')),
        ('of other lengths', any(len({getattr(sample, 'shape', None)
                                      for sample in one}) > 1 for one in given
                                 if not hasattr(one, 'shape')))) if is_there)


def _host(array: Any) -> numpy.ndarray:
    # ascontiguousarray() would give an array without axes one.
    return numpy.asarray(chainer.backends.cuda.to_cpu(
        nested.array_of(array)), order='C')


def check_result(result: Any) -> None:
    """Raises ValueError if what a model has returned is no loss."""
    if not isinstance(result, chainer.Variable) or result.size != 1:
        raise ValueError(
            f'the model returned {type(result).__name__} of shape '
            f'{getattr(result, "shape", "unknown")}; called with a batch, it '
            'must return its loss, a scalar variable, as '
            'chainer.links.Classifier does, or be cut with '
            'partition(..., loss_func=)')

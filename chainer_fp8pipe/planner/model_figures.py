"""Times a model as training runs it: whole, and as the part of a pipeline.

A call that is timed alone misses Python, the graph and caches.  So a copy of
the model is trained for some steps: by plain Chainer, as replicas do, and as a
pipeline of one stage, whose calls are timed one by one
(:mod:`~chainer_fp8pipe.chains.profiling.laps`).  Where there is no memory for
a copy, or parameters have no values yet, the times of single calls must do.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ..chains import nested
from ..chains.ghost import is_ghost
from ..chains.names import Names, parameters_of
from ..chains.partition import partition
from ..chains.partitioned import check_result
from ..chains.profiling.laps import Laps, clock_of
from ..chains.tracing.measuring import memory_traced
from ..chains.tracing.trace import Tracer
from ..exchange.buckets import divide
from ..mpi.agreement import Signature, agree, raise_together
from ..pipeline.randomness import preserved
from ..planning.job.job_profile import Figure, ModelFigures
from ..planning.partition.calls import Call
from ..planning.partition.positions import order_of
from ..training.updaters.pipeline_updater import PipelineUpdater
from .codec.cold_caches import CacheFiller
from .core_sharing import CoreSharing
from .turns import Work, in_turns

#: Elements of a bucket of gradients, in bytes of float32; the default of
#: communicators.
_BUCKET = 1 << 22
_REPEATS = 5
#: The smaller batch has this part of the larger one's samples.
_SMALLER = 4
_ELEMENTS = 1 << 22     # of parameters with which an optimizer is timed


class Example:
    """A batch, whole or its first samples.

    Args:
        batch: Arrays as a converter gives them: one, a tuple or a dictionary.

    Raises:
        ValueError: Not all arrays have equally many samples.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves, self._tree = nested.leaves(batch)
        sizes = {nested.array_of(leaf).shape[:1] for leaf in self._leaves}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(
                'the arrays of the example must all have the samples of one '
                'batch as their first axis, not '
                + ', '.join(str(nested.array_of(leaf).shape)
                            for leaf in self._leaves))
        self.samples: int = sizes.pop()[0]
        if not self.samples:
            raise ValueError('the example has no sample')

    @property
    def sample_bytes(self) -> float:
        """Of a sample."""
        return sum(nested.array_of(leaf).nbytes
                   for leaf in self._leaves) / self.samples

    def of(self, samples: int) -> Any:
        """A batch of so many samples; repeated where there are fewer."""
        def cut(array: Any) -> Any:
            times = -(-samples // self.samples)
            xp = chainer.backend.get_array_module(array)
            return xp.concatenate([array] * times)[:samples]
        return nested.rebuilt(self._tree, [
            cut(nested.array_of(leaf)) for leaf in self._leaves])


class InSitu(NamedTuple):
    """Seconds of a batch in training, of the processor."""

    forward: float
    backward: float
    spread: float


def call_with(model: Any, batch: Any) -> Any:
    """What the model returns for a batch: its loss."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def measure_model(comm: MPI.Comm, model: Any, example: Example,
                  optimizer: Any, micro_batch: int, copies: bool
                  ) -> tuple[ModelFigures, CoreSharing]:
    """Times a model; call it on all ranks, which must have equal ones.

    The first rank takes times while the others wait; then all train at once,
    to see how much they slow each other down.

    Args:
        comm: All ranks.
        model: The whole model; it stays as it is.
        example: Samples of one rank.
        optimizer: That will train the model; its class and hyperparameters
            count.
        micro_batch: Samples of a small micro-batch.
        copies: Whether there is memory for a copy of the model.

    Returns:
        The figures, of which the update is that of all ranks at once; and
        how much ranks slow each other down, after a first visit.
    """
    names = Names(model)
    samples = example.samples
    few = min(max(1, micro_batch), samples)
    if few == samples and samples > 1:
        few = max(1, samples // _SMALLER)
    sizes = (samples, few)
    in_situ = copies and not any(
        parameter._data[0] is None or is_ghost(parameter._data[0])
        for parameter in names.parameters.values())
    undivided = ''
    try:
        calls = _traced_calls(comm, model, names, example, sizes)
    except ValueError as error:     # the same on all ranks
        if not in_situ:
            raise
        undivided, calls = str(error), []
    plain: list[InSitu] = []
    step = micro = Figure(0.0)
    if in_situ:
        first = comm.rank == 0
        plain, laps, step, micro = comm.bcast(raise_together(
            comm, lambda: _measured(model, example, sizes, not undivided)
            if first else None, error=ValueError))
        calls = [_with(of, times) for of, times
                 in zip(calls, laps, strict=False)]
        work = plain_pass(copy.deepcopy(model), example.of(samples))
    else:
        def work() -> Any:
            return Tracer(model, names).trace(nested.Fresh(
                functools.partial(call_with, model), (example.of(few),),
                {}))
    parameters = parameters_of(names)
    calls = calls or [_made_up(names, parameters)] * 2
    return with_ranks(comm, ModelFigures(
        samples, calls[0], few, calls[1],
        order_of(calls[0], list(names.parameters)), parameters, (),
        Figure(0.0), **of_passes(calls, plain), step=step, micro_batch=micro,
        sample_bytes=example.sample_bytes, undivided=undivided), work,
        optimizer, model.device)


def of_passes(calls: Sequence[Sequence[Call]], plain: Sequence[InSitu]
              ) -> dict[str, Any]:
    """Fields of :class:`.ModelFigures` about plain passes of both sizes.

    Args:
        calls: Of both sizes.
        plain: What was measured; none: the sums of calls must do.
    """
    found = [one[:2] for one in plain] or [
        (sum(call.forward for call in of), sum(call.backward for call in of))
        for of in calls]
    return {'plain': found[0], 'plain_few': found[1],
            'spread': plain[0].spread if plain else 0.1}


def with_ranks(comm: MPI.Comm, figures: ModelFigures,
               work: Callable[[], Any], optimizer: Any, device: Any
               ) -> tuple[ModelFigures, CoreSharing]:
    """Has all ranks work for the first time, and adds what an optimizer takes.

    Args:
        comm: All ranks; call it on all.
        figures: Without buckets and optimizer.
        work: A pass of a rank.
        optimizer: That will train the model.
        device: Chainer's, on which ranks compute.

    Returns:
        As :func:`measure_model`.
    """
    sharing = CoreSharing(comm, device, work)
    sharing.visit()
    parameters = figures.parameters
    # All at once: updates wait for memory, which ranks of a host share.
    update, arrays, temporary = comm.bcast(raise_together(
        comm, lambda: measure_optimizer(optimizer, parameters, device),
        error=ValueError))
    buckets = divide({name: one.nbytes // one.dtype.itemsize
                      for name, one in parameters.items() if one.nbytes},
                     _BUCKET)
    return comm.bcast(dataclasses.replace(
        figures, buckets=buckets, update=update, optimizer_arrays=arrays,
        update_temporary=temporary)), sharing


def _traced_calls(comm: MPI.Comm, model: Any, names: Names, example: Example,
                  sizes: Sequence[int]) -> list[tuple[Call, ...]]:
    """The calls with each size; the first rank takes times.

    Raises:
        ValueError: The model cannot be cut; on all ranks.
    """
    tracer = Tracer(model, names)

    def trace(first: bool) -> list[Any] | None:
        if first != (comm.rank == 0):
            return None
        return [tracer.trace(nested.Fresh(
            functools.partial(call_with, model), (example.of(size),), {}),
            timed=first) for size in sizes]
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        traces, = filter(None, [
            raise_together(comm, functools.partial(trace, first),
                           error=ValueError) for first in (True, False)])
    agree(comm, Signature({
        f'the trace with {size} samples': found.digest
        for size, found in zip(sizes, traces, strict=True)}),
        remedy='Build the same model on all ranks, and give plan() examples '
        'of the same shapes.')
    return [tuple(map(_plain_call, found.calls)) for found in traces]


def _plain_call(call: Any) -> Call:
    """What planning needs of a traced call, which can be sent."""
    return Call(**{field.name: getattr(call, field.name)
                   for field in dataclasses.fields(Call)})


def _made_up(names: Names, parameters: Any) -> tuple[Call, ...]:
    """A call for each layer that has parameters, as long as it is large.

    For models that cannot be traced: tells roughly when gradients are final.
    """
    layers: dict[str, list[str]] = {}
    for name in names.parameters:
        layers.setdefault(name.rpartition('/')[0], []).append(name)
    return tuple(
        Call('layer', layer or '/', parameters=tuple(of),
             forward=float(size), backward=2.0 * size)
        for layer, of in layers.items()
        if (size := sum(parameters[name].nbytes for name in of)))


# --- in training -------------------------------------------------------------

def _measured(model: Any, example: Example, sizes: Sequence[int],
              divisible: bool) -> Any:
    """Plain passes and the laps of calls at both sizes; two overheads."""
    plain = copy.deepcopy(model)
    works = [plain_pass(plain, example.of(size)) for size in sizes]
    if not divisible:
        return in_situ(in_turns(works)), [], Figure(0.0), Figure(0.0)
    alone = MPI.COMM_SELF.Dup()
    try:
        staged = partition(copy.deepcopy(model), example.of(sizes[1]), alone,
                           micro_batches=1, profile=0)
        steps = [_Steps(staged, example.of(size * count), count, alone)
                 for size, count in ((sizes[0], 1), (sizes[1], 1),
                                     (sizes[1], 4))]
        found = in_turns([*works, *steps])
    finally:
        alone.Free()
    return (in_situ(found[:2]), [
        one.laps(of) for one, of in zip(steps[::2], found[2::2], strict=True)],
        *overheads(*(one.beside_calls(of) for one, of in zip(
            steps[1:], found[3:], strict=True))))


def in_situ(found: Sequence[numpy.ndarray]) -> list[InSitu]:
    """Medians of plain passes, float64[rounds, 2], for each size."""
    return [InSitu(float(forward), float(backward),
                   Figure.of(one.sum(axis=1).tolist()).spread)
            for one in found for forward, backward in [
                numpy.median(one, axis=0)]]


def overheads(one: numpy.ndarray, four: numpy.ndarray
              ) -> tuple[Figure, Figure]:
    """Seconds of a step, and of a micro-batch, beside their calls.

    Args:
        one: Seconds of steps beside the calls, with one micro-batch.
        four: The same with four.
    """
    each = Figure.of(numpy.maximum(four - one, 0.0) / 3)
    return (Figure.of(numpy.maximum(one - each.value, 0.0)), each)


def plain_pass(model: Any, batch: Any) -> Work:
    """A pass as an optimizer's ``update(lossfun, ...)`` makes it, timed."""
    now = clock_of(model.device)

    def work() -> tuple[float, float]:
        with preserved():
            start = now()
            loss = call_with(model, batch)
            middle = now()
            check_result(loss)
            model.cleargrads()
            loss.backward()
            return middle - start, now() - middle
    return work


class Repeating(chainer.dataset.Iterator):
    """Gives one batch again and again."""

    epoch, is_new_epoch = 0, False
    epoch_detail, previous_epoch_detail = 0.0, 0.0

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __next__(self) -> Any:
        return self._batch
    next = __next__


@chainer.dataset.converter()
def as_it_is(batch: Any, device: Any) -> Any:
    """A converter for batches of :class:`Repeating`."""
    return batch


class _Steps:
    """Steps of a pipeline of one stage: the whole, and the laps of calls.

    Args:
        model: Partitioned.
        batch: Of a step.
        micro_batches: Of a step.
        comm: Of this rank.
    """

    def __init__(self, model: Any, batch: Any, micro_batches: int,
                 comm: MPI.Comm) -> None:
        optimizer = chainer.optimizers.SGD(0.0)
        optimizer.setup(model)
        model.partition.optimizer = None
        self._updater = PipelineUpdater(
            Repeating(batch), optimizer, comm, micro_batches=micro_batches,
            schedule='1f1b', converter=as_it_is, device=model.device)
        self._model, self._count = model, micro_batches
        self._now = clock_of(model.device)
        self._numbers: list[int] = []

    def __call__(self) -> list[float]:
        """The whole step, then each call's forward and backward lap."""
        passes = self._model.partition.passes
        passes.laps = laps = Laps(self._model.device)
        start = self._now()
        self._updater.update()
        whole = self._now() - start
        passes.laps = None
        medians = laps.medians()
        self._numbers = sorted(medians)
        return [whole, *(lap for number in self._numbers
                         for lap in medians[number])]

    def laps(self, found: numpy.ndarray) -> dict[int, tuple[float, float]]:
        """Seconds of each call, by number."""
        medians = numpy.median(found[:, 1:], axis=0).tolist()
        return dict(zip(self._numbers, zip(medians[::2], medians[1::2],
                                           strict=True), strict=True))

    def beside_calls(self, found: numpy.ndarray) -> numpy.ndarray:
        """Seconds of each step beside its calls."""
        return found[:, 0] - self._count * found[:, 1:].sum(axis=1)


def _with(calls: Sequence[Call], times: dict[int, tuple[float, float]]
          ) -> tuple[Call, ...]:
    """The calls with their seconds in training."""
    return tuple(
        dataclasses.replace(call, forward=times[number][0],
                            backward=times[number][1])
        if number in times else call for number, call in enumerate(calls))


# --- the optimizer --------------------------------------------------------

def measure_optimizer(optimizer: Any, parameters: Any, device: Any
                      ) -> tuple[Figure, int, float]:
    """Seconds of an update of all parameters, and what it keeps.

    A copy of the optimizer updates parameters of the same shapes, as many as
    there is room for; the rest is reckoned.  They come from memory, as after
    a pass and an exchange.

    Args:
        optimizer: A ``chainer.Optimizer``, set up or not; it stays as it is.
        parameters: By path, an object with ``shape`` and ``dtype``.
        device: Chainer's.

    Returns:
        Seconds, arrays of a parameter's size that the optimizer keeps, and
        bytes of temporary arrays as a multiple of the largest parameter's.
    """
    shapes = [(one.shape, one.dtype) for one in parameters.values()
              if one.shape is not None]
    link, done = chainer.Link(), 0
    total = sum(int(numpy.prod(shape)) for shape, _ in shapes)
    with link.init_scope():
        for number, (shape, dtype) in enumerate(shapes):
            if done and done + int(numpy.prod(shape)) > _ELEMENTS:
                continue
            setattr(link, f'p{number}', chainer.Parameter(
                numpy.full(shape, .5, dtype)))
            done += int(numpy.prod(shape))
    if not done:
        return Figure(0.0), 0, 0.0
    link.to_device(device)
    clone = copy.copy(optimizer)
    clone.hyperparam = copy.copy(optimizer.hyperparam)
    clone.setup(link)
    for parameter in link.params():
        parameter.grad = parameter.array * 1e-3
    now, filler = clock_of(device), CacheFiller()
    found = []
    for _ in range(_REPEATS + 1):
        filler.fill()
        start = now()
        clone.update()
        found.append((now() - start) * total / done)
    arrays = max(sum(getattr(value, 'shape', ()) == parameter.shape
                     for value in (parameter.update_rule.state or {}
                                   ).values())
                 for parameter in link.params())
    largest = max(parameter.array.nbytes for parameter in link.params())
    with memory_traced():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        clone.update()
        _, peak = tracemalloc.get_traced_memory()
    return (Figure.of(found[1:]), arrays,
            max(peak - before - (1 << 14), 0) / largest)

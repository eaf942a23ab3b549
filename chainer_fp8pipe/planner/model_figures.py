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
import time
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
from ..chains.profiling.core_sharing import crowding, measure_cores
from ..chains.profiling.laps import Laps, clock_of
from ..chains.tracing.measuring import memory_traced
from ..chains.tracing.trace import Tracer
from ..exchange.buckets import divide
from ..mpi.agreement import Signature, agree, raise_together
from ..pipeline.randomness import preserved
from ..planning.cores import Cores
from ..planning.job.job_profile import Figure, ModelFigures
from ..planning.partition.calls import Call
from ..planning.partition.positions import order_of
from ..training.updaters.pipeline_updater import PipelineUpdater

#: Elements of a bucket of gradients, in bytes of float32; the default of
#: communicators.
_BUCKET = 1 << 22
_REPEATS, _FEWEST = 5, 3
#: The smaller batch has this part of the larger one's samples.
_SMALLER = 4
#: A rank that takes so many times as long as the others is slow.
SLOW = 1.5
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
                  ) -> tuple[ModelFigures, Cores, tuple[float, ...]]:
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
        The figures, how much ranks slow each other down, and how many times
        as long as the median each rank takes for the same.
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
        plain, laps, step, micro = comm.bcast(on_first(comm, lambda: (
            _measured(model, example, sizes, not undivided) if first
            else None)))
        calls = [_with(of, times) for of, times
                 in zip(calls, laps, strict=False)]
        work = step_of(_copied(model), example.of(samples))
    else:
        def work() -> None:
            Tracer(model, names).trace(nested.Fresh(
                functools.partial(_spread_out, model), (example.of(few),),
                {}))
    parameters = parameters_of(names)
    calls = calls or [_made_up(names, parameters)] * 2
    return with_ranks(comm, ModelFigures(
        samples, calls[0], few, calls[1],
        order_of(calls[0], list(names.parameters)), parameters, (),
        Figure(0.0), **of_passes(calls, plain), step=step, micro_batch=micro,
        undivided=undivided), work, optimizer, model.device)


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
               ) -> tuple[ModelFigures, Cores, tuple[float, ...]]:
    """Has all ranks work, and adds what an optimizer takes.

    Args:
        comm: All ranks; call it on all.
        figures: Without buckets and optimizer.
        work: Of a rank, some tenths of a second.
        optimizer: That will train the model.
        device: Chainer's, on which ranks compute.

    Returns:
        As :func:`measure_model`.
    """
    cores = measure_cores(comm, device, work)
    speeds = _speeds(comm, device, work)
    parameters = figures.parameters
    crowded = crowding(comm, cores)
    # All at once: updates wait for memory, which ranks of a host share.
    update, arrays, temporary = comm.bcast(on_first(
        comm, lambda: measure_optimizer(optimizer, parameters, device)))
    buckets = divide({name: one.nbytes // one.dtype.itemsize
                      for name, one in parameters.items() if one.nbytes},
                     _BUCKET)
    return comm.bcast(dataclasses.replace(
        figures, buckets=buckets,
        update=update._replace(value=update.value / crowded),
        optimizer_arrays=arrays, update_temporary=temporary)), cores, speeds


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
            functools.partial(_spread_out, model), (example.of(size),), {}),
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


def _spread_out(model: Any, batch: Any) -> Any:
    return call_with(model, batch)


def on_first(comm: MPI.Comm, action: Callable[[], Any]) -> Any:
    """What the action returns; its error is a ValueError on all ranks."""
    return raise_together(comm, action, error=ValueError)


# --- in training -------------------------------------------------------------

def _copied(model: Any) -> Any:
    """A copy, without what the model's gradients hold."""
    return copy.deepcopy(model)


def _measured(model: Any, example: Example, sizes: Sequence[int],
              divisible: bool) -> Any:
    """Plain passes and the laps of calls at both sizes; two overheads."""
    found = _copied(model)
    plain = [plain_passes(found, example.of(size)) for size in sizes]
    if not divisible:
        return plain, [], Figure(0.0), Figure(0.0)
    laps, steps = _as_one_stage(found, example, sizes)
    return plain, laps, *steps


def step_of(model: Any, batch: Any) -> Callable[[], None]:
    """A pass forward and back, for :func:`with_ranks`."""
    def work() -> None:
        with preserved():
            loss = call_with(model, batch)
            model.cleargrads()
            loss.backward()
    return work


def plain_passes(model: Any, batch: Any) -> InSitu:
    """A pass as an optimizer's ``update(lossfun, ...)`` makes it."""
    now = clock_of(model.device)
    forward: list[float] = []
    backward: list[float] = []
    begin = time.perf_counter()
    while len(forward) < _FEWEST + 1 or (
            len(forward) < 4 * _REPEATS
            and time.perf_counter() - begin < 1.0):
        with preserved():
            start = now()
            loss = call_with(model, batch)
            middle = now()
            check_result(loss)
            model.cleargrads()
            loss.backward()
            end = now()
            del loss
        forward.append(middle - start)
        backward.append(end - middle)
    whole = Figure.of([one + other for one, other in zip(
        forward[1:], backward[1:], strict=True)])
    share = Figure.of(forward[1:]).value, Figure.of(backward[1:]).value
    return InSitu(*share, whole.spread)


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


def _as_one_stage(model: Any, example: Example, sizes: Sequence[int]
                  ) -> tuple[list[dict], tuple[Figure, Figure]]:
    """Laps of a pipeline of one stage, and what a step takes beside them.

    Returns:
        Seconds of each call by its number, at both sizes; seconds of a step
        and of a micro-batch beside the calls.
    """
    alone = MPI.COMM_SELF.Dup()
    try:
        partition(model, example.of(sizes[1]), alone, micro_batches=1,
                  profile=0)
        laps = [_laps(model, example.of(size), alone) for size in sizes]
        step, micro = _overheads(model, example, sizes[1], alone)
    finally:
        alone.Free()
    return laps, (step, micro)


def _updater(model: Any, batch: Any, micro_batches: int, comm: MPI.Comm
             ) -> PipelineUpdater:
    optimizer = chainer.optimizers.SGD(0.0)
    optimizer.setup(model)
    model.partition.optimizer = None
    return PipelineUpdater(Repeating(batch), optimizer, comm,
                           micro_batches=micro_batches, schedule='1f1b',
                           converter=as_it_is, device=model.device)


def _laps(model: Any, batch: Any, comm: MPI.Comm
          ) -> dict[int, tuple[float, float]]:
    updater = _updater(model, batch, 1, comm)
    passes = model.partition.passes
    updater.update()
    passes.laps = laps = Laps(model.device)
    begin, done = time.perf_counter(), 0
    while done < _FEWEST or (done < 4 * _REPEATS
                             and time.perf_counter() - begin < 1.0):
        updater.update()
        done += 1
    passes.laps = None
    return laps.medians()


def _overheads(model: Any, example: Example, samples: int, comm: MPI.Comm
               ) -> tuple[Figure, Figure]:
    """Seconds of a step, and of a micro-batch, beside their calls."""
    now = clock_of(model.device)
    times = []
    for count in 1, 4:
        updater = _updater(model, example.of(samples * count), count, comm)
        updater.update()
        passes = model.partition.passes
        passes.laps = laps = Laps(model.device)
        found = []
        for _ in range(_REPEATS):
            start = now()
            updater.update()
            found.append(now() - start)
        passes.laps = None
        calls = sum(map(sum, laps.medians().values()))
        times.append([seconds - count * calls for seconds in found])
    micro = [max(four - one, 0.0) / 3
             for one, four in zip(*times, strict=True)]
    each = Figure.of(micro)
    return (Figure.of([max(one - each.value, 0.0) for one in times[0]]),
            each)


def _with(calls: Sequence[Call], times: dict[int, tuple[float, float]]
          ) -> tuple[Call, ...]:
    """The calls with their seconds in training."""
    return tuple(
        dataclasses.replace(call, forward=times[number][0],
                            backward=times[number][1])
        if number in times else call for number, call in enumerate(calls))


# --- ranks and optimizer -----------------------------------------------------

def _speeds(comm: MPI.Comm, device: Any, work: Callable[[], Any]
            ) -> tuple[float, ...]:
    """How many times as long as the median each rank takes.

    Processor time, so that ranks that share cores are no reason.
    """
    now = clock_of(device)

    def timed() -> float:
        found = []
        for _ in range(_FEWEST):
            start = now()
            work()
            found.append(now() - start)
        return min(found)
    seconds = comm.allgather(raise_together(comm, timed))
    median = float(numpy.median(seconds))
    # Ranks that share a core's parts or caches differ by chance.
    return tuple(one / median if one > SLOW * median else 1.0
                 for one in seconds)


def measure_optimizer(optimizer: Any, parameters: Any, device: Any
                      ) -> tuple[Figure, int, float]:
    """Seconds of an update of all parameters, and what it keeps.

    A copy of the optimizer updates parameters of the same shapes, as many as
    there is room for; the rest is reckoned.

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
    now = clock_of(device)
    found = []
    for _ in range(_REPEATS + 1):
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

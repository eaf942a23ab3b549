"""Measures a model in training: its calls, its optimizer, all ranks at once.
"""
# A call that is timed alone misses Python, the graph and caches, so single
# calls only say how a pass is divided; how long a pass takes is measured on a
# copy of the model that is trained by plain Chainer, at two sizes of a batch.
# A machine that others use can be twice as slow some seconds later: both sizes
# are timed in turns, and medians count.
#
# Then all ranks train such a copy at once.  By how much longer a pass takes
# than on the first rank alone has in it all that ranks do to each other:
# shared cores and memory, hyperthreads, slow hosts, stragglers.  Nothing of
# this is modelled.
#
# Where there is no memory for a copy, or parameters have no values yet, the
# times of single calls must do, and ranks that share cores take turns.
from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..chains.measure import clock_of
from ..chains.measured_optimizer import measure_optimizer
from ..chains.names import Names, parameters_of
from ..chains.partition import partition
from ..chains.partitioned import check_result
from ..chains.placeholder import is_placeholder
from ..chains.recorder import Tracer
from ..chains.replay import MicroBatch
from ..mpi.agreement import agree, raise_together
from ..mpi.ranks import own_cores, pools_of
from ..pipeline.randomness import preserved
from ..planning.calls import Call, Value, order_of
from ..planning.step import ModelFigures
from ..report.quantities import bytes_in
from ..training.updater import PipelineUpdater
from .example import Example, Repeating, as_it_is, call_with
from .exchange_times import repeated

#: Seconds after which what is timed in turns is not timed again.
_ENOUGH = 3.0
#: Bytes of a rank beside arrays, where the system does not say.
_OVERHEAD = 16e6


def measure_model(comm: MPI.Comm, model: Any, example: Example,
                  optimizer: Any, micro_batch: int, copies: bool
                  ) -> tuple[ModelFigures, tuple[float, ...], bool]:
    """Times a model; call it on all ranks, which must have equal ones.

    Args:
        comm: All ranks.
        model: The whole model; it stays as it is.
        example: Samples of one rank.
        optimizer: That will train the model; it stays as it is.
        micro_batch: Samples of a small micro-batch.
        copies: Whether there is memory for copies of the model.

    Returns:
        The model's figures; for each rank how many times as long a pass
        takes, where all compute at once, as on the first rank alone; whether
        each rank has a core for a second thread.

    Raises:
        ValueError: The model is not the same on all ranks, or it can neither
            be cut nor copied; on all ranks.
    """
    names = Names(model)
    samples, few = sizes = example.sizes(micro_batch)
    in_training = copies and not any(
        one._data[0] is None or is_placeholder(one._data[0])
        for one in names.parameters.values())
    parameters, undivided = parameters_of(names), ''
    try:
        calls = _traced_calls(comm, model, names, example, sizes)
    except ValueError as error:     # the same on all ranks
        if not in_training:
            raise
        undivided, calls = str(error), [_made_up(names, parameters)] * 2
    micro = 0.0
    slowdown, spare = _taking_turns(comm)
    if in_training:
        def alone() -> tuple | None:
            return None if comm.rank else _in_training(
                model, example, sizes, not undivided)
        passes, micro = comm.bcast(raise_together(comm, alone,
                                                  error=ValueError))
        calls = [_scaled(of, seconds) for of, seconds
                 in zip(calls, passes, strict=True)]
        slowdown = _all_at_once(comm, model, example.of(samples),
                                sum(passes[0]))
    update, arrays, temporary = comm.bcast(raise_together(
        comm, lambda: measure_optimizer(optimizer, parameters, model.device),
        error=ValueError))
    figures = ModelFigures(
        samples, calls[0], few, calls[1],
        order_of(calls[0], list(names.parameters)), parameters,
        update, micro, arrays, temporary, undivided=undivided)
    return comm.bcast(figures), slowdown, spare


# --- calls ------------------------------------------------------------------

def _traced_calls(comm: MPI.Comm, model: Any, names: Names, example: Example,
                  sizes: Sequence[int]) -> list[tuple[Call, ...]]:
    """The calls with each size; the first rank takes times.

    Raises:
        ValueError: The model cannot be cut; on all ranks.
    """
    tracer = Tracer(names)

    def trace(first: bool) -> list[Any] | None:
        if first != (comm.rank == 0):
            return None
        return [tracer.trace(MicroBatch(
            functools.partial(call_with, model), (example.of(size),), {}),
            timed=first) for size in sizes]
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        traces, = filter(None, [
            raise_together(comm, functools.partial(trace, first),
                           error=ValueError) for first in (True, False)])
    agree(comm, {
        f'the trace with {size} samples': found.digest
        for size, found in zip(sizes, traces, strict=True)},
        remedy='Build the same model on all ranks, and give plan() examples '
        'of the same shapes.')
    return [tuple(Call(**{  # what planning needs of them, which can be sent
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(Call)}) for call in found.calls)
        for found in traces]


def _made_up(names: Names, parameters: Mapping[str, Value]
             ) -> tuple[Call, ...]:
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


def _scaled(calls: Sequence[Call], seconds: tuple[float, float]
            ) -> tuple[Call, ...]:
    """The calls, which together take these seconds forward and backward."""
    totals = [max(sum(getattr(call, name) for call in calls), 1e-12)
              for name in ('forward', 'backward')]
    return tuple(dataclasses.replace(
        call, forward=call.forward * seconds[0] / totals[0],
        backward=call.backward * seconds[1] / totals[1]) for call in calls)


# --- passes -----------------------------------------------------------------

def _in_training(model: Any, example: Example, sizes: Sequence[int],
                 divisible: bool) -> tuple[list[tuple[float, float]], float]:
    """Seconds of plain passes of both sizes, and what a micro-batch adds.

    The latter is what a pipeline of one stage takes for a micro-batch of the
    smaller size beyond a plain pass.
    """
    clone = copy.deepcopy(model)
    works = [plain_pass(clone, example.of(size)) for size in sizes]
    if not divisible:
        return _in_turns(works), 0.0
    alone = MPI.COMM_SELF.Dup()
    try:
        works.append(_pipeline_step(copy.deepcopy(model), example.of(
            sizes[1]), alone))
        large, small, step = _in_turns(works)
    finally:
        alone.Free()
    return [large, small], max(sum(step) - sum(small), 0.0)


def _in_turns(works: Sequence[Callable[[], tuple[float, float]]]
              ) -> list[tuple[float, float]]:
    """Medians of the seconds that each kind of work returns."""
    found = repeated(MPI.COMM_SELF, lambda: [work() for work in works],
                     _ENOUGH)
    return [(forward, backward) for forward, backward
            in numpy.median(found, axis=0).tolist()]


def plain_pass(model: Any, batch: Any) -> Callable[[], tuple[float, float]]:
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


def _pipeline_step(model: Any, batch: Any, comm: MPI.Comm
                   ) -> Callable[[], tuple[float, float]]:
    """A micro-batch of a pipeline of one stage, timed."""
    staged = partition(model, batch, comm, micro_batches=1)
    updater = PipelineUpdater(
        Repeating(batch), chainer.optimizers.SGD(0.0).setup(staged), comm,
        micro_batches=1, converter=as_it_is, device=model.device)
    now = clock_of(model.device)

    def work() -> tuple[float, float]:
        start = now()
        updater.update()
        return now() - start, 0.0
    return work


# --- ranks ------------------------------------------------------------------

def _taking_turns(comm: MPI.Comm) -> tuple[tuple[float, ...], bool]:
    """Ranks as they would be if cores were all they shared."""
    every = comm.allgather(own_cores())
    pools = pools_of(every)
    crowded = [pools.count(pool) / len(set().union(*(
        mine for mine, other in zip(every, pools, strict=True)
        if other == pool))) for pool in pools]
    return (tuple(max(one, 1.0) for one in crowded),
            all(one <= 0.5 for one in crowded))


def _all_at_once(comm: MPI.Comm, model: Any, batch: Any, alone: float
                 ) -> tuple[float, ...]:
    """Has all ranks train copies; ``alone`` is what the first one took."""
    work = plain_pass(raise_together(comm, lambda: copy.deepcopy(model)),
                      batch)
    found = repeated(comm, lambda: raise_together(comm, lambda: sum(work())),
                     _ENOUGH / 2)
    return tuple(max(one / max(alone, 1e-9), 1.0)
                 for one in comm.allgather(statistics.median(found)))


# --- memory of the process --------------------------------------------------

def resident() -> float | None:
    """Bytes of this process that are in memory; None: the system hides that.

    What was freed is first given back to the system.
    """
    gc.collect()
    # Only glibc has the function.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return bytes_in('VmRSS')


def growth(before: float | None) -> float:
    """Bytes that this process has grown by: buffers of BLAS, MPI, Python.

    Args:
        before: What :func:`resident` returned.
    """
    after = resident()
    if before is None or after is None:
        return _OVERHEAD
    return max(after - before, 0.0)

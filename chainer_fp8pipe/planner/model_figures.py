"""Measures a model: its calls at two sizes of a batch, and its optimizer.

Seconds are those of training.  Where there is no memory for a copy of the
model, or parameters have no values yet, the times of single calls must do.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chainer
from mpi4py import MPI

from ..chains import nested
from ..chains.ghost import is_ghost
from ..chains.names import Names, parameters_of
from ..chains.tracing.trace import Tracer
from ..exchange.buckets import divide
from ..mpi.agreement import Signature, agree, raise_together
from ..planning.job.job_profile import USUAL_HEAP, Figure, ModelFigures
from ..planning.job.model_costs import ModelCosts
from ..planning.partition.calls import Call
from ..planning.partition.positions import order_of
from . import own_memory
from .core_sharing import CoreSharing
from .example import Example, call_with
from .optimizer_figures import measure_optimizer
from .training_passes import (
    InSitu,
    InTraining,
    measured_in_training,
    plain_pass,
)

#: Elements of a bucket of gradients, in bytes of float32; the default of
#: communicators.
_BUCKET = 1 << 22
#: Bytes of a pass beside which some of Python's own do not matter.
_LARGE = 1 << 24
#: A share of the heap that is larger than any seen comes from something else.
_MOST_HEAP = 0.3


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
    samples, few = sizes = example.sizes(micro_batch)
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
    found = InTraining([])
    if in_situ:
        first = comm.rank == 0
        found = comm.bcast(raise_together(
            comm, lambda: measured_in_training(
                model, example, sizes, not undivided) if first else None,
            error=ValueError))
        calls = [_with(of, times) for of, times
                 in zip(calls, found.laps, strict=False)]
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
        Figure(0.0), **of_passes(calls, found.plain), step=found.step,
        micro_batch=found.micro_batch, sample_bytes=example.sample_bytes,
        undivided=undivided), work, in_situ, optimizer, model.device)


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
               work: Callable[[], Any], is_pass: bool, optimizer: Any,
               device: Any) -> tuple[ModelFigures, CoreSharing]:
    """Has all ranks work for the first time, and adds what an optimizer takes.

    Args:
        comm: All ranks; call it on all.
        figures: Without buckets and optimizer.
        work: What a rank does.
        is_pass: Whether this is a plain pass of ``figures.samples``.
        optimizer: That will train the model.
        device: Chainer's, on which ranks compute.

    Returns:
        As :func:`measure_model`.
    """
    sharing = CoreSharing(comm, device, work)
    with own_memory.Peak() as peak:
        sharing.visit()
    parameters = figures.parameters
    # All at once: updates wait for memory, which ranks of a host share.
    update, arrays, temporary = comm.bcast(raise_together(
        comm, lambda: measure_optimizer(optimizer, parameters, device),
        error=ValueError))
    buckets = divide({name: one.nbytes // one.dtype.itemsize
                      for name, one in parameters.items() if one.nbytes},
                     _BUCKET)
    heap = comm.allreduce(_heap(
        figures, peak.nbytes if is_pass else None), MPI.MAX)
    return comm.bcast(dataclasses.replace(
        figures, buckets=buckets, update=update, optimizer_arrays=arrays,
        update_temporary=temporary, heap=heap)), sharing


def _heap(figures: ModelFigures, nbytes: float | None) -> float:
    """What the heap takes beyond the arrays of a pass, as a share of these.

    Args:
        figures: Without it.
        nbytes: By which the process has grown in plain passes; None: nobody
            knows.
    """
    intervals = ModelCosts(dataclasses.replace(figures, heap=0.0)).intervals(
        figures.samples)
    last = intervals.count
    arrays = float(intervals.kept[0, last] + intervals.plain)
    if nbytes is None or arrays < _LARGE:
        return USUAL_HEAP
    gradients = float(intervals.parameters[0, last])
    return min(max((nbytes - gradients) / arrays - 1, 0.0), _MOST_HEAP)


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


def _with(calls: Sequence[Call], times: dict[int, tuple[float, float]]
          ) -> tuple[Call, ...]:
    """The calls with their seconds in training."""
    return tuple(
        dataclasses.replace(call, forward=times[number][0],
                            backward=times[number][1])
        if number in times else call for number, call in enumerate(calls))

"""Times a ``Divisible`` layer by layer, and weighs what each layer keeps.

Each layer is a call of the plan, so that search, steps and memory are those of
any other model.  Layers run as in a stage
(:mod:`~chainer_fp8pipe.pipeline.chunk`): first one by one, a copy in memory at
a time, which says what they keep; then, where there is room for a copy of the
model and all layers are built, all of them in training, for times with Python,
graph and caches.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import numpy
from mpi4py import MPI

from ...chains.profiling.laps import clock_of
from ...links.divisible.divisible import Divisible
from ...links.divisible.lazy import built, own_copy
from ...mpi.agreement import raise_together
from ...pipeline.block import Arrays
from ...pipeline.layer_block import as_tuple
from ...pipeline.loss import LossHead
from ...pipeline.randomness import preserved
from ...planning.job.job_profile import Figure, ModelFigures
from ...planning.partition.calls import Call, Parameter
from ...planning.partition.positions import order_of
from ...training.updaters.pipeline_updater import PipelineUpdater
from ..core_sharing import CoreSharing
from ..example import Example, Repeating, as_it_is
from ..model_figures import of_passes, with_ranks
from ..training_passes import InSitu, in_situ, overheads, plain_pass
from ..turns import Work, in_turns
from .layer_passes import LayerPasses, made_up_gradients
from .layers_alone import Heaviest, LayersAlone

#: Seconds in which all ranks work at a time.
_WORK = 0.1


def measure_layers(comm: MPI.Comm, model: Divisible, example: Example,
                   loss_fun: Callable, optimizer: Any, micro_batch: int,
                   copies: bool
                   ) -> tuple[ModelFigures, CoreSharing]:
    """Times a model's layers; call it on all ranks, which have equal ones.

    The first rank measures while the others wait; then all work at once.

    Args:
        comm: All ranks.
        model: The whole model; it stays as it is, and builds nothing.
        example: Samples of one rank: inputs of the first layer, and the
            target last.
        loss_fun: ``loss_fun(*outputs, target)``.
        optimizer: That will train the model; its class and hyperparameters
            count.
        micro_batch: Samples of a small micro-batch.
        copies: Whether there is memory for a copy of the model.

    Returns:
        As :func:`.measure_model`.  Parameters are named as by the whole
        model; group i of the order is layer i, and begins with its number.

    Raises:
        ValueError: A layer or the loss has failed; on all ranks.
    """
    samples, few = sizes = example.sizes(micro_batch)
    batches = [example.of(size) for size in sizes]
    device = chainer.backend.get_device_from_array(*batches[0])
    in_training = copies and all(
        built(slot) is not None for _, slot in model.numbered_slots())
    found: _Found = comm.bcast(raise_together(
        comm, lambda: _found(model, batches, loss_fun, device, in_training)
        if comm.rank == 0 else None, error=ValueError))
    work = (_work_of(model, found.longest, device) if not in_training else
            plain_pass(_WithLoss(copy.deepcopy(model), loss_fun, device),
                       batches[0]))
    return with_ranks(comm, ModelFigures(
        samples, found.calls[0], few, found.calls[1],
        order_of(found.calls[0]), found.parameters, (), Figure(0.0),
        **of_passes(found.calls, found.plain), ghost=Figure(0.0),
        step=found.step, micro_batch=found.micro_batch), work,
        in_training, optimizer, device)


def check_whole(model: Divisible, example: Any) -> None:
    """Raises ValueError unless all layers, inputs and a target are there."""
    if model.bounds != ((0, model.total),) or model.layout is not None:
        raise ValueError(f'{model!r} is a part already; plan the whole model')
    if not model.total:
        raise ValueError(f'{model!r} has no layer')
    if not isinstance(example, tuple) or len(example) < 2:
        raise ValueError('the example of a Divisible must be a tuple: arrays '
                         'for the first layer, and the target last')


class _Found(NamedTuple):
    calls: list[tuple[Call, ...]]           # of both sizes
    parameters: dict[str, Parameter]
    longest: Heaviest
    plain: list[InSitu]
    step: Figure
    micro_batch: Figure


def _found(model: Divisible, batches: Sequence[Arrays], loss_fun: Callable,
           device: Any, in_training: bool) -> _Found:
    head = LossHead(loss_fun, {'accuracy': F.accuracy}
                    if loss_fun is F.softmax_cross_entropy else {}, None)
    with preserved(), chainer.using_device(device), \
            chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        calls, parameters, longest = LayersAlone(model, device).measured(
            batches, head)
        if not in_training:
            return _Found(calls, parameters, longest, [], Figure(0.0),
                          Figure(0.0))
        whole = copy.deepcopy(model)
        whole.to_device(device)
        return _in_training(_Found(calls, parameters, longest, [], Figure(0.0),
                                   Figure(0.0)), whole, batches, loss_fun,
                            head, device)


def _in_training(found: _Found, model: Divisible, batches: Sequence[Arrays],
                 loss_fun: Callable, head: LossHead, device: Any) -> _Found:
    """Puts seconds of training in the place of those of single layers.

    Args:
        found: Layer by layer.
        model: A copy, which is trained by nothing.
        batches: Of both sizes.
        loss_fun: ``loss_fun(*outputs, target)``.
        head: With this function.
        device: Chainer's.
    """
    run = LayerPasses(model.pieces[0], model.seed, device)
    few = Example(batches[1])
    alone = MPI.COMM_SELF.Dup()
    try:
        part = model.stage(alone)
        large, small, laps, laps_few, one, four = in_turns([
            *(plain_pass(_WithLoss(model, loss_fun, device), batch)
              for batch in batches),
            *(functools.partial(run.laps, batch, head) for batch in batches),
            *(_step(part, few.of(count * few.samples), count, loss_fun,
                    device, alone) for count in (1, 4))])
    finally:
        alone.Free()
    step, micro = overheads(*(
        times[:, 0] - count * laps_few.sum(axis=1)
        for count, times in ((1, one), (4, four))))
    return found._replace(
        calls=[tuple(map(_with_times, of, numpy.median(times, axis=0
                                                       ).reshape(-1, 2)))
               for of, times in zip(found.calls, (laps, laps_few),
                                    strict=True)],
        plain=in_situ([large, small]), step=step, micro_batch=micro)


def _with_times(call: Call, times: numpy.ndarray) -> Call:
    forward, backward = times.tolist()
    return dataclasses.replace(call, forward=forward, backward=backward)


def _step(part: Any, batch: Any, micro_batches: int, loss_fun: Callable,
          device: Any, comm: MPI.Comm) -> Work:
    """A step of a pipeline of one stage, timed."""
    now = clock_of(device)
    updater = PipelineUpdater(
        Repeating(batch), chainer.optimizers.SGD(0.0).setup(part), comm,
        micro_batches=micro_batches, schedule='1f1b', loss_fun=loss_fun,
        converter=as_it_is, device=device)

    def work() -> tuple[float]:
        start = now()
        updater.update()
        return (now() - start,)
    return work


class _WithLoss(chainer.Chain):
    """A model that returns its loss, as plain Chainer trains it."""

    def __init__(self, layers: Divisible, loss_fun: Callable, device: Any
                 ) -> None:
        super().__init__()
        self._loss_fun = loss_fun
        with self.init_scope():
            self.layers = layers
        self.to_device(device)

    def forward(self, *arrays: Any) -> chainer.Variable:
        *inputs, target = arrays
        return self._loss_fun(*as_tuple(self.layers(*inputs)), target)


def _work_of(model: Divisible, longest: Heaviest, device: Any
             ) -> Callable[[], None]:
    """Passes of one layer, some of them."""
    slot = dict(model.numbered_slots())[longest.number]
    layer = own_copy(slot, model.seed, longest.number, device)
    run = LayerPasses([(longest.number, layer)], model.seed, device)
    inputs = tuple(map(device.send, longest.inputs))
    times = min(1000, math.ceil(_WORK / max(longest.seconds, 1e-9)))

    def work() -> None:
        with preserved(), chainer.using_device(device):
            for _ in range(times):
                outputs, _ = run.forward(inputs, longest.wanted)
                run.backward(made_up_gradients(outputs))
    return work

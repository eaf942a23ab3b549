"""Measures the parameters and the time of each layer of a model."""
from __future__ import annotations

import copy
import time
from typing import Any, NamedTuple

import chainer

from ...pipeline.layer_block import as_variables
from ...pipeline.layers import LayerError, layer_name
from .layer_slots import LayerSlots
from .lazy import Lazy, initialising

#: The shortest of so many runs counts, after one that is not counted.
_RUNS = 3


class LayerCost(NamedTuple):
    """The number of a layer's parameters, and its time."""

    parameters: int
    seconds: float      # of forward and backward together; 0 if not timed


def measure(model: LayerSlots, example: Any,
            timed: bool) -> list[LayerCost]:
    """Runs a copy of each layer on what the one before returned.

    One copy is in memory at a time.  The model stays as it is: lazy layers
    are not built, statistics not updated, and NumPy's random numbers not
    drawn.

    Args:
        model: The whole model.
        example: An input, or a tuple of them; the layers run on its device.
        timed: Whether to time forward and backward as in training.
    """
    if example is None:
        raise ValueError('there is no input to measure with; call '
                         'stage(..., example=x) with one micro-batch')
    arrays = tuple(variable.array for variable in as_variables(example))
    found = []
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        for number, slot in model.numbered_slots():
            try:
                arrays, measurement = _measured(
                    slot, model.seed, number, arrays, timed)
            except LayerError:
                raise
            except Exception as error:
                raise LayerError(
                    f'{layer_name(number, slot)}, while it was measured: '
                    f'{type(error).__name__}: {error}') from error
            found.append(measurement)
    return found


def _measured(slot: Any, seed: int, number: int, arrays: tuple,
              timed: bool) -> tuple[tuple, LayerCost]:
    device = chainer.backend.get_device_from_array(*arrays)
    built = slot.layer if isinstance(slot, Lazy) else slot
    layer = (slot.make(seed, number) if built is None
             else copy.deepcopy(built) if isinstance(built, chainer.Link)
             else built)
    with initialising(seed, number, device.xp), chainer.using_device(device):
        if isinstance(layer, chainer.Link):
            layer.to_device(device)
        # The first layer's input needs no gradient.
        outputs, _ = _run(layer, arrays, number > 0, timed, device)
        seconds = min(_run(layer, arrays, number > 0, timed, device)[1]
                      for _ in range(_RUNS)) if timed else 0.0
    size = layer.count_params() if isinstance(layer, chainer.Link) else 0
    return outputs, LayerCost(size, seconds)


def _run(layer: Any, arrays: tuple, wanted: bool, backward: bool,
         device: Any) -> tuple[tuple, float]:
    """A layer's outputs, and the seconds that they took."""
    inputs = [chainer.Variable(
        array, requires_grad=wanted and array.dtype.kind == 'f')
        for array in arrays]
    start = _now(device)
    outputs = as_variables(layer(*inputs))
    ends = [output for output in outputs
            if backward and output.creator_node is not None]
    for end in ends:
        end.grad = device.xp.ones_like(end.array)
    if ends:
        chainer.backward(ends)
    seconds = _now(device) - start
    return tuple(output.array for output in outputs), seconds


def _now(device: Any) -> float:
    if isinstance(device, chainer.backend.GpuDevice):
        device.device.synchronize()
    return time.perf_counter()

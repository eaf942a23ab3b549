"""Each layer alone: its seconds, and the bytes that its tape keeps."""
from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer
import numpy

from ...chains.profiling.laps import clock_of
from ...chains.tracing.measuring import memory_traced
from ...links.divisible.divisible import Divisible
from ...links.divisible.lazy import built, own_copy
from ...pipeline.block import Arrays
from ...pipeline.chunk import why_once
from ...pipeline.loss import LossHead
from ...planning.partition.calls import Call, Parameter, Source, Value
from .layer_passes import (
    PLACE,
    LayerPasses,
    loss_laps,
    made_up_gradients,
)
from .layer_shapes import (
    named_parameters,
    parameter_of,
    shared_things,
)

_REPEATS = 3
#: Small objects of Python's count as nothing.
_SMALL = 1 << 14


class Heaviest(NamedTuple):
    """The layer that takes longest, and what it is given."""

    number: int
    inputs: Arrays
    wanted: tuple[bool, ...] | None
    seconds: float


class LayersAlone:
    """Runs a copy of each layer alone, on what the one before returned.

    Args:
        model: The whole model.
        device: Chainer's.
    """

    def __init__(self, model: Divisible, device: Any) -> None:
        self._model, self._device = model, device
        self._whole = shared_things(model)
        self._names: dict[tuple[int, str], str] = {}
        self._parameters: dict[str, Parameter] = {}

    def measured(self, batches: Sequence[Arrays], head: LossHead
                 ) -> tuple[list[tuple[Call, ...]], dict[str, Parameter],
                            Heaviest]:
        """The calls for each batch, the loss last; parameters by path."""
        calls: list[list[Call]] = [[] for _ in batches]
        arrays = [batch[:-1] for batch in batches]
        wanted: tuple[bool, ...] | None = None
        longest = Heaviest(0, (), None, -1.0)
        slots = self._model.numbered_slots()
        for number, slot in slots:
            layer = own_copy(slot, self._model.seed, number, self._device)
            run = LayerPasses([(number, layer)], self._model.seed,
                              self._device)
            before = arrays[-1], wanted
            alone = [_measured(run, given, wanted) for given in arrays]
            names = self._named(number, slot, layer)
            for of, one in zip(calls, alone, strict=True):
                of.append(self._call(number, layer, names, of, one,
                                     number == slots[-1][0]))
            arrays = [one.outputs for one in alone]
            wanted = alone[0].wants
            if alone[-1].forward + alone[-1].backward > longest.seconds:
                longest = Heaviest(number, *before, (
                    alone[-1].forward + alone[-1].backward))
        for of, outputs, batch in zip(calls, arrays, batches, strict=True):
            of.append(_call_of_loss(head, outputs, batch[-1], of,
                                    clock_of(self._device)))
        cpu = chainer.backend.CpuDevice()
        return (list(map(tuple, calls)), self._parameters, longest._replace(
            inputs=tuple(map(cpu.send, longest.inputs))))

    def _named(self, number: int, slot: Any, layer: Any
               ) -> tuple[str, ...]:
        """Paths of a layer's parameters; shared ones have their first.

        Shapes are those that the layer's copy has found.
        """
        # Lazy slots that are not built share a layer if they are one object.
        owners = ([(slot, path) for path, _ in named_parameters(layer)]
                  if built(slot) is None else
                  [(one, path) for path, one in named_parameters(built(slot))])
        found = []
        for (owner, path), (_, one) in zip(owners, named_parameters(layer),
                                           strict=True):
            name = self._names.setdefault(
                (id(owner), path if owner is slot else ''),
                f'/{number}{path}')
            found.append(name)
            self._parameters.setdefault(name, parameter_of(one))
        return tuple(found)

    def _call(self, number: int, layer: Any, names: tuple[str, ...],
              before: Sequence[Call], one: _Alone, last: bool) -> Call:
        links = (layer.links() if isinstance(layer, chainer.Link) else ())
        previous = (tuple(before[-1].outputs) if before else ())
        inputs = tuple(Source(number - 1, output) for output in previous)
        return Call(
            getattr(layer, '__name__', type(layer).__name__), f'/{number}',
            inputs=inputs, parameters=(f'/{number}', *names),
            outputs={index: Value(output.shape, output.dtype, wants)
                     for index, (output, wants) in enumerate(zip(
                         one.outputs, one.wants, strict=True))},
            forward=one.forward, backward=one.backward,
            deferrable=one.deferrable if names else 0.0, kept=one.kept,
            retained=(*(source for source, kept in zip(
                inputs, one.inputs_kept, strict=False) if kept),
                *(Source(number, index) for index, kept
                  in enumerate(one.outputs_kept) if kept)),
            temporary=one.temporary,
            whole=(*self._whole.get(number, ()), *['loss'] * last),
            once=any(why_once(link) for link in links))


class _Alone(NamedTuple):
    """A layer that was run alone; see :class:`.Call`."""

    outputs: Arrays
    wants: tuple[bool, ...]
    forward: float
    backward: float
    deferrable: float
    kept: int
    temporary: int
    inputs_kept: tuple[bool, ...]
    outputs_kept: tuple[bool, ...]


def _measured(run: LayerPasses, inputs: Arrays, wanted: tuple[bool, ...] | None
              ) -> _Alone:
    """Runs a layer, times it, and weighs what its tape keeps."""
    outputs, _ = run.forward(inputs, wanted)    # gets memory, and shapes
    wants = run.wants
    run.backward(made_up_gradients(outputs))
    outputs = tuple(output.copy() for output in outputs)
    weight = _weighed(run, inputs, wanted)
    times = []
    for _ in range(_REPEATS):
        made, forward = run.forward(inputs, wanted)
        backward, = run.backward(made_up_gradients(made))
        made, _ = run.forward(inputs, wanted)
        weights, = run.backward(made_up_gradients(made), defer=True)
        times.append((forward[0], backward, weights))
    forward, backward, weights = map(min, zip(*times, strict=True))
    return _Alone(outputs, wants, forward, backward,
                  min(weights / backward, 1.0) if backward else 0.0, *weight)


def _weighed(run: LayerPasses, inputs: Arrays, wanted: tuple[bool, ...] | None
             ) -> tuple[int, int, tuple[bool, ...], tuple[bool, ...]]:
    """Bytes kept and in use for a time; which arrays the tape keeps."""
    given = tuple(array.copy() for array in inputs)
    before = list(map(_reference, given))
    with memory_traced():
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        made, _ = run.forward(given, wanted)
        after, peak = tracemalloc.get_traced_memory()
        kept = after - start - sum(array.nbytes for array in made)
        temporary = peak - after
        gradients = made_up_gradients(made)
        afterwards = list(map(_reference, made))
        del given, made
        alive = [tuple(reference() is not None for reference in references)
                 for references in (before, afterwards)]
        tracemalloc.reset_peak()
        base, _ = tracemalloc.get_traced_memory()
        run.backward(gradients)
        _, peak = tracemalloc.get_traced_memory()
    return (kept if kept > _SMALL else 0, max(temporary, peak - base, 0),
            alive[0], alive[1])


def _reference(array: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(array)
    except TypeError:               # not of this class: taken to be kept
        return lambda: array


def _call_of_loss(head: LossHead, outputs: Arrays, target: Any,
                  calls: Sequence[Call], now: Callable[[], float]) -> Call:
    """The loss, which stays with the last layer."""
    times = [loss_laps(head, outputs, target, now)[0]
             for _ in range(_REPEATS + 1)]
    with memory_traced():
        start, _ = tracemalloc.get_traced_memory()
        head.begin([target], [1.0], 1.0, None)
        head.forward(0, outputs, PLACE)
        kept = tracemalloc.get_traced_memory()[0] - start
        head.backward(0)
    forward, backward = map(min, zip(*times[1:], strict=True))
    return Call(
        'loss', inputs=tuple(Source(len(calls) - 1, output)
                             for output in calls[-1].outputs),
        outputs={0: Value((), numpy.dtype('f'), True)}, forward=forward,
        backward=backward, kept=kept if kept > _SMALL else 0,
        whole=('loss',))

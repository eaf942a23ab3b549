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
import math
import statistics
import time
import tracemalloc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import numpy
from mpi4py import MPI

from ..chains.profiling.laps import clock_of
from ..chains.tracing.measuring import memory_traced
from ..intercept.unchecked_calls import unchecked
from ..links.divisible.divisible import Divisible
from ..links.divisible.lazy import Lazy, initialising
from ..links.divisible.shared_parameters import things_used
from ..pipeline.batch_statistics import BatchStatistics
from ..pipeline.block import AnyTape, Arrays
from ..pipeline.chunk import why_once
from ..pipeline.gradient_sums import GradientSums
from ..pipeline.layer_block import LayerBlock, as_tuple
from ..pipeline.layers import Layer, blame
from ..pipeline.loss import LossHead
from ..pipeline.randomness import Place, preserved
from ..planning.cores import Cores
from ..planning.job.job_profile import Figure, ModelFigures
from ..planning.partition.calls import Call, Parameter, Source, Value
from ..planning.partition.partition_plan import PartitionPlan
from ..planning.partition.positions import order_of
from ..training.updaters.pipeline_updater import PipelineUpdater
from .model_figures import (
    Example,
    InSitu,
    Repeating,
    as_it_is,
    of_passes,
    on_first,
    plain_passes,
    step_of,
    with_ranks,
)

_FEWEST, _MOST = 3, 20          # repeats
#: Seconds in which passes are repeated, and which ranks work at a time.
_ENOUGH, _WORK = 1.0, 0.1
#: Small objects of Python's count as nothing.
_SMALL = 1 << 14
_PLACE = Place(0, 0, 0, 0)


def measure_layers(comm: MPI.Comm, model: Divisible, example: Example,
                   loss_fun: Callable, optimizer: Any, micro_batch: int,
                   copies: bool
                   ) -> tuple[ModelFigures, Cores, tuple[float, ...]]:
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
    samples = example.samples
    few = min(max(1, micro_batch), samples)
    if few == samples and samples > 1:
        few = max(1, samples // 4)
    batches = [example.of(size) for size in (samples, few)]
    device = chainer.backend.get_device_from_array(*batches[0])
    built = not any(_is_unbuilt(slot) for _, slot in model.numbered_slots())
    in_situ = copies and built
    found: _Found = comm.bcast(on_first(comm, lambda: (
        _found(model, batches, loss_fun, device, in_situ)
        if comm.rank == 0 else None)))
    work = (_work_of(model, found.longest, device) if not in_situ else
            step_of(_WithLoss(copy.deepcopy(model), loss_fun, device),
                    batches[0]))
    return with_ranks(comm, ModelFigures(
        samples, found.calls[0], few, found.calls[1],
        order_of(found.calls[0]), found.parameters, (), Figure(0.0),
        **of_passes(found.calls, found.plain), ghost=Figure(0.0),
        step=found.step, micro_batch=found.micro_batch), work, optimizer,
        device)


def check_whole(model: Divisible, example: Any) -> None:
    """Raises ValueError unless all layers, inputs and a target are there."""
    if model.bounds != ((0, model.total),) or model.layout is not None:
        raise ValueError(f'{model!r} is a part already; plan the whole model')
    if not model.total:
        raise ValueError(f'{model!r} has no layer')
    if not isinstance(example, tuple) or len(example) < 2:
        raise ValueError('the example of a Divisible must be a tuple: arrays '
                         'for the first layer, and the target last')


def layer_shapes(model: Divisible, planned: Mapping[str, Any]
                 ) -> dict[str, Any]:
    """Shapes of parameters by path; builds nothing.

    Args:
        model: A whole one.
        planned: What a plan says, for the layers that are not built.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for number, slot in model.numbered_slots():
        if _is_unbuilt(slot):
            found.update({name: shape for name, shape in planned.items()
                          if name.startswith(f'/{number}/')})
            continue
        for path, one in _named(_built(slot)):
            if id(one) not in seen:
                seen.add(id(one))
                found[f'/{number}{path}'] = (None if one.array is None
                                             else one.shape)
    return found


def layer_counts(cut: PartitionPlan, layers: int) -> list[int]:
    """How many layers each chunk of a plan has.

    Args:
        cut: Of a plan that was made for a ``Divisible``.
        layers: Of the model.

    Raises:
        ValueError: The plan is for another model, or cuts inside of a layer.
    """
    if len(cut.order) != layers:
        raise ValueError(f'the plan is for a model of {len(cut.order)} '
                         f'layers, and this one has {layers}; make the plan '
                         'again')
    if any(position.depth for position in cut.cuts):
        raise ValueError('a Divisible is cut between layers: calls_later '
                         'must be 0 in each cut of the plan')
    ends = [*(position.place for position in cut.cuts), layers]
    return [end - start for start, end in zip([0, *ends], ends,
                                              strict=False)]


# --- all that the first rank finds -------------------------------------------

class _Heaviest(NamedTuple):
    """The layer that takes longest, and what it is given."""

    number: int
    inputs: Arrays
    wanted: tuple[bool, ...] | None
    seconds: float


class _Found(NamedTuple):
    calls: list[tuple[Call, ...]]           # of both sizes
    parameters: dict[str, Parameter]
    longest: _Heaviest
    plain: list[InSitu]
    step: Figure
    micro_batch: Figure


def _found(model: Divisible, batches: Sequence[Arrays], loss_fun: Callable,
           device: Any, in_situ: bool) -> _Found:
    head = LossHead(loss_fun, {'accuracy': F.accuracy}
                    if loss_fun is F.softmax_cross_entropy else {}, None)
    with preserved(), chainer.using_device(device), \
            chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        calls, parameters, longest = _OneByOne(model, device).measured(
            batches, head)
        if not in_situ:
            return _Found(calls, parameters, longest, [], Figure(0.0),
                          Figure(0.0))
        whole = copy.deepcopy(model)
        whole.to_device(device)
        run = _Run(whole.pieces[0], model.seed, device)
        laps = [run.laps(batch, head) for batch in batches]
        calls = [tuple(
            dataclasses.replace(call, forward=forward, backward=backward)
            for call, (forward, backward) in zip(of, times, strict=True))
            for of, times in zip(calls, laps, strict=True)]
        plain = [plain_passes(_WithLoss(whole, loss_fun, device), batch)
                 for batch in batches]
        step, micro = _overheads(
            whole, batches[1], loss_fun, sum(map(sum, laps[1])), device)
    return _Found(calls, parameters, longest, plain, step, micro)


def _overheads(model: Divisible, batch: Arrays, loss_fun: Callable,
               seconds: float, device: Any) -> tuple[Figure, Figure]:
    """Seconds of a step, and of a micro-batch, beside their layers.

    Args:
        model: A copy, which is trained by nothing.
        batch: Of one micro-batch.
        loss_fun: ``loss_fun(*outputs, target)``.
        seconds: Of a micro-batch in the layers and the loss.
        device: Chainer's.
    """
    now = clock_of(device)
    times = []
    alone = MPI.COMM_SELF.Dup()
    try:
        part = model.stage(alone)
        for count in 1, 4:
            updater = PipelineUpdater(
                Repeating(Example(batch).of(count * len(batch[-1]))),
                chainer.optimizers.SGD(0.0).setup(part), alone,
                micro_batches=count, schedule='1f1b', loss_fun=loss_fun,
                converter=as_it_is, device=device)
            updater.update()
            found = []
            for _ in range(_FEWEST + 2):
                start = now()
                updater.update()
                found.append(now() - start - count * seconds)
            times.append(found)
    finally:
        alone.Free()
    micro = Figure.of([max(four - one, 0.0) / 3
                       for one, four in zip(*times, strict=True)])
    return (Figure.of([max(one - micro.value, 0.0) for one in times[0]]),
            micro)


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


def _work_of(model: Divisible, longest: _Heaviest, device: Any
             ) -> Callable[[], None]:
    """Passes of one layer, some of them."""
    slot = dict(model.numbered_slots())[longest.number]
    run = _Run([(longest.number, _own(slot, model.seed, longest.number,
                                      device))], model.seed, device)
    inputs = tuple(map(device.send, longest.inputs))
    times = min(1000, math.ceil(_WORK / max(longest.seconds, 1e-9)))

    def work() -> None:
        with preserved(), chainer.using_device(device):
            for _ in range(times):
                outputs, _ = run.forward(inputs, longest.wanted)
                run.backward(_gradients(outputs))
    return work


# --- layers as a stage runs them ---------------------------------------------

class _Run:
    """Layers, one after the other, for one micro-batch.

    Args:
        layers: With their numbers.
        seed: Of the model's initial values.
        device: Chainer's.
    """

    def __init__(self, layers: Sequence[Layer], seed: int, device: Any
                 ) -> None:
        self._now = clock_of(device)
        self._statistics, self._sums = BatchStatistics(), GradientSums()
        self._blocks = [LayerBlock(
            layer, first=not layer[0], statistics=self._statistics,
            initial_seed=seed, xp=device.xp) for layer in layers]
        self._tapes: list[AnyTape] = []

    @property
    def wants(self) -> tuple[bool, ...]:
        """For each output, whether backward needs its gradient."""
        return self._tapes[-1].wants

    def forward(self, inputs: Arrays, wanted: tuple[bool, ...] | None
                ) -> tuple[Arrays, list[float]]:
        """Outputs, and the seconds of each layer."""
        arrays, seconds = inputs, []
        self._statistics.next_micro_batch()
        before = self._now()
        with self._statistics:
            for block in self._blocks:
                with blame(block.name, 0):
                    tape, arrays = block.record(0, arrays, wanted, _PLACE)
                wanted = tape.wants
                self._tapes.append(tape)
                before, start = self._now(), before
                seconds.append(before - start)
        # Averages stay as they are.
        self._statistics.forget()
        return arrays, seconds

    def backward(self, gradients: Arrays, defer: bool = False
                 ) -> list[float]:
        """The seconds of each layer; with ``defer``, of weights alone."""
        found = []
        self._sums.begin(self._blocks, None)
        before = self._now()
        for block in reversed(self._blocks):
            tape = self._tapes.pop()
            with blame(f'the backward pass of {block.name}', 0), unchecked():
                gradients = tape.backward(gradients, self._sums, defer)
                if defer:
                    before = self._now()
                    tape.backward_weight(self._sums)
            del tape
            self._sums.through(block)
            self._sums.settle([block])
            before, start = self._now(), before
            found.append(before - start)
        # Functions may use links of the model itself.
        self._sums.forget()
        return found[::-1]

    def laps(self, batch: Arrays, head: LossHead
             ) -> list[tuple[float, float]]:
        """Medians of each layer's seconds in training, and the loss's."""
        found: list[list[tuple[float, float]]] = []
        begin = time.perf_counter()
        while len(found) <= _FEWEST or (
                len(found) <= _MOST
                and time.perf_counter() - begin < _ENOUGH):
            outputs, forward = self.forward(batch[:-1], None)
            loss, gradients = _loss(head, outputs, batch[-1], self._now)
            found.append([*zip(forward, self.backward(gradients),
                               strict=True), loss])
        return [(statistics.median(forward), statistics.median(backward))
                for forward, backward in (
                    zip(*times, strict=True)
                    for times in zip(*found[1:], strict=True))]


def _loss(head: LossHead, outputs: Arrays, target: Any,
          now: Callable[[], float]) -> tuple[tuple[float, float], Arrays]:
    """Seconds of the loss forward and backward; its gradients."""
    head.begin([target], [1.0], 1.0, None)
    start = now()
    head.forward(0, outputs, _PLACE)
    middle = now()
    gradients = head.backward(0)
    return (middle - start, now() - middle), gradients


def _gradients(outputs: Arrays) -> Arrays:
    """Made-up ones."""
    return tuple(
        chainer.backend.get_array_module(output).full_like(output, .01)
        if output.dtype.kind == 'f' else None for output in outputs)


# --- layer by layer ----------------------------------------------------------

class _OneByOne:
    """Runs a copy of each layer alone, on what the one before returned.

    Args:
        model: The whole model.
        device: Chainer's.
    """

    def __init__(self, model: Divisible, device: Any) -> None:
        self._model, self._device = model, device
        self._whole = _shared(model)
        self._names: dict[tuple[int, str], str] = {}
        self._parameters: dict[str, Parameter] = {}

    def measured(self, batches: Sequence[Arrays], head: LossHead
                 ) -> tuple[list[tuple[Call, ...]], dict[str, Parameter],
                            _Heaviest]:
        """The calls for each batch, the loss last; parameters by path."""
        calls: list[list[Call]] = [[] for _ in batches]
        arrays = [batch[:-1] for batch in batches]
        wanted: tuple[bool, ...] | None = None
        longest = _Heaviest(0, (), None, -1.0)
        slots = self._model.numbered_slots()
        for number, slot in slots:
            layer = _own(slot, self._model.seed, number, self._device)
            run = _Run([(number, layer)], self._model.seed, self._device)
            before = arrays[-1], wanted
            alone = [_measured(run, given, wanted) for given in arrays]
            names = self._named(number, slot, layer)
            for of, one in zip(calls, alone, strict=True):
                of.append(self._call(number, layer, names, of, one,
                                     number == slots[-1][0]))
            arrays = [one.outputs for one in alone]
            wanted = alone[0].wants
            if alone[-1].forward + alone[-1].backward > longest.seconds:
                longest = _Heaviest(number, *before, (
                    alone[-1].forward + alone[-1].backward))
        for of, outputs, batch in zip(calls, arrays, batches, strict=True):
            of.append(_call_of_loss(head, outputs, batch[-1], of,
                                    clock_of(self._device)))
        cpu = chainer.backend.CpuDevice()
        return (list(map(tuple, calls)), self._parameters, longest._replace(
            inputs=tuple(map(cpu.send, longest.inputs))))

    def _named(self, number: int, slot: Any, layer: Any) -> tuple[str, ...]:
        """Paths of a layer's parameters; shared ones have their first.

        Shapes are those that the layer's copy has found.
        """
        # What is not built is the same layer where it is the same object.
        owners = ([(slot, path) for path, _ in _named(layer)]
                  if _is_unbuilt(slot) else
                  [(one, path) for path, one in _named(_built(slot))])
        found = []
        for (owner, path), (_, one) in zip(owners, _named(layer),
                                           strict=True):
            name = self._names.setdefault(
                (id(owner), path if owner is slot else ''),
                f'/{number}{path}')
            found.append(name)
            self._parameters.setdefault(name, _parameter(one))
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


def _measured(run: _Run, inputs: Arrays, wanted: tuple[bool, ...] | None
              ) -> _Alone:
    """Runs a layer, times it, and weighs what its tape keeps."""
    outputs, _ = run.forward(inputs, wanted)    # gets memory, and shapes
    wants = run.wants
    run.backward(_gradients(outputs))
    outputs = tuple(output.copy() for output in outputs)
    weight = _weighed(run, inputs, wanted)
    times = []
    for _ in range(_FEWEST):
        made, forward = run.forward(inputs, wanted)
        backward, = run.backward(_gradients(made))
        made, _ = run.forward(inputs, wanted)
        weights, = run.backward(_gradients(made), defer=True)
        times.append((forward[0], backward, weights))
    forward, backward, weights = map(min, zip(*times, strict=True))
    return _Alone(outputs, wants, forward, backward,
                  min(weights / backward, 1.0) if backward else 0.0, *weight)


def _weighed(run: _Run, inputs: Arrays, wanted: tuple[bool, ...] | None
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
        gradients = _gradients(made)
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
    times = [_loss(head, outputs, target, now)[0] for _ in range(_FEWEST + 1)]
    with memory_traced():
        start, _ = tracemalloc.get_traced_memory()
        head.begin([target], [1.0], 1.0, None)
        head.forward(0, outputs, _PLACE)
        kept = tracemalloc.get_traced_memory()[0] - start
        head.backward(0)
    forward, backward = map(min, zip(*times[1:], strict=True))
    return Call(
        'loss', inputs=tuple(Source(len(calls) - 1, output)
                             for output in calls[-1].outputs),
        outputs={0: Value((), numpy.dtype('f'), True)}, forward=forward,
        backward=backward, kept=kept if kept > _SMALL else 0,
        whole=('loss',))


# --- slots -------------------------------------------------------------------

def _is_unbuilt(slot: Any) -> bool:
    return isinstance(slot, Lazy) and slot.layer is None


def _built(slot: Any) -> Any:
    return slot.layer if isinstance(slot, Lazy) else slot


def _own(slot: Any, seed: int, number: int, device: Any) -> Any:
    """A copy of a layer, or one that is built for this."""
    if _is_unbuilt(slot):
        layer = slot.make(seed, number)
    else:
        layer = _built(slot)
        if isinstance(layer, chainer.Link):
            layer = copy.deepcopy(layer)
    if isinstance(layer, chainer.Link):
        with initialising(seed, number, device.xp):
            layer.to_device(device)
    return layer


def _named(layer: Any) -> list[tuple[str, chainer.Parameter]]:
    return (list(layer.namedparams()) if isinstance(layer, chainer.Link)
            else [])


def _parameter(one: chainer.Parameter) -> Parameter:
    if one.array is not None:
        return Parameter(one.shape, one.array.dtype)
    return Parameter(None, numpy.dtype(chainer.get_dtype(
        getattr(one.initializer, 'dtype', None))))


def _shared(model: Divisible) -> dict[int, tuple[str, ...]]:
    """By layer, names of what it shares with others, and no cut divides."""
    users: dict[int, set[int]] = {}
    alive = []                  # so that no id is used again
    for number, slot in model.numbered_slots():
        for thing in things_used(slot):
            alive.append(thing)
            users.setdefault(id(thing), set()).add(number)
    found: dict[int, tuple[str, ...]] = {}
    for one, numbers in enumerate(users.values()):
        if len(numbers) > 1:
            for number in numbers:
                found[number] = (*found.get(number, ()), f'shared {one}')
    return found

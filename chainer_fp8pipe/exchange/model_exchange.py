"""One model's exchange: codec, buckets, and what is on its way."""
from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import chainer
import numpy

from ..allreduce.engine import Algorithm, Bucket
from ..codecs import Cast, Codec, State, Tensors
from ..mpi.agreement import Signature
from ..mpi.waiting import give_way
from .buckets import (
    BucketNames,
    LastBackward,
    ReadyTimes,
    Slice,
    divide,
    finished_first,
    needed_first,
)
from .deferred_update import DeferredUpdate
from .gradients import (
    Gradients,
    arrays_of,
    distinct_parameters,
    flat_float32,
    problem_of,
)

#: Flat arrays by name, as in snapshots.
Saved = dict[str, numpy.ndarray]

_REMEDY = ('after its exchange had begun: by a hook, by cleargrads or by '
           'another backward pass; pass overlap=False to create_communicator')
_NO_WIRE = numpy.empty(0, numpy.uint8)


@dataclasses.dataclass
class Update:
    """Gradients and buckets of the update that is under way.

    Attributes:
        values: Parameters' arrays, by name; empty while nothing is sent
            early.
        loss_scale: The factor of the gradients; None for none.
        missing: By the bucket's number, names of gradients that are not
            final yet.
        arrays: Gradients that are final.
        ready: How many slices, in their order, are of complete buckets.
        todo: Those of them that are not sent yet, each with the event that
            a GPU reaches when it has computed them; None for the CPU.
        begun: How many slices have been sent.
        sent: By the bucket's number, what is on its way.
        frozen: Gradients that must not be changed now.
        announced: Gradients are reported by what computes them, and nothing
            else can change them.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float | None = None
    missing: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: int = 0
    todo: collections.deque[tuple[Slice, Any]] = dataclasses.field(
        default_factory=collections.deque)
    begun: int = 0
    sent: dict[int, Bucket] = dataclasses.field(default_factory=dict)
    frozen: list[numpy.ndarray] = dataclasses.field(default_factory=list)
    announced: bool = False

    @property
    def factor(self) -> float:
        """Of the gradients that are sent."""
        return 1.0 if self.loss_scale is None else self.loss_scale

    def thaw(self) -> None:
        """Lets gradients be changed again."""
        for array in self.frozen:
            array.flags.writeable = True
        self.frozen.clear()

    def freeze(self, arrays: Iterable[Any]) -> None:
        """Makes a change of a gradient in place an error from now on."""
        for array in arrays:
            if isinstance(array, numpy.ndarray) and array.flags.writeable:
                array.flags.writeable = False
                self.frozen.append(array)


class ModelExchange:
    """All that is remembered of one model whose gradients are averaged.

    The first updates travel in ``float32``: early gradients change by orders
    of magnitude from one update to the next, and the fp8 paper begins all
    its comparisons with 100 such updates (section 4.2).

    The thread of the backward pass calls :meth:`begin` and :meth:`final`,
    the exchange's thread calls :meth:`step`, and the main thread calls the
    others between passes.

    Args:
        reference: To the model.
        codec: The codec after the warm-up.
        warm_up: Updates that travel in float32.
        wake: Called when there is something to do for :meth:`step`.

    Attributes:
        number: How many models' gradients were averaged before this one's
            first, the same on all ranks; -1: this one's were not yet.
        updates: Updates finished so far.
        codec_state: What the codec keeps.
        scaling_is_dynamic: Whether the loss scale looks like one of Chainer's
            dynamic loss scaling, which skips an update whose gradients are
            not finite; static loss scaling does not.
        sizes: Elements of every parameter, by name.
        buckets: As :func:`.divide` gives them.
        slices: In the order in which they are sent.
        times: When gradients became final.
        queue: Where buckets are sent; None before the first update.
        ready: The order is known, so the next update may begin early.
        update: Gradients and buckets of the update that is under way.
        failure: The traceback of an error in the exchange's thread, or ''.
        deferred: The last update, while parts of it wait for an access.
        seconds: How long all buckets together travel.
    """

    def __init__(self, reference: weakref.ref[chainer.Link], codec: Codec,
                 warm_up: int = 0,
                 wake: Callable[[], object] = lambda: None) -> None:
        self.reference = reference
        self._wake = wake
        self._warm_up = warm_up
        self._first = Cast('float32').init()
        self.number = -1
        self.updates = 0
        self.codec_state = codec.init()
        self.scaling_is_dynamic = False
        self._loss_scale = 0.0
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self._passes = LastBackward()
        self._parameters: Mapping[str, chainer.Parameter] = {}
        self.update = Update()
        self.failure = ''
        self.deferred: DeferredUpdate | None = None
        self.seconds = 0.0
        self.queue: Algorithm | None = None
        self.follow({}, 0)

    @property
    def model(self) -> chainer.Link | None:
        """The model; None if it is no more."""
        return self.reference()

    @property
    def current(self) -> State:
        """That of the codec of the update to come."""
        return (self._first if self.updates < self._warm_up
                else self.codec_state)

    @property
    def codec(self) -> Codec:
        """Of the update to come."""
        return self.current.codec

    def see(self, loss_scale: float | None) -> None:
        """Notes the loss scale of the update to come."""
        if loss_scale is None:
            self.scaling_is_dynamic = False
            return
        # Dynamic scaling starts at 1, which no one would choose as a static
        # scale, and changes.
        changed = self._loss_scale not in (0.0, loss_scale)
        self.scaling_is_dynamic |= changed or loss_scale == 1.0
        self._loss_scale = loss_scale

    def save(self) -> Saved:
        """All that must be saved for an exact continuation."""
        return {'dynamic': numpy.asarray(self.scaling_is_dynamic),
                'loss_scale': numpy.asarray(self._loss_scale),
                'codec|done': numpy.asarray(self.updates),
                **{f'codec|{key}': value
                   for key, value in self.codec_state.save().items()}}

    def load(self, saved: Saved) -> None:
        """Takes over what :meth:`save` gave; {}: of a model that is new.

        Raises:
            ValueError: Another kind of communicator gave it; nothing has
                changed then.
        """
        of_codec = {key.partition('|')[2]: value for key, value
                    in saved.items() if key.startswith('codec|')}
        codec = self.codec_state.codec
        updates, dynamic, scale, state = 0, False, 0.0, codec.init()
        try:
            if saved:
                updates = int(of_codec.pop('done'))
                state = codec.load(of_codec)
                dynamic = bool(saved['dynamic'])
                scale = float(saved['loss_scale'])
        except KeyError as error:
            raise ValueError('this is no state of a communicator of '
                             f'chainer_fp8pipe: {error} is not in it'
                             ) from error
        self.updates, self.codec_state = updates, state
        self.scaling_is_dynamic, self._loss_scale = dynamic, scale
        self.update.thaw()
        # What has been sent of an update stays where it is.
        self.update, self.queue, self.failure = Update(), None, ''
        self._passes = LastBackward()
        self.follow({}, 0)

    # --- buckets -------------------------------------------------------------

    def follow(self, sizes: dict[str, int], bucket_bytes: int) -> None:
        """Divides other parameters than before into buckets."""
        self.ready = False
        self.sizes = dict(sizes)
        self.buckets: tuple[BucketNames, ...] = divide(sizes, bucket_bytes)
        self.slices = list(map(Slice, range(len(self.buckets))))
        self.times = ReadyTimes()
        self._bucket_of = {name: number
                           for number, names in enumerate(self.buckets)
                           for name in names}

    def stage(self, sizes: Mapping[str, int]) -> str:
        """``'new'``, ``'known'`` or ``'ready'`` (for early buckets)."""
        if sizes != self.sizes or self.queue is None:
            return 'new'
        return 'ready' if self.ready else 'known'

    def usual_times(self) -> list[float]:
        """When each gradient is final, in a fixed order of their names.

        Returns:
            Seconds after the first one; infinity for what was never final.
        """
        return self.times.usual(sorted(self.sizes))

    def choose_order(self, usual: list[float], defers: bool) -> None:
        """Chooses the order of slices.

        Args:
            usual: As :meth:`usual_times` returns them, the same on all
                ranks.
            defers: The next forward pass waits for each bucket by itself.
        """
        assert self.queue is not None
        times = dict(zip(sorted(self.sizes), usual, strict=True))
        if not defers or not self.buckets:
            self.slices = finished_first(self.buckets, times)
            return
        codec, queue = self.codec, self.queue
        sizes = [sum(self.sizes[name] for name in names)
                 for names in self.buckets]
        each = self.seconds / sum(sizes)
        self.slices = needed_first(
            self.buckets, times, [each * size for size in sizes],
            [queue.chunks(-(-size // codec.grain), codec)
             for size in sizes])

    @property
    def signature(self) -> int:
        """A number that differs between ranks that cannot go on together."""
        return Signature({
            'model': str(self.number), 'sizes': str(self.sizes),
            'order': str(self.slices), 'ready': str(self.ready),
            'updates': str(self.updates)}).number

    # --- the backward pass ---------------------------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """See :class:`.ready_gradients.Watcher`."""
        if self.deferred:
            return self._parameters     # an access would wait
        model = self.model
        if model is None:
            return {}
        return {name: parameter
                for name, parameter in distinct_parameters(model)
                if parameter.array is not None and parameter.size
                and parameter.layout is None
                and not problem_of(name, *arrays_of(parameter))}

    def begin(self, names: set[str], kind: Hashable, models: int,
              loss_scale: float | None) -> bool:
        """See :class:`.ready_gradients.Watcher`."""
        self.complete()
        last = self._passes.begin(kind, models)
        self.times.begin()
        if not self.ready:
            return True
        if not last or self.update.values or self.failure:
            return False
        # Plain arrays: touching a parameter in the exchange's thread would
        # wait for its deferred update.
        values = {name: parameter.array
                  for name, parameter in self.parameters().items()}
        if self.sizes != {name: array.size for name, array in values.items()}:
            return False
        missing = {}
        for number, _ in self.slices:
            # Slices behind a bucket that must wait have to wait, too.
            if not names.issuperset(self.buckets[number]):
                break
            missing[number] = set(self.buckets[number])
        if missing:
            self.update = Update(values, loss_scale, missing)
        return bool(missing)

    def announce(self, loss_scale: float | None) -> bool:
        """As :meth:`begin`, for gradients that somebody else reports."""
        if self.update.announced:
            # The arrays may be the same as now, with other contents.
            self.failure = ('an earlier step ended without an update after '
                            'its exchange had begun')
        wanted = self.begin(set(self.parameters()), 'announced', 0,
                            loss_scale)
        self.update.announced = wanted and self.ready
        return wanted

    def final(self, name: str, gradient: Any) -> None:
        """See :class:`.ready_gradients.Watcher`."""
        self.times.note(name)
        update = self.update
        missing = update.missing.get(self._bucket_of.get(name, -1))
        if not missing:
            return
        missing.discard(name)
        update.arrays[name] = gradient
        before = update.ready
        while update.ready < len(self.slices) and update.missing.get(
                self.slices[update.ready].bucket) == set():
            part = self.slices[update.ready]
            if not update.announced:
                update.freeze(update.arrays[one]
                              for one in self.buckets[part.bucket])
            update.ready += 1
            update.todo.append((part, _computed(gradient)))
        if update.ready > before:
            self._wake()
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    # --- sending -------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether :meth:`step` would find nothing to do."""
        return not self.update.todo and (
            self.queue is None or self.queue.idle)

    def interrupt(self) -> None:
        """Has :meth:`step` return; for other threads."""
        if self.queue:
            self.queue.interrupt()

    def step(self, alone: bool) -> bool:
        """Sends and receives; returns whether anything moved.

        Args:
            alone: No other model has anything to send, so a step may take a
                while.
        """
        if self.queue is None or self.failure:
            return False
        update = self.update
        # Gradients are added meanwhile by backward; values stay as they are.
        device = chainer.backend.get_device_from_array(
            next(iter(update.values.values()), None))
        # A thread has a current device and stream of its own.
        with chainer.using_device(device):
            moved = bool(update.todo)
            if moved:
                part, computed = update.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                names = self.buckets[part.bucket]
                self.send(part, Tensors(
                    names, [flat_float32(update.arrays[name])
                            for name in names],
                    [flat_float32(update.values[name]) for name in names],
                    update.factor, self.codec.grain))
            if alone and not update.todo:
                return self.queue.work() or moved
            return self.queue.advance() or moved

    def send(self, part: Slice, tensors: Tensors, contributes: bool = True,
             decodes: bool = False) -> None:
        """Sends the next slice.

        Args:
            part: The slice.
            tensors: All of its bucket.
            contributes: As for :class:`.Bucket`.
            decodes: As for :class:`.Bucket`.
        """
        assert self.queue is not None
        update, state = self.update, self.current
        if not update.begun:
            state.codec.begin(state, tensors.loss_scale)
        update.begun += 1
        bucket = update.sent.get(part.bucket)
        if bucket:
            self.queue.resume(bucket, part.until)
            return
        bucket = update.sent[part.bucket] = Bucket(
            state, tensors, self.wire(part.bucket, tensors.xp, tensors.size),
            contributes=contributes, decodes=decodes, number=part.bucket)
        self.queue.submit(bucket, part.until)

    def send_rest(self, gradients: Gradients) -> dict[Bucket, Tensors]:
        """Sends what has not been sent yet; returns all buckets."""
        assert self.queue is not None
        begun, early = self.update.begun, tuple(self.update.sent.values())
        parts = [gradients.part(names, self.codec.grain)
                 for names in self.buckets]
        for piece in self.slices[begun:]:
            if parts[piece.bucket].size:
                self.send(piece, parts[piece.bucket], decodes=True)
                self.queue.advance()
        sent = {bucket: parts[number]
                for number, bucket in self.update.sent.items()}
        for bucket in early:        # which backward could not let
            bucket.begin_decoding(sent[bucket])
        return sent

    def send_zeros(self, count: int, loss_scale: float) -> None:
        """Sends zeros for slices that other ranks have sent; waits for all.

        Args:
            count: How many the rank sent that sent most.
            loss_scale: That rank's.
        """
        assert self.queue is not None
        self.update.todo.clear()
        parameters = self.parameters()
        for part in self.slices[self.update.begun:count]:
            names = self.buckets[part.bucket]
            # Means are encoded by their ratio to the parameters, and the
            # residual is kept: the parameters must be the real ones.
            values = [flat_float32(parameters[name].array) for name in names]
            self.send(part, Tensors(
                names, [value - value for value in values], values,
                loss_scale, self.codec.grain), contributes=False)
        sent = self.update.sent
        for part in self.slices[count:]:        # the rest of begun buckets
            if part.bucket in sent:
                self.queue.resume(sent[part.bucket], part.until)
        for bucket in sent.values():
            self.queue.finish(bucket)

    def wire(self, bucket: int, xp: Any, size: int) -> numpy.ndarray:
        """The wire of a bucket; the same memory at the next update.

        Args:
            bucket: Number of the bucket.
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
        """
        assert self.queue is not None
        dtype = self.codec.wire_dtype
        known, wire = self._wires.get(bucket, (None, _NO_WIRE))
        if known is not xp or wire.size < size or wire.dtype != dtype:
            wire = self.queue.empty_wire(xp, size, dtype)
            self._wires[bucket] = xp, wire
        return wire[:size]

    # --- between backward passes ---------------------------------------------

    def problem(self, gradients: Gradients) -> str:
        """Why the buckets sent early are void; '' if they are valid."""
        update = self.update
        if self.failure:
            return f'the exchange failed beside backward: {self.failure}'
        for number, _ in self.slices[:update.ready]:
            for name in self.buckets[number]:
                if gradients.arrays.get(name) is not update.arrays[name]:
                    return (f'the gradient of parameter {name} was changed '
                            f'{_REMEDY}')
        if update.ready and gradients.loss_scale != update.loss_scale:
            return (f'the loss scale was changed from {update.loss_scale} to '
                    f'{gradients.loss_scale} {_REMEDY}')
        if update.ready and gradients.sizes != self.sizes:
            return f'parameters of the model came or went {_REMEDY}'
        return ''

    def defer(self, deferred: DeferredUpdate,
              parameters: Mapping[str, chainer.Parameter]) -> None:
        """Leaves the rest of the update to accesses, or to the thread."""
        self._parameters, self.deferred = parameters, deferred
        self._wake()

    def complete(self) -> None:
        """Waits for the deferred update, if there is one."""
        if self.deferred:
            self.deferred.complete()
            self.deferred, self._parameters = None, {}

    def averaged(self) -> None:
        """The update is over."""
        self._passes.averaged()
        self.update.thaw()
        self.update = Update()

    def learn(self, defers: bool, one_order: bool) -> tuple[bool, bool]:
        """An update is over whose backward pass was watched.

        Returns:
            Whether to choose an order now; and for the first time.
        """
        is_first = not self.ready
        is_time = self.times.keep(self.ready)
        self.ready = True
        return (not one_order and (is_first or is_time and defers)), is_first

    def take_times(self, means: list[float], is_first: bool, defers: bool
                   ) -> None:
        """Chooses the order by the means of all ranks' times."""
        *usual, self.seconds = means
        if is_first or all(map(math.isfinite, usual)):
            self.choose_order(usual, defers)

    def release(self) -> None:
        """Gives up the memory of the wires."""
        self._wires.clear()


def _computed(array: Any) -> Any:
    """A CUDA event behind all work submitted so far; None for NumPy."""
    if isinstance(array, numpy.ndarray):
        return None
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()

"""One model's exchange: codec, buckets, and the update under way."""
from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import chainer
import numpy

from ..allreduce.engine import PARTS, Bucket, Engine
from ..codecs import Cast, Codec, State, Tensors
from ..mpi.agreement import Signature
from ..mpi.waiting import give_way
from .buckets import (
    BucketNames,
    LastBackward,
    ReadyTimes,
    Slice,
    divide,
    send_order,
)
from .deferred_update import DeferredUpdate
from .gradients import (
    Gradients,
    distinct_parameters,
    flat_float32,
    problem_of,
)

#: Flat arrays by name, as in snapshots.
Saved = dict[str, numpy.ndarray]

_REMEDY = ('after its exchange had begun: by a hook, by cleargrads or by '
           'another backward pass; pass overlap=False to create_communicator')


@dataclasses.dataclass(eq=False)
class Update:
    """Gradients and buckets of one update, until their means are there.

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
        tensors: Of each bucket, what its mean is written into.
        nonfinite: Of each bucket whose mean is there, names of tensors that
            are NaN or infinite.
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
    tensors: dict[Bucket, Tensors] = dataclasses.field(default_factory=dict)
    nonfinite: dict[Bucket, list[str]] = dataclasses.field(
        default_factory=dict)

    def thaw(self) -> None:
        """Lets gradients be changed again."""
        for array in self.frozen:
            array.flags.writeable = True
        self.frozen.clear()


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
        update: The update under way.
        failure: The traceback of an error in the exchange's thread, or ''.
        deferred: The last update, while parts of it wait for an access.
        seconds: How long all buckets together travel.
    """

    def __init__(self, reference: weakref.ref[chainer.Link], codec: Codec,
                 warm_up: int = 0,
                 wake: Callable[[], object] = lambda: None) -> None:
        self.reference = reference
        self._wake, self._warm_up = wake, warm_up
        self._first = Cast('float32').init()
        self._loss_scale = 0.0
        self.number = -1
        self.codec_state = codec.init()
        self.update = Update()
        self.deferred: DeferredUpdate | None = None
        self._parameters: Mapping[str, chainer.Parameter] = {}
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self.seconds = 0.0
        self.load({})

    @property
    def current(self) -> State:
        """That of the codec of the update to come."""
        return (self._first if self.updates < self._warm_up
                else self.codec_state)

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
                state = State.load(codec, of_codec)
                dynamic = bool(saved['dynamic'])
                scale = float(saved['loss_scale'])
        except KeyError as error:
            raise ValueError('this is no state of a communicator of '
                             f'chainer_fp8pipe: {error} is not in it'
                             ) from error
        self.updates, self.codec_state = updates, state
        self.scaling_is_dynamic = dynamic
        self._loss_scale = scale
        self.update.thaw()
        # What has been sent of an update stays where it is.
        self.update, self.failure = Update(), ''
        self.queue: Engine | None = None
        self._passes = LastBackward()
        self.follow({}, 0)

    # --- buckets -------------------------------------------------------------

    def follow(self, sizes: dict[str, int], bucket_bytes: int) -> None:
        """Divides other parameters than before into buckets."""
        self.ready = False
        self.sizes = dict(sizes)
        self.buckets: tuple[BucketNames, ...] = divide(sizes, bucket_bytes)
        self.slices = [(number, PARTS) for number in range(len(self.buckets))]
        self.times = ReadyTimes()
        self._bucket_of = {name: number
                           for number, names in enumerate(self.buckets)
                           for name in names}

    def choose_order(self, means: list[float], is_first: bool, defers: bool
                     ) -> None:
        """Chooses the order of slices, by the means of all ranks' times.

        Args:
            means: When each gradient is final, in the order of their names:
                seconds after the first one, infinity for what was never
                final; and then how long all buckets together travel.
            is_first: No order has been chosen before; later ones are chosen
                only where all gradients were final.
            defers: The next forward pass waits for each bucket by itself.
        """
        assert self.queue is not None
        *usual, self.seconds = means
        if not is_first and math.inf in usual:
            return
        times = dict(zip(sorted(self.sizes), usual, strict=True))
        if not defers:
            self.slices = send_order(self.buckets, times)
            return
        codec, queue = self.current.codec, self.queue
        sizes = [sum(self.sizes[name] for name in names)
                 for names in self.buckets]
        whole = sum(sizes)
        self.slices = send_order(
            self.buckets, times,
            [self.seconds * size / whole for size in sizes],
            [queue.chunks(-(-size // codec.grain), codec) for size in sizes])

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
        model = self.reference()
        if model is None:
            return {}
        return {name: parameter
                for name, parameter in distinct_parameters(model)
                if parameter.array is not None and parameter.size
                and parameter.layout is None and not problem_of(
                    name, parameter.array, parameter.grad)}

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
        for piece in self.slices[before:]:
            if update.missing.get(piece[0]) != set():
                break
            if not update.announced:
                self._freeze(self.buckets[piece[0]])
            update.ready += 1
            update.todo.append((piece, None if isinstance(
                gradient, numpy.ndarray) else _computed(gradient)))
        if update.ready > before:
            self._wake()
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    def _freeze(self, names: BucketNames) -> None:
        """Makes a change of a gradient in place an error from now on."""
        for name in names:
            array = self.update.arrays[name]
            if isinstance(array, numpy.ndarray) and array.flags.writeable:
                array.flags.writeable = False
                self.update.frozen.append(array)

    # --- sending -------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether :meth:`step` would find nothing to do."""
        return not self.update.todo and (
            self.queue is None or self.queue.idle)

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
                piece, computed = update.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                self.send(piece, self._tensors(
                    self.buckets[piece[0]], update.loss_scale,
                    update.arrays.__getitem__, update.values.__getitem__))
            if alone and not update.todo:
                return self.queue.work() or moved
            return self.queue.advance() or moved

    def _tensors(self, names: BucketNames, loss_scale: float | None,
                 gradient: Callable[[str], Any], value: Callable[[str], Any]
                 ) -> Tensors:
        return Tensors(names, [flat_float32(gradient(name)) for name in names],
                       [flat_float32(value(name)) for name in names],
                       1.0 if loss_scale is None else loss_scale,
                       self.current.codec.grain)

    def send(self, piece: Slice, tensors: Tensors, contributes: bool = True,
             decodes: bool = False) -> None:
        """Sends the next slice.

        Args:
            piece: The slice.
            tensors: All of its bucket.
            contributes: As for :class:`.Bucket`.
            decodes: As for :class:`.Bucket`.
        """
        assert self.queue is not None
        update, state, (number, until) = self.update, self.current, piece
        if not update.begun:
            state.codec.begin(state, tensors.loss_scale)
        update.begun += 1
        bucket = update.sent.get(number)
        if bucket:
            self.queue.resume(bucket, until)
            return
        bucket = update.sent[number] = Bucket(
            state, tensors, self.wire(number, tensors.xp, tensors.size),
            contributes=contributes, decodes=decodes, number=number)
        self.queue.submit(bucket, until)

    def send_rest(self, gradients: Gradients) -> None:
        """Sends what has not been sent yet."""
        assert self.queue is not None
        update, grain = self.update, self.current.codec.grain
        early = tuple(update.sent.values())
        parts = [gradients.part(names, grain) for names in self.buckets]
        for piece in self.slices[update.begun:]:
            if parts[piece[0]].size:
                self.send(piece, parts[piece[0]], decodes=True)
                self.queue.advance()
        for number, bucket in update.sent.items():
            update.tensors[bucket] = parts[number]
        for bucket in early:        # which backward could not let
            bucket.begin_decoding(update.tensors[bucket])

    def send_zeros(self, count: int, loss_scale: float) -> None:
        """Sends zeros for slices that other ranks have sent; waits for all.

        Args:
            count: How many the rank sent that sent most.
            loss_scale: That rank's.
        """
        assert self.queue is not None
        update = self.update
        update.todo.clear()
        # Means are encoded by their ratio to the parameters, and the residual
        # is kept: the parameters must be the real ones.
        values = {name: parameter.array
                  for name, parameter in self.parameters().items()}
        for piece in self.slices[update.begun:count]:
            self.send(piece, self._tensors(
                self.buckets[piece[0]], loss_scale,
                lambda name: numpy.zeros_like(values[name]),
                values.__getitem__), contributes=False)
        for number, until in self.slices[count:]:   # the rest of begun buckets
            if number in update.sent:
                self.queue.resume(update.sent[number], until)
        for bucket in update.sent.values():
            self.queue.finish(bucket)

    def wire(self, bucket: int, xp: Any, size: int) -> numpy.ndarray:
        """The wire of a bucket; the same memory at the next update.

        Args:
            bucket: Number of the bucket.
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
        """
        assert self.queue is not None
        dtype = self.current.codec.wire_dtype
        known, wire = self._wires.get(bucket, (None, None))
        if (wire is None or known is not xp or wire.size < size
                or wire.dtype != dtype):
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

    def release(self) -> None:
        """Gives up the memory of the wires."""
        self._wires.clear()


def _computed(array: Any) -> Any:
    """A CUDA event behind all work submitted so far."""
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()

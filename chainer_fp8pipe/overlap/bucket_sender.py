"""Sends buckets of a model while its backward passes go on."""
from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import chainer
import numpy

from ..allreduce.engine import Algorithm, Bucket
from ..codecs import Codec, Tensors
from ..exchange.gradients import (
    Gradients,
    arrays_of,
    distinct_parameters,
    flat_float32,
    problem_of,
)
from ..exchange.model_state import ModelState
from ..mpi.agreement import Signature
from ..mpi.waiting import give_way
from .deferred_update import DeferredUpdate
from .send_order import SendOrder, Slice

_REMEDY = ('after its exchange had begun: by a hook, by cleargrads or by '
           'another backward pass; pass overlap=False to create_communicator')


@dataclasses.dataclass
class InFlight:
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

    def make_ready(self, order: SendOrder, gradient: Any) -> bool:
        """Finds slices that can be sent; whether there are any.

        Args:
            order: Of all slices.
            gradient: The one that has just become final.
        """
        before = self.ready
        while self.ready < len(order.slices) and self.missing.get(
                order.slices[self.ready].bucket) == set():
            part = order.slices[self.ready]
            if not self.announced:
                self._freeze(self.arrays[name]
                             for name in order.buckets[part.bucket])
            self.ready += 1
            self.todo.append((part, _computed(gradient)))
        return self.ready > before

    def tensors(self, names: Iterable[str], grain: int) -> Tensors:
        """A bucket that is complete.

        Args:
            names: Of its parameters.
            grain: Of the codec.
        """
        names = tuple(names)
        return Tensors(
            names, [flat_float32(self.arrays[name]) for name in names],
            [flat_float32(self.values[name]) for name in names],
            self.factor, grain)

    def thaw(self) -> None:
        """Lets gradients be changed again."""
        for array in self.frozen:
            array.flags.writeable = True
        self.frozen.clear()

    def _freeze(self, arrays: Iterable[Any]) -> None:
        # A change of a gradient in place is an error from now on.
        for array in arrays:
            if isinstance(array, numpy.ndarray) and array.flags.writeable:
                array.flags.writeable = False
                self.frozen.append(array)


class LastBackward:
    """Predicts which backward pass is the last before an all-reduce.

    Between two means of a model's gradients there may be several passes,
    whose gradients add up; or the loss of a generator goes through a
    discriminator, whose own pass is still to come.  Gradients become final
    only in the last pass.
    """

    def __init__(self) -> None:
        self._counts: collections.Counter[Hashable] = collections.Counter()
        self._last: Hashable = None
        self._usual: Hashable = None
        self._often = 0
        self._models: int | None = None
        self._complete = False

    def begin(self, kind: Hashable, models: int) -> bool:
        """Counts a pass; returns whether it should be the last.

        Args:
            kind: Passes of the same kind cannot be told apart.
            models: How many models were watched so far; with another one,
                kinds have another meaning.
        """
        if models != self._models:
            if self._models is not None:
                self._usual = None
                self._complete = False
            self._models = models
        self._counts[kind] += 1
        self._last = kind
        return kind == self._usual and self._counts[kind] >= self._often

    def averaged(self) -> None:
        """The gradients have been averaged."""
        if self._complete and self._last is not None:
            often = self._counts[self._last]
            if self._last == self._usual:
                # An update with fewer passes than usual is no new rule.
                often = max(often, self._often)
            self._usual, self._often = self._last, often
        self._counts.clear()
        self._last = None
        self._complete = True


class BucketSender:
    """Sends buckets of one model as soon as their gradients are final.

    The thread of the backward pass calls :meth:`begin` and :meth:`final`,
    the exchange's thread calls :meth:`step`, and the main thread calls the
    others between passes.

    Args:
        model: The model.
        state: Of this model.
        wake: Called when there is something to do for :meth:`step`.

    Attributes:
        order: Of buckets, and when their gradients were final.
        queue: Where buckets are sent.
        ready: The order is known, so the next update may begin early.
        update: Gradients and buckets of the update that is under way.
        failure: The traceback of an error in the exchange's thread, or ''.
        deferred: The last update, while parts of it wait for an access.
        seconds: How long all buckets together travelled.
    """

    def __init__(self, model: chainer.Link, state: ModelState,
                 wake: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._wake = wake
        self._passes = LastBackward()
        self.order = SendOrder()
        self.queue: Algorithm | None = None
        self.ready = False
        self.update = InFlight()
        self.failure = ''
        self.deferred: DeferredUpdate | None = None
        self.seconds = 0.0
        self._parameters: Mapping[str, chainer.Parameter] = {}

    @property
    def is_dead(self) -> bool:
        """The model is no more."""
        return self._model() is None

    # --- the backward pass ---------------------------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """See :class:`.ready_gradients.Watcher`."""
        if self.deferred:
            return self._parameters     # an access would wait
        model = self._model()
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
        self.order.times.begin()
        if not self.ready:
            return True
        if not last or self.update.values or self.failure:
            return False
        parameters = self.parameters()
        if self.order.sizes != {name: parameter.size for name, parameter
                                in parameters.items()}:
            return False
        missing = {}
        for number, _ in self.order.slices:
            # Slices behind a bucket that must wait have to wait, too.
            if not names.issuperset(self.order.buckets[number]):
                break
            missing[number] = set(self.order.buckets[number])
        if missing:
            # Plain arrays: touching a parameter in the exchange's thread
            # would wait for its deferred update.
            self.update = InFlight(
                {name: parameter.array
                 for name, parameter in parameters.items()},
                loss_scale, missing)
        return bool(missing)

    def announce(self, loss_scale: float | None) -> bool:
        """As :meth:`begin`, for gradients that :meth:`.announced` reports."""
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
        self.order.times.note(name)
        update = self.update
        missing = update.missing.get(self.order.bucket_of(name))
        if not missing:
            return
        missing.discard(name)
        update.arrays[name] = gradient
        if update.make_ready(self.order, gradient):
            self._wake()
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    # --- the exchange's thread -----------------------------------------------

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
        # Gradients are added meanwhile by backward; values stay as they are.
        some = next(iter(self.update.values.values()), None)
        device = chainer.backend.get_device_from_array(some)
        # A thread has a current device and stream of its own.
        with chainer.using_device(device):
            moved = bool(self.update.todo)
            if moved:
                part, computed = self.update.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                self.send(part, self.update.tensors(
                    self.order.buckets[part.bucket], self.codec.grain))
            if alone and not self.update.todo:
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
        update, codec = self.update, self.codec
        if not update.begun:
            codec.begin(self._state.current, tensors.loss_scale)
        update.begun += 1
        bucket = update.sent.get(part.bucket)
        if bucket:
            self.queue.resume(bucket, part.until)
            return
        update.sent[part.bucket] = Bucket(
            self._state.current, tensors, self._state.wire(
                part.bucket, codec, tensors.xp, tensors.size,
                self.queue),
            contributes=contributes, decodes=decodes, number=part.bucket)
        self.queue.submit(update.sent[part.bucket], part.until)

    # --- between backward passes ---------------------------------------------

    @property
    def codec(self) -> Codec:
        """Of the update under way, or to come."""
        return self._state.current.codec

    @property
    def number(self) -> int:
        """The model's number."""
        return self._state.number

    @property
    def signature(self) -> int:
        """A number that differs between ranks that cannot go on together."""
        return Signature({
            'model': str(self.number), 'sizes': str(self.order.sizes),
            'order': str(self.order.slices), 'ready': str(self.ready),
            'updates': str(self._state.updates)}).number

    def problem(self, gradients: Gradients) -> str:
        """Why the buckets sent early are void; '' if they are valid."""
        update, order = self.update, self.order
        if self.failure:
            return f'the exchange failed beside backward: {self.failure}'
        for number, _ in order.slices[:update.ready]:
            for name in order.buckets[number]:
                if gradients.arrays.get(name) is not update.arrays[name]:
                    return (f'the gradient of parameter {name} was changed '
                            f'{_REMEDY}')
        if update.ready and gradients.loss_scale != update.loss_scale:
            return (f'the loss scale was changed from {update.loss_scale} to '
                    f'{gradients.loss_scale} {_REMEDY}')
        if update.ready and gradients.sizes != order.sizes:
            return f'parameters of the model came or went {_REMEDY}'
        return ''

    def stage(self, sizes: Mapping[str, int]) -> str:
        """``'new'``, ``'known'`` or ``'ready'`` (for early buckets)."""
        if sizes != self.order.sizes:
            return 'new'
        return 'ready' if self.ready else 'known'

    def follow(self, sizes: dict[str, int], bucket_bytes: int) -> None:
        """Starts anew with other parameters."""
        self.ready = False
        self.order.follow(sizes, self._state.buckets(sizes, bucket_bytes))

    def choose_order(self, usual: list[float], defers: bool) -> None:
        """Chooses the order in which buckets are sent.

        Args:
            usual: When gradients are final, the same on all ranks.
            defers: The next forward pass waits for each bucket by itself.
        """
        assert self.queue is not None
        queue, codec = self.queue, self.codec
        self.order.choose(
            usual, self.seconds if defers else None,
            lambda size: queue.chunks(-(-size // codec.grain),
                                                codec))

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
        self.update = InFlight()

    def fill(self, count: int, loss_scale: float) -> None:
        """Sends zeros for slices that other ranks have sent; waits for all.

        Args:
            count: How many the rank sent that sent most.
            loss_scale: That rank's.
        """
        self.update.todo.clear()
        parameters = self.parameters()
        for part in self.order.slices[self.update.begun:count]:
            names = self.order.buckets[part.bucket]
            # Means are encoded by their ratio to the parameters, and the
            # residual is kept: the parameters must be the real ones.
            values = [flat_float32(parameters[name].array) for name in names]
            self.send(part, Tensors(
                names, [value - value for value in values], values,
                loss_scale, self.codec.grain), contributes=False)
        assert self.queue is not None
        sent = self.update.sent
        for part in self.order.slices[count:]:  # the rest of begun buckets
            if part.bucket in sent:
                self.queue.resume(sent[part.bucket], part.until)
        for bucket in sent.values():
            self.queue.finish(bucket)


def _computed(array: Any) -> Any:
    """A CUDA event behind all work submitted so far; None for NumPy."""
    if isinstance(array, numpy.ndarray):
        return None
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()

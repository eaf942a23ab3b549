"""The part of a model's exchange that takes place during backward."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import chainer

from ..codecs import Tensors
from ..exchange.buckets import Bucket
from ..exchange.exchange import Exchange, Transfer
from ..exchange.gradients import Gradients, flat_float32
from ..exchange.model_state import ModelState
from ..exchange.parameter_checks import (
    arrays_of,
    distinct_parameters,
    problem_of,
)
from ..mpi.agreement import Signature
from ..mpi.waiting import give_way
from .deferred_update import DeferredUpdate, Use
from .in_flight import InFlight
from .last_backward import LastBackward
from .ready_times import ReadyTimes
from .send_order import Slice, finished_first, needed_first

_REMEDY = ('after its exchange had begun: by a hook, by cleargrads or by '
           'another backward pass; pass overlap=False to create_communicator')


class BucketSender:
    """Sends buckets of one model as soon as their gradients are final.

    The thread of the backward pass calls :meth:`begin` and :meth:`final`,
    the exchange's thread :meth:`step`, and, between passes, the main thread
    the others.

    Args:
        model: Whose gradients.
        state: Of this model.
        limit: Bytes of float32 in a bucket.
        wake: Called when there is something to do for :meth:`step`.

    Attributes:
        buckets: As :func:`.divide` gives them.
        order: Slices of them, in the order in which they are sent.
        exchange: Where they are sent.
        ready: The model is known, so that the next update may begin early.
        update: What is known of the update that is under way.
        failure: What went wrong in the exchange's thread.
        deferred: The last update, if it need not be complete yet.
        seconds: How long all buckets together travelled.
    """

    def __init__(self, model: chainer.Link, state: ModelState, limit: int,
                 wake: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._limit = limit
        self._wake = wake
        self._sizes: dict[str, int] = {}
        self._bucket_of: dict[str, int] = {}
        self._passes = LastBackward()
        self._finals = ReadyTimes()
        self.buckets: tuple[Bucket, ...] = ()
        self.order: list[Slice] = []
        self.exchange: Exchange | None = None
        self.ready = False
        self.update = InFlight()
        self.failure = ''
        self.deferred: DeferredUpdate | None = None
        self.seconds = 0.0
        self._parameters: Mapping[str, chainer.Parameter] = {}

    # --- the backward pass --------------------------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """See :class:`.ready_gradients.Watcher`."""
        if self.deferred:
            return self._parameters     # a look would wait
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
        self._finals.begin()
        if not self.ready:
            return True
        if not last or self.update.values or self.failure:
            return False
        parameters = self.parameters()
        if self._sizes != _sizes(parameters):
            return False
        missing = {}
        for number, _ in self.order:
            # Those behind a bucket that must wait have to wait, too.
            if not names.issuperset(self.buckets[number]):
                break
            missing[number] = set(self.buckets[number])
        if missing:
            # Arrays, which no look can make wait in the exchange's thread.
            self.update = InFlight(
                {name: parameter.array
                 for name, parameter in parameters.items()},
                loss_scale, missing)
        return bool(missing)

    def announce(self, loss_scale: float | None) -> bool:
        """As :meth:`begin`, for gradients that are found in another way."""
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
        self._finals.note(name)
        update = self.update
        missing = update.missing.get(self._bucket_of.get(name, -1))
        if not missing:
            return
        missing.discard(name)
        update.arrays[name] = gradient
        if update.hand(self.order, self.buckets, gradient):
            self._wake()
            # Ranks may share a core: what goes on here is less urgent than
            # to send this, and than other ranks' gradients of the layer.
            give_way()

    # --- the exchange's thread ----------------------------------------------

    @property
    def idle(self) -> bool:
        """There is nothing to do for :meth:`step`."""
        return not self.update.todo and (
            self.exchange is None or self.exchange.idle)

    def interrupt(self) -> None:
        """Has :meth:`step` return; for other threads."""
        if self.exchange:
            self.exchange.interrupt()

    def step(self, alone: bool) -> bool:
        """Does what there is to do now; whether it was anything.

        Args:
            alone: Nobody else has anything to do: it may take a while.
        """
        if self.exchange is None or self.failure:
            return False
        some = next(iter(self.update.arrays.values()), None)
        device = chainer.backend.get_device_from_array(some)
        # A thread has a current device and stream of its own.
        with chainer.using_device(device):
            moved = bool(self.update.todo)
            if moved:
                part, computed = self.update.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                self.send(part, self.update.tensors(
                    self.buckets[part.bucket]))
            if alone and not self.update.todo:
                return self.exchange.work() or moved
            return self.exchange.advance() or moved

    def send(self, part: Slice, tensors: Tensors, real: bool = True,
             decodes: bool = False) -> None:
        """Sends the next slice.

        Args:
            part: The slice.
            tensors: All of its bucket.
            real: As for :class:`.Transfer`.
            decodes: As for :class:`.Transfer`.
        """
        assert self.exchange is not None
        update, codec = self.update, self._state.warm_up.current
        if not update.begun:
            codec.start(tensors.loss_scale)
        update.begun += 1
        transfer = update.sent.get(part.bucket)
        if transfer:
            self.exchange.resume(transfer, part.until)
            return
        update.sent[part.bucket] = Transfer(
            codec, tensors, self._state.wire(
                part.bucket, codec, tensors.xp, tensors.size), real, decodes)
        self.exchange.submit(update.sent[part.bucket], part.until)

    # --- between backward passes --------------------------------------------

    @property
    def number(self) -> int:
        """Of the model."""
        return self._state.number

    @property
    def signature(self) -> int:
        """A number that is equal on two ranks if they can go on together."""
        return Signature({
            'model': str(self.number), 'sizes': str(self._sizes),
            'order': str(self.order), 'ready': str(self.ready),
            'updates': str(self._state.warm_up.done)}).number

    def problem(self, gradients: Gradients) -> str:
        """Why what was sent cannot be used; '' if it can."""
        update = self.update
        if self.failure:
            return f'the exchange failed beside backward: {self.failure}'
        for number, _ in self.order[:update.handed]:
            for name in self.buckets[number]:
                if gradients.arrays.get(name) is not update.arrays[name]:
                    return (f'the gradient of parameter {name} was changed '
                            f'{_REMEDY}')
        if update.handed and gradients.loss_scale != update.loss_scale:
            return (f'the loss scale was changed from {update.loss_scale} to '
                    f'{gradients.loss_scale} {_REMEDY}')
        if update.handed and gradients.sizes != self._sizes:
            return f'parameters of the model came or went {_REMEDY}'
        return ''

    def stage(self, sizes: Mapping[str, int]) -> str:
        """How well a model with these parameters is known."""
        if sizes != self._sizes:
            return 'new'
        return 'ready' if self.ready else 'known'

    def follow(self, sizes: dict[str, int]) -> None:
        """Takes notice of the parameters, which are not what they were."""
        self.ready = False
        self._sizes = dict(sizes)
        self._finals = ReadyTimes()
        self.buckets = self._state.buckets(sizes, self._limit)
        self.order = list(map(Slice, range(len(self.buckets))))
        self._bucket_of = {name: number
                           for number, names in enumerate(self.buckets)
                           for name in names}

    def observe(self) -> bool:
        """Takes notice of when gradients became final in an update.

        Returns:
            Whether it is time to reckon the order: with the first update,
            and now and then when some have been sent in that order.
        """
        return self._finals.keep(self.ready)

    def observed(self) -> list[float]:
        """When each gradient is final, in a fixed order of their names.

        Returns:
            Seconds after the first one; infinity for what was never final.
        """
        return self._finals.usual(sorted(self._sizes))

    def reckon(self, finals: Sequence[float], seconds: float | None) -> None:
        """Chooses the order in which buckets are sent.

        Args:
            finals: As :meth:`observed` returns them, the same on all ranks.
            seconds: How long all buckets together travel; None: their order
                is to be that in which they were finished.
        """
        times = dict(zip(sorted(self._sizes), finals, strict=True))
        if seconds is None:
            self.order = finished_first(self.buckets, times)
            return
        assert self.exchange is not None
        sizes = [sum(self._sizes[name] for name in names)
                 for names in self.buckets]
        each = seconds / sum(sizes)
        itemsize = self._state.warm_up.current.wire_dtype.itemsize
        self.order = needed_first(
            self.buckets, times,
            [each * size for size in sizes],
            [self.exchange.chunks(size, itemsize) for size in sizes])

    def defer(self, parameters: Mapping[str, chainer.Parameter],
              finish: Callable[[str, Use | None], None]) -> None:
        """The update goes on at an access; see :class:`.DeferredUpdate`."""
        self._parameters = self.parameters()
        self.deferred = DeferredUpdate(parameters, finish)
        self._wake()        # the thread has the rest to do

    def complete(self) -> None:
        """Waits for the last update."""
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
        for part in self.order[self.update.begun:count]:
            names = self.buckets[part.bucket]
            # Means are encoded by their ratio to the parameters, and what
            # that loses is kept: these must be the real ones.
            values = [flat_float32(parameters[name].array) for name in names]
            self.send(part, Tensors(
                names, [value - value for value in values], values,
                loss_scale), real=False)
        assert self.exchange is not None
        sent = self.update.sent
        for part in self.order[count:]:     # the rest of what was begun
            if part.bucket in sent:
                self.exchange.resume(sent[part.bucket], part.until)
        for transfer in sent.values():
            self.exchange.finish(transfer)


def _sizes(parameters: Mapping[str, chainer.Parameter]) -> dict[str, int]:
    return {name: parameter.size for name, parameter in parameters.items()}

"""Buckets that are sent while backward goes on (``overlap=True``)."""
# In the pass of an optimizer's `update(lossfun, ...)`, a bucket is sent by a
# thread as soon as its gradients are final (intercept/ready_gradients); mean()
# has the ranks agree, ends the thread, sends the rest and waits for all.  The
# thread lives no longer than the update.  The results are the same bits as
# without overlap.
#
# A bucket that was sent early can become void: a hook has changed its
# gradients, another rank does not agree, an error in backward was caught, or
# the script drops the update (bcast_data).  Then the ranks tell each other how
# much they have sent; who has sent less than the others sends zeros, all drop
# the means, and what the codec keeps is again what it was (State.undo).  So a
# void bucket changes no number, and is sent again, after backward.  Where a
# rank's thread has failed, ranks send in different orders, or some that sent
# refuse the update, every later one raises an error, on all ranks.
#
# A communicator's models share its engine: all ranks update them in one order,
# and while buckets of one are void, no other's are sent early.
from __future__ import annotations

import collections
import dataclasses
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from ..mpi.agreement import agree, digest, is_raised_by_all
from ..mpi.waiting import LONG, give_way
from .exchange import SAME_GRADIENTS, Exchange, Setup, device_of
from .gradients import (
    Gradients,
    distinct_parameters,
    flat_float32,
    problem_of,
)

_PAUSE = 100e-6     # seconds of sleep when nothing has moved


@dataclasses.dataclass(eq=False)
class Early:
    """Gradients and buckets of an update that are sent before its mean.

    Attributes:
        values: Parameters' arrays, flat, by name.
        loss_scale: The factor of the gradients; None for none.
        missing: By bucket, names of gradients that are not final yet.
        arrays: Gradients that are final, by name.
        ready: How many buckets are complete, in the order of sending.
        todo: Those of them that were not sent yet, each with the event that
            a GPU reaches when it has computed them.
        news: There is something to do, or ``stops``.
        stops: The thread is to end.
        thread: It sends; None before the first bucket and after the last.
        is_void: The update is over, without a mean.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float | None = None
    missing: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: int = 0
    todo: collections.deque[tuple[int, Any]] = dataclasses.field(
        default_factory=collections.deque)
    news: threading.Event = dataclasses.field(default_factory=threading.Event)
    stops: bool = False
    thread: threading.Thread | None = None
    is_void: bool = False


class EarlyExchange(Exchange):
    """An exchange whose buckets are sent during the backward pass.

    It hears of passes from :mod:`.ready_gradients`.

    Attributes:
        early: What is sent early of the update under way.
        finals: Names of parameters, in the order in which their gradients
            became final in the last pass.
        failure: The traceback of an error in the thread, or ''.
    """

    def __init__(self, model: weakref.ref[chainer.Link], setup: Setup
                 ) -> None:
        self.early, self.failure = Early(), ''
        self.finals: list[str] = []
        super().__init__(model, setup)

    # --- a mean --------------------------------------------------------------

    def _follow(self, sizes: Mapping[str, int]) -> None:
        super()._follow(sizes)
        if sizes:
            # All ranks send in the order in which one of them can.
            place = {name: number for number, name in enumerate(
                self.setup.ranks.allgather(self.finals)[0])}
            self.order = sorted(self.order, key=lambda number: max(
                place.get(name, len(place))
                for name in self.buckets[number]))

    def _agree(self, entries: dict[str, str], gradients: Gradients) -> None:
        """Has ranks agree; if only early buckets are void, drops these."""
        ranks = self.setup.ranks
        entries['the order of buckets'] = str([*self.order])
        problem = gradients.problem
        if self.failure:
            problem = f'the exchange failed beside backward: {self.failure}'
        try:
            agree(ranks.comm, entries, problem or self._void(gradients),
                  SAME_GRADIENTS, wait=ranks.wait)
            return
        except ValueError as error:
            # Others come to no more calls where this rank raises alone.
            if not is_raised_by_all(error):
                raise
            was_sent = self.withdraw()
            if ranks.failure is not None:
                raise
        try:
            agree(ranks.comm, entries, problem, SAME_GRADIENTS,
                  wait=ranks.wait)
        except ValueError:
            if was_sent:
                ranks.break_off()
            raise

    def _void(self, gradients: Gradients) -> str:
        """Why the buckets sent early are void; '' if they are valid."""
        early = self.early
        if self.setup.early is None:
            return ''
        if (self.setup.early is not self or early.is_void
                or gradients.loss_scale != early.loss_scale
                or gradients.sizes != self.sizes):
            return 'the update is another one'
        for number in self.order[:early.ready]:
            for name in self.buckets[number]:
                if gradients.arrays.get(name) is not early.arrays[name]:
                    return f'the gradient of parameter {name} has changed'
        return ''

    def withdraw(self) -> bool:
        """Cancels an update that ranks may have begun; call it on all of them.

        What only some ranks have sent, the others answer with zeros, so that
        no message is left on its way.  If a thread has failed, or the ranks'
        orders differ, the ranks are broken off instead.

        Returns:
            Whether any rank had sent anything.
        """
        setup = self.setup
        if setup.early not in (None, self):
            return setup.early.withdraw()
        self._end_thread()
        begun, failures, signatures, factors = zip(*setup.ranks.allgather((
            len(self.sent), bool(self.failure), digest({
                'model': str(self.number), 'updates': str(self.updates),
                'sizes': str(self.sizes),
                'order': str([*self.order])}),
            self.early.loss_scale or 1.0)), strict=True)
        if any(failures) or (any(begun) and len(set(signatures)) > 1):
            setup.ranks.break_off()
        elif any(begun):
            self._send_zeros(max(begun), max(factors))
        self.early, self.sent, setup.early = Early(), {}, None
        return any(begun)

    def _send_zeros(self, count: int, loss_scale: float) -> None:
        """Sends zeros for so many buckets that a rank has sent; waits for all.
        """
        # All of it is undone, so that any parameters will do.
        zeros, ones = ({name: numpy.full(size, number, numpy.float32)
                        for name, size in self.sizes.items()}
                       for number in (0, 1))
        self._begin(loss_scale)
        for number in self.order[len(self.sent):count]:
            self._send(number, zeros, ones, contributes=False)
        for bucket in self.sent.values():
            self.setup.engine.finish(bucket)
        self.current.undo()

    def _send_rest(self, gradients: Gradients) -> None:
        self._end_thread()
        if self.failure:            # since the ranks have agreed
            raise RuntimeError('the exchange failed beside the training: '
                               f'{self.failure}')
        # While backward went on, their means could not be written.
        for bucket in self.sent.values():
            bucket.tensors.decode_into([
                gradients.flat[name] for name in bucket.tensors.names])
        super()._send_rest(gradients)
        self.early, self.setup.early = Early(), None

    def _begin(self, loss_scale: float | None) -> None:
        if not self.sent:
            super()._begin(loss_scale)
            self.current.hold()

    # --- the backward pass: see ready_gradients ------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        model = self.model()
        return {} if model is None else {
            name: parameter for name, parameter in distinct_parameters(model)
            if parameter.array is not None and parameter.size
            and parameter.layout is None and not problem_of(
                name, parameter.array, parameter.grad)}

    def begin(self, names: set[str], loss_scale: float | None) -> None:
        self.finals = []
        parameters, sizes, setup = self.parameters(), self.sizes, self.setup
        if (setup.early or self.failure or setup.ranks.failure is not None
                or sizes != {name: parameter.size
                             for name, parameter in parameters.items()}):
            return
        missing = {}
        for number in self.order:
            # Buckets behind one that must wait have to wait, too.
            if not names.issuperset(self.buckets[number]):
                break
            missing[number] = set(self.buckets[number])
        if missing:
            self.early = Early({name: flat_float32(parameter.array)
                                for name, parameter in parameters.items()},
                               loss_scale, missing)

    def final(self, name: str, gradient: Any) -> None:
        self.finals.append(name)
        early = self.early
        number = next((number for number, missing in early.missing.items()
                       if name in missing), None)
        if number is None or early.is_void:
            return
        early.missing[number].discard(name)
        early.arrays[name] = gradient
        before = early.ready
        for number in self.order[before:]:
            if early.missing.get(number) != set():
                break
            early.ready += 1
            xp = chainer.backend.get_array_module(gradient)
            early.todo.append((number, None if xp is numpy else (
                xp.cuda.get_current_stream().record())))
        if early.ready > before:
            self.setup.early = self
            if early.thread is None:
                # A daemon: an interrupt may keep it from being joined.
                early.thread = threading.Thread(
                    target=self._work_beside, args=(early,), daemon=True,
                    name='exchange of gradients')
                early.thread.start()
            early.news.set()
            self.setup.engine.interrupt()   # work under way must see it, too
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    def end(self) -> None:
        self._end_thread()
        self.early.is_void = True

    def _end_thread(self) -> None:
        """From here on the engine is the caller's."""
        early = self.early
        early.stops = True
        if early.thread:
            early.news.set()
            self.setup.engine.interrupt()
            early.thread.join()
            early.thread = None

    # --- the thread ----------------------------------------------------------

    def _work_beside(self, early: Early) -> None:
        setup = self.setup
        setup.events.hide()
        # A thread has a current device and stream of its own.
        device = device_of(early.values)
        try:
            with chainer.using_device(device):
                while True:
                    early.news.clear()      # first: it may be set at any time
                    if early.stops:
                        return
                    if not early.todo and setup.engine.idle:
                        early.news.wait()
                        continue
                    with setup.events.section('exchange'):
                        moved = self._step(early, device.xp)
                    if not moved:
                        time.sleep(_PAUSE)
        except Exception:       # the main thread raises it
            self.failure = traceback.format_exc()

    def _step(self, early: Early, xp: Any) -> bool:
        """Sends a bucket, or moves frames; whether anything moved."""
        if not early.todo:
            return self.setup.engine.work(LONG)
        number, computed = early.todo.popleft()
        if computed is not None:
            xp.cuda.get_current_stream().wait_event(computed)
        self._begin(early.loss_scale)
        self._send(number, {name: flat_float32(early.arrays[name])
                            for name in self.buckets[number]}, early.values)
        self.setup.engine.work()
        return True

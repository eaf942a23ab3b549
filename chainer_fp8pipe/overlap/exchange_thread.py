"""The thread that exchanges gradients while backward passes go on."""
from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import chainer
import numpy
from mpi4py import MPI

from ..allreduce.engine import Algorithm
from ..exchange.model_state import ModelState
from ..intercept import ready_gradients
from ..mpi import finalizing
from ..report.stream import EventStream
from .bucket_sender import BucketSender

# Seconds of sleep when there is nothing to do.
_PAUSE = 100e-6


class ExchangeThread:
    """Works for the senders of all models of a communicator.

    Thread and main thread take turns: while the main thread averages
    gradients it does all that there is to do, and the thread waits.

    Args:
        events: Where to write what happens.
    """

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._models: list[BucketSender] = []
        self._known: weakref.WeakKeyDictionary[chainer.Link, BucketSender] = (
            weakref.WeakKeyDictionary())
        self._turn = threading.Lock()
        self._main_waits = False
        self._work = threading.Event()
        self._leave = False
        self._thread: threading.Thread | None = None

    def of(self, model: chainer.Link, state: ModelState) -> BucketSender:
        """The sender of a model, whose backward is watched from now on."""
        sender = self._known.get(model)
        if sender is None:
            self._forget_dead()
            sender = BucketSender(model, state, self._wake)
            self._known[model] = sender
            self._models.append(sender)
            ready_gradients.watch(sender)
        return sender

    def known(self, model: chainer.Link) -> BucketSender | None:
        """The sender of a model; None if that was not averaged yet."""
        return self._known.get(model)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A ``with`` block during which the thread stands still."""
        try:
            self._main_waits = True
            self._interrupt()
            with self._turn:
                self._main_waits = False
                yield
        finally:        # also where the wait is interrupted
            self._main_waits = False

    def complete(self) -> None:
        """Waits for the deferred updates of all models."""
        with contextlib.ExitStack() as stack:
            for sender in self._models:      # even after one has raised
                stack.callback(sender.complete)

    def forget(self) -> None:
        """Forgets all models."""
        for sender in self._models:
            ready_gradients.unwatch(sender)
        self._models.clear()
        self._known.clear()

    def _forget_dead(self) -> None:
        """Forgets models that are no more, and have nothing under way."""
        for sender in tuple(self._models):
            if sender.is_dead:
                with contextlib.suppress(Exception):    # nobody's concern
                    sender.complete()
                if sender.idle and not sender.failure:
                    ready_gradients.unwatch(sender)
                    self._models.remove(sender)

    def uses(self, queue: Algorithm) -> bool:
        """Whether a model, or what is left of one, goes through it."""
        return not queue.idle or any(
            sender.queue is queue for sender in self._models)

    def close(self) -> None:
        """Ends the thread, even in the middle of an exchange."""
        self.forget()
        self._leave = True
        self._work.set()
        if self._thread:
            self._thread.join()
            finalizing.forget(self._end)

    def _end(self) -> None:
        """Ends the last update, for which other ranks may wait."""
        try:
            self.complete()
        finally:
            self.close()

    # --- the thread ---------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None:
            # A daemon, or Python would wait for it before it is ended.
            self._thread = threading.Thread(
                target=self._run, name='exchange of gradients', daemon=True)
            self._thread.start()
            finalizing.before_finalize(self._end)
            _all.add(self)
        self._work.set()
        self._interrupt()

    def _interrupt(self) -> None:
        """Ends the thread's step, so that the thread sees what is new."""
        for sender in tuple(self._models):
            sender.interrupt()

    def _run(self) -> None:
        self._events.hide()
        # After each step, because a step may clear what close() has set.
        while not self._leave:
            self._work.wait()
            moved = False
            if not self._main_waits:
                with self._turn:
                    moved = self._step()
            if not moved:
                time.sleep(_PAUSE)

    def _step(self) -> bool:
        moved = False
        # Cleared first: it may be set again at any time.
        self._work.clear()
        busy = [sender for sender in self._models if not sender.idle]
        with self._events.section('exchange'):
            for sender in busy:
                try:
                    moved |= sender.step(alone=len(busy) == 1)
                except Exception:       # the main thread raises it
                    sender.failure = traceback.format_exc()
        if not all(sender.idle or sender.failure for sender in self._models):
            self._work.set()
        return moved


_all: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()


def _complete_all() -> None:
    """Before a fork, which has the parameters, but cannot wait for them."""
    if threading.current_thread() is threading.main_thread():
        for thread in tuple(_all):
            # An update that fails raises at each access, too.
            with contextlib.suppress(Exception):
                thread.complete()


os.register_at_fork(before=_complete_all)


def threads_are_allowed(comm: MPI.Comm) -> bool:
    """Whether threads of all ranks may call MPI at any time."""
    level = numpy.array(MPI.Query_thread(), numpy.int32)
    comm.Allreduce(MPI.IN_PLACE, level, MPI.MIN)
    return int(level) >= MPI.THREAD_MULTIPLE

"""Exchanges gradients in a thread while backward passes go on."""
from __future__ import annotations

import atexit
import contextlib
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import chainer
import numpy
from mpi4py import MPI

from ..allreduce import Statistics
from ..exchange.model_state import ModelState
from ..intercept import ready_gradients
from ..mpi.forever import keep_forever
from .bucket_sender import BucketSender

# Seconds between two looks when there is nothing to do.
_PAUSE = 100e-6


class ExchangeThread:
    """What of a communicator's exchanges takes place during backward.

    Thread and main thread take turns: while the main thread averages
    gradients it does all that there is to do, and the thread waits.

    Args:
        limit: Bytes of float32 in a bucket.
        statistics: Counters to add to.
    """

    def __init__(self, limit: int, statistics: Statistics) -> None:
        self._limit = limit
        self._statistics = statistics
        self._models: list[BucketSender] = []
        self._ended: list[BucketSender] = []
        self._known: weakref.WeakKeyDictionary[chainer.Link, BucketSender] = (
            weakref.WeakKeyDictionary())
        self._turn = threading.Lock()
        self._main_waits = False
        self._work = threading.Event()
        self._leave = False
        self._thread: threading.Thread | None = None

    def of(self, model: chainer.Link, state: ModelState) -> BucketSender:
        """The early part of this model's exchanges; watched from now on."""
        early = self._known.get(model)
        if early is None:
            early = BucketSender(model, state, self._limit, self._wake)
            self._known[model] = early
            self._models.append(early)
            ready_gradients.watch(early)
        return early

    def known(self, model: chainer.Link) -> BucketSender | None:
        """The same; None if the model has not been averaged yet."""
        return self._known.get(model)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A ``with`` block during which the thread does nothing."""
        self._main_waits = True
        self._interrupt()
        with self._turn:
            self._main_waits = False
            yield

    def complete(self) -> None:
        """Waits for all that updates have left to be waited for."""
        with contextlib.ExitStack() as stack:
            for early in self._models:      # all of them, if one raises, too
                stack.callback(early.complete)

    def forget(self) -> None:
        """Starts anew with all models."""
        for early in self._models:
            ready_gradients.unwatch(early)
        self._ended += self._models
        self._models.clear()
        self._known.clear()

    def close(self) -> list[BucketSender]:
        """Ends the thread, whatever is on its way.

        Returns the early parts of all models there have been.
        """
        self.forget()
        self._leave = True
        self._work.set()
        if self._thread:
            self._thread.join()
            atexit.unregister(self._end)
        ended, self._ended = self._ended, []
        for early in ended:
            if not early.idle:
                keep_forever(early)
        return ended

    def _end(self) -> None:
        """The program ends; others may be waiting for the last update."""
        try:
            self.complete()
        finally:
            self.close()

    # --- the thread ---------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None:
            # A daemon, or Python would wait for it before atexit ends it.
            self._thread = threading.Thread(
                target=self._run, name='exchange of gradients', daemon=True)
            self._thread.start()
            atexit.register(self._end)
        self._work.set()
        self._interrupt()

    def _interrupt(self) -> None:
        """Has the thread look at what else there is."""
        for early in tuple(self._models):
            early.interrupt()

    def _run(self) -> None:
        self._statistics.hide()
        # Looked at after each step, which may clear what close() has set.
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
        busy = [early for early in self._models if not early.idle]
        with self._statistics.section('exchange'):
            for early in busy:
                try:
                    moved |= early.step(alone=len(busy) == 1)
                except Exception:       # the main thread raises it
                    early.failure = traceback.format_exc()
        if not all(early.idle or early.failure for early in self._models):
            self._work.set()
        return moved


def threads_are_allowed(comm: MPI.Comm) -> bool:
    """Whether threads of all ranks may call MPI at any time."""
    level = numpy.array(MPI.Query_thread(), numpy.int32)
    comm.Allreduce(MPI.IN_PLACE, level, MPI.MIN)
    return int(level) >= MPI.THREAD_MULTIPLE

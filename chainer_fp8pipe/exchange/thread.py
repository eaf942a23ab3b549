"""The thread that exchanges gradients while training goes on."""
# One for the process, whatever the number of communicators and models.  MPI
# moves nothing by itself: somebody must encode, send, sum and decode while
# the main thread computes.  The thread never waits long for a communicator's
# turn: another communicator's exchange may be what other ranks wait for.
from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..allreduce.engine import Engine
from ..mpi import finalizing

if TYPE_CHECKING:
    from .early import EarlyExchange

# Seconds of sleep when there is nothing to do.
_PAUSE = 100e-6


class Turn:
    """A communicator's lock, which the exchange's thread gives up soon.

    The main thread holds it while it averages gradients, the exchange's for
    one step at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._main_waits = False

    @contextlib.contextmanager
    def taken(self, engines: Sequence[Engine]) -> Iterator[None]:
        """A ``with`` block of the main thread.

        Args:
            engines: Those that the exchange's thread may be waiting in.
        """
        try:
            self._main_waits = True
            for engine in engines:
                engine.interrupt()
            with self._lock:
                self._main_waits = False
                yield
        finally:        # also where the wait is interrupted
            self._main_waits = False

    @contextlib.contextmanager
    def tried(self, seconds: float) -> Iterator[bool]:
        """A ``with`` block of the exchange's thread; True if it has the turn.

        Args:
            seconds: For how long to try.
        """
        has_it = not self._main_waits and self._lock.acquire(timeout=seconds)
        try:
            yield has_it
        finally:
            if has_it:
                self._lock.release()


class ExchangeThread:
    """Works for all models that have something to send early."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begins anew: in a fork, which must not talk MPI for its parent."""
        self._exchanges: tuple[EarlyExchange, ...] = ()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self, exchange: EarlyExchange) -> None:
        """Has the thread work for a model; starts it if need be."""
        with self._lock:
            if exchange not in self._exchanges:
                self._exchanges += exchange,
            if self._thread is None:
                # A daemon, or Python would wait for it before it ends.
                self._thread = threading.Thread(
                    target=self._run, name='exchange of gradients',
                    daemon=True)
                finalizing.before_finalize(self._end)
                self._thread.start()
        self._work.set()
        for engine in exchange.setup.engines:
            engine.interrupt()      # a step under way must see it, too

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        self._work.set()
        for exchange in self._exchanges:
            for engine in exchange.setup.engines:
                engine.interrupt()
        if thread:
            thread.join()

    def _run(self) -> None:
        own = threading.current_thread()
        while self._thread is own:
            self._work.wait()
            self._work.clear()      # first: it may be set again at any time
            if not self._step():
                time.sleep(_PAUSE)

    def _step(self) -> bool:
        """A step of each model that has work; whether anything moved.

        Comes again until there is none: a thread that waits refers to no
        model.
        """
        with self._lock:
            self._exchanges = busy = tuple(
                [one for one in self._exchanges if one.busy])
        if busy:
            self._work.set()
        return any([one.step(alone=len(busy) == 1) for one in busy])


#: Of this process.
exchange_thread = ExchangeThread()


os.register_at_fork(after_in_child=exchange_thread.forget_all)

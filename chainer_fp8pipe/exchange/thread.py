"""The thread that exchanges gradients while training goes on."""
# One for the process, whatever the number of communicators and models.  MPI
# moves nothing by itself: somebody must encode, send, sum and decode while
# the main thread computes.  The thread never waits long for a communicator's
# turn (Reducer.taken): another communicator's exchange may be what other ranks
# wait for.
from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from ..mpi import finalizing

if TYPE_CHECKING:
    from .reducer import Reducer

# Seconds of sleep when there is nothing to do.
_PAUSE = 100e-6


class ExchangeThread:
    """Works for all reducers that have sent something early."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begins anew: in a fork, which must not talk MPI for its parent."""
        self._reducers: tuple[Reducer, ...] = ()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self, reducer: Reducer) -> None:
        """Has the thread work for a reducer; starts it if need be."""
        if reducer not in self._reducers:
            with self._lock:
                self._reducers += reducer,
                if self._thread is None:
                    # A daemon, or Python would wait for it before it ends.
                    self._thread = threading.Thread(
                        target=self._run, name='exchange of gradients',
                        daemon=True)
                    finalizing.before_finalize(self._end)
                    self._thread.start()
        self._work.set()

    def drop(self, reducer: Reducer) -> None:
        """Works for a reducer no more; the thread ends with the last one.

        Not from within :meth:`.Reducer.taken`.
        """
        with self._lock:
            if reducer not in self._reducers:
                return
            with reducer.taken():
                self._reducers = tuple(
                    other for other in self._reducers if other is not reducer)
            thread, last = self._thread, not self._reducers
            if last:
                self._thread = None
                self._work.set()
        if last and thread:
            thread.join()
            finalizing.forget(self._end)

    def _end(self) -> None:
        for reducer in self._reducers:
            self.drop(reducer)

    def _run(self) -> None:
        own = threading.current_thread()
        while self._thread is own:
            self._work.wait()
            self._work.clear()      # first: it may be set again at any time
            if not self._step():
                time.sleep(_PAUSE)

    def _step(self) -> bool:
        """A step of each reducer; whether anything moved.

        By itself, so that a thread that waits refers to no reducer.
        """
        busy = [reducer for reducer in self._reducers if reducer.busy]
        moved = False
        for reducer in busy:
            moved |= reducer.step(alone=len(busy) == 1)
        if any(reducer.busy for reducer in busy):
            self._work.set()
        return moved


#: Of this process.
exchange_thread = ExchangeThread()


os.register_at_fork(after_in_child=exchange_thread.forget_all)

"""Keeps messages between nodes moving while this rank computes.

MPI moves a large message only while both sides are inside a call of MPI:
they first agree where it goes, and over TCP the sender then feeds a socket.
A stage that computes makes no such calls for a long time, and the next stage
would wait for an activation that was sent long ago.  So a thread calls MPI
from time to time, while a channel to another node has something to do.  Ranks
of one node read each other's memory, and need no help.
"""
from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from mpi4py import MPI

from ..mpi.finalizing import before_finalize

_PERIOD = 1e-3      # seconds between calls of MPI


class Progress:
    """The thread; it starts when it is first needed."""

    def __init__(self) -> None:
        self._busy: weakref.WeakSet[object] = weakref.WeakSet()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, channel: object, busy: bool) -> None:
        """Notes whether a channel has a message on its way."""
        (self._busy.add if busy else self._busy.discard)(channel)
        if not self._busy:
            self._wanted.clear()
            return
        self._wanted.set()
        if (self._thread is None
                and MPI.Query_thread() == MPI.THREAD_MULTIPLE):
            self._thread = threading.Thread(
                target=self._run, name='MPI progress', daemon=True)
            self._thread.start()
            before_finalize(self._stop)

    def _run(self) -> None:
        tag: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)      # nobody's
        while self._thread is not None:
            # That MPI looks at the network is what counts; where it finds a
            # message at once, it does not.
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, tag)
            time.sleep(_PERIOD)
            self._wanted.wait()

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        self._wanted.set()
        if thread:
            thread.join()


progress = Progress()

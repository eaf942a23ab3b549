"""Waits for messages: they leave the core to others, and say for what."""
# Ranks may outnumber the cores.  A wait polls, and soon yields the core
# between polls, which is about as fast while nobody else wants the core.
# After a while it sleeps between polls, for a small part of the time that has
# passed.  ``wait_until`` is for a cheap poll, ``Pauses`` for loops of their
# own, and ``waiting`` notes for what the main thread waits: the watch over
# the job (``mpi/watch.py``) reads the notes when nothing seems to move.
from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

_POLLS = 20             # before the first yield, about 4 us
_PATIENCE = 200e-6      # seconds of polling before the first sleep
_SLEEP = 20e-6          # seconds; Linux makes about 75 us of it
_PART = 1 / 32          # of a long wait that a pause takes
_LONGEST = 5e-4        # seconds of a sleep, little beside 32 ms of waiting
#: Seconds of yielding before the first sleep: among ranks of one node all is
#: over by then, and sleeping would make it take twice as long.
BRIEF = 2e-3
#: Seconds that a thread may wait in one call: Python handles signals between
#: two calls.
LONG = 0.05

#: Yields the core, if any other thread wants it; not every system has a call
#: for that.
give_way: Callable[[], object] = getattr(
    os, 'sched_yield', functools.partial(time.sleep, 0))


def wait_until(done: Callable[[], bool]) -> None:
    """Polls ``done`` until it returns a true value."""
    for _ in range(_POLLS):
        if done():
            return
    start = time.perf_counter()
    while time.perf_counter() < start + _PATIENCE:
        give_way()
        if done():
            return
    while not done():
        # A rank of a pipeline waits for tenths of a second: short pauses
        # would keep a sixth of a core that others may need.
        waited = time.perf_counter() - start
        time.sleep(min(max(waited / 64, _SLEEP), _LONGEST))


class Pauses:
    """Pauses between polls that are not cheap.

    A poll of many messages takes some 20 microseconds.  A rank that waits for
    long would poll most of the time, on a core that others need, if only to
    run the network.  So a pause takes a small part of the wait so far.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins a new wait, after a poll that found work."""
        self._since = time.perf_counter()

    def pause(self, longest: float) -> None:
        """Yields, or sleeps ``longest`` seconds at most.

        Call it after a poll that found nothing.
        """
        waited = time.perf_counter() - self._since
        if waited < BRIEF or longest < _SLEEP:
            give_way()
        else:
            time.sleep(min(waited * _PART, longest))


# --- notes -------------------------------------------------------------------

class Wait(NamedTuple):
    """Something that a rank waits for.

    Attributes:
        text: In words, such as ``'frame 17 of bucket 2 from rank 3'``.
        ranks: Of ``MPI.COMM_WORLD``, that it is to come from; () if that is
            not known, as inside collective calls.
    """

    text: str
    ranks: tuple[int, ...] = ()


#: Called by any thread, at any time.
Note = Callable[[], list[Wait]]

# Of the main thread, from the outermost wait to the innermost.
_notes: list[Note] = []


class waiting:
    """A ``with`` block in which the main thread waits.

    In other threads, which nobody asks, it does nothing.

    Args:
        note: Says for what; called only when somebody wants to know.
    """

    __slots__ = ('_note',)

    def __init__(self, note: Note) -> None:
        self._note = note

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            _notes.append(self._note)

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            _notes.pop()


def current_waits() -> list[Wait]:
    """Asks notes, the outermost first, until one knows; [] if none does."""
    for note in tuple(_notes):
        if found := note():
            return found
    return []


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Ranks of ``MPI.COMM_WORLD``, in the order of the communicator's."""
    return tuple(comm.Get_group().Translate_ranks(
        None, MPI.COMM_WORLD.Get_group()))

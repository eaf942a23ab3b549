"""Waits for messages: they leave the core to others, and say for what."""
# Ranks may outnumber the cores.  A wait polls, and soon yields the core
# between polls, which is about as fast while nobody else wants the core.
# After a while it sleeps between polls, for a small part of the time that has
# passed: others need the core, if only to run the network.
from __future__ import annotations

import collections
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

_POLLS = 20             # before the first yield, about 4 us
_SLEEP = 20e-6          # seconds; Linux makes about 75 us of it
_PART = 1 / 32          # of a long wait that a pause takes
_LONGEST = 5e-4         # seconds of a sleep, little beside 32 ms of waiting
#: Seconds of yielding before the first sleep: among ranks of one node all is
#: over by then, and sleeping would make it take twice as long.
BRIEF = 2e-3
#: Seconds of a wait in one call: Python handles signals between two.
LONG = 0.05

#: Yields the core, if any other thread wants it.
give_way: Callable[[], object] = getattr(
    os, 'sched_yield', functools.partial(time.sleep, 0))


class Pauses:
    """Pauses between polls."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins a new wait, after a poll that found work."""
        self._since = time.perf_counter()

    def pause(self, longest: float = _LONGEST) -> None:
        """Yields, or sleeps, after a poll that found nothing."""
        waited = time.perf_counter() - self._since
        if waited < BRIEF or longest < _SLEEP:
            give_way()
        else:
            time.sleep(min(waited * _PART, longest))


def wait_until(done: Callable[[], bool]) -> None:
    """Polls ``done`` until it returns a true value."""
    for _ in range(_POLLS):
        if done():
            return
    pauses = Pauses()
    with waiting(lambda: []):
        while not done():
            pauses.pause()


class Wait(NamedTuple):
    """What is waited for, in words, and from which ranks of COMM_WORLD."""

    text: str
    ranks: tuple[int, ...] = ()


# By thread, from the outermost wait to the innermost.
_notes: dict[int, list[Callable[[], list[Wait]]]] = collections.defaultdict(
    list)


class waiting:
    """A block in which a thread waits.

    ``note`` says for what, to any thread, at any time.
    """

    def __init__(self, note: Callable[[], list[Wait]]) -> None:
        self._note = note

    def __enter__(self) -> None:
        _notes[threading.get_ident()].append(self._note)

    def __exit__(self, *_: object) -> None:
        _notes[threading.get_ident()].pop()


def current_waits(thread: int | None = None) -> list[Wait]:
    """The waits that the outermost note of a thread gives; None: the main one.

    A wait without a note has no text; empty: the thread does not wait.
    """
    notes = tuple(_notes[thread or threading.main_thread().ident or 0])
    return next(filter(None, (note() for note in notes)),
                [Wait('')] * bool(notes))


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Ranks of ``MPI.COMM_WORLD``, in the order of the communicator's."""
    return tuple(comm.Get_group().Translate_ranks(
        None, MPI.COMM_WORLD.Get_group()))

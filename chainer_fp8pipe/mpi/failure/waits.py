"""What this rank waits for, noted by those who wait.

Other threads read the notes when nothing seems to move any more.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI


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
    """What the outermost wait that knows is for; [] if nothing is."""
    for note in tuple(_notes):
        if found := note():
            return found
    return []


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Ranks of ``MPI.COMM_WORLD``, in the order of the communicator's."""
    return tuple(comm.Get_group().Translate_ranks(
        None, MPI.COMM_WORLD.Get_group()))

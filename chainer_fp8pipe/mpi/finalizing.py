"""What must be done while MPI still works.

A program ends by its last line, by an exception, or calls ``MPI.Finalize``
itself and goes on.  What others wait for must have left this rank, and no
thread may call MPI any more, before the first of these.  So there is one
list for all: it is worked through once, when ``atexit`` or MPI_Finalize
begins, and a process that was forked off has none.
"""
from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

_actions: list[Callable[[], object]] = []


def before_finalize(action: Callable[[], object]) -> None:
    """Has ``action`` called before MPI ends, the latest action first.

    ``action`` may communicate.  What it raises is reported like an exception
    that nobody has caught, and thus ends all ranks.
    """
    _begin()
    _actions.append(action)


def forget(action: Callable[[], object]) -> None:
    """Takes an action back, if it was not called yet."""
    if action in _actions:
        _actions.remove(action)


@functools.cache
def _begin() -> None:
    atexit.register(_work)
    # The first act of MPI_Finalize is to take away the attributes of this
    # communicator; MPI works until they are gone.
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_work), None)
    os.register_at_fork(after_in_child=_actions.clear)


def _work(*_: Any) -> None:
    while _actions:
        try:
            _actions.pop()()
        except Exception:
            sys.excepthook(*sys.exc_info())     # type: ignore[arg-type]

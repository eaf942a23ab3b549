"""What must be done before MPI ends, and what must live until it has."""
# What others wait for must have left this rank, and no thread may call MPI any
# more, before the program ends or calls ``MPI.Finalize`` itself.  So there is
# one list of actions, worked through once, when the first of these begins; a
# process that was forked off has none.  A message that was given up may arrive
# in its buffer even later: such a buffer is never freed.
from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

_actions: list[Callable[[], object]] = []


def before_finalize(action: Callable[[], object]) -> None:
    """Has ``action`` called before MPI ends, the latest action first.

    It may communicate.  What it raises ends all ranks.
    """
    begin()
    _actions.append(action)


def forget(action: Callable[[], object]) -> None:
    """Takes an action back."""
    if action in _actions:
        _actions.remove(action)


@functools.cache
def begin() -> None:
    """From now on actions come when MPI or the program ends."""
    atexit.register(_work)
    # The first act of MPI_Finalize is to take away the attributes of this
    # communicator; MPI works until they are gone.
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_work), None)
    os.register_at_fork(after_in_child=_actions.clear)


def _work(*_: Any) -> None:
    while _actions:
        try:
            _actions.pop()()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


def keep_forever(owner: Any) -> None:
    """Never frees an object, nor anything it refers to."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class HeldRequest:
    """A request of MPI's whose buffers are never freed before it is complete.

    Not even if nobody waits for it any more.  ``buffers`` are all that it
    reads or writes, which mpi4py's requests of reductions do not hold.
    """

    def __init__(self, request: MPI.Request, *buffers: Any) -> None:
        self._request, self._buffers = request, buffers

    def test(self) -> bool:
        """Whether it is complete."""
        return self._request.Test()

    def __del__(self, keep: Callable[[Any], None] = keep_forever) -> None:
        if self._request:
            keep((self._request, self._buffers))

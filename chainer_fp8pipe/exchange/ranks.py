"""Ranks that exchange together, and hear when one of them raises alone."""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from ..mpi.agreement import Meeting, is_raised_by_all
from ..mpi.finalizing import keep_forever
from ..mpi.waiting import wait_until

_TAG = 1
# Seconds from one look for others' failures to the next, while this rank
# waits.
_EVERY = 0.1
# Seconds before a rank that has heard of a failure raises: if the error ends
# the job, its own traceback is to be the only one.
_GRACE = 0.3
_BROKEN = ('an earlier update of this communicator failed after part of it '
           'had been exchanged{}; make a new communicator and load a snapshot')


class Ranks:
    """Collective calls of all ranks, one after the other.

    An error that one rank raises alone, between two of these calls, would
    leave the others waiting for ever: MPI knows nothing of it.  So that rank
    sends each of them a message, and who waits looks for one from time to
    time, and raises as well.  While nothing fails, this costs nothing.

    Args:
        comm: The ranks.

    Attributes:
        comm: A duplicate, so that calls cannot meet those of the user, which
            need not come in the same order.
        failure: Why nothing can be exchanged any more, if so.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm.Dup()
        self.failure: str | None = None
        self._in_section = threading.Lock()
        self._next_look = 0.0

    def break_off(self, why: str = '') -> None:
        """Nothing can be exchanged any more; to be called on all ranks."""
        self.failure = why and f' ({why})'

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """A ``with`` block of collective calls, which one thread makes.

        What it raises is told to the others.

        Raises:
            RuntimeError: Another thread is in such a block, or an exchange
                has failed.
        """
        if not self._in_section.acquire(blocking=False):
            raise RuntimeError(
                'two threads average gradients with one communicator at the '
                f'same time on rank {self.comm.rank}; call '
                'multi_node_mean_grad from one thread, or give each thread a '
                'communicator')
        try:
            if self.failure is not None:
                raise RuntimeError(_BROKEN.format(self.failure))
            yield
        except BaseException as error:
            self.tell(error)
            raise
        finally:
            self._in_section.release()

    def tell(self, error: BaseException) -> None:
        """Tells the others of an error, unless they raise it by themselves."""
        if self.failure is not None or is_raised_by_all(error):
            return
        text = f'rank {self.comm.rank}: {type(error).__name__}: {error}'
        self.break_off(text)
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                keep_forever(self.comm.isend(text, rank, _TAG))

    def listen(self) -> bool:
        """Raises RuntimeError if a rank has failed; looks seldom.  False."""
        now = time.monotonic()
        if self.failure is None and now >= self._next_look:
            self._next_look = now + _EVERY
            if self.comm.Iprobe(MPI.ANY_SOURCE, _TAG):
                self.break_off(self.comm.recv(source=MPI.ANY_SOURCE, tag=_TAG))
                time.sleep(_GRACE)
        if self.failure is not None:
            raise RuntimeError(_BROKEN.format(self.failure))
        return False

    def wait(self, done: Callable[[], bool]) -> None:
        """Polls until ``done`` returns a true value.

        Raises:
            RuntimeError: Another rank has failed.
        """
        wait_until(lambda: done() or self.listen())

    def allgather(self, value: Any) -> list[Any]:
        """All ranks' values."""
        return Meeting(self.comm, self.wait).say(value)

    def free(self) -> None:
        """Gives the duplicate back to MPI, unless messages may be left in it.

        A later communicator would find them.
        """
        if self.failure is None:
            self.comm.Free()

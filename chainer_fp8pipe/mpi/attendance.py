"""Which ranks take part in something that not all may take part in.

Scripts give some extensions to rank 0 alone.  A collective call would then
wait for the others for ever; so the ranks that are there say so by a message
of their own, and rank 0 answers.
"""
from __future__ import annotations

import time

import numpy
from mpi4py import MPI

from .failure.waits import Wait, waiting
from .forever import keep_forever
from .waiting import wait_until

_HERE, _ANSWER = 32_301, 32_302     # tags; MPI has at least 32,767
#: Seconds that rank 0 waits for others after it has come as far as they.
PATIENCE = 5.0
#: Seconds after which others are sure that rank 0 does not take part.
IN_VAIN = 120.0


class Attendance:
    """Finds out who takes part; make it on each rank that does.

    Args:
        comm: All ranks, whether they take part or not.
        what: Takes part, for messages, such as ``'RunReport'``.
    """

    def __init__(self, comm: MPI.Comm, what: str) -> None:
        self._comm, self._what = comm, what
        if comm.rank:
            self._word = numpy.zeros(1, numpy.uint8)
            self._said = comm.Isend(self._word, 0, _HERE)

    def settle(self) -> tuple[int, ...]:
        """The ranks that take part; call it on those that do.

        All must have made this object before any rank comes here.  If all
        take part, nobody waits longer than messages travel.

        Raises:
            RuntimeError: Rank 0 does not take part; on the others.
        """
        if self._comm.rank:
            return self._ask()
        there = {0}
        end = time.monotonic() + PATIENCE

        def all_there() -> bool:
            there.update(self._heard())
            return (len(there) == self._comm.size
                    or time.monotonic() > end)
        wait_until(all_there)
        for rank in sorted(there - {0}):
            self._answer(rank, there)
        return tuple(sorted(there))

    def _heard(self) -> list[int]:
        status, found = MPI.Status(), []
        while self._comm.Iprobe(MPI.ANY_SOURCE, _HERE, status):
            self._comm.Recv(numpy.zeros(1, numpy.uint8),
                            status.Get_source(), _HERE)
            found.append(status.Get_source())
        return found

    def _answer(self, rank: int, there: set[int]) -> None:
        flags = numpy.array([one in there for one in range(self._comm.size)],
                            numpy.uint8)
        wait_until(self._comm.Isend(flags, rank, _ANSWER).Test)

    def _ask(self) -> tuple[int, ...]:
        flags = numpy.zeros(self._comm.size, numpy.uint8)
        answer = self._comm.Irecv(flags, 0, _ANSWER)
        end, came = time.monotonic() + IN_VAIN, [False]

        def has_come() -> bool:
            came[0] = answer.Test()
            return came[0] or time.monotonic() > end
        with waiting(lambda: [Wait(f'{self._what} of rank 0', (0,))]):
            wait_until(has_come)
        if not came[0]:
            answer.Cancel()
            if not answer.Test():       # it is on its way already
                keep_forever((answer, flags))
            keep_forever((self._said, self._word))
            raise RuntimeError(
                f'rank {self._comm.rank}: {self._what} is on this rank but '
                'not on rank 0, which writes; give it to all ranks')
        self._said.Wait()
        return tuple(numpy.flatnonzero(flags).tolist())

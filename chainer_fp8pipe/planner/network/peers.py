"""Ranks that send each other messages, and name a rank that does not answer.

MPI waits for a message as long as that takes, even if no packet ever passes
from one host to another.  Here every wait ends: the rank that has waited too
long tells all others whose message has not come, and all raise that.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from ...mpi.forever import keep_forever
from ...mpi.waiting import wait_until
from .link_rounds import shifts

# Tags of messages; every MPI allows them.
_MEET, _GATHER, _GIVEN_UP, _QUESTION, _ALIVE = range(32001, 32006)
_LOOK = 0.05            # seconds between two looks at what others say
_FAREWELL = 1.0         # seconds in which the others must hear of a failure
_SUSPICION = 0.8        # of the patience: then a rank is asked if it lives
_CHECK = ('check that their hosts reach each other by the network interface '
          'that MPI uses (UCX_NET_DEVICES, FI_TCP_IFACE), that no firewall '
          'stands between them, and that all ranks measure the network')


class Pending:
    """A message on its way.

    Args:
        start: Begins to send or to receive it.
        data: Its memory.
        rank: The rank at the other end.
        tag: MPI's.
    """

    def __init__(self, start: Callable[..., MPI.Request],
                 data: numpy.ndarray, rank: int, tag: int) -> None:
        self.rank = rank
        with self._named():
            self._request = start(data, rank, tag)

    def test(self) -> bool:
        """Says whether the message is through."""
        try:
            return self._request.Test()
        except MPI.Exception:
            with self._named():
                raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            raise RuntimeError(f'no message passes to or from rank '
                               f'{self.rank} ({error}): {_CHECK}') from error


class Peers:
    """The ranks of a communicator, none of which is waited for endlessly.

    Args:
        comm: mpi4py's communicator of all ranks.
        patience: Seconds after which a rank that should have sent a message
            counts as one that does not answer.
        longest: Seconds for which ranks may measure while others wait, and
            answer that they are alive.
    """

    def __init__(self, comm: MPI.Comm, patience: float, longest: float
                 ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.patience = patience
        self._longest = max(patience, longest)
        self._next_look = 0.0
        self._everybody_knows = False
        self._since = 0.0       # when the present wait began
        self._calm = 0.0        # when all who are waited for were alive
        self._asked = False     # whether they are, since then
        self._alive: set[int] = set()       # who answered

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the other ranks of an exception, so that all raise one."""
        try:
            yield
        except BaseException as error:
            # MPI may still write where messages were expected: what the
            # functions' variables hold is not freed.
            keep_forever(error.__traceback__)
            if self._everybody_knows or not isinstance(error, Exception):
                raise
            self._give_up(f'rank {self.rank} failed: '
                          f'{type(error).__name__}: {error}')

    def meet(self) -> None:
        """Hears from the ranks 1, 2, 4, ... places away on a ring.

        Raises:
            RuntimeError: One of them does not answer.
        """
        others = {(self.rank + way * shift) % self.size
                  for shift in shifts(self.size) for way in (1, -1)}
        data = {rank: numpy.zeros((2, 1), numpy.uint8) for rank in others}
        self.wait([start(row, rank) for rank, rows in data.items()
                   for start, row in zip(
                       (self.receiver(_MEET), self.sender(_MEET)), rows,
                       strict=True)])

    def gather(self, numbers: numpy.ndarray,
               members: Sequence[int] | None = None) -> numpy.ndarray:
        """Every member's numbers, the same bits on all of them.

        Each rank sends log2(members) messages: Bruck et al., "Efficient
        Algorithms for All-to-All Communications in Multiport Message-Passing
        Systems" (1997).

        Args:
            numbers: float64 of shape (n,).
            members: The ranks that call this; None: all.

        Returns:
            float64 of shape (members, n).

        Raises:
            RuntimeError: A rank does not answer, or has failed.
        """
        ring = range(self.size) if members is None else members
        place, found = ring.index(self.rank), numpy.array([numbers], float)
        for shift in shifts(len(ring)):
            count = min(shift, len(ring) - shift)
            heard = numpy.empty((count, found.shape[1]))
            source = ring[(place + shift) % len(ring)]
            self.wait([
                self.receiver(_GATHER)(heard, source),
                self.sender(_GATHER)(found[:count], ring[place - shift])])
            found = numpy.concatenate([found, heard])
        return numpy.roll(found, place, 0)

    def sync(self, members: Sequence[int]) -> None:
        """Waits until all members are here."""
        self.gather(numpy.zeros(1), members)

    def in_time(self, action: Callable[[], Any]) -> Any:
        """Returns what ``action`` returns, a call of MPI's for all ranks.

        Raises:
            RuntimeError: It takes too long; or what it raised.
        """
        outcome: list[Any] = []

        def act() -> None:
            try:
                outcome.append((action(), None))
            except Exception as error:
                outcome.append((None, error))
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            act()
        else:
            threading.Thread(target=act, daemon=True).start()
            since = time.monotonic()
            others = set(range(self.size)) - {self.rank}
            wait_until(lambda: bool(outcome) or self.look(
                since, lambda: others, self.patience))
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def sender(self, tag: int) -> Callable[[numpy.ndarray, int], Pending]:
        """Starts to send memory to a rank."""
        return lambda data, rank: Pending(self.comm.Isend, data, rank, tag)

    def receiver(self, tag: int) -> Callable[[numpy.ndarray, int], Pending]:
        """Starts to receive from a rank into memory."""
        return lambda data, rank: Pending(self.comm.Irecv, data, rank, tag)

    def wait(self, messages: Iterable[Pending]) -> None:
        """Waits for messages, and leaves the core to other ranks.

        Raises:
            RuntimeError: They take too long, or a rank has failed.
        """
        left = list(messages)
        since = time.monotonic()

        def over() -> bool:
            left[:] = [message for message in left if not message.test()]
            return not left or self.look(
                since, lambda: [message.rank for message in left])
        wait_until(over)

    def look(self, since: float, missing: Callable[[], Collection[int]],
             longest: float | None = None) -> bool:
        """Looks, now and then, whether a wait must end.

        A rank whose message is late may wait for a third one itself.  Such a
        rank says that it is alive, and is not the one to be named.

        Args:
            since: When the wait began, by ``time.monotonic``.
            missing: Names the ranks that are waited for.
            longest: Seconds that the wait may take though all these ranks
                are alive; None: those of these peers.

        Returns:
            False.

        Raises:
            RuntimeError: The wait takes too long, or a rank has failed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK
        self._hear()
        if self._since != since:
            self._since = self._calm = since
            self._asked = False
        silence = now - self._calm
        if silence > _SUSPICION * self.patience and not self._asked:
            self._asked, self._alive = True, set()
            for rank in set(missing()):
                self._say(_QUESTION, rank)
        if now - since > (longest or self._longest):
            self._give_up(_complaint(self.rank, now - since, missing()))
        if silence > self.patience:
            silent = set(missing()) - self._alive
            if silent:
                self._give_up(_complaint(self.rank, now - since, silent))
            self._calm, self._asked = now, False
        return False

    def _hear(self) -> None:
        """Reads what other ranks say about themselves."""
        status = MPI.Status()
        for tag in (_GIVEN_UP, _QUESTION, _ALIVE):
            while self.comm.Iprobe(MPI.ANY_SOURCE, tag, status):
                text = self.comm.recv(source=status.source, tag=tag)
                if tag == _GIVEN_UP:
                    self._everybody_knows = True
                    raise RuntimeError(text)
                if tag == _QUESTION:
                    self._say(_ALIVE, status.source)
                else:
                    self._alive.add(status.source)

    def _say(self, tag: int, rank: int, text: str = '') -> MPI.Request | None:
        """Sends without waiting; None if the rank cannot be reached."""
        with contextlib.suppress(MPI.Exception):
            request = self.comm.isend(text, rank, tag)
            keep_forever(request)
            return request
        return None

    def _give_up(self, text: str) -> NoReturn:
        """Raises on this rank, and on those that hear of it."""
        self._everybody_knows = True
        said = [self._say(_GIVEN_UP, rank, text)
                for rank in range(self.size) if rank != self.rank]
        requests = [request for request in said if request]
        end = time.monotonic() + _FAREWELL
        with contextlib.suppress(MPI.Exception):
            wait_until(lambda: MPI.Request.Testall(requests)
                       or time.monotonic() > end)
        raise RuntimeError(text)


def _complaint(rank: int, waited: float, silent: Collection[int]) -> str:
    ranks = ', '.join(map(str, sorted(set(silent))))
    return (f'rank {rank} has waited {waited:.3g} s for a message of rank '
            f'{ranks}: {_CHECK}')

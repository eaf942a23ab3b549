"""All ranks agree on what they exchange, or all raise the same error."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from mpi4py import MPI

from .waiting import wait_until


class Signature:
    """Entries that must be equal on all ranks.

    Args:
        entries: Name to description, e.g.
            ``{'parameter /l1/W': 'float32 (10, 5)'}``; order counts.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.entries = dict(entries)
        digest = hashlib.blake2b(
            repr(list(self.entries.items())).encode(), digest_size=8)
        self.number = int.from_bytes(digest.digest(), 'big') >> 1

    def difference(self, rank: int, other: Signature, other_rank: int) -> str:
        """One sentence about the first entry that differs; '' if none."""
        mine, theirs = self.entries, other.entries
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return (f'{name} is '
                        f'{mine.get(name, "missing")} on rank {rank} but '
                        f'{theirs.get(name, "missing")} on rank {other_rank}')
        if list(mine) != list(theirs):
            return (f'rank {rank} and rank {other_rank} have the same '
                    'entries in a different order')
        return ''


def agree(comm: MPI.Comm, signature: Signature, problem: str = '',
          remedy: str = '', error: type[Exception] = ValueError) -> None:
    """Raises the same error on all ranks unless all are in agreement.

    Costs one all-reduce of 16 bytes while all is well.

    Args:
        comm: The ranks.
        signature: Must be equal on all of them.
        problem: A fault of this rank, '' if none; all ranks then raise, and
            name this rank.
        remedy: Added to the message about a difference.
        error: Class of the exception.

    Raises:
        error: The message names the ranks and the entry.
    """
    Agreement(comm, signature, problem, remedy, error).wait()


class Agreement:
    """A pending :func:`agree`; every rank calls :meth:`wait` at some time."""

    def __init__(self, comm: MPI.Comm, signature: Signature,
                 problem: str = '', remedy: str = '',
                 error: type[Exception] = ValueError) -> None:
        self._comm = comm
        self._signature = signature
        self._problem, self._remedy = problem, remedy
        self._kind = error
        self._error: Exception | None = None
        number = -1 if problem else signature.number
        self._extremes = numpy.array([number, -number], numpy.int64)
        self._request = comm.Iallreduce(MPI.IN_PLACE, self._extremes, MPI.MAX)

    def wait(self) -> None:
        """Raises as :func:`agree`; the same error at every call."""
        if self._error:
            raise self._error
        # MPI's own wait would keep the core from other ranks and threads.
        wait_until(self._request.Test)
        largest, smallest = int(self._extremes[0]), -int(self._extremes[1])
        if smallest != largest or largest < 0:
            self._error = self._kind(_explain(
                self._comm, self._signature, self._problem, self._remedy))
            raise self._error


def are_equal(comm: MPI.Comm, number: int) -> bool:
    """Whether a number of 64 bits, 0 to 2^64 - 1, is the same on all ranks.

    Costs one all-reduce of 16 bytes.
    """
    # The largest, and what is left of 2^64 - 1 by the smallest.
    extremes = numpy.array([number, ~number & (1 << 64) - 1], numpy.uint64)
    # MPI's own wait would keep the core from other ranks and threads.
    wait_until(comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX).Test)
    return bool(extremes[0] == ~extremes[1])


def check_same(everyone: Sequence[Mapping[str, Any]], remedy: str,
               write: Callable[[Any], str] = repr) -> None:
    """Raises ValueError if a rank's arguments are not those of rank 0.

    ``everyone`` is all ranks' arguments by name, gathered on all ranks;
    ``write`` writes a value in the message, which ends with the remedy.
    """
    for rank, arguments in enumerate(everyone):
        for name, value in arguments.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f'{name} is {write(everyone[0][name])} on rank 0 but '
                    f'{write(value)} on rank {rank}; {remedy}')


def raise_together(comm: MPI.Comm, action: Callable[[], Any],
                   error: type[Exception] = RuntimeError) -> Any:
    """Does ``action``; if it fails on any rank, raises on every rank.

    Returns what ``action`` returned.  ``action`` must not communicate.
    """
    result, problem, cause = None, '', None
    try:
        result = action()
    except Exception as reason:     # the ranks that wait must hear of it
        problem, cause = f'{type(reason).__name__}: {reason}', reason
    try:
        agree(comm, Signature({}), problem, error=error)
    except error as together:
        raise together from cause
    return result


def _explain(comm: MPI.Comm, signature: Signature, problem: str,
             remedy: str) -> str:
    everyone = comm.allgather((problem, signature))
    problems = [f'rank {rank}: {text}'
                for rank, (text, _) in enumerate(everyone) if text]
    if problems:
        texts = {text for text, _ in everyone}
        return (f'all ranks: {texts.pop()}' if len(texts) == 1
                else '; '.join(problems))
    first = everyone[0][1]
    sentence = next(filter(None, (
        first.difference(0, other, rank)
        for rank, (_, other) in enumerate(everyone))),
        'the ranks do not agree')
    return f'{sentence}. {remedy}'.strip()

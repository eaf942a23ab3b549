"""All ranks agree on what they do and hold, or all raise the same error."""
# A rank that raises alone leaves the others in a collective call for ever.  So
# each rank says what it is about to do, as a digest of 63 bits, or that it has
# failed, as a number that no digest is.  One all-reduce of the largest and the
# smallest, 16 bytes, tells whether all say the same; only where they do not,
# or all have failed, an all-gather of the texts finds out who says what.
from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy
from mpi4py import MPI

from .finalizing import HeldRequest
from .waiting import wait_until

_Error = TypeVar('_Error', bound=BaseException)
#: Waits until a function returns a true value, or raises: MPI's own waits
#: would keep the core from other ranks and threads, and hear of no failure.
Waiter = Callable[[Callable[[], bool]], object]

# What a rank says that has failed.
_PROBLEM = (1 << 64) - 1


#: What all ranks of a communicator must have while one has it, by its name.
in_common: list[tuple[MPI.Comm, str]] = []
_THERE = 'there'


def with_common(comm: MPI.Comm, entries: Mapping[str, str]) -> dict[str, str]:
    """Entries with what these ranks must have in common."""
    return {**entries, **{
        name: _THERE for ranks, name in in_common
        if ranks and MPI.Comm.Compare(comm, ranks) != MPI.UNEQUAL}}


def digest(entries: Mapping[str, str]) -> int:
    """63 bits of entries in their order."""
    found = hashlib.blake2b(
        repr(list(entries.items())).encode(), digest_size=8)
    return int.from_bytes(found.digest(), 'big') >> 1


def agree(comm: MPI.Comm, entries: Mapping[str, str], problem: str = '',
          remedy: str = '', error: type[Exception] = ValueError,
          wait: Waiter = wait_until) -> None:
    """Raises the same error on all ranks unless all are in agreement.

    Args:
        comm: The ranks.
        entries: Must be equal on all of them: name to description, e.g.
            ``{'parameter /l1/W': 'float32 (10, 5)'}``; order counts.
        problem: A fault of this rank, '' if none.
        remedy: Added to the message about a difference.
        error: Class of the exception, which names ranks and entry.
        wait: How to wait.
    """
    entries = with_common(comm, entries)
    if not are_equal(comm, _PROBLEM if problem else digest(entries),
                     wait) or problem:
        raise raised_by_all(error(_explain(
            Meeting(comm, wait).say((problem, entries)), remedy)))


def raised_by_all(error: _Error) -> _Error:
    """Marks an error that every rank raises; returns it."""
    vars(error)['raised_by_all'] = True
    return error


def is_raised_by_all(error: BaseException) -> bool:
    """Whether :func:`raised_by_all` has marked it."""
    return 'raised_by_all' in vars(error)


def are_equal(comm: MPI.Comm, number: int, wait: Waiter = wait_until) -> bool:
    """Whether a number, 0 to 2^64 - 1, is the same on all ranks."""
    # The largest, and what is left of 2^64 - 1 by the smallest.
    extremes = numpy.array([number, ~number & (1 << 64) - 1], numpy.uint64)
    wait(HeldRequest(
        comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX), extremes).test)
    return bool(extremes[0] == ~extremes[1])


class Meeting:
    """Exchanges small objects, in one collective call each.

    What is said is pickled and padded to a length that all ranks know; only
    what is longer than ever before takes another call.
    """

    def __init__(self, comm: MPI.Comm, wait: Waiter = wait_until) -> None:
        self.comm, self._wait = comm, wait
        self._room = 256        # bytes; the same on all ranks

    def say(self, thing: Any) -> list[Any]:
        """The things of all ranks, in their order, pickled on the way."""
        words = pickle.dumps(thing)
        while True:
            mine = numpy.frombuffer(
                b'%20d' % len(words) + words[:self._room].ljust(self._room),
                numpy.uint8)
            found = numpy.empty((self.comm.size, mine.size), numpy.uint8)
            self._wait(HeldRequest(self.comm.Iallgather(mine, found), mine,
                                   found).test)
            rows = [row.tobytes() for row in found]
            longest = max(int(row[:20]) for row in rows)
            if longest <= self._room:       # pickles know where they end
                return [pickle.loads(row[20:]) for row in rows]
            self._room = 2 * longest


def raise_together(comm: MPI.Comm, action: Callable[[], Any],
                   error: type[Exception] = RuntimeError,
                   entries: Callable[[Any], Mapping[str, str]] | None = None,
                   remedy: str = '') -> Any:
    """Does ``action``, which must not communicate; fails on all ranks or none.

    ``entries`` gives of the result what must be equal on all ranks, too.
    Where ``action`` raised what is no Exception (a wish to exit), that is
    raised.
    """
    result, problem, own = None, '', None
    found: Mapping[str, str] = {}
    try:
        result = action()
        found = entries(result) if entries else {}
    except BaseException as reason:     # the ranks that wait must hear of it
        problem, own = f'{type(reason).__name__}: {reason}', reason
    try:
        agree(comm, found, problem, remedy, error)
    except error as together:
        if own is not None and not isinstance(own, Exception):
            raise own from None         # a wish to exit
        raise together from own
    return result


def of_first_rank(comm: MPI.Comm, choose: Callable[[], Any]) -> Any:
    """The first rank's result on all ranks, or its error as a ValueError."""
    found, problem = None, None
    try:
        found = choose() if comm.rank == 0 else None
    except Exception as error:
        problem = error if isinstance(error, ValueError) else ValueError(
            f'{type(error).__name__}: {error}')
    found, problem = comm.bcast((found, problem))
    if problem is not None:
        raise raised_by_all(problem)
    return found


def _explain(everyone: Sequence[tuple[str, dict[str, str]]], remedy: str
             ) -> str:
    if texts := {text for text, _ in everyone} - {''}:
        if all(text == min(texts) for text, _ in everyone):
            return f'all ranks: {min(texts)}'
        return '; '.join(f'rank {rank}: {text}' for rank, (text, _)
                         in enumerate(everyone) if text)
    _, first = everyone[0]
    rank, other = next(((rank, other) for rank, (_, other)
                        in enumerate(everyone)
                        if [*other.items()] != [*first.items()]), (0, first))
    sentence, remedy = next(((
        f'{name} is {first.get(name, "missing")} on rank 0 but '
        f'{other.get(name, "missing")} on rank {rank}',
        # What all or none must have is no fault of the rest.
        '' if _THERE in (first.get(name), other.get(name)) else remedy)
        for name in {**first, **other} if first.get(name) != other.get(name)),
        (f'rank 0 and rank {rank} have the same entries in a different order',
         remedy))
    return f'{sentence}. {remedy}'.strip()

"""All ranks agree on what they do and hold, or all raise the same error."""
# A rank that raises alone leaves the others in a collective call for ever.  So
# whatever may fail on one rank is done between two agreements: each rank says
# what it is about to do, as a digest of 63 bits, or that it has failed, as a
# number that no digest is.  One all-reduce of the largest and the smallest
# tells whether all say the same; only where they do not, or all have failed,
# an all-gather of the texts finds out who says what, and all raise the same
# error.  What is reduced is smaller than a packet of any network, so that an
# agreement costs as much as a barrier.
from __future__ import annotations

import collections
import hashlib
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy
from mpi4py import MPI

from .finalizing import HeldRequest, keep_forever
from .waiting import wait_until, world_ranks

_Error = TypeVar('_Error', bound=BaseException)
#: Waits until a function returns a true value, or raises: MPI's own waits
#: would keep the core from other ranks and threads, and hear of no failure.
Waiter = Callable[[Callable[[], bool]], object]

# What a rank says that has failed.
_PROBLEM = (1 << 64) - 1
# Bytes that say how long what a rank says is.
_LENGTH = 8


def digest(entries: Mapping[str, str]) -> int:
    """63 bits of entries in their order."""
    found = hashlib.blake2b(
        repr(list(entries.items())).encode(), digest_size=8)
    return int.from_bytes(found.digest(), 'big') >> 1


def agree(comm: MPI.Comm, entries: Mapping[str, str], problem: str = '',
          remedy: str = '', error: type[Exception] = ValueError,
          wait: Waiter = wait_until) -> None:
    """Raises the same error on all ranks unless all are in agreement.

    Costs one all-reduce of 16 bytes while all is well.

    Args:
        comm: The ranks.
        entries: Must be equal on all of them: name to description, e.g.
            ``{'parameter /l1/W': 'float32 (10, 5)'}``; order counts.
        problem: A fault of this rank, '' if none; all ranks then raise, and
            name this rank.
        remedy: Added to the message about a difference.
        error: Class of the exception.
        wait: How to wait.

    Raises:
        error: The message names the ranks and the entry.
    """
    if not are_equal(comm, _PROBLEM if problem else digest(entries),
                     wait) or problem:
        raise raised_by_all(error(_explain(
            Meeting(comm, wait).say((problem, dict(entries))), remedy)))


def raised_by_all(error: _Error) -> _Error:
    """Marks an error that every rank raises; returns it."""
    vars(error)['raised_by_all'] = True
    return error


def is_raised_by_all(error: BaseException) -> bool:
    """Whether :func:`raised_by_all` has marked it."""
    return 'raised_by_all' in vars(error)


def are_equal(comm: MPI.Comm, number: int, wait: Waiter = wait_until) -> bool:
    """Whether a number of 64 bits, 0 to 2^64 - 1, is the same on all ranks.

    Costs one all-reduce of 16 bytes.
    """
    # The largest, and what is left of 2^64 - 1 by the smallest.
    extremes = numpy.array([number, ~number & (1 << 64) - 1], numpy.uint64)
    wait(HeldRequest(
        comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX), extremes).test)
    return bool(extremes[0] == ~extremes[1])


class Meeting:
    """Exchanges small objects, in one collective call each.

    What is said is pickled and padded to a length that all ranks know; only
    what is longer than ever before takes another call.

    Args:
        comm: The ranks.
        wait: How to wait.
    """

    def __init__(self, comm: MPI.Comm, wait: Waiter = wait_until) -> None:
        self.comm, self._wait = comm, wait
        self._room = 256        # bytes; the same on all ranks

    def say(self, thing: Any) -> list[Any]:
        """The things of all ranks, in their order, pickled on the way."""
        words = pickle.dumps(thing)
        while True:
            mine = numpy.zeros(_LENGTH + self._room, numpy.uint8)
            mine[:_LENGTH].view(numpy.int64)[0] = len(words)
            part = words[:self._room]
            mine[_LENGTH:_LENGTH + len(part)] = numpy.frombuffer(
                part, numpy.uint8)
            found = numpy.empty((self.comm.size, mine.size), numpy.uint8)
            self._wait(HeldRequest(self.comm.Iallgather(mine, found), mine,
                                   found).test)
            lengths = found[:, :_LENGTH].copy().view(numpy.int64)[:, 0]
            longest = int(lengths.max())
            if longest <= self._room:
                return [pickle.loads(row[_LENGTH:_LENGTH + length].tobytes())
                        for row, length in zip(found, lengths.tolist(),
                                               strict=True)]
            self._room = 2 * longest


def raise_together(comm: MPI.Comm, action: Callable[[], Any],
                   error: type[Exception] = RuntimeError,
                   entries: Callable[[Any], Mapping[str, str]] | None = None,
                   remedy: str = '') -> Any:
    """Does ``action``; if it fails on any rank, raises on every rank.

    Args:
        comm: The ranks.
        action: Must not communicate.
        error: Class of the exception; where ``action`` raised what is no
            Exception (a wish to exit), that is raised.
        entries: Gives of the result what must be equal on all ranks, too.
        remedy: As for :func:`agree`.

    Returns:
        What ``action`` returned.
    """
    result, problem, own = None, '', None
    found: Mapping[str, str] = {}
    try:
        result = action()
        if entries is not None:
            found = entries(result)
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
    """Returns the first rank's result on all ranks, or raises its ValueError.

    Another error, which may not be fit to be sent, is a ValueError with its
    text.
    """
    found: Any = None
    problem: ValueError | None = None
    if comm.rank == 0:
        try:
            found = choose()
        except ValueError as error:
            problem = error
        except Exception as error:
            problem = ValueError(f'{type(error).__name__}: {error}')
    found, problem = comm.bcast((found, problem))
    if problem is not None:
        raise raised_by_all(problem)
    return found


def _explain(everyone: Sequence[tuple[str, dict[str, str]]], remedy: str
             ) -> str:
    problems = [f'rank {rank}: {text}'
                for rank, (text, _) in enumerate(everyone) if text]
    if problems:
        texts = {text for text, _ in everyone}
        return (f'all ranks: {texts.pop()}' if len(texts) == 1
                else '; '.join(problems))
    sentence = next(filter(None, (
        _difference(everyone[0][1], other, rank)
        for rank, (_, other) in enumerate(everyone))),
        'the ranks do not agree')
    return f'{sentence}. {remedy}'.strip()


def _difference(first: dict[str, str], other: dict[str, str], rank: int
                ) -> str:
    """One sentence about the first entry that differs; '' if none."""
    for name in {**first, **other}:
        if first.get(name) != other.get(name):
            return (f'{name} is {first.get(name, "missing")} on rank 0 but '
                    f'{other.get(name, "missing")} on rank {rank}')
    if list(first) != list(other):
        return (f'rank 0 and rank {rank} have the same entries in a '
                'different order')
    return ''


# --- who takes part ----------------------------------------------------------

_HERE = 32_301          # a tag; MPI has at least 32,767
# Attendances of these ranks so far.
_numbers: collections.Counter[tuple[int, ...]] = collections.Counter()
#: Seconds after which those that are not there do not take part.
IN_VAIN = 120.0


class Attendance:
    """Finds out whether all take part in what scripts give to each rank.

    A collective call would wait for those that do not for ever; so each rank
    that is there says so to each other one.  Make it on each rank that takes
    part.

    Args:
        comm: All ranks, whether they take part or not.
        what: Takes part, for messages, such as ``'Snapshot'``.
    """

    def __init__(self, comm: MPI.Comm, what: str) -> None:
        self._comm, self._what = comm, what
        self._missing = sorted({*range(comm.size)} - {comm.rank})
        # Nobody may have taken what was sent for an earlier one.
        self._ranks = world_ranks(comm)
        self._number = _numbers[self._ranks] = _numbers[self._ranks] + 1
        for rank in self._missing:
            keep_forever(comm.isend(self._number, rank, _HERE))

    def settle(self) -> None:
        """Waits until all are there; all must have made this object before.

        Raises:
            RuntimeError: After two minutes; names those that are not.
        """
        end = time.monotonic() + IN_VAIN

        def all_there() -> bool:
            for rank in [*self._missing]:
                while rank in self._missing and self._comm.Iprobe(
                        rank, _HERE):
                    if self._comm.recv(
                            source=rank, tag=_HERE) >= self._number:
                        self._missing.remove(rank)
            return not self._missing or time.monotonic() > end
        wait_until(all_there)
        if self._missing:
            _numbers[self._ranks] -= 1      # as those have it
            raise RuntimeError(
                f'rank {self._comm.rank}: {self._what} is on this rank but '
                f'not on rank {", ".join(map(str, self._missing))}; extend '
                'the trainer with it on all ranks')

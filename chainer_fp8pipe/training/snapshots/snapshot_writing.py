"""A snapshot on its way from all ranks to the disk, beside the training.

A thread of each rank computes the digests of the rank's values, and one of
rank 0 writes the file.  Messages are the main thread's alone: whoever owns a
:class:`SnapshotWriting` calls :meth:`~SnapshotWriting.step` now and then, at
the ends of updates, which looks at messages that have arrived and starts
others, and never waits.  So threads and MPI meet nowhere, and no rank has to
do a step when another does: the messages have a communicator of their own.

Rank 0 is sent the digests of all ranks, answers each rank with the keys that
it is to send, and receives their values in their order, some megabytes at a
time, so that it never holds more of the other ranks'.
"""
from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import numpy
from mpi4py import MPI

from ...mpi.forever import keep_forever
from . import snapshot_file
from .json_values import is_plain, to_json
from .snapshot_file import (
    Member,
    SavedValue,
    ValueEntry,
    bytes_of,
    entry_of,
    plan,
)

#: Bytes of other ranks' values that are on their way to rank 0, and as many
#: that wait there for the disk.
WINDOW = 1 << 26
_TABLE, _PLAN, _VALUES, _OUTCOME = range(4)      # tags
# Seconds after which a rank that ends by an error finds that it does so alone:
# the other ranks have ended, or wait for it in an update.
_PATIENCE = 0.5
# Seconds that a disk has for its last piece when a file is given up.
_LAST_PIECE = 0.1

_Way = Generator[None, None, Any]


def prepared(state: Mapping[str, numpy.ndarray],
             copies: dict[str, numpy.ndarray] | None = None
             ) -> dict[str, SavedValue]:
    """The values of a state as the file has them.

    Args:
        state: Arrays by their keys.
        copies: If given, arrays are copied, so that they may change
            afterwards: into those of the last time, where they fit, as the
            system takes several times as long to give new memory.  Those of
            this time are left here.

    Raises:
        TypeError: A value cannot be saved; the key is named.
    """
    values, last = {}, copies or {}
    for key, value in state.items():
        if is_plain(value.dtype):
            if value.dtype.itemsize == 0:       # empty texts
                value = value.astype(f'{value.dtype.kind}1')
            values[key] = SavedValue(
                numpy.asarray(value, order='C') if copies is None
                else _copy(value, last.get(key)))
            continue
        try:
            text = to_json(value if value.shape else value[()])
            values[key] = SavedValue(numpy.frombuffer(text, numpy.uint8), True)
        except TypeError as error:
            raise TypeError(
                f'{key} cannot be saved: {error}; serialize arrays, numbers, '
                'texts, and lists and dictionaries of them') from None
    if copies is not None:
        copies.clear()
        copies.update({key: value.array for key, value in values.items()
                       if not value.is_json})
    return values


def _copy(value: numpy.ndarray, last: numpy.ndarray | None) -> numpy.ndarray:
    if last is None or (last.shape, last.dtype) != (value.shape, value.dtype):
        return numpy.array(value, order='C', copy=True)
    last[...] = value
    return last


class SnapshotWriting:
    """The writing of one snapshot.  Make it on all ranks, and step it.

    Args:
        comm: All ranks; a duplicate is made of it.
        path: The file.
        values: This rank's, of :func:`prepared`; the arrays must not change
            before :meth:`step` returns True.
        communicator: The names of the job's communicators.
        after: What rank 0's thread does when the file is whole.
    """

    def __init__(self, comm: MPI.Comm, path: str,
                 values: dict[str, SavedValue], communicator: str,
                 after: Callable[[], None] = lambda: None) -> None:
        self.path = path
        #: Why the file could not be written; '' while that is not known, and
        #: if it was.
        self.problem = ''
        self.is_done = False
        self._comm = comm.Dup()
        self._values = values
        self._after = after
        self._digests = _Digests(values)
        self._writer: _FileWriter | None = None
        self._all_end: MPI.Request | None = None
        self._ends_since = 0.0
        self._way = (self._send() if comm.rank else self._receive(
            communicator))

    def step(self) -> bool:
        """Does what can be done without waiting; True when all is over."""
        if not self.is_done:
            try:
                self.is_done = next(self._way, self) is self
            except BaseException as error:
                self.is_done = True
                self.problem = f'{type(error).__name__}: {error}'
                self._give_up()
                raise
        return self.is_done

    def free(self) -> None:
        """Frees the communicator; on all ranks, after the last step."""
        self._comm.Free()

    def step_at_an_error(self, clock: Callable[[], float] = time.monotonic
                         ) -> bool:
        """A step of a rank that ends by an error, which others may not.

        Returns True when all is over: the file is whole, or this rank has
        waited for half a second, and not all others end by an error, too.
        The snapshot was given up then, and no half file is left.
        """
        if self._all_end is None:
            self._all_end = self._comm.Ibarrier()
            self._ends_since = clock()
        if self.step():
            return True
        if self._all_end.Test() or clock() - self._ends_since < _PATIENCE:
            return False
        self._give_up()
        return True

    def _give_up(self) -> None:
        if self._writer:
            self._writer.give_up()
        keep_forever(self)      # with the memory of its messages

    # --- the ways of the ranks, which yield where they wait ------------------
    #
    # A rank that fails on its way says so in place of what is expected of it,
    # so that all others hear of it, and none waits.

    def _send(self) -> _Way:
        """Of the ranks that send their values."""
        table = yield from self._table()
        yield from self._send_object(table, 0, _TABLE)
        keys = yield from self._receive_object(0, _PLAN)
        self._values = {key: self._values[key] for key in keys}
        for window in _windows([table[key].size for key in keys]):
            requests = [self._comm.Isend(
                [bytes_of(self._values[keys[number]].array)[start:stop],
                 MPI.BYTE], 0, _VALUES) for number, start, stop in window]
            yield from self._until(
                functools.partial(MPI.Request.Testall, requests))
            for number, _, stop in window:
                if stop == table[keys[number]].size:
                    del self._values[keys[number]]
        self._values = {}
        self.problem = yield from self._receive_object(0, _OUTCOME)

    def _receive(self, communicator: str) -> _Way:
        """Of rank 0, which writes."""
        tables = [(yield from self._table())]
        for rank in range(1, self._comm.size):
            tables.append((yield from self._receive_object(rank, _TABLE)))
        problem = '; '.join(f'rank {rank}: {table}'
                            for rank, table in enumerate(tables)
                            if isinstance(table, str))
        if not problem:
            try:
                self._writer = _FileWriter(self.path, communicator,
                                           self._comm.size, self._after)
            except RuntimeError as error:       # no thread is left
                problem = f'rank 0: {type(error).__name__}: {error}'
        parts = plan(tables) if not problem else [[] for _ in tables]
        for rank in range(1, self._comm.size):
            yield from self._send_object([key for _, key, _ in parts[rank]],
                                         rank, _PLAN)
        if self._writer:
            problem = yield from self._write(self._writer, tables, parts)
        self._values = {}
        self.problem = problem
        for rank in range(1, self._comm.size):
            yield from self._send_object(self.problem, rank, _OUTCOME)

    def _write(self, writer: _FileWriter, tables: list[Any],
               parts: list[list[Any]]) -> _Way:
        """Gives all values to the writer; returns the problem, '' if none."""
        for prefix, key, ranks in parts[0]:
            writer.put(Member(prefix + key, self._values[key],
                              tables[0][key], ranks))
        self._values = {}
        for rank in range(1, self._comm.size):
            yield from self._receive_values(rank, [
                (prefix + key, tables[rank][key], ranks)
                for prefix, key, ranks in parts[rank]], writer)
        writer.close()
        yield from self._until(lambda: not writer.is_alive())
        return writer.problem

    def _receive_values(self, rank: int, part: list[
            tuple[str, ValueEntry, list[int] | None]], writer: _FileWriter
            ) -> _Way:
        arrays: dict[int, numpy.ndarray] = {}
        for window in _windows([entry.size for _, entry, _ in part]):
            requests = []
            for number, start, stop in window:
                if start == 0:
                    arrays[number] = part[number][1].empty()
                requests.append(self._comm.Irecv(
                    [bytes_of(arrays[number])[start:stop], MPI.BYTE], rank,
                    _VALUES))
            yield from self._until(
                functools.partial(MPI.Request.Testall, requests))
            for number, _, stop in window:
                name, entry, ranks = part[number]
                if stop == entry.size:
                    writer.put(Member(name, SavedValue(
                        arrays.pop(number), entry.is_json), entry, ranks))
            yield from self._until(lambda: writer.waiting <= WINDOW)

    def _table(self) -> _Way:
        """The entries of this rank's values; why there are none."""
        yield from self._until(lambda: not self._digests.is_alive())
        return self._digests.problem or self._digests.table

    def _until(self, done: Callable[[], bool]) -> _Way:
        while not done():
            yield

    def _send_object(self, value: Any, rank: int, tag: int) -> _Way:
        request = self._comm.isend(value, rank, tag)
        yield from self._until(lambda: request.test()[0])

    def _receive_object(self, rank: int, tag: int) -> _Way:
        # A request of its own knows no size before the message is there.
        while (message := self._comm.improbe(rank, tag)) is None:
            yield
        request = message.irecv()
        while not (answer := request.test())[0]:
            yield
        return answer[1]


def _windows(sizes: Iterable[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts values into messages, some of which are sent at a time.

    Yields lists of (number, start, stop): a value's place in ``sizes`` and a
    range of its bytes; a value of no bytes has one range, which is empty.
    """
    window: list[tuple[int, int, int]] = []
    room = WINDOW
    for number, size in enumerate(sizes):
        start = 0
        while True:
            stop = min(start + room, size)
            window.append((number, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield window
                window, room = [], WINDOW
            if start == size:
                break
    if window:
        yield window


class _Digests(threading.Thread):
    """Computes what a rank says of its values; without the interpreter."""

    def __init__(self, values: dict[str, SavedValue]) -> None:
        super().__init__(name='digests of a snapshot', daemon=True)
        self.table: dict[str, ValueEntry] = {}
        self.problem = ''
        self._saved: dict[str, SavedValue] | None = values
        try:
            self.start()
        except RuntimeError:        # no thread is left: the training waits
            self.run()

    def run(self) -> None:
        """Fills the table."""
        try:
            self.table = {key: entry_of(value) for key, value
                          in (self._saved or {}).items()}
        except Exception as error:      # rank 0 is told
            self.problem = f'{type(error).__name__}: {error}'
        self._saved = None


class _FileWriter(threading.Thread):
    """Writes a file from what it is given; ends after :meth:`close`."""

    def __init__(self, path: str, communicator: str, ranks: int,
                 after: Callable[[], None]) -> None:
        super().__init__(name='writer of a snapshot', daemon=True)
        self.problem = ''
        #: Bytes that were put and are not written.
        self.waiting = 0
        self._lock = threading.Lock()
        self._path, self._after = path, after
        self._job = communicator, ranks
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._is_given_up = False
        self.start()

    def put(self, member: Member) -> None:
        """Gives it another member of the file."""
        with self._lock:
            self.waiting += member.entry.size
        self._given.put(member)

    def close(self) -> None:
        """Says that the file has all members."""
        self._given.put(None)

    def give_up(self) -> None:
        """Says that the file is not wanted any more; it is removed.

        Unless the disk holds the thread for longer than a moment.
        """
        self._is_given_up = True
        self.close()                # it may wait for the next member
        self.join(_LAST_PIECE)

    def run(self) -> None:
        """Writes; takes all that comes also where it cannot write."""
        members = self._members()
        try:
            snapshot_file.write(self._path, members, *self._job, self._check)
            self._after()
        except Exception as error:
            self.problem = f'rank 0: {type(error).__name__}: {error}'
            with contextlib.suppress(_GivenUp):
                for _ in members:
                    pass

    def _members(self) -> Iterator[Member]:
        while (member := self._given.get()) is not None:
            yield member
            with self._lock:
                self.waiting -= member.entry.size
        self._check()

    def _check(self) -> None:
        if self._is_given_up:
            raise _GivenUp


class _GivenUp(RuntimeError):
    """The end of a file that is never complete."""

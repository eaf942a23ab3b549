"""All ranks' values on their way to a snapshot's file, and back."""
# Writing happens beside the training.  A thread of each rank computes the
# digests of its values, and one of rank 0 writes the file.  Messages are the
# main thread's alone: whoever owns a SnapshotWriting calls step() now and
# then, at the ends of updates, which looks at what has arrived, starts what
# can be started, and never waits.  So threads and MPI meet nowhere, and no
# rank has to do a step when another does: the messages have a communicator
# of their own.
#
# Rank 0 is sent the digests of all ranks, answers each with the names of
# what it is to send (what the first rank that has a key has is sent once),
# and receives that in order, WINDOW bytes at a time, so that it never holds
# more of other ranks' values than that, and as much that waits for the disk.
#
# A rank that fails on its way says so in place of what is expected of it: all
# others hear of it, and none waits.
#
# Reading is a collective.  Rank 0 alone touches the file, and each rank
# compares what it is sent with the digests that the writers computed.
from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ...mpi.finalizing import keep_forever
from . import file
from .file import (
    JSON,
    Content,
    DamagedSnapshot,
    Entry,
    Member,
    SnapshotIndex,
    bytes_of,
    entry_of,
    plan,
)
from .json_values import from_json, is_plain, object_array, to_json

#: Bytes of other ranks' values that are on their way to rank 0, and as many
#: that wait there for the disk.
WINDOW = 1 << 26
_TABLE, _PLAN, _VALUES, _OUTCOME = range(4)      # tags
# Seconds after which a rank that ends by an error finds that it does so alone:
# the other ranks have ended, or wait for it in an update.
_PATIENCE = 0.5
# Seconds that a disk has for its last piece when a file is given up.
_LAST_PIECE = 0.1

State = dict[str, numpy.ndarray]
_Way = Generator[None, None, Any]


def prepared(state: State, copies: State | None = None) -> State:
    """The values of a state as the file has them: plain arrays, or JSON.

    Args:
        state: Arrays by their keys.
        copies: If given, arrays are copied, so that they may change
            afterwards: into those of the last time, where they fit, as the
            system takes several times as long to give new memory.  Those of
            this time are left here.

    Raises:
        TypeError: A value cannot be saved; the key is named.
    """
    values, last = {}, dict(copies or {})
    for key, value in state.items():
        if is_plain(value.dtype):
            if value.dtype.itemsize == 0:       # empty texts
                value = value.astype(f'{value.dtype.kind}1')
            copy = last.get(key)
            if copies is None:
                values[key] = numpy.asarray(value, order='C')
            elif copy is not None and (copy.shape, copy.dtype) == (
                    value.shape, value.dtype):
                copy[...] = value
                values[key] = copy
            else:
                values[key] = numpy.array(value, order='C', copy=True)
            continue
        try:
            values[key] = numpy.frombuffer(
                to_json(value if value.shape else value[()]), JSON)
        except TypeError as error:
            raise TypeError(
                f'{key} cannot be saved: {error}; serialize arrays, numbers, '
                'texts, and lists and dictionaries of them') from None
    if copies is not None:
        copies.clear()
        copies.update(values)
    return values


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

    def __init__(self, comm: MPI.Comm, path: str, values: State,
                 communicator: str, after: Callable[[], None] = lambda: None
                 ) -> None:
        self.path = path
        #: Why the file could not be written; '' while that is not known, and
        #: if it was.
        self.problem = ''
        self.is_done = False
        self._comm = comm.Dup()
        self._values = values
        self._after = after
        self._digests = _Thread('digests of a snapshot', lambda: {
            key: entry_of(value) for key, value in values.items()})
        try:
            self._digests.start()
        except RuntimeError:        # no thread is left: the training waits
            self._digests.run()
        self._writer: _FileWriter | None = None
        self._all_end: MPI.Request | None = None
        self._ends_since = 0.0
        self._way = (self._send() if comm.rank else
                     self._receive(communicator))

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

    def _send(self) -> _Way:
        """Of the ranks that send their values."""
        table = yield from self._table()
        yield from self._send_object(table, 0, _TABLE)
        keys = yield from self._receive_object(0, _PLAN)
        arrays = [bytes_of(self._values[key]) for key in keys]
        requests = [self._comm.Isend(
            [arrays[number][start:stop], MPI.BYTE], 0, _VALUES)
            for window in _windows(map(len, arrays))
            for number, start, stop in window]
        yield from self._until(lambda: MPI.Request.Testall(requests))
        self._values = {}
        self.problem = yield from self._receive_object(0, _OUTCOME)

    def _receive(self, communicator: str) -> _Way:
        """Of rank 0, which writes."""
        others = range(1, self._comm.size)
        tables = [(yield from self._table())]
        for rank in others:
            tables.append((yield from self._receive_object(rank, _TABLE)))
        self.problem = '; '.join(
            f'rank {rank}: {table}' for rank, table in enumerate(tables)
            if isinstance(table, str))
        names: list[list[str]] = [[] for _ in tables]
        if not self.problem:
            owners, names = plan(tables)
            try:
                self._writer = _FileWriter(self.path, communicator,
                                           self._comm.size, owners,
                                           self._after)
            except RuntimeError as error:       # no thread is left
                self.problem = f'rank 0: {type(error).__name__}: {error}'
                names = [[] for _ in tables]
        for rank in others:
            yield from self._send_object(
                [name.partition('/')[2] for name in names[rank]], rank, _PLAN)
        if writer := self._writer:
            for rank, table in enumerate(tables):
                yield from self._write(writer, rank, [
                    (name, table[name.partition('/')[2]])
                    for name in names[rank]])
            writer.close()
            yield from self._until(lambda: not writer.thread.is_alive())
            if writer.thread.problem:
                self.problem = f'rank 0: {writer.thread.problem}'
        for rank in others:
            yield from self._send_object(self.problem, rank, _OUTCOME)

    def _write(self, writer: _FileWriter, rank: int,
               part: list[tuple[str, Entry]]) -> _Way:
        """Gives a rank's values to the writer."""
        if rank == 0:
            for name, entry in part:
                writer.put(Member(name, self._values[
                    name.partition('/')[2]], entry))
            self._values = {}
            return
        arrays: dict[int, numpy.ndarray] = {}
        for window in _windows(entry.size for _, entry in part):
            requests: list[MPI.Request] = []
            for number, start, stop in window:
                if start == 0:
                    arrays[number] = part[number][1].empty()
                requests.append(self._comm.Irecv(
                    [bytes_of(arrays[number])[start:stop], MPI.BYTE], rank,
                    _VALUES))
            yield from self._until(
                functools.partial(MPI.Request.Testall, requests))
            for number, _, stop in window:
                name, entry = part[number]
                if stop == entry.size:
                    writer.put(Member(name, arrays.pop(number), entry))
            yield from self._until(lambda: writer.waiting <= WINDOW)

    def _table(self) -> _Way:
        """The entries of this rank's values; why there are none."""
        yield from self._until(lambda: not self._digests.is_alive())
        return self._digests.problem or self._digests.result

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
    """Cuts values into messages, some of which are received at a time.

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


class _Thread(threading.Thread):
    """Does something beside the training, and keeps what came of it."""

    def __init__(self, name: str, action: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.result: Any = None
        self.problem = ''
        self._action: Callable[[], Any] | None = action

    def run(self) -> None:
        """Does it."""
        assert self._action is not None
        try:
            self.result = self._action()
        except Exception as error:      # all ranks are told
            self.problem = f'{type(error).__name__}: {error}'
        self._action = None             # with the values that it holds


class _FileWriter:
    """A thread that writes what it is given, until :meth:`close`."""

    def __init__(self, path: str, communicator: str, ranks: int,
                 owners: dict[str, list[int]], after: Callable[[], None]
                 ) -> None:
        #: Bytes that were put and are not written.
        self.waiting = 0
        self._lock = threading.Lock()
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._is_given_up = False

        def write() -> None:
            members = self._members()
            try:
                file.write(path, members, communicator, ranks, owners,
                           self._check)
                after()
            except Exception:
                with contextlib.suppress(_GivenUp):
                    for _ in members:       # all that still comes
                        pass
                raise
        self.thread = _Thread('writer of a snapshot', write)
        self.thread.start()

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
        self.thread.join(_LAST_PIECE)

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


# --- reading -----------------------------------------------------------------

def read(comm: MPI.Comm, content: Content | None, index: SnapshotIndex,
         wanted: numpy.ndarray, is_own: Callable[[str], bool]) -> State:
    """Reads this rank's values from the file; call it on all ranks.

    Args:
        comm: The ranks.
        content: The open file on rank 0, None elsewhere.
        index: The file's, on all ranks.
        wanted: bool array: whether this rank wants each of the index's keys.
        is_own: Whether each rank takes its own value of a key, where it had
            another than the first rank.

    Raises:
        ValueError: The file is damaged, or a value was on its way; on all
            ranks.
    """
    wishes = numpy.array(comm.allgather(wanted))
    # What every rank takes, such as all of a data-parallel model.
    common = [takers.all() and not (
        is_own(key) and not index.is_same_everywhere(key))
        for key, takers in zip(index.keys, wishes.T, strict=True)]
    found: dict[str, Any] = {}
    problem: Exception | None = None

    def answer(name: str) -> Any:
        """After an error None: the others wait for all their values."""
        nonlocal problem
        if problem is None and content is not None:
            try:
                return content.read(name)
            except Exception as error:
                problem = error
        return None

    for number, key in enumerate(index.keys):
        takers = numpy.flatnonzero(wishes[:, number]).tolist()
        names = [index.name(key, rank if is_own(key) else None)
                 for rank in takers]
        if common[number]:
            found[names[0]] = comm.bcast(
                answer(names[0]) if content is not None else None)
        elif content is not None:
            values = {name: answer(name) for name in dict.fromkeys(names)}
            for rank, name in zip(takers, names, strict=True):
                if rank == 0:
                    found[name] = values[name]
                else:
                    comm.send(values[name], rank)
        elif comm.rank in takers:
            found[names[takers.index(comm.rank)]] = comm.recv(source=0)
    return raise_together(comm, lambda: _restored(found, index, problem),
                          error=ValueError)


def _restored(found: dict[str, Any], index: SnapshotIndex,
              problem: Exception | None) -> State:
    """The values that were sent with the names of their members."""
    if problem is not None:
        raise problem
    state = {}
    for name, array in found.items():
        if array is None:       # rank 0 has the problem
            continue
        if entry_of(array) != index.entries[name]:
            raise DamagedSnapshot(
                f'{index.path}: {name} came with other bits than it was '
                'saved with; look at memory and disk of rank 0, and resume '
                'again')
        if array.dtype == JSON:
            array = object_array(from_json(array.tobytes()))
        state[name.partition('/')[2]] = array
    return state

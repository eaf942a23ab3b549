"""All ranks' values on their way to a snapshot's file, and back."""
# Writing happens beside the training.  A thread of each rank computes the
# digests of its values, and one of rank 0 writes the file.  Messages are the
# main thread's alone: whoever owns a SnapshotWriting calls step() now and
# then, at the ends of updates, which looks at what has arrived, starts what
# can be started, and never waits.  So threads and MPI meet nowhere, and no
# rank has to do a step when another does: the messages have a communicator
# of their own.
#
# Rank 0 is sent the digests of all ranks.  Then it asks one rank after the
# other for what it lacks (what several ranks have it asks of the first), for
# WINDOW bytes or one value at a time; as much waits there for the disk.  Its
# last message is the outcome.
#
# A rank that fails on its way says so in place of what is expected of it: all
# others hear of it, and none waits.
#
# Reading is a collective.  Rank 0 alone touches the file, and each rank
# compares what it is sent with the digests that the writers computed.
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI
from mpi4py.util import pkl5

from ...mpi.agreement import raise_together
from ...mpi.finalizing import keep_forever
from . import file
from .file import Content, DamagedSnapshot, SnapshotIndex, State, value_of

WINDOW = 1 << 26
# Seconds after which a rank that ends by an error finds that it does so alone:
# the other ranks have ended, or wait for it in an update.
_PATIENCE = 0.5
# Seconds that a disk has for its last piece when a file is given up.
_LAST_PIECE = 0.1

_Way = Generator[None, None, Any]


class Entry(NamedTuple):
    """What is known of a value without it."""

    digest: str
    size: int               # bytes


def plan(tables: Sequence[dict[str, Entry]]
         ) -> tuple[dict[str, list[int]], list[dict[str, str]]]:
    """Decides which rank sends which values, by the entries of all ranks.

    Returns:
        Which ranks have a key, and for each rank the keys that come from it,
        with the names of the members.
    """
    owners: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for key in table:
            owners.setdefault(key, []).append(rank)
    return owners, [
        {key: f'all/{key}' if owners[key][0] == rank else f'rank{rank}/{key}'
         for key, entry in table.items()
         if owners[key][0] == rank or tables[owners[key][0]][key] != entry}
        for rank, table in enumerate(tables)]


class SnapshotWriting:
    """The writing of one snapshot.  Make it on all ranks, and step it.

    Args:
        comm: All ranks; a duplicate is made of it.
        path: The file.
        values: This rank's, of :func:`~.file.prepared`; the arrays must not
            change before :meth:`step` returns True.
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
        # Its messages are the arrays themselves, not copies in a pickle.
        self._comm: Any = pkl5.Intracomm(comm.Dup())
        self._values = values
        self._digests = _Thread('digests of a snapshot', lambda: {
            key: Entry(file.digest_of(value), value.nbytes)
            for key, value in values.items()})
        try:
            self._digests.start()
        except RuntimeError:        # no thread is left: the training waits
            self._digests.run()
        self._writer: _Writer | None = None
        self._all_end: MPI.Request | None = None
        self._ends_since = 0.0
        self._way = (self._send() if comm.rank else
                     self._receive(communicator, after))

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
            self._writer.close(is_wanted=False)
            self._writer.join(_LAST_PIECE)
        keep_forever(self)      # with the memory of its messages

    # --- the ways of the ranks, which yield where they wait ------------------

    def _send(self) -> _Way:
        """Of the ranks that send their values."""
        table = yield from self._table()
        yield from self._put(table, 0)
        while isinstance(asked := (yield from self._take(0)), list):
            yield from self._put([self._values[key] for key in asked], 0)
        self._values = {}
        self.problem = asked

    def _receive(self, communicator: str, after: Callable[[], None]) -> _Way:
        """Of rank 0, which writes."""
        tables = [(yield from self._table())]
        for rank in range(1, self._comm.size):
            tables.append((yield from self._take(rank)))
        self.problem = '; '.join(
            f'rank {rank}: {table}' for rank, table in enumerate(tables)
            if isinstance(table, str))
        if not self.problem:
            problem = yield from self._write(tables, communicator, after)
            self.problem = problem and f'rank 0: {problem}'
        for rank in range(1, self._comm.size):
            yield from self._put(self.problem, rank)

    def _write(self, tables: list[dict[str, Entry]], communicator: str,
               after: Callable[[], None]) -> _Way:
        """Gives all values to a writer; returns why it has failed."""
        owners, names = plan(tables)
        try:
            writer = self._writer = _Writer(
                lambda members: file.write(
                    self.path, members, communicator, len(tables), owners),
                after)
        except RuntimeError as error:       # no thread is left
            return f'{type(error).__name__}: {error}'
        for key, name in names[0].items():
            writer.put(name, self._values[key], tables[0][key].digest)
        self._values = {}
        for rank, table in list(enumerate(tables))[1:]:
            for keys in _windows(names[rank], table):
                yield from self._put(keys, rank)
                arrays = yield from self._take(rank)
                for key, array in zip(keys, arrays, strict=True):
                    writer.put(names[rank][key], array, table[key].digest)
                del arrays      # or it would be kept until the next came
                yield from _until(lambda: writer.waiting <= WINDOW)
        writer.close()
        yield from _until(lambda: not writer.is_alive())
        return writer.problem

    def _table(self) -> _Way:
        """The entries of this rank's values; why there are none."""
        yield from _until(lambda: not self._digests.is_alive())
        return self._digests.problem or self._digests.result

    def _put(self, value: Any, rank: int) -> _Way:
        request = self._comm.isend(value, rank)
        yield from _until(lambda: request.test()[0])

    def _take(self, rank: int) -> _Way:
        # A request of its own knows no size before the message is there.
        while (message := self._comm.improbe(rank)) is None:
            yield
        request = message.irecv()
        while not (answer := request.test())[0]:
            yield
        return answer[1]


def _until(done: Callable[[], bool]) -> _Way:
    while not done():
        yield


def _windows(keys: dict[str, str], table: dict[str, Entry]
             ) -> Iterator[list[str]]:
    """Some of a rank's keys at a time."""
    window, size = [], 0
    for key in keys:
        window.append(key)
        size += table[key].size
        if size >= WINDOW:
            yield window
            window, size = [], 0
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


class _Writer(_Thread):
    """Writes the members that it is given, until :meth:`close`."""

    def __init__(self, write: Callable[[Iterator[Any]], None],
                 after: Callable[[], None]) -> None:
        def act() -> None:
            write(self._members())
            after()
        super().__init__('writer of a snapshot', act)
        self._put_bytes = self._written_bytes = 0   # each of one thread
        self._given: SimpleQueue[Any] = SimpleQueue()
        self.start()

    @property
    def waiting(self) -> int:
        """Bytes that were put and are not written; 0 after a failure."""
        return (self._put_bytes - self._written_bytes if self.is_alive()
                else 0)

    def put(self, *member: Any) -> None:
        """Gives it the name, array and digest of another member."""
        if self.is_alive():         # or nobody would take it
            self._put_bytes += member[1].nbytes
            self._given.put(member)

    def close(self, is_wanted: bool = True) -> None:
        """Says that all members were put, or that the file is given up."""
        self._given.put(is_wanted)

    def _members(self) -> Iterator[tuple[str, numpy.ndarray, str]]:
        while not isinstance(member := self._given.get(), bool):
            yield member
            self._written_bytes += member[1].nbytes
        if not member:
            raise RuntimeError('the snapshot is given up')


# --- reading -----------------------------------------------------------------

#: What a rank takes of a key: nothing, the first rank's value, or its own.
NOTHING, FIRST, OWN = range(3)


def read(comm: MPI.Comm, content: Content | None, index: SnapshotIndex,
         wishes: numpy.ndarray) -> State:
    """Reads this rank's values from the file; call it on all ranks.

    Args:
        comm: The ranks.
        content: The open file on rank 0, None elsewhere.
        index: The file's, on all ranks.
        wishes: What this rank takes of each of the index's keys.

    Raises:
        ValueError: The file is damaged, or a value was on its way; on all
            ranks.
    """
    found: dict[str, tuple[str, Any]] = {}
    everyone = numpy.array(comm.allgather(wishes))
    for key, takers in zip(index.owners, everyone.T, strict=True):
        receivers: dict[str, list[int]] = {}    # by names of members
        for rank in numpy.flatnonzero(takers).tolist():
            receivers.setdefault(index.name(
                key, rank if takers[rank] == OWN else None), []).append(rank)
        for name, ranks in receivers.items():
            value = _delivered(comm, content, name, ranks)
            if comm.rank in ranks:
                found[key] = name, value
    return raise_together(comm, lambda: _checked(found, index),
                          error=ValueError)


def _delivered(comm: MPI.Comm, content: Content | None, name: str,
               ranks: list[int]) -> Any:
    """A member that these ranks get from rank 0, or why it has none."""
    value: Any = None
    if content is not None:
        try:
            value = content.read(name)
        except Exception as error:      # the others wait for something
            value = error
    if len(ranks) == comm.size:         # as all of a replica's model
        return comm.bcast(value)
    if comm.rank == 0:
        for rank in set(ranks) - {0}:
            comm.send(value, rank)
    elif comm.rank in ranks:
        value = comm.recv(source=0)
    return value


def _checked(found: dict[str, tuple[str, Any]], index: SnapshotIndex
             ) -> State:
    """The values that have come, which are those that were saved."""
    state = {}
    for key, (name, value) in found.items():
        if isinstance(value, Exception):
            raise value
        if file.digest_of(value) != index.digests[name]:
            raise DamagedSnapshot(
                f'{index.path}: {name} came with other bits than it was '
                'saved with; look at memory and disk of rank 0, and resume '
                'again')
        state[key] = value_of(value)
    return state

"""Memory that the other ranks of a node read where it lies."""
# A rank's part of the node's memory is a file without a name (memfd_create),
# far longer than what is used: what nobody has touched takes no memory.
# Neighbours open it where /proc shows this process's files, once and whole, so
# that what is allocated later is there for them, too.  In it lie what chunks
# send, and a Mail (messages.h) for each message to a neighbour.
from __future__ import annotations

import collections
import functools
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..mpi.ranks import machine_name

#: Bytes of addresses, not of memory.
RESERVED = 1 << 36
#: Bytes of a Mail in compiled code.
MAIL = 64
_PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16


class Name(NamedTuple):
    """Where the memory of a process is found."""

    place: str
    pid: int
    file: int
    token: bytes    # that it begins with


class NodeMemory:
    """Arrays that neighbours can read.

    Attributes:
        address: Of the first byte, in this process.
        name: What neighbours need to find it.

    Raises:
        OSError: The system has no such memory.
    """

    def __init__(self) -> None:
        if not hasattr(os, 'memfd_create'):
            raise OSError('this system has no memfd_create')
        self._file = os.memfd_create('chainer_fp8pipe')
        os.ftruncate(self._file, RESERVED)
        self._mapped = mmap.mmap(self._file, RESERVED)
        self.address = _address(self._mapped)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        self._holes = [(0, RESERVED)]       # (start, stop), in order
        self._token = self.empty(_TOKEN_BYTES)
        self._token[...] = numpy.frombuffer(
            os.urandom(_TOKEN_BYTES), numpy.uint8)
        self.name = Name(_place(), self._pid, self._file,
                         self._token.tobytes())

    def empty(self, nbytes: int) -> numpy.ndarray:
        """uint8[nbytes] that begins a page; given back with its last view.

        Raises:
            MemoryError: There are not so many addresses in one piece.
        """
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        with self._lock:
            self._take_back()
            place = next((place for place, (start, stop)
                          in enumerate(self._holes) if stop - start >= size),
                         None)
            if place is None:
                raise MemoryError(
                    f'{nbytes / 2 ** 30:.1f} GiB for messages between ranks '
                    f'of a node exceed the rest of {RESERVED >> 30} GiB; '
                    'lower frame_bytes, or pass shared_memory=False, to '
                    'create_communicator')
            start, stop = self._holes[place]
            self._holes[place:place + 1] = (
                [(start + size, stop)] if start + size < stop else [])
        block = _Block((nbytes,), numpy.uint8, self._mapped, start)
        weakref.finalize(block, self._free, start, start + size
                         ).atexit = False
        return numpy.asarray(block)

    def _free(self, start: int, stop: int) -> None:
        # A process that was forked off has not the right.  Blocks may be
        # freed at any moment, even inside of empty(), so this takes no lock.
        if os.getpid() == self._pid:
            self._freed.append((start, stop))

    def _take_back(self) -> None:
        while self._freed:
            start, stop = self._freed.popleft()
            self._mapped.madvise(mmap.MADV_REMOVE, start, stop - start)
            self._holes.append((start, stop))
        self._holes.sort()
        joined: list[tuple[int, int]] = []
        for start, stop in self._holes:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        self._holes = joined


class _Block(numpy.ndarray):
    """A block of memory, which lives as long as any view of it."""


class Neighbour(NamedTuple):
    """Another rank of this node.

    Attributes:
        rank: Its number.
        address: Of its memory, in this process.
        inbox: Address of the Mails that it writes for this rank.
        outbox: Address of those that this rank writes for it.
    """

    rank: int
    address: int
    inbox: int
    outbox: int


# A neighbour may look at its Mails when this rank has done with them.
_outboxes: list[numpy.ndarray] = []


def meet(comm: MPI.Comm, mails: int) -> tuple[Neighbour, ...]:
    """Finds the other ranks of this node, and makes Mails; on all ranks.

    Neighbours are those that can open each other's memory.  Mails stay until
    the process ends.

    Args:
        comm: The ranks.
        mails: For each neighbour; the most that any rank asks for.
    """
    memory = node_memory()
    found = comm.allgather((mails, memory and memory.name))
    mails = max(mails for mails, _ in found)
    opened = {rank: address for rank, (_, name) in enumerate(found)
              if memory and name and rank != comm.rank
              for address in [_opened(memory.name, name)] if address}
    mine = dict.fromkeys(opened, 0)
    if memory and opened:
        outbox = memory.empty(len(opened) * mails * MAIL)
        outbox[...] = 0
        _outboxes.append(outbox)
        mine = {rank: outbox.ctypes.data + place * mails * MAIL
                for place, rank in enumerate(opened)}
    # By rank, where in the writer's memory its reader finds its Mails.
    offsets = comm.allgather(
        {rank: address - memory.address for rank, address in mine.items()}
        if memory else {})
    return tuple(Neighbour(
        rank, address, address + offsets[rank][comm.rank], mine[rank])
        for rank, address in opened.items() if comm.rank in offsets[rank])


@functools.cache
def node_memory() -> NodeMemory | None:
    """This process's; None: the system has none."""
    try:
        return NodeMemory()
    except (OSError, ValueError, OverflowError):
        return None


def _address(mapped: mmap.mmap) -> int:
    return numpy.frombuffer(mapped, numpy.uint8, 1).ctypes.data


def _opened(mine: Name, other: Name) -> int:
    """Address of another process's memory; 0: it cannot be read here."""
    if mine.place != other.place:
        return 0
    try:
        return _address(_mapped(other))
    except (OSError, ValueError):
        return 0


@functools.cache
def _mapped(name: Name) -> mmap.mmap:
    opened = os.open(f'/proc/{name.pid}/fd/{name.file}', os.O_RDWR)
    try:
        mapped = mmap.mmap(opened, RESERVED)    # longer than other files
    finally:
        os.close(opened)
    # The file's number may have been another's for a moment.
    if mapped[:_TOKEN_BYTES] != name.token:
        raise ValueError(f'process {name.pid} has other memory')
    return mapped


def _place() -> str:
    """The same where process ids mean the same processes."""
    return machine_name() + os.readlink('/proc/self/ns/pid')

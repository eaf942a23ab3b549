"""Memory in which the ranks of a node find their messages."""
# A sender writes a message once, past the processor's caches, and the other
# sums or decodes it where it lies, where MPI would copy it twice.
#
# Each rank's part is a file without a name (memfd_create) that neighbours open
# in /proc.  For each flight (_engine.c) and each message to a neighbour it has
# a line that says "it is there" (a Mail), and the bytes.  Both sides number
# messages alike, so only places are said.  All of it goes with the engine.
from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..mpi.ranks import machine_name
from .plan import Framing, Opcode, Step

#: Bytes of a Mail in compiled code, and of a line of the caches.
LINE = 64
#: A sum has so many times the bytes of its wire, at most: 32 bits for 4.
WIDEST = 8
# Longer frames (store and forward) are no neighbour's to keep.
_MOST = 1 << 32
_TOKEN_BYTES = 16
_SENDS = Opcode.SEND_PARTIAL, Opcode.SEND_RESULT


class Place(NamedTuple):
    """Where a step's message lies; all 0: MPI sends it.

    Attributes:
        mail: Address of its Mail, for the first flight.
        data: Address of its bytes.
        stride: From those to the next flight's.
        copies: The step writes them; or an earlier one has.
    """

    mail: int = 0
    data: int = 0
    stride: int = 0
    copies: bool = True


class SharedMemory:
    """Places for the messages between ranks of a node; made on all ranks.

    Attributes:
        places: Of each step.
        neighbours: The ranks that can read this one's memory, and it theirs.
    """

    def __init__(self, comm: MPI.Comm, steps: Sequence[Step],
                 framing: Framing) -> None:
        self._kept: list[mmap.mmap] = []    # as long as it is written to
        machines = comm.allgather(
            _machine() if framing.shared_memory else '')
        near = {rank for rank, machine in enumerate(machines)
                if machine and machine == machines[comm.rank]} - {comm.rank}
        # By rank, Mails and messages to it, in their order.
        sends: dict[int, list[tuple[int, int]]] = {rank: [] for rank in near}
        stride = _laid_out(steps, framing.frame_bytes, sends)
        made = self._make(stride * framing.frames_in_flight) if near else None
        token, file, address = made or (b'', -1, 0)
        told = comm.allgather((os.getpid(), file, token, stride, sends))
        found = {rank: self._open(process, other, begin,
                                  length * framing.frames_in_flight)
                 for rank in near if made
                 for process, other, begin, length, _ in [told[rank]]
                 if begin}
        read = comm.allgather({rank for rank, at in found.items() if at})
        self.neighbours = sorted(rank for rank in read[comm.rank]
                                 if comm.rank in read[rank])
        if made:
            os.close(file)
        ways = {rank: (iter(sends[rank]), iter(told[rank][4][comm.rank]))
                for rank in self.neighbours}
        self.places: list[Place] = []
        written: set[int] = set()
        for kind, peer, *_ in (step.action for step in steps):
            place = Place()
            if kind is not Opcode.ENCODE and peer in ways:
                mail, data = next(ways[peer][kind not in _SENDS])
                if kind in _SENDS:
                    place = Place(address + mail, address + data, stride,
                                  data not in written)
                    written.add(data)
                else:
                    place = Place(found[peer] + mail, found[peer] + data,
                                  told[peer][3])
            self.places.append(place)

    def _make(self, size: int) -> tuple[bytes, int, int] | None:
        """This rank's part: how it begins, its file and its address."""
        if not 0 < size < _MOST or not hasattr(os, 'memfd_create'):
            return None
        token = os.urandom(_TOKEN_BYTES)
        file = os.memfd_create('chainer_fp8pipe')
        try:
            os.ftruncate(file, LINE + size)
            mapped = mmap.mmap(file, LINE + size)
        except OSError as error:        # too large for a limit
            os.close(file)
            warnings.warn('the ranks of this node share no memory, which is '
                          f'faster than messages: {error}; see ulimit -v',
                          RuntimeWarning, stacklevel=2)
            return None
        mapped[:_TOKEN_BYTES] = token
        return token, file, self._address(mapped)

    def _open(self, process: int, file: int, token: bytes, size: int
              ) -> int:
        """Address of another rank's part; 0: it cannot be read here."""
        try:
            opened = os.open(f'/proc/{process}/fd/{file}', os.O_RDWR)
            try:
                mapped = mmap.mmap(opened, LINE + size)
            finally:
                os.close(opened)
        except (OSError, ValueError):
            return 0
        # The file's number may be another's where processes are numbered
        # differently.
        return (self._address(mapped)
                if mapped[:_TOKEN_BYTES] == token else 0)

    def _address(self, mapped: mmap.mmap) -> int:
        self._kept.append(mapped)
        return numpy.frombuffer(mapped, numpy.uint8, 1).ctypes.data + LINE


def _laid_out(steps: Sequence[Step], frame_bytes: int,
              sends: dict[int, list[tuple[int, int]]]) -> int:
    """Finds places for all messages to neighbours; bytes of a flight."""
    messages = [step for step in steps if step.action.kind in _SENDS
                and step.action.peer in sends]
    used = LINE * len(messages)
    # All neighbours read the same copy of a mean.
    means: dict[tuple[int, int], int] = {}
    for number, step in enumerate(messages):
        kind, peer, start, stop = step.action
        is_mean = kind is Opcode.SEND_RESULT
        data = means.get((start, stop), used) if is_mean else used
        if data == used:
            used += -(-(stop - start) * max(frame_bytes, LINE)
                      * (WIDEST if step.summed else 1) // LINE) * LINE
        if is_mean:
            means[start, stop] = data
        sends[peer].append((LINE * number, data))
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _machine() -> str:
    """The same where process ids mean the same processes."""
    try:
        return machine_name() + os.readlink('/proc/self/ns/pid')
    except OSError:
        return ''

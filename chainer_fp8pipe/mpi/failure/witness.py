"""A rank that dies without Python's knowledge is named all the same.

A rank may be killed by the kernel for want of memory, or crash in a library.
It prints nothing then, and the launcher kills all other ranks before they can
say whom they miss.  So on each node there is a process beside the ranks, the
*witness*, which the launcher does not know of.  It waits for the first of
them to end, and if that one has not said goodbye, names it on the standard
error that it has from the rank that started it.  :mod:`._witness_process` is
what it runs.

This is a help, and not what a job depends on: where it cannot work, which is
anywhere but on Linux and where processes may not be watched, there is none.
"""
from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from typing import Any

from mpi4py import MPI

from ..forever import keep_forever
from . import _witness_process

#: The environment variable that, as ``0``, has no witness started.
SWITCH = 'CHAINER_FP8PIPE_WITNESS'

_SECONDS = 1.0          # to connect, at most
_BACKLOG = 1024         # ranks of a node that may connect before it is up
# A process that dies closes what it opened last first, Linux being so.  This
# is above what the launcher reads, so that the witness knows before it does.
_LOWEST_FD = 200


class _Line:
    """This rank's way to its witness.

    Attributes:
        address: Of the witness; b'' if there is none.
        role: What this rank does in the job.
    """

    def __init__(self) -> None:
        self.address = b''
        self.role = ''
        self._socket: socket.socket | None = None
        self._owner = 0

    def connect(self, address: bytes) -> None:
        """Has this rank watched, if it can be."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as low:
            low.settimeout(_SECONDS)
            try:
                low.connect(address)
                line = socket.socket(fileno=fcntl.fcntl(
                    low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD))
            except OSError:
                return
        line.setblocking(False)
        self.address, self._socket, self._owner = address, line, os.getpid()
        atexit.register(say_goodbye)
        # A program may call MPI_Finalize itself.  Its first act is to take
        # away the attributes of this communicator.
        MPI.COMM_SELF.Set_attr(
            MPI.Comm.Create_keyval(delete_fn=say_goodbye), None)

    def say(self, message: bytes) -> None:
        """Tells the witness, if there is one."""
        # Not from a fork of this rank, which has the socket, too.
        if self._socket and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.send(message, socket.MSG_NOSIGNAL)


_line = _Line()


def watch(comm: MPI.Comm, role: str = '') -> None:
    """Has these ranks watched, each once.  Call it on all of them.

    One process is started per node, if it is not there, and not waited for:
    a rank that dies within the first tenth of a second is not named.  It is
    gone as soon as any rank of the node is.

    Args:
        comm: The ranks.
        role: What this rank does in the job, such as ``'stage 0'``, to be
            named with it.  Without one it keeps that of an earlier call; at
            first it is ``'worker'``.
    """
    if comm.size == 1:
        return
    _line.role = role or _line.role or 'worker'
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        address = _agree_on_one(node)
    finally:
        node.Free()
    if address and not _line.address and _is_possible():
        _line.connect(address)
    world = MPI.COMM_WORLD
    _line.say(f'rank {world.rank} of {world.size} ({_line.role})'.encode())


def say_goodbye(*_: Any) -> None:
    """This rank's process may end from now on."""
    _line.say(_witness_process.GOODBYE)


def say_that_all_end() -> None:
    """This rank ends the job, having said why; nobody need be named."""
    _line.say(_witness_process.ALL_END)


def _agree_on_one(node: MPI.Comm) -> bytes:
    """The address of these ranks' witness; b'' if there cannot be one."""
    offers = node.allgather(_line.address if _is_possible() else None)
    for offer in offers:
        if offer:
            return offer
    if b'' not in offers:
        return b''
    starter = offers.index(b'')
    return node.bcast(_start() if node.rank == starter else b'', starter)


def _is_possible() -> bool:
    # Other systems have none of these, and a Python that was built for an
    # old Linux has not the first.
    return (hasattr(os, 'pidfd_open') and hasattr(socket, 'SO_PEERCRED')
            and bool(sys.executable) and os.environ.get(SWITCH) != '0')


def _start() -> bytes:
    """Starts a witness; its address, or b'' if it cannot be started."""
    with contextlib.suppress(OSError), socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind('')       # Linux then finds a name, and no file
        listener.listen(_BACKLOG)
        # Nobody waits for it, so it must not be missed either.
        keep_forever(subprocess.Popen(
            [sys.executable, '-I', '-S', _witness_process.__file__,
             str(listener.fileno()), str(os.getpid()),
             str(MPI.COMM_WORLD.size)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd='/',
            pass_fds=[listener.fileno()]))
        return listener.getsockname()
    return b''

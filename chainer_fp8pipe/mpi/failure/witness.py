"""Names a rank that is killed, or that crashes in a library.

Such a rank prints nothing, and the launcher kills all others.  The launcher's
own report is not enough: when rank 1 of 3 was killed, Hydra (MPICH 5.0.2)
named the process of rank 0, and it printed nothing about ``os._exit(3)``.

So each node has a process beside the ranks, the *witness*, which runs
:mod:`._witness_process`.  The witness waits for the first rank to end, and
names a rank that has not said goodbye on its starter's standard error.  No
job depends on the witness: there is none on systems other than Linux, or
where processes may not be watched.
"""
from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import socket
import subprocess
import sys
from typing import Any, NamedTuple

from mpi4py import MPI

from ..forever import keep_forever
from . import _witness_process
from .dumped_stack import register as register_stack
from .side_channel import Address, address_of, open_socket

#: The environment variable that, as ``0``, has no witness started.
SWITCH = 'CHAINER_FP8PIPE_WITNESS'

_SECONDS = 1.0          # to connect, at most
_BACKLOG = 1024         # ranks that may connect before the witness is up
# A process that dies closes what it opened last first, Linux being so.  This
# is above what the launcher reads, so that the witness knows before it does.
_LOWEST_FD = 200


class _Reached(NamedTuple):
    """A witness's addresses: for the ranks of its node, and for questions."""

    line: bytes
    questions: Address


class _Line:
    """This rank's connection to its witness."""

    def __init__(self) -> None:
        self.witness: _Reached | None = None
        self.role = ''          # this rank's part in the job
        self._socket: socket.socket | None = None
        self._owner = 0

    def connect(self, witness: _Reached) -> None:
        """Connects to a witness, if that is possible."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as low:
            low.settimeout(_SECONDS)
            try:
                low.connect(witness.line)
                line = socket.socket(fileno=fcntl.fcntl(
                    low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD))
            except OSError:
                return
        line.setblocking(False)
        self.witness, self._socket, self._owner = witness, line, os.getpid()
        atexit.register(say_goodbye)
        # A program may call MPI_Finalize itself.  Its first act is to take
        # away the attributes of this communicator.
        MPI.COMM_SELF.Set_attr(
            MPI.Comm.Create_keyval(delete_fn=say_goodbye), None)

    def say(self, message: bytes) -> None:
        """Sends a message to the witness, if there is one."""
        # Not from a fork of this rank, which has the socket, too.
        if self._socket and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.send(message, socket.MSG_NOSIGNAL)


_line = _Line()


def register(comm: MPI.Comm, role: str = '') -> Address | None:
    """Registers these ranks with the witness of their node; call it on all.

    Returns where to ask the witness for the states of its processes; None if
    there is none.

    The first call on a node starts the witness without waiting for it: a
    rank that dies within the next tenth of a second is not named.  The
    witness ends with the first rank of the node.

    ``role`` is this rank's part in the job for the message, such as ``'stage
    0'``; '' keeps that of an earlier call, at first ``'worker'``.
    """
    _line.role = role or _line.role or 'worker'
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        witness = _agree_on_one(node)
    finally:
        node.Free()
    if witness and not _line.witness and _is_possible():
        _line.connect(witness)
        _line.say(register_stack().encode())
    _line.say(own_name().encode())
    return witness.questions if witness else None


def own_name() -> str:
    """This rank and its part in the job, in words."""
    world = MPI.COMM_WORLD
    return f'rank {world.rank} of {world.size} ({_line.role})'


def say_goodbye(*_: Any) -> None:
    """Tells the witness that this rank may end from now on."""
    _line.say(_witness_process.GOODBYE)


def say_that_all_end() -> None:
    """Tells the witness that this rank, which has said why, ends the job."""
    _line.say(_witness_process.ALL_END)


def _agree_on_one(node: MPI.Comm) -> _Reached | None:
    """Where these ranks' witness is; None if there cannot be one."""
    possible, offers = zip(*node.allgather((_is_possible(), _line.witness)),
                           strict=True)
    if any(offers):
        return next(filter(None, offers))
    if True not in possible:
        return None
    starter = possible.index(True)
    return node.bcast(_start() if node.rank == starter else None, starter)


def _is_possible() -> bool:
    # Missing on other systems, the first also in builds for an old Linux.
    return (hasattr(os, 'pidfd_open') and hasattr(socket, 'SO_PEERCRED')
            and bool(sys.executable) and os.environ.get(SWITCH) != '0')


def _start() -> _Reached | None:
    """Starts a witness; where it is, or None if it cannot be started."""
    with contextlib.suppress(OSError), socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, (
            open_socket()) as questions:
        listener.bind('')       # Linux then finds a name, and no file
        listener.listen(_BACKLOG)
        token = secrets.token_hex(8)
        # Kept, as Popen warns when a process is freed before it ends.
        keep_forever(subprocess.Popen(
            [sys.executable, '-I', '-S', _witness_process.__file__,
             token, *map(str, (listener.fileno(), os.getpid(),
                               MPI.COMM_WORLD.size, questions.fileno()))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd='/',
            pass_fds=[listener.fileno(), questions.fileno()]))
        return _Reached(listener.getsockname(), address_of(questions, token))
    return None

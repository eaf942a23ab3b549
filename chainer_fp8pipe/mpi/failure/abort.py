"""An exception that nobody catches ends the job on all ranks."""
from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
import traceback
from types import TracebackType

from mpi4py import MPI

from .watch import say_that_all_end

#: Seconds after which a launcher that does not read is waited for no more.
_PATIENCE = 10.0
# Seconds in which it passes on what it has read.  Hydra needs none, as it does
# one after the other what a rank prints and what it asks for.
_PASSING_ON = 0.1


def abort_on_exception() -> None:
    """Makes an uncaught exception on one rank end all ranks.

    Without it the other ranks wait for this one forever: Python would call
    MPI_Finalize on its way out, which waits for everybody.  Does nothing if
    there is one rank only, or if it was called before.
    """
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = _abort


def _abort(kind: type[BaseException], error: BaseException,
           trace: TracebackType | None) -> None:
    rank = f'rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}'
    interrupted = issubclass(kind, KeyboardInterrupt)
    if interrupted:         # on every rank; where each was does not matter
        text = f'\n{rank} interrupted\n'
    else:
        trace_text = ''.join(traceback.format_exception(kind, error, trace))
        text = f'\n{rank} failed, ending all:\n{trace_text}'
    end_all_ranks(text, 130 if interrupted else 1)


def end_all_ranks(text: str, code: int) -> None:
    """Prints why, and ends all ranks with an exit code."""
    say_that_all_end()          # what the launcher kills need not be named
    sys.stdout.flush()
    sys.stderr.write(text)      # in one write, so that ranks do not mix
    sys.stderr.flush()
    # MPI_Abort may end the launcher before it has passed that on.
    wait_until_read()
    time.sleep(_PASSING_ON)
    MPI.COMM_WORLD.Abort(code)


def wait_until_read() -> None:
    """Waits until the launcher has read the pipes of our output.

    What other ranks print later then comes later, however late the launcher
    gets a core.  One that does not read is waited for during ten seconds.
    """
    end = time.monotonic() + _PATIENCE
    for descriptor in (1, 2):       # whatever Python's own files are by now
        with contextlib.suppress(OSError):      # it is closed
            while _unread(descriptor) and time.monotonic() < end:
                time.sleep(0.01)


def _unread(descriptor: int) -> int:
    """Unread bytes in a pipe, which Linux tells the writer, too."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    number = fcntl.ioctl(descriptor, termios.FIONREAD, struct.pack('i', 0))
    return int(struct.unpack('i', number)[0])

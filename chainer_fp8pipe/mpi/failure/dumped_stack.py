"""The stack of a rank whose interpreter is held by a library.

Some calls keep Python's lock while they wait; mpi4py's ``allreduce`` of
objects does.  No thread of the rank can look then, but the handler of a
signal can, which writes the stack to a file in memory.  The witness sends the
signal, and reads the file.
"""
from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
from typing import NamedTuple

from .main_thread import mpi_method

#: What the witness is told: the number of the signal and that of the file.
_STACK = 'stack {} {}'


class DumpedStack(NamedTuple):
    """What a file of :func:`register` says.

    Attributes:
        text: As in a traceback, the innermost frame last.
        place: File, line and function of the innermost.
        call: The method of mpi4py that is called there; '' if none is.
    """

    text: str
    place: str
    call: str


def register() -> str:
    """Lets this process's stack be asked for; what to tell the witness.

    '' if that is not possible here.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError,
                             RuntimeError):
        number = signal.SIGRTMAX - 5        # which nobody else uses
        file = os.memfd_create('stack of a rank')
        # What is restored when the interpreter ends: a rank that is in
        # MPI_Finalize by then must not die of the question.
        signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file, all_threads=False)
        return _STACK.format(int(number), file)
    return ''


def dumped_stack(text: str) -> DumpedStack | None:
    """Reads the last stack that a signal's handler has written."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)',
                        text.rpartition('most recent call first')[2])
    if not frames:
        return None
    lines = [f'  File "{name}", line {line}, in {function}\n'
             for name, line, function in reversed(frames)]
    name, line, function = frames[0]
    source = linecache.getline(name, int(line))
    return DumpedStack(
        ''.join(lines), f'{os.path.basename(name)}:{line} in {function}',
        mpi_method(name, re.findall(r'\.(\w+)\(', source)))

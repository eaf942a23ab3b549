"""A rank enters its job; an exception that nobody catches ends all ranks."""
# Where several ranks raise the same one at a time, one of them prints it.
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mpi4py import MPI

from ..report.launch_protocol import say_rank
from . import ALONE, started_together
from .ranks import share_cores

#: Seconds after which a launcher that does not read is waited for no more.
_PATIENCE = 10.0
# Seconds in which it passes on what it has read.  Hydra needs none, as it does
# one after the other what a rank prints and what it asks for.
_PASSING_ON = 0.1
#: Seconds in which ranks that find the same fault say so.
_TOGETHER = 0.5
#: Of the messages about it: 32767 is the largest that every MPI knows.
_TAG = 32759
_PACKAGE = os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))) + os.sep
#: What the user has not written.
_LIBRARIES = 'chainer_fp8pipe', 'chainer', 'chainermn', 'numpy', 'mpi4py', 'os'
#: What only hands on.
_PASSING = (os.path.join(_PACKAGE, 'intercept', ''),
            os.path.join(_PACKAGE, 'mpi', 'agreement.py'))


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
    comm = MPI.COMM_WORLD
    interrupted = issubclass(kind, KeyboardInterrupt)
    if interrupted:         # on every rank; where each was does not matter
        said, what = 'interrupted', ''
    else:
        said, what = 'failed, ending all:', shown(error)
    alike = [comm.rank]
    with contextlib.suppress(Exception):        # MPI may be what has failed
        alike = _ranks_alike(
            comm, f'{kind.__qualname__}: {"" if interrupted else error}',
            has_cause=error.__cause__ is not None)
    if comm.rank != alike[0]:
        # That one prints, and ends all ranks; unless it does not.
        time.sleep(_PATIENCE)
    text = f'\nrank {comm.rank} of {comm.size} {said}\n{what}'
    if others := sorted(alike[1:]):
        text += (f'{_in_words(others)}: interrupted, too\n' if interrupted
                 else f'{_in_words(others)} raised the same\n')
    end_all_ranks(text, 130 if interrupted else 1)


def shown(error: BaseException) -> str:
    """The printed form of an exception: a traceback of the user's own code.

    Without what has led to the script, or stands between it and Chainer; and
    without any frames if they have been printed, or are another rank's,
    which the exception's ``is_shown`` says.
    """
    said = traceback.TracebackException.from_exception(error)
    if getattr(error, 'is_shown', False):
        return ''.join(said.format_exception_only())
    if (said.__cause__ is not None and str(error.__cause__) in str(error)
            and of_the_user(error) is None):
        said.__cause__ = None       # all ranks raise what a check has said
    one: traceback.TracebackException | None = said
    while one is not None:
        one.stack = traceback.StackSummary.from_list(_of_the_user(one.stack))
        one = one.__cause__ or (
            None if one.__suppress_context__ else one.__context__)
    return ''.join(said.format())


def of_the_user(error: BaseException) -> BaseException | None:
    """The exception of the user's own code that has led to another one.

    None if a check of the package has raised it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    files = _files(error)
    libraries = tuple(
        os.path.dirname(file) + os.sep for name in _LIBRARIES
        if (file := getattr(sys.modules.get(name), '__file__', None)))
    return error if files and not _is_ours(files[-1]) and any(
        not file.startswith((*libraries, '<frozen', 'src/mpi4py'))
        for file in files) else None


def _files(error: BaseException) -> list[str]:
    return [frame.f_code.co_filename
            for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _of_the_user(frames: list[traceback.FrameSummary]
                 ) -> list[traceback.FrameSummary]:
    rest = list(itertools.dropwhile(
        lambda frame: (_is_ours(frame.filename)
                       or 'runpy' in frame.filename), frames))
    # Without any of the user's, the fault is in what led there.
    hidden: Any = _PACKAGE
    if not rest or _is_ours(rest[-1].filename):
        hidden = _PASSING
    return [frame for frame in rest or frames
            if not frame.filename.startswith(hidden)]


def _ranks_alike(comm: MPI.Comm, text: str, has_cause: bool) -> list[int]:
    """The ranks that end with the same error now, first who is to print it.

    Not a collective: others may wait for a message that nobody sends.
    """
    # Who knows the cause prints it.
    mine = bytes([not has_cause]) + hashlib.blake2b(
        text.encode(errors='replace'), digest_size=15).digest()
    sent = [comm.Isend([mine, MPI.BYTE], rank, _TAG)
            for rank in range(comm.size) if rank != comm.rank]
    heard = {comm.rank: mine}
    status = MPI.Status()
    end = time.monotonic() + _TOGETHER
    while len(heard) <= len(sent) and time.monotonic() < end:
        if comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            said = bytearray(len(mine))
            comm.Recv([said, MPI.BYTE], status.source, _TAG)
            heard[status.source] = bytes(said)
        else:
            time.sleep(0.01)
    return [rank for _, rank in sorted(
        (said[0], rank) for rank, said in heard.items()
        if said[1:] == mine[1:])]


def _in_words(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 1-3, 6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ('ranks ' if ranks[1:] else 'rank ') + ', '.join(
        f'{run[0]}-{run[-1]}' if run[1:] else str(run[0]) for run in runs)


def end_all_ranks(text: str, code: int) -> None:
    """Prints why, and ends all ranks with an exit code."""
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


# --- the beginning -----------------------------------------------------------

# A library that does not speak with the program that has started the ranks
# gives each of them a world of its own, rank 0 of 1.  N processes would then
# train N times, and nothing would say so.

_MPICH = ('mpiexec of MPICH, which "pip install mpich" puts beside the '
          'interpreter, or with "srun --mpi=pmi2"')
#: What starts ranks, by the library's vendor in mpi4py.
_STARTED_BY = {'Open MPI': 'mpirun of Open MPI, or with "srun --mpi=pmix"'}


class StartError(RuntimeError):
    """Several processes have been started, and MPI says that each is alone."""


def enter_world() -> None:
    """Begins to work as a rank; whatever works on all ranks calls it first.

    From then on an exception that nobody catches ends all ranks, and BLAS
    takes as many threads as there are cores for a rank alone.

    Raises:
        StartError: The environment says that this is one of several
            processes, and MPI that it is alone; on each of them.
    """
    if MPI.COMM_WORLD.size == 1:
        if problem := _not_alone(os.environ):
            raise StartError(problem)
        return
    # A process that this one starts has the variables of a rank, but is none.
    os.environ[ALONE] = '1'
    say_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    share_cores()
    abort_on_exception()


def _not_alone(environment: Mapping[str, str]) -> str:
    """Why a process of a world of 1 is not alone; '' if it is."""
    if not (started := started_together(environment)):
        return ''
    starter, number, count, size = started
    library = MPI.get_vendor()[0]
    return (
        f'{starter} has started {count} processes, of which this one is '
        f'number {number} ({size}={count}), but {library}'
        ' says that it is alone, rank 0 of 1.  Start them with '
        f'{_STARTED_BY.get(library, _MPICH)}; or have mpi4py load the MPI of '
        f'what has started them (MPI4PY_LIBMPI); or, if each is to be alone, '
        f'set {ALONE}=1')

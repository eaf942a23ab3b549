"""A rank enters its job; however it fails, it ends all others."""
# Others wait for ever for a rank that fails alone: Python calls MPI_Finalize
# on its way out, which waits for everybody.  So a failure becomes MPI_Abort.
# There are three ways out, and any of them may be the user's own: an exception
# goes through sys.excepthook, which a script may have replaced before or after
# this; sys.exit and exit() pass by the hook; and at the end atexit is called
# whatever has happened.  The hook is for the first and atexit for the others:
# a program has ended by an exception if its outermost frame has not returned.
#
# Importing the package is enough, where a starter of ranks says in the
# environment that there are several; MPI is loaded only once it is needed.
# Nothing holds in a process that a rank has forked off or started.
from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import opcode
import os
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from ..report.launch_protocol import say_rank
from . import ALONE, all_ranks, started_together
from .tracebacks import shown

#: The environment variable with the process that is the rank; its children
#: have it, too.
_RANK_PROCESS = 'CHAINER_FP8PIPE_RANK_PROCESS'
#: Seconds after which a launcher that does not read is waited for no more.
_PATIENCE = 10.0
# Seconds in which it passes on what it has read.  Hydra needs none, as it does
# one after the other what a rank prints and what it asks for.
_PASSING_ON = 0.1
# Seconds by which a rank lets each one before it print the same first.
_EACH, _AT_MOST = 0.25, 2.0
#: Seconds in which other ranks that leave with a code have printed why.
_LAST_WORDS = 1.0
#: Seconds that MPI, loaded only to end all ranks, is waited for.
_START = 600.0


def begin() -> None:
    """Has a failure end all ranks, if this process is one of several.

    Does nothing in a process that a rank has started.
    """
    if started_together(os.environ) and os.environ.setdefault(
            _RANK_PROCESS, str(os.getpid())) == str(os.getpid()):
        _end.install()


def enter_world(comm: Any = None) -> None:
    """Begins to work as a rank; whatever works on all ranks calls it first.

    From then on a failure on one rank ends all, and BLAS takes as many
    threads as there are cores for a rank alone.

    Args:
        comm: That of the caller; nothing is done, and MPI not loaded, for
            one that is none of mpi4py's.

    Raises:
        StartError: The environment says that this is one of several
            processes, and MPI that it is alone; on each of them.
    """
    if comm is not None and not type(
            all_ranks(comm)).__module__.startswith('mpi4py'):
        return
    world = _mpi().COMM_WORLD
    if world.size == 1:
        if problem := _not_alone(os.environ):
            raise StartError(problem)
        return
    # A process that this one starts has the variables of a rank, but is none.
    os.environ[ALONE] = '1'
    say_rank(world.rank, world.size)
    importlib.import_module('.ranks', __package__).share_cores()
    _end.install()


def end_all_ranks(text: str, code: int) -> None:
    """Prints why, and ends all ranks with an exit code."""
    _end.has_begun = True
    try:
        with contextlib.suppress(Exception):    # closed, or not a file
            sys.stdout.flush()
        try:
            sys.stderr.write(text)  # in one write, so that ranks do not mix
            sys.stderr.flush()
        except Exception:
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors='replace'))
        # MPI_Abort may end the launcher before it has passed that on.
        wait_until_read()
        time.sleep(_PASSING_ON)
    finally:
        _abort(code)


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


def _mpi() -> Any:
    return importlib.import_module('mpi4py.MPI')


def _abort(code: int) -> None:
    if 'mpi4py.MPI' not in sys.modules:
        # It waits for the others to load it, too, if they ever do.
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(_START, exit=True)
    try:
        mpi = _mpi()
    except ImportError:         # then nobody waits for this process
        return
    if mpi.Is_finalized():
        os._exit(code)
    if mpi.COMM_WORLD.size > 1:
        mpi.COMM_WORLD.Abort(code)


class _End:
    """What is done when this process fails.

    Attributes:
        has_begun: All ranks are being ended.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._pid = 0
        self._code: object = None       # of the latest sys.exit
        self._frame: FrameType | None = None

    def install(self) -> None:
        """Is called once MPI's users may have begun to wait for this rank."""
        # What else is done at the end waits for others, so this comes first.
        if 'mpi4py.MPI' in sys.modules:
            importlib.import_module('.finalizing', __package__).begin()
        atexit.unregister(self.at_exit)
        atexit.register(self.at_exit)
        if self._pid == os.getpid():
            return
        self._pid, self._before = os.getpid(), _last_error()
        self._frame = _outermost()
        self._hook, sys.excepthook = sys.excepthook, self.of_exception
        exit, quitter = sys.exit, type(getattr(sys.modules['builtins'],
                                               'exit', None))

        def noting_exit(status: Any = None, /) -> Any:
            self._code = status
            exit(status)
        sys.exit = noting_exit
        if quitter.__name__ == 'Quitter':       # not under python -S
            call = quitter.__call__

            def noting_quit(quit: Any, code: Any = None) -> Any:
                self._code = code
                return call(quit, code)
            quitter.__call__ = noting_quit  # type: ignore[method-assign]

    def of_exception(self, kind: type[BaseException], error: BaseException,
                     trace: TracebackType | None) -> None:
        """Prints an exception that nobody has caught, and ends all ranks.

        A hook that the user has set before is called as well.
        """
        if not self._is_rank():
            self._hook(kind, error, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        text = ''
        try:
            self.has_begun = True
            rank, size = _number()
            try:
                what = '' if interrupted else shown(error)
            except Exception:       # of its own __str__, say
                what = f'{kind.__qualname__}, which cannot be printed\n'
            text = (f'\nrank {rank} of {size} '
                    + ('interrupted' if interrupted
                       else 'failed, ending all:') + f'\n{what}')
            # The first rank prints what many find.  Who knows the cause of
            # what all raise does so at once.
            time.sleep(0.0 if error.__cause__ is not None
                       else min(rank * _EACH, _AT_MOST))
            if self._hook is not sys.__excepthook__:
                self._hook(kind, error, trace)
        except Exception:       # of the user's hook
            pass
        finally:
            end_all_ranks(text, 130 if interrupted else 1)

    def at_exit(self) -> None:
        """Ends all ranks if this one has failed, and nobody knows."""
        if (self.has_begun or not self._is_rank()
                or _has_returned(self._frame)):
            return
        error = _last_error()
        if error is not None and error is not self._before:
            # A hook that was set later has printed it.
            rank, size = _number()
            end_all_ranks(f'\nrank {rank} of {size} failed, ending all:\n'
                          + ''.join(_type_of(error)), 1)
        elif self._code not in (None, 0):
            time.sleep(_LAST_WORDS)
            end_all_ranks('', self._code if isinstance(self._code, int)
                          else 1)       # Python has printed it

    def _is_rank(self) -> bool:
        """Whether this is a rank, and no fork of it."""
        if self._pid != os.getpid():
            return False
        mpi = sys.modules.get('mpi4py.MPI')
        # MPI_Finalize has waited for all: nobody waits any more.
        return mpi is None or (not mpi.Is_finalized()
                               and mpi.COMM_WORLD.size > 1)


_end = _End()


def _number() -> tuple[int, int]:
    """Of this rank, and how many there are."""
    if 'mpi4py.MPI' in sys.modules and not _mpi().Is_finalized():
        return _mpi().COMM_WORLD.rank, _mpi().COMM_WORLD.size
    _, number, count, _ = started_together(os.environ) or ('', '0', 1, '')
    return int(number) if number.isdecimal() else 0, count


def _type_of(error: BaseException) -> str:
    return f'{type(error).__qualname__}\n'


def _last_error() -> BaseException | None:
    """The exception that Python has last handed to a hook."""
    return getattr(sys, 'last_exc', None) or getattr(sys, 'last_value', None)


def _outermost() -> FrameType | None:
    """The main thread's first frame, of which the program's end tells."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType | None) -> bool:
    """Whether a frame that has ended did so by returning."""
    if frame is None or frame.f_lasti < 0:
        return True
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith(
        'RETURN')


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


def _not_alone(environment: Mapping[str, str]) -> str:
    """Why a process of a world of 1 is not alone; '' if it is."""
    if not (started := started_together(environment)):
        return ''
    starter, number, count, size = started
    library = _mpi().get_vendor()[0]
    return (
        f'{starter} has started {count} processes, of which this one is '
        f'number {number} ({size}={count}), but {library}'
        ' says that it is alone, rank 0 of 1.  Start them with '
        f'{_STARTED_BY.get(library, _MPICH)}; or have mpi4py load the MPI of '
        f'what has started them (MPI4PY_LIBMPI); or, if each is to be alone, '
        f'set {ALONE}=1')

"""A rank enters its job; however it fails, it ends all others."""
# Others wait for ever for a rank that fails alone: Python calls MPI_Finalize
# on its way out, which waits for everybody.  So a failure becomes MPI_Abort.
# An exception goes through sys.excepthook; one that a script has set later
# leaves a trace, which atexit finds.  A wish to exit that nobody has caught is
# known by the interpreter's own look at its code, when no frame is left.
#
# Importing the package is enough, where a starter of ranks says in the
# environment that there are several.  Nothing holds in a process that a rank
# has forked off or started.
from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import itertools
import os
import stat
import sys
import termios
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from ..report.launch_protocol import FAILED, say_rank, tell
from . import ALONE, RANK_PROCESS, all_ranks, started_together

#: Seconds after which a launcher that does not read is waited for no more,
#: and in which it passes on what it has read.
_PATIENCE, _PASSING_ON = 10.0, 0.1
# Seconds by which a rank lets each one before it print the same first.
_EACH, _AT_MOST = 0.25, 2.0
#: Seconds in which other ranks that leave with a code have printed why.
_LAST_WORDS = 1.0
#: Seconds after which a rank that neither a full pipe nor MPI lets end ends
#: itself: where MPI is yet to be loaded it waits for the others to load it.
_STUCK, _START = 30.0, 600.0

_PACKAGE = os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))) + os.sep
#: What the user has not written.
_LIBRARIES = 'chainer_fp8pipe', 'chainer', 'chainermn', 'numpy', 'mpi4py', 'os'
#: What only hands on.
_PASSING = (os.path.join(_PACKAGE, 'intercept', ''),
            os.path.join(_PACKAGE, 'mpi', 'agreement.py'))


class StartError(RuntimeError):
    """Several processes have been started, and MPI says that each is alone."""


def begin() -> None:
    """Has a failure end all ranks, if this process is one of several."""
    if started_together(os.environ):
        _end.install()


def enter_world(comm: Any = None) -> None:
    """Begins to work as a rank; whatever works on all ranks calls it first.

    From then on a failure on one rank ends all, and BLAS takes as many
    threads as there are cores for a rank alone.  For a communicator that is
    none of mpi4py's nothing is done.  Raises StartError if the environment
    says that this is one of several processes, and MPI that it is alone.
    """
    if comm is not None and not type(
            all_ranks(comm)).__module__.startswith('mpi4py'):
        return
    from mpi4py import MPI
    world, started = MPI.COMM_WORLD, started_together(os.environ)
    if world.size > 1:
        from .ranks import share_cores
        say_rank(world.rank, world.size)
        share_cores()
        _end.install()
    elif started:
        # N processes would train N times.
        (starter, number, count, size), library = started, MPI.get_vendor()[0]
        start = ('mpirun of Open MPI, or "srun --mpi=pmix"'
                 if library == 'Open MPI' else
                 'mpiexec of MPICH, or "srun --mpi=pmi2"')
        raise StartError(
            f'{starter} has started {count} processes, of which this one is '
            f'number {number} ({size}={count}), but {library} says that it is '
            f'alone, rank 0 of 1.  Start them with {start}; or have mpi4py '
            'load the MPI of what has started them (MPI4PY_LIBMPI); or, if '
            f'each is to be alone, set {ALONE}=1')


def stderr() -> Any:
    """Where any rank may speak, also where the script of one alone does."""
    return getattr(sys.stderr, 'of_all_ranks', sys.stderr)


def end_all_ranks(text: str, code: int, line: str = '') -> None:
    """Prints why, and ends all ranks with an exit code.

    The ``line`` is for the launcher.
    """
    _end.has_begun = True
    code = code % 256 or 1
    with contextlib.suppress(Exception):    # too many files are open, say
        faulthandler.dump_traceback_later(
            _STUCK if _mpi() else _START, exit=True,
            file=os.open(os.devnull, os.O_WRONLY))
    try:
        if line:
            tell(line)      # it may wait for a full pipe
        with contextlib.suppress(Exception):    # closed, or not a file
            sys.stdout.flush()
        try:
            stderr().write(text)    # in one write, so that ranks do not mix
            stderr().flush()
        except Exception:
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors='replace'))
        # MPI_Abort may end the launcher before it has passed that on.
        wait_until_read()
        time.sleep(_PASSING_ON)
    finally:
        with contextlib.suppress(ImportError):  # then nobody waits
            from mpi4py import MPI
            if not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
                MPI.COMM_WORLD.Abort(code)      # may return in a thread
            os._exit(code)


def wait_until_read() -> None:
    """Waits until the launcher has read the pipes of our output.

    What other ranks print later then comes later.
    """
    end = time.monotonic() + _PATIENCE
    for descriptor in (1, 2):       # whatever Python's own files are by now
        with contextlib.suppress(OSError):      # it is closed
            # Linux tells the writer, too, how much is unread.
            while (stat.S_ISFIFO(os.fstat(descriptor).st_mode)
                   and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
                   and time.monotonic() < end):
                time.sleep(0.01)


def _mpi() -> Any:
    """mpi4py's module, if it has been loaded."""
    return sys.modules.get('mpi4py.MPI')


class _Code:
    """``SystemExit.code``; who reads it without a frame is the interpreter.

    Then nobody has caught the exception, and a failure's code ends all ranks.
    """

    def __init__(self) -> None:
        self._member = vars(SystemExit)['code']

    def __get__(self, error: Any, kind: Any = None) -> Any:
        found = self._member.__get__(error, kind)
        if error is not None and found not in (None, 0) and _end.is_rank():
            try:
                sys._getframe(1)
            except ValueError:
                line = f'{_failed()}SystemExit: ' + str(found).partition(
                    '\n')[0]
                if isinstance(found, int):
                    time.sleep(_LAST_WORDS)
                    end_all_ranks('', found, line)
                end_all_ranks(f'{found}\n', 1, line)
        return found

    def __set__(self, error: Any, value: Any) -> None:
        self._member.__set__(error, value)


def _exit(status: Any = None, /) -> NoReturn:
    """``sys.exit``, which before Python 3.12 makes no object to be asked."""
    raise SystemExit(status)


class _End:
    """What is done when this process fails."""

    def __init__(self) -> None:
        self.has_begun, self._pid = False, 0

    def install(self) -> None:
        # What else is done at the end waits for others, so this comes first.
        if _mpi():
            from .finalizing import begin
            begin()
        atexit.unregister(self.at_exit)
        atexit.register(self.at_exit)
        os.environ.setdefault(RANK_PROCESS, str(os.getpid()))
        if self._pid != os.getpid():
            self._pid, self._before = os.getpid(), _last_error()
            self._hook, sys.excepthook = sys.excepthook, self.of_exception
            sys.exit = _exit
            # The class cannot be set an attribute, but its dictionary can.
            gc.get_referents(vars(SystemExit))[0]['code'] = _code
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    def of_exception(self, kind: type[BaseException], error: BaseException,
                     trace: TracebackType | None) -> None:
        """In place of ``sys.excepthook``, which is called as well."""
        if not self.is_rank():
            self._hook(kind, error, trace)
            return
        self.has_begun = True
        text = f'{kind.__qualname__}, which cannot be printed\n'
        try:
            text = shown(error)
            # The first rank prints what many find.  Who knows the cause of
            # what all raise does so at once.
            if error.__cause__ is None:
                time.sleep(min(_place()[0] * _EACH, _AT_MOST))
            if self._hook is not sys.__excepthook__:
                self._hook(kind, error, trace)
        except Exception:       # of its __str__, or of the user's hook
            pass
        finally:
            fail_all(error, text)

    def at_exit(self) -> None:
        """Ends all ranks if a hook that was set later has got an error."""
        error = _last_error()
        if (error is not None and not self.has_begun
                and error is not self._before and self.is_rank()):
            fail_all(error, f'{type(error).__qualname__}\n')

    def is_rank(self) -> bool:
        """Whether this is a rank, no fork of it, and others may wait."""
        return self._pid == os.getpid() and (_mpi() is None or (
            not _mpi().Is_finalized() and _mpi().COMM_WORLD.size > 1))


_end, _code = _End(), _Code()


def fail_all(error: BaseException, text: str) -> None:
    """Ends all ranks by an exception of this one, which is printed so."""
    line = ''
    with contextlib.suppress(Exception):    # of what prints it
        line = _failed() + next(
            line for part in traceback.format_exception_only(error)
            for line in part.splitlines() if line[:1].strip())
    end_all_ranks('\nrank {} of {} failed, ending all:\n'.format(*_place())
                  + text, 1, line)


def _failed() -> str:
    """Begins the line that tells a launcher of this rank's failure."""
    return FAILED + 'rank {} of {}: '.format(*_place())


def _place() -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    if _mpi():
        return _mpi().COMM_WORLD.rank, _mpi().COMM_WORLD.size
    _, number, count, _ = started_together(os.environ) or ('', '0', 1, '')
    return int(number) if number.isdecimal() else 0, count


def _last_error() -> BaseException | None:
    """The exception that Python has last handed to a hook."""
    return getattr(sys, 'last_exc', None) or getattr(sys, 'last_value', None)


def shown(error: BaseException) -> str:
    """A traceback of the user's own code, without what has led there.

    And without any frames if they have been printed, or are another rank's,
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
        rest = list(itertools.dropwhile(
            lambda frame: frame.filename.startswith(_PACKAGE)
            or 'runpy' in frame.filename, one.stack)) or list(one.stack)
        # Where the package itself has raised, it is shown.
        hidden = _PASSING if rest and rest[-1].filename.startswith(
            _PACKAGE) else (_PACKAGE,)
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in rest if not frame.filename.startswith(hidden)])
        one = one.__cause__ or (
            None if one.__suppress_context__ else one.__context__)
    return ''.join(said.format())


def of_the_user(error: BaseException) -> BaseException | None:
    """The exception of the user's own code that has led to another one.

    None if a check of the package has raised it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    files = [frame.f_code.co_filename
             for frame, _ in traceback.walk_tb(error.__traceback__)]
    libraries = tuple(
        os.path.dirname(file) + os.sep for name in _LIBRARIES
        if (file := getattr(sys.modules.get(name), '__file__', None)))
    return error if files and not files[-1].startswith(_PACKAGE) and any(
        not file.startswith((*libraries, '<frozen', 'src/mpi4py'))
        for file in files) else None

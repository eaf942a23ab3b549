"""Ends what a job has left behind: processes and shared memory."""
# All processes of a job, whatever sessions and groups they have moved to, have
# a mark in their environment, NAME=value, by which they are found in /proc; on
# systems without it, none are.  As a script this is the *guard*, a process
# beside the launcher: it waits until the launcher ends, and if the launcher
# has not said goodbye, as it was killed, the guard ends the job.  So this
# imports the standard library only, to start quickly and to stay small.
import contextlib
import glob
import os
import signal
import subprocess
import sys
import time

_GOODBYE = b'goodbye'       # the launcher has ended its job itself
_PATIENCE = 3.0             # seconds that processes have after SIGTERM
#: Seconds after which a process that was killed is left to the system.  One
#: that waits for a dead disk ends when the disk answers, or never.
_KILLED = 10.0
_PAUSE = 0.01
_STAT_PARENT = 1            # place in /proc/PID/stat, after the name
#: What MPICH leaves of a job that was killed; other libraries use memory
#: without a name, or clear up when they are told to end.
_SEGMENTS = '/dev/shm/mpich_shm_*'


class Guard:
    """Starts the guard.

    Args:
        mark: Of the job.
    """

    def __init__(self, mark: str) -> None:
        theirs, self._line = os.pipe()
        try:
            # A session of its own: an interrupt of the terminal is not its.
            self._process = subprocess.Popen(
                [sys.executable, '-I', '-S', __file__, str(theirs), mark],
                pass_fds=[theirs], cwd='/', stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, start_new_session=True)
        finally:
            os.close(theirs)

    def dismiss(self) -> None:
        """Ends the guard, as the job has ended."""
        with contextlib.suppress(OSError):
            os.write(self._line, _GOODBYE)
        os.close(self._line)
        self._process.wait()


def marked(mark: str) -> list[int]:
    """The living processes of a job, other than this one."""
    # A process that is dead but not waited for has no environment.
    return [pid for pid in _numbers() if pid != os.getpid()
            and mark.encode() in _read(pid, 'environ').split(b'\0')]


def end_job(mark: str, patience: float = _PATIENCE) -> None:
    """Ends a job's processes: what starts ranks by SIGTERM, if it does.

    What is left after ``patience`` seconds is killed.
    """
    pids = marked(mark) if patience else []
    for pid in pids:
        fields = _read(pid, 'stat').rpartition(b')')[2].split()
        if fields and int(fields[_STAT_PARENT]) not in pids:
            _send(pid, signal.SIGTERM)
    kill_rest(mark, patience)


def kill_rest(mark: str, patience: float) -> list[int]:
    """Kills what has not ended by itself after ``patience`` seconds.

    Returns the processes that even that has not ended.
    """
    end = time.monotonic() + patience
    while left := marked(mark):
        if (late := time.monotonic() - end) >= _KILLED:
            break
        if late >= 0:
            for pid in left:
                _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    return left


def is_running(mark: str, program: list[str]) -> bool:
    """Whether a process of a job, or a fork of one, runs this program."""
    wanted = os.fsencode('\0'.join(program) + '\0')
    return any(_read(pid, 'cmdline') == wanted for pid in marked(mark))


def remove_segments(since: float) -> None:
    """Removes MPICH's shared memory that nobody uses any more.

    Args:
        since: Only what was made later, in seconds of ``time.time()``.
    """
    mine = []
    for path in glob.glob(_SEGMENTS):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if found.st_uid == os.geteuid() and found.st_ctime >= since:
                mine.append(path)
    used = _used(mine) if mine else ()
    for path in mine:
        if path not in used:
            with contextlib.suppress(OSError):
                os.remove(path)


def _used(paths: list[str]) -> set[str]:
    """Those that a process has mapped or opened."""
    found: set[str] = set()
    for pid in _numbers():
        text = _read(pid, 'maps').decode(errors='replace')
        found.update(path for path in paths if path in text)
        with contextlib.suppress(OSError):
            for entry in os.scandir(f'/proc/{pid}/fd'):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(entry.path))
    return found


def _numbers() -> list[int]:
    """Of all processes."""
    try:
        return [int(name) for name in os.listdir('/proc') if name.isdigit()]
    except OSError:
        return []


def _read(pid: int, name: str) -> bytes:
    """A file about a process; nothing of one that has ended."""
    try:
        with open(f'/proc/{pid}/{name}', 'rb') as file:
            return file.read()
    except OSError:
        return b''


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _guard(pipe: int, mark: str) -> None:
    """Waits for the launcher's end on a pipe that only the launcher writes."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)   # the launcher says when
    since = time.time()
    if not os.read(pipe, len(_GOODBYE)):
        with contextlib.suppress(OSError):
            os.write(2, b'chainer_fp8pipe launch: the launcher was killed; '
                     b'its job is ended\n')
        end_job(mark)
        remove_segments(since)


if __name__ == '__main__':
    _guard(int(sys.argv[1]), sys.argv[2])

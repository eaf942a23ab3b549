"""One start of a job: its processes, what they print, and how it has ended."""
# A job runs until what started the ranks has ended.  It is killed where a
# signal for the launcher, which is handed on, does not end it in time, where a
# rank is dead or all stand still, and where all are done but something of
# theirs holds it open.  If the launcher is killed, Linux tells what started
# the ranks to end them.
#
# All processes of a job, whatever sessions they have moved to, have a mark in
# their environment, NAME=value, by which they are found in /proc, where it is.
#
# Threads pass output on; the main one never waits for the terminal, which may
# be slow or stopped, so that a signal is heeded at any time.
#
# The launcher knows nothing of ranks but what they print on the standard error
# stream (report.launch_protocol), what the program that starts them says of a
# death, and exit codes.  MPICH names the process that was the first to end,
# which may be one that it has killed itself, while the dead one was writing
# its core.  So it is asked for the statuses of all ranks, which tell the two
# apart unless both were killed; then all that were are named.
from __future__ import annotations

import contextlib
import ctypes
import glob
import math
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from ..report.launch_protocol import DONE, FAILED, RANK, STILL, UPDATED

TICK = 0.1              # seconds between looks
_PATIENCE = 5.0         # for a job to end by itself after a rank has died
_LAST_WORDS = 0.5       # for a job's processes after that which started them
_DONE = 60.0            # for what ranks do after the script
#: For a job that has got a signal: time to write a snapshot, as it is under
#: Slurm and Kubernetes.
_GRACE = 30.0
#: Seconds after which a process that was killed is left to the system: one
#: that waits for a dead disk may never end.
_KILLED = 10.0
_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)  # Linux has it

#: Exit code of a program that was called wrongly.
USAGE = 2
STDOUT, STDERR = 1, 2

_SAID = re.compile(
    rf'(?:{UPDATED}(?P<update>\d+)|(?P<done>{DONE})|{STILL}(?P<still>.*)|'
    rf'{FAILED}(?P<failed>rank \d+ of \d+): (?P<error>.*)|'
    rf'{RANK}(?P<name>rank (?P<rank>\d+) of \d+) = PID (?P<process>\d+) on '
    r'(?P<host>.*))$')
#: What ranks and MPICH say to the launcher alone, and how it begins.
_HIDDEN = re.compile(
    f'(?:{UPDATED}|{DONE}|{RANK}|{FAILED}|{STILL}).*\n|'
    r'\[mpiexec@\S* Exit codes: .*\n(?:\[\S+\] [\d,]+\n)*'.encode())
_BEGUN = re.compile(
    rf'(?:{os.path.commonprefix([DONE, RANK, UPDATED, FAILED, STILL])}|'
    r'\[mpiexec@).*\Z'.encode())
#: A line for each host, whose ranks follow each other.
_CODES = re.compile(r'(\[mpiexec@\S* Exit codes: |^)\[\S+\] ([\d,]+)$')
_DIED = re.compile(
    r'YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)|'
    r'process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)')
_SLURM = re.compile(
    r'srun: error: (Node failure on .*|\S+: task \d+: (?!Exited).*)')
_LONGEST = 1 << 16      # bytes of a line that are looked at


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """A block in which signals are only noted, in a list that it gives.

    They are SIGINT and SIGTERM, also where this process has inherited that
    they are ignored or blocked, as shells have it for what runs in the
    background: who sends them to a launcher means it.
    """
    received: list[signal.Signals] = []
    before = {number: signal.signal(number, lambda number, frame:
                                    received.append(signal.Signals(number)))
              for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    # Where SIGCHLD is ignored, nobody learns of exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(command: Sequence[str], environment: Mapping[str, str], mark: str,
            ranks: int, has_hosts: bool, received: Sequence[signal.Signals]
            ) -> Ending:
    """Starts a job, watches it to its end, and clears up after it.

    The environment has the mark, by which the job's processes are found.  Of
    the signals that are received the first is handed on, and another one
    kills the job.  ``has_hosts`` is that of :func:`ending_of`.
    """
    at, output = time.time(), JobOutput()
    # A session of its own: the launcher alone says when to end.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    relays = [threading.Thread(target=_relay, args=args, daemon=True)
              for args in ((output, process.stdout, STDOUT),
                           (output, process.stderr, STDERR))]
    for relay in relays:
        relay.start()
    sent, deadline = 0, math.inf
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(TICK)
            if len(received) > sent:
                sent, deadline = len(received), time.monotonic() + _GRACE
                if sent > 1:
                    break
                process.send_signal(received[0])
            elif deadline == math.inf and (
                    output.cause or output.done == ranks):
                # Hydra waits for ever for a rank that is dead, or done, while
                # a child of it lives.
                deadline = time.monotonic() + (
                    _PATIENCE if output.cause else _DONE)
    finally:
        is_late = process.poll() is None
        kill_rest(mark, 0 if is_late else _LAST_WORDS)
        if process.poll() is None:          # where none has a mark
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_PATIENCE)
        for relay in relays:    # a stranger may hold the pipe for ever
            relay.join(_GRACE)
    code = process.poll()
    if is_late and output.done == ranks:
        code = 0
    elif code == 0 and not output.done:
        say('no rank has come to the end of the script, though the exit code '
            'is 0: one may have called os._exit()')
    return ending_of(output, -signal.SIGKILL if code is None else code,
                     has_hosts)._replace(at=at, seconds=time.time() - at)


def _relay(output: JobOutput, file: IO[bytes], to: int) -> None:
    """Passes a stream of a job on, while the launcher learns from it."""
    lines = Lines(output.look)
    with file:
        while piece := os.read(file.fileno(), 1 << 16):
            show(lines.feed(piece), to)


def marked(mark: str) -> list[int]:
    """The living processes of a job, other than this one."""
    found = []
    for path in glob.glob('/proc/[0-9]*/environ'):
        # A process that is dead but not waited for has no environment.
        with contextlib.suppress(OSError), open(path, 'rb') as file:
            if mark.encode() in file.read().split(b'\0'):
                found.append(int(path.split('/')[2]))
    return [*{*found} - {os.getpid()}]


def kill_rest(mark: str, patience: float) -> None:
    """Kills what has not ended by itself after ``patience`` seconds."""
    end = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < end + _KILLED:
        for pid in left if time.monotonic() >= end else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK / 10)


# --- what a job prints -------------------------------------------------------

def say(text: str) -> None:
    """Prints a line about the job, with the time."""
    show(f'chainer_fp8pipe launch: {time.strftime("%H:%M:%S")} {text}\n'
         .encode(errors='replace'))


def show(rest: bytes, stream: int = STDERR) -> None:
    """Prints text as it is; a terminal that is gone does not matter."""
    # Not by sys.stderr: an interpreter that ends while another thread writes
    # there is aborted.
    with contextlib.suppress(OSError):
        while rest:
            try:
                rest = rest[os.write(stream, rest):]
            except BlockingIOError:     # the terminal is somebody else's, too
                select.select([], [stream], [])


class Lines:
    """Reads a stream by lines, and says what of it the user shall see.

    Pieces of lines are handed on at once, as a progress bar never ends its
    line.
    """

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look
        self._line = self._held = b''   # not ended yet; not shown yet

    def feed(self, piece: bytes) -> bytes:
        """Takes the next piece of output; returns what is shown now."""
        *whole, last = (self._line + piece).split(b'\n')
        self._line = last[-_LONGEST:]
        for line in whole:
            self._look(line.decode(errors='replace'))
        shown = _HIDDEN.sub(b'', self._held + piece)
        begun = _BEGUN.search(shown)
        self._held = shown[begun.start():] if begun else b''
        return shown[:len(shown) - len(self._held)]


class JobOutput:
    """Learns from the lines that one start of a job prints."""

    def __init__(self) -> None:
        #: The first that was finished and the latest that is known.
        self.updates: list[int] = []
        self.done = 0           # ranks in which the script has ended in order
        #: Who died and of what, or why the job stands still, so that it ends.
        self.cause = ''
        #: The rank that raised an exception, and which.
        self.failed = self.error = ''
        self._ranks: dict[int, re.Match[str]] = {}  # what they said
        self._codes: list[int] = []                 # of all of them
        self._since = time.monotonic()

    def look(self, line: str) -> None:
        """Takes a line."""
        if said := _SAID.search(line):
            self._hear(said)
        elif (found := _CODES.search(line)) and (found[1] or self._codes):
            self._codes += map(int, filter(None, found[2].split(',')))
        elif found := _DIED.search(line):
            self.has_died(found[2], int(found[1] or found[3]))
        elif found := _SLURM.match(line):
            self._end(found[1])

    def _hear(self, said: re.Match[str]) -> None:
        self.done += bool(said['done'])
        if said['rank']:
            self._ranks[int(said['rank'])] = said
        elif said['still']:
            self._end(said['still'])
        elif said['failed'] and not self.failed:
            self.failed, self.error = said['failed'], said['error']
        elif said['update']:
            if not self.updates:
                say(f'trains: update {said["update"]} is done, '
                    f'{time.monotonic() - self._since:.1f} s after the start')
            self.updates = [*self.updates[:1], int(said['update'])]

    def _end(self, cause: str) -> None:
        if not self.failed:     # who has ended all others has said why
            self.cause = self.cause or cause

    def has_died(self, rank: str | None = None, number: int = 0) -> None:
        """Finds out by the statuses of all ranks which one died, and how."""
        # As of wait(): 128 says that there is a core, above is an exit code.
        codes = {one: code if code >= 1 << 8 else code & 127
                 for one, code in enumerate(self._codes)}
        crashed, exited, ended, killed = ([
            one for one, code in codes.items() if is_so(code)] for is_so in (
            lambda code: 0 < code < 1 << 8 and code not in (
                signal.SIGTERM, signal.SIGKILL),
            lambda code: code >= 1 << 8, lambda code: code == signal.SIGTERM,
            lambda code: code == signal.SIGKILL))
        suspects = ([int(rank)] if rank
                    else crashed or exited[:1] or ended or killed)
        if not suspects:
            return
        number, said = codes.get(suspects[0], number), self._ranks.get(
            suspects[0])
        name = said['name'] if said else f'rank {suspects[0]}'
        if number >= 1 << 8:        # by itself, as by os._exit()
            if not (self.failed or self.cause):
                self.failed, self.error = name, f'exit code {number >> 8}'
            return
        if suspects[1:]:
            name = 'one of ranks ' + ', '.join(map(str, suspects))
        elif said:
            name += f', process {said["process"]} on host {said["host"]},'
        self._end(f'{name} was killed by {_name(number)}' + (
            ' (the system does that when memory is short)'
            if number == signal.SIGKILL else ''))


def _name(number: int) -> str:
    return next((one.name for one in signal.Signals if one == number),
                f'signal {number}')


class Ending(NamedTuple):
    """How a start has ended."""

    code: int           # of what started the ranks; negative: as of a signal
    cause: str          # in words, for the user
    #: What the script itself did wrong, the same words for the same failure;
    #: '' if something from outside ended the job.
    failure: str = ''
    updates: Sequence[int] = ()     # as of JobOutput
    at: float = 0.0     # when it began, in seconds of time.time()
    seconds: float = 0.0            # that it ran


def ending_of(output: JobOutput, code: int, has_hosts: bool) -> Ending:
    """Puts an ending into words.

    With hosts a code may be that of a network, and no failure of the script.
    """
    output.has_died()       # MPICH speaks of signals alone
    cause, failure = output.cause or f'exit code {code}', ''
    if code == 0:
        cause = 'its end, in order'
    elif output.cause:
        pass
    elif output.failed:
        cause = f'{output.failed}: {output.error}'
        failure = output.error.partition(':')[0]    # it may name a process
    elif code < 0:
        cause = f'what starts the ranks was killed by {_name(-code)}'
    elif code == USAGE or not has_hosts:
        failure = cause
    return Ending(code, cause, failure, output.updates)

"""One attempt at a job: what it says, its processes, how it has ended."""
# An attempt is in one of three states.  It *runs* until what started the ranks
# has ended.  It is *ending* when a signal has come for the launcher, when all
# ranks are done but something of theirs holds the job open, or when ranks have
# said that one is dead or all stand still: then a signal was sent, and the
# next one has a time.  It is *abandoned* when even what was killed does not
# end, as the system waits for a disk.  Whatever the way, what is left of its
# processes and shared memory is removed.
#
# The launcher knows nothing of ranks but what they print on the standard error
# stream (report.launch_protocol) and exit codes.  One thread passes output on;
# the main one never waits for the terminal, which may be slow or stopped, so
# that a signal is heeded at any time.
from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from types import FrameType
from typing import Any, NamedTuple

from ..report.launch_protocol import DONE, RANK, UPDATED
from .leftovers import end_job, is_running, kill_rest, remove_segments

#: Exit code of a program that was called wrongly.
USAGE = 2

_UPDATE = re.compile(re.escape(UPDATED) + r'(\d+)')
_RANK = re.compile(re.escape(RANK)
                   + r'(rank \d+ of \d+) = PID (\d+) on (.*)')
# What starts ranks says of a death: MPICH's mpiexec in several lines, on the
# standard output, Open MPI's and Slurm's with the rank's number.  MPICH's
# names the process that was the first to end, which may be one that it has
# ended itself, while the dead one was writing its core.  The exit codes of
# all ranks tell the two apart where the signals differ; where they do not, all
# that were killed are named.
_CODES = re.compile(rb'\[mpiexec@[^\]\n]*(?:\] ?)?(?:$|Exit codes: '
                    rb'(.*(?:\n\[.*)*)(?:\n(?=[^\[])|\n?$))')
_CLEARED_UP = 0, signal.SIGTERM, signal.SIGKILL
_PID = re.compile(r'=\s+PID (\d+) RUNNING AT (\S+)')
_SIGNAL = re.compile(r'YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*'
                     r'\(signal (\d+)\)')
_OPEN_MPI = re.compile(
    r'process rank (\d+) with PID (\d+) on node (\S+) exited on signal '
    r'(\d+)')
_SLURM = re.compile(r'srun: error: (\S+): task (\d+): (Killed|Segmentation '
                    r'fault|Bus error|Aborted|Terminated)')
_SLURM_SIGNALS = {'Killed': 9, 'Segmentation fault': 11, 'Bus error': 7,
                  'Aborted': 6, 'Terminated': 15}
_STALLED = re.compile(r'chainer_fp8pipe: (the job stands still: .*)')
#: Follows where that is no mere warning.
_STALL_ENDS = 'ending all ranks with exit code 75'
_FAILED = re.compile(r'(rank \d+ of \d+) failed, ending all:')
_NODE_FAILED = re.compile(r'srun: error: (Node failure on .*)')
_TRACE = 'Traceback (most recent call last):'
_FRAME = re.compile(r'  File "(.*)", line (\d+)(?:, in .*)?')
#: The line after a traceback's frames.
_ERROR = re.compile(r'([A-Za-z_][\w.]*)(?:: .*)?')
_LONGEST = 1 << 16      # characters of a line that are looked at


class JobOutput:
    """Reads the standard error of one attempt.

    Attributes:
        update: The first update that was finished; None before.
        latest: The latest one that is known.
        done: Ranks in which the script has ended in order.
        dead: The rank that died, and of what, or Slurm's words about its
            node; ''.
        stalled: The line about a job that stands still, and that ranks end
            therefore; ''.
        failed: The rank that raised an exception; ''.
        error: The last line of its traceback; ''.
        where: The exception's type and innermost frame, which are the same
            each time, while its text may name a process or a time; ''.
    """

    def __init__(self) -> None:
        self.update: int | None = None
        self.latest: int | None = None
        self.done = 0
        self.dead = self.stalled = self.failed = self.error = self.where = ''
        #: Names and hosts, by their processes.
        self._ranks: dict[str, tuple[str, str]] = {}
        self._crashed: tuple[str, int] | None = None    # process, signal
        self._killed: list[str] = []    # ranks, by SIGKILL
        self._codes = b''               # as far as they were read
        self._died = ''         # the process that died, its host
        self._still = ''        # about a job that stands still
        self._is_trace = False  # the error is to come
        self._frame = ''        # the latest of the traceback
        self._line = ''         # that is not complete yet
        self._printed = ''      # the same of the standard output
        self._shown = 0         # characters of it that were handed on

    def feed(self, text: str) -> str:
        """Takes the next piece of output; returns what the user shall see.

        That is everything but lines for the launcher.  Pieces of lines are
        handed on at once, as a progress bar never ends its line.
        """
        shown = []
        *lines, last = (self._line + text).split('\n')
        for line in lines:
            self._look(line)
            end = _end_of_shown(line + '\n')
            shown.append((line + '\n')[self._shown:end])
            self._shown = 0
        if len(last) > _LONGEST:
            last, self._shown = last[self._shown:], 0
        end = max(self._shown, _end_of_shown(last))
        shown.append(last[self._shown:end])
        self._line, self._shown = last, end
        return ''.join(shown)

    def feed_printed(self, piece: bytes) -> bytes:
        """Takes the next piece of the standard output; returns what is shown.
        """
        piece, self._codes = self._codes + piece, b''
        if found := _CODES.search(piece):   # comes in parts, the last of all
            if found.end() == len(piece):
                self._codes = found[0]
            self._look_at_codes((found[1] or b'').decode(errors='replace'))
            piece = piece[:found.start()] + piece[found.end():]
        *lines, self._printed = (
            self._printed + piece.decode(errors='replace')).split('\n')
        self._printed = self._printed[-_LONGEST:]
        for line in lines:
            if line.startswith(('=', 'YOUR APPLICATION')):
                self._look(line)
        return piece

    def _look_at_codes(self, text: str) -> None:
        """Finds the rank that no clearing up has ended."""
        codes = [int(code) for part in re.findall(r'\] ([\d,]+)', text)
                 for code in part.split(',') if code]
        self._killed, self._crashed = [], None
        for process, (name, host) in self._ranks.items():
            rank = int(name.split()[1])
            code = codes[rank] if rank < len(codes) else 0
            if code == signal.SIGKILL:
                self._killed.append(str(rank))
            elif code < 1 << 7 and code not in _CLEARED_UP:
                self._crashed = f'{process} on host {host}', code

    def _look(self, line: str) -> None:
        """Finds what a line says."""
        if found := _UPDATE.search(line):
            self.latest = int(found[1])
            if self.update is None:
                self.update = self.latest
        elif DONE in line:
            self.done += 1
        elif found := _RANK.search(line):
            self._ranks[found[2]] = found[1], found[3]
        elif self._look_for_death(line):
            pass
        elif found := _STALLED.search(line):
            self._still = found[1]
        elif _STALL_ENDS in line:
            self.stalled = self._still
        elif found := _FAILED.search(line):
            self.failed = self.failed or found[1]
        elif self.failed:
            self._look_at_trace(line)

    def _look_for_death(self, line: str) -> bool:
        """Finds what the program that started the ranks says of a death."""
        if found := _NODE_FAILED.match(line):
            self.dead = self.dead or found[1]
        elif found := _PID.match(line):
            self._died = self._died or f'{found[1]} on host {found[2]}'
        elif self._died and (found := _SIGNAL.match(line)):
            self._has_died(*(self._crashed or (self._died, int(found[1]))))
        elif found := _OPEN_MPI.search(line):
            self._has_died(f'{found[2]} on host {found[3]}', int(found[4]))
        elif (found := _SLURM.match(line)) and not self.failed:
            self.dead = self.dead or (
                f'rank {found[2]} on host {found[1]} was '
                + _killed_by(_SLURM_SIGNALS[found[3]]))
        return bool(found)

    def _has_died(self, process: str, number: int) -> None:
        rank, _ = self._ranks.get(process.split()[0], ('', ''))
        # Who has ended all others has said why.
        if not rank or self.dead or self.failed or self.stalled:
            return
        self.dead = f'{rank}, process {process}, was {_killed_by(number)}'
        if number in _CLEARED_UP and len(self._killed) > 1:
            self.dead = (f'one of ranks {", ".join(sorted(self._killed))} was '
                         + _killed_by(signal.SIGKILL))

    def _look_at_trace(self, line: str) -> None:
        """Of several tracebacks the last one counts, as in a chain."""
        if line == _TRACE:
            self._is_trace, self._frame = True, ''
        elif self._is_trace and (found := _FRAME.fullmatch(line)):
            self._frame = f'{found[1]}:{found[2]}'
        elif self._is_trace and (found := _ERROR.fullmatch(line)):
            self._is_trace = False
            self.error, self.where = line, f'{found[1]} {self._frame}'


def _end_of_shown(text: str) -> int:
    """Where a line for the launcher begins in a text, or may begin."""
    return next((place for place, letter in enumerate(text)
                 if letter == UPDATED[0] and any(
                     own.startswith(text[place:place + len(own)])
                     for own in (UPDATED, DONE, RANK))), len(text))


def _killed_by(number: int, is_rank: bool = True) -> str:
    names = {one.value: one.name for one in signal.Signals}
    return f'killed by {names.get(number, f"signal {number}")}' + (
        ' (the system does that when memory is short)'
        if is_rank and number == signal.SIGKILL else '')


class Ending(NamedTuple):
    """How an attempt has ended.

    Attributes:
        code: Exit code of what started the ranks; negative: the signal that
            killed it.
        cause: In words, for the user.
        failure: What the script itself did wrong, the same words for the
            same failure; '' if something from outside ended the job.
        first: The first update that was finished; None: none.
        latest: The latest one that is known.
        progressed: Whether the next attempt begins further on.
        at: When it began, in seconds of ``time.time()``.
        seconds: That it ran.
    """

    code: int
    cause: str
    failure: str = ''
    first: int | None = None
    latest: int | None = None
    progressed: bool = False
    at: float = 0.0
    seconds: float = 0.0


def ending_of(output: JobOutput, code: int, has_hosts: bool) -> Ending:
    """Puts an ending into words.

    Args:
        output: What the job has said.
        code: As in :class:`Ending`.
        has_hosts: Whether ranks are on other hosts, so that an exit code may
            be that of a network.
    """
    failure = ''
    if code == 0:
        cause = 'its end, in order'
    elif output.stalled or output.dead:
        cause = output.stalled or output.dead
    elif output.failed:
        failure = output.where or 'an exception'
        cause = f'{output.failed}: {output.error or failure}'
    elif code < 0:
        cause = f'what starts the ranks was {_killed_by(-code, False)}'
    else:
        cause = f'exit code {code}'
        failure = cause if code == USAGE or not has_hosts else ''
    return Ending(code, cause, failure, output.update, output.latest)


# --- the terminal and signals ------------------------------------------------

_TICK = 0.5             # seconds between looks while nothing happens
_PATIENCE = 5.0         # for a job to end by itself after a rank has died
_LAST_WORDS = 0.5       # for a job's processes after that which started them
#: After a signal that has not ended a job the next one is sent, in so many
#: seconds: time to write a snapshot, as it is under Slurm and Kubernetes.
_FOLLOWED_BY = {signal.SIGINT: (10.0, signal.SIGTERM),
                signal.SIGHUP: (10.0, signal.SIGTERM),
                signal.SIGTERM: (30.0, signal.SIGKILL)}
_PIECE = 1 << 16
_STDOUT, _STDERR = 1, 2


def say(text: str) -> None:
    """Prints a line about the job, with the time."""
    show(f'chainer_fp8pipe launch: {time.strftime("%H:%M:%S")} {text}\n')


def show(text: str | bytes, stream: int = _STDERR) -> None:
    """Prints text as it is; a terminal that is gone does not matter."""
    rest = (text if isinstance(text, bytes)
            else text.encode(errors='replace'))
    with contextlib.suppress(OSError):
        while rest:
            try:
                # Not by sys.stderr: an interpreter that ends while another
                # thread writes there is aborted.
                rest = rest[os.write(stream, rest):]
            except BlockingIOError:     # the terminal is somebody else's, too
                room = select.poll()    # select() takes 1,024 files only
                room.register(stream, select.POLLOUT)
                room.poll()


class Interrupts:
    """A block in which signals are counted and do nothing else.

    SIGINT and SIGTERM count also where this process has inherited that they
    are ignored or blocked, as shells have it for what runs in the background:
    who sends them to a launcher means it.  Processes that are started in the
    block have them as usual.  SIGHUP stays ignored under ``nohup``.

    Attributes:
        received: SIGINT, SIGTERM and SIGHUP, in their order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._wakes, self._end = os.pipe()
        for file in self._wakes, self._end:
            os.set_blocking(file, False)

    def __enter__(self) -> Interrupts:
        self._wakeup = signal.set_wakeup_fd(self._end,
                                            warn_on_full_buffer=False)
        # Where SIGCHLD is ignored, nobody learns of exit codes.
        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._count) for number in numbers}
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
            # Not ours, but what is started would inherit it.
            self._before[signal.SIGQUIT] = signal.signal(
                signal.SIGQUIT, signal.SIG_DFL)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._wakes)
        os.close(self._end)

    def wait(self, seconds: float) -> None:
        """Until a signal comes, that of a child's end among them."""
        connection.wait([self._wakes], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakes, 4096):
                pass

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(signal.Signals(number))


class Attempt:
    """Starts a job and watches it to its end.

    Args:
        command: What starts the ranks.
        environment: Of all processes, with the mark.
        mark: By which they are found.
        interrupts: Of the launcher, in their block.

    Attributes:
        output: What it has said.

    Raises:
        OSError: The command cannot be run.
    """

    def __init__(self, command: Sequence[str],
                 environment: Mapping[str, str], mark: str,
                 interrupts: Interrupts) -> None:
        self.output = JobOutput()
        self._mark, self._interrupts = mark, interrupts
        self._since = time.time()
        self._handed_on = 0     # of the launcher's signals
        #: When which signal is sent, if the job has not ended by then.
        self._next: tuple[float, signal.Signals] | None = None
        self._is_abandoned = False
        # A group of its own: the launcher alone says when to end.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True)
        self._pieces = 0        # of output, that have been passed on
        self._readers = [threading.Thread(target=relay, daemon=True)
                         for relay in (self._relay, self._relay_printed)]
        for reader in self._readers:
            reader.start()

    def watch(self, tick: Callable[[], None], program: Sequence[str] = (),
              ranks: int = 0) -> int:
        """Waits for the end of the job, and clears up after it.

        What starts ranks waits also for processes that they have left
        behind.  The launcher does not, where it can see that all ranks have
        ended.

        Args:
            tick: Called twice a second or more often.
            program: What each rank runs; () if ranks are on other hosts.
            ranks: Their number.

        Returns:
            The exit code of the command, or 0 if all ranks have ended in
            order before.
        """
        are_done = False
        try:
            while self._process.poll() is None and not self._is_abandoned:
                self._interrupts.wait(_TICK)
                self._hand_on()
                now = time.monotonic()
                if self._next is None:
                    are_done = bool(program) and (
                        self.output.done == ranks
                        and not is_running(self._mark, list(program)))
                    tick()
                    if are_done:
                        self._send(signal.SIGTERM, _PATIENCE, signal.SIGKILL)
                    elif self.output.dead or self.output.stalled:
                        # Hydra waits for ever for a rank that is dead while
                        # a fork of it lives.
                        self._next = now + _PATIENCE, signal.SIGKILL
                elif now >= self._next[0]:
                    self._send(self._next[1])
        finally:
            self._clear_up()
        return 0 if are_done else (
            -signal.SIGKILL if self._process.returncode is None
            else self._process.returncode)

    def _relay(self) -> None:
        """Passes on what the job says."""
        assert self._process.stderr
        decoder = codecs.getincrementaldecoder('utf-8')('replace')
        with self._process.stderr as file:
            while piece := os.read(file.fileno(), _PIECE):
                if text := self.output.feed(decoder.decode(piece)):
                    show(text)
                self._pieces += 1

    def _relay_printed(self) -> None:
        """Passes on what the job prints, byte for byte."""
        assert self._process.stdout
        with self._process.stdout as file:
            while piece := os.read(file.fileno(), _PIECE):
                show(self.output.feed_printed(piece), _STDOUT)
                self._pieces += 1

    def _hand_on(self) -> None:
        """Hands the first signal on; a second one ends everything."""
        received = self._interrupts.received
        if len(received) > self._handed_on:
            self._handed_on = len(received)
            self._send(signal.SIGKILL if received[1:] else received[0])

    def _send(self, number: signal.Signals, *following: Any) -> None:
        """Sends a signal, and plans the one that follows."""
        if number == signal.SIGKILL:
            self._next = None
            self._kill()
        else:
            self._process.send_signal(number)
            patience, then = following or _FOLLOWED_BY[number]
            self._next = time.monotonic() + patience, then

    def _kill(self) -> None:
        end_job(self._mark, 0)
        with contextlib.suppress(OSError):      # where none has a mark
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._is_abandoned = True

    def _clear_up(self) -> None:
        if self._process.poll() is None:        # an error of the launcher
            self._kill()
        if left := kill_rest(self._mark, _LAST_WORDS):
            say(f'processes {", ".join(map(str, left))} do not end, although '
                'they were killed: the system waits for something, such as a '
                'disk')
        for reader in self._readers:
            while reader.is_alive():
                before = self._pieces
                reader.join(_PATIENCE)
                if self._pieces == before:      # a stranger holds the pipe
                    break
        remove_segments(self._since)

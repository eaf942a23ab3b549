"""What the output of a job tells the launcher, and how a start has ended."""
# The launcher knows nothing of ranks but what they print on the standard error
# stream (report.launch_protocol), what the program that starts them says of a
# death, and exit codes.  MPICH names the process that was the first to end,
# which may be one that it has killed itself, while the dead one was writing
# its core.  The statuses of all ranks, for which it is asked, tell the two
# apart unless both were killed; then all that were are named.
from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..report.launch_protocol import DONE, RANK, UPDATED

#: Exit code of a program that was called wrongly.
USAGE = 2
STDOUT, STDERR = 1, 2

#: What is not shown begins so: messages of ranks, and exit codes.
_MARKS = os.path.commonprefix([DONE, RANK, UPDATED]), '[mpiexec@'
_UPDATED = re.compile(f'{re.escape(UPDATED)}(\\d+)$')
_DONE = re.compile(f'{re.escape(DONE)}$')
_RANK = re.compile(
    re.escape(RANK) + r'(?P<name>rank (\d+) of \d+) = PID (\d+) on (.*)$')
#: A line for each host, whose ranks follow each other.
_CODES = re.compile(r'(\[mpiexec@[^\]]*\] Exit codes: |^)\[\S+\] ([\d,]+)$')
_FIRST = re.compile(r'=\s+PID (\d+) RUNNING AT (\S+)')
_DIED = re.compile(
    r'YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)|'
    r'process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)')
_SLURM = re.compile(
    r'srun: error: (Node failure on .*|\S+: task \d+: (?!Exited).*)')
_STILL = re.compile(r'chainer_fp8pipe: (the job stands still: .*)')
#: Follows where that is no mere warning.
_STALL_ENDS = 'ending all ranks with exit code 75'
_FAILED = re.compile(r'(rank \d+ of \d+) failed, ending all:')
_FRAME = '  File "'
#: The line after a traceback's frames.
_ERROR = re.compile(r'[A-Za-z_][\w.]*(?:: .*)?')
_LONGEST = 1 << 16      # characters of a line that are looked at


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
    """Reads a stream, and says what of it the user shall see.

    Pieces of lines are handed on at once, as a progress bar never ends its
    line.

    Args:
        look: Gets each line, of characters for bytes; returns where the part
            begins that is not shown.
    """

    def __init__(self, look: Callable[[str], int]) -> None:
        self._look = look
        self._line, self._shown = '', 0     # not ended yet; so far

    def feed(self, piece: bytes) -> bytes:
        """Takes the next piece of output; returns what is shown of it."""
        *whole, last = (self._line + piece.decode('latin-1')).split('\n')
        shown = ''
        for line in whole:
            end = self._look(line)
            shown += line[self._shown:end] + '\n' * (end == len(line))
            self._shown = 0
        end = min(_beginning(last, mark, self._shown) for mark in _MARKS)
        shown += last[self._shown:end]
        cut = max(end - _LONGEST, 0)
        self._line, self._shown = last[cut:], end - cut
        return shown.encode('latin-1')


def _beginning(text: str, mark: str, start: int) -> int:
    """Where a mark is, or begins at the end; else the text's end."""
    if (place := text.find(mark, start)) >= 0:
        return place
    return next((place for place in range(
        max(start, len(text) - len(mark) + 1), len(text))
        if mark.startswith(text[place:])), len(text))


class JobOutput:
    """Learns from the lines that one start of a job prints.

    Attributes:
        updates: The first that was finished and the latest that is known;
            empty before.
        done: Ranks in which the script has ended in order.
        cause: Who died and of what, or why the job stands still, so that it
            ends; ''.
        failed: The rank that raised an exception; ''.
        error: The last line of its traceback; ''.
    """

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.done = 0
        self.cause = self.failed = self.error = ''
        self._still = ''        # about a job that stands still
        self._is_trace = False  # the error is to come
        self._first = '', ''    # the process that MPICH saw end first, host
        # By rank: its name, process and host.
        self._ranks: dict[int, tuple[str, str, str]] = {}
        self._codes: list[int] = []     # of all ranks
        self._since = time.monotonic()

    def look(self, line: str) -> int:
        """Takes a line; returns where the part for the launcher begins."""
        if found := _UPDATED.search(line):
            if not self.updates:
                say(f'trains: update {found[1]} is done, '
                    f'{time.monotonic() - self._since:.1f} s after the start')
            self.updates = [*self.updates[:1], int(found[1])]
        elif found := _DONE.search(line):
            self.done += 1
        elif found := _RANK.search(line):
            self._ranks[int(found[2])] = found['name'], found[3], found[4]
        elif (found := _CODES.search(line)) and (found[1] or self._codes):
            self._codes += map(int, filter(None, found[2].split(',')))
        else:
            self._read(line.encode('latin-1').decode(errors='replace'))
            return len(line)
        return found.start()

    def _read(self, line: str) -> None:
        if found := _FIRST.match(line):
            self._first = found[1], found[2]
        elif found := _DIED.search(line):
            self._has_died(found[2], int(found[1] or found[3]))
        elif found := _SLURM.match(line):
            self._end(found[1])
        elif found := _STILL.search(line):
            self._still = found[1]
        elif _STALL_ENDS in line:
            self._end(self._still)
        elif found := _FAILED.search(line):
            self.failed = self.failed or found[1]
        # Of several tracebacks the last one counts, as in a chain.
        elif self.failed and line.startswith(_FRAME):
            self._is_trace = True
        elif self._is_trace and _ERROR.fullmatch(line):
            self.error, self._is_trace = line, False

    def _end(self, cause: str) -> None:
        if not self.failed:     # who has ended all others has said why
            self.cause = self.cause or cause

    def _has_died(self, rank: str | None, number: int) -> None:
        # As of wait(): 128 says that there is a core.
        codes = {one: code if (code := self._codes[one]) >= 1 << 8 else
                 code & 127 for one in self._ranks if one < len(self._codes)}
        process, _ = self._first
        same = [one for one, known in self._ranks.items()
                if known[1] == process]
        crashed = [one for one, code in codes.items() if 0 < code < 1 << 8
                   and code not in (signal.SIGTERM, signal.SIGKILL)]
        exited = [one for one, code in codes.items() if code >= 1 << 8]
        if exited and not crashed:      # by itself, as by os._exit()
            if not self.failed:
                self.failed = self._ranks[exited[0]][0]
                self.error = f'exit code {codes[exited[0]] >> 8}'
            return
        suspects = [int(rank)] if rank else (
            crashed
            or [one for one, code in codes.items() if code == signal.SIGKILL]
            # Hydra and the rank may know a host by different names.
            or [one for one in same if self._ranks[one][1:] == self._first]
            or same * (len(same) == 1))
        if suspects:
            number = codes.get(suspects[0]) or number
            name, process, host = self._ranks.get(
                suspects[0], (f'rank {suspects[0]}', '', ''))
            if suspects[1:]:
                name = 'one of ranks ' + ', '.join(map(str, sorted(suspects)))
            elif process:
                name += f', process {process} on host {host},'
            self._end(f'{name} was killed by {_name(number)}' + (
                ' (the system does that when memory is short)'
                if number == signal.SIGKILL else ''))


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f'signal {number}'


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
    failure = ''
    if code == 0:
        cause = 'its end, in order'
    elif output.cause:
        cause = output.cause
    elif output.failed:
        cause = f'{output.failed}: {output.error or "an exception"}'
        # The text may name a process or a time.
        failure = (output.error or cause).partition(':')[0]
    elif code < 0:
        cause = f'what starts the ranks was killed by {_name(-code)}'
    else:
        cause = f'exit code {code}'
        failure = cause if code == USAGE or not has_hosts else ''
    return Ending(code, cause, failure, output.updates)

"""What the output of a job tells the launcher, and how a start has ended."""
# The launcher knows nothing of ranks but what they print on the standard error
# stream (report.launch_protocol), what the program that starts them says of a
# death, and exit codes.  MPICH's mpiexec tells of a death on the standard
# output, in several lines, Open MPI's and Slurm's in one on the other stream.
# MPICH's names the process that was the first to end, which may be one that it
# has ended itself, while the dead one was writing its core.  The exit codes of
# all ranks, for which it is asked, tell the two apart where the signals
# differ; where they do not, all that were killed are named.
from __future__ import annotations

import re
import signal
from typing import NamedTuple

from ..report.launch_protocol import DONE, RANK, UPDATED

#: Exit code of a program that was called wrongly.
USAGE = 2

#: What is for the launcher, and is not shown.
_MESSAGE = re.compile(
    f'(?:{re.escape(UPDATED)}(?P<update>\\d+)|(?P<done>{re.escape(DONE)})|'
    rf'{re.escape(RANK)}(?P<rank>rank \d+ of \d+) = PID (?P<pid>\d+) on '
    '(?P<host>.*))\n')
_HEARD = '\0'           # stands for one, and ends a line
_PID = re.compile(r'=\s+PID (\d+) RUNNING AT (\S+)')
_SIGNAL = re.compile(r'YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*'
                     r'\(signal (\d+)\)')
_CODES = re.compile(rb'\[mpiexec@[^\]\n]*(?:\] ?)?(?:$|Exit codes: '
                    rb'(.*(?:\n\[.*)*)(?:\n(?=[^\[])|\n?$))')
_CLEARED_UP = 0, signal.SIGTERM, signal.SIGKILL
_OPEN_MPI = re.compile(
    r'process rank \d+ with PID (\d+) on node (\S+) exited on signal (\d+)')
_SLURM = re.compile(r'srun: error: (\S+): task (\d+): (Killed|Segmentation '
                    r'fault|Bus error|Aborted|Terminated)')
_SLURM_SIGNALS = {'Killed': 9, 'Segmentation fault': 11, 'Bus error': 7,
                  'Aborted': 6, 'Terminated': 15}
_NODE_FAILED = re.compile(r'srun: error: (Node failure on .*)')
_STALLED = re.compile(r'chainer_fp8pipe: (the job stands still: .*)')
#: Follows where that is no mere warning.
_STALL_ENDS = 'ending all ranks with exit code 75'
_FAILED = re.compile(r'(rank \d+ of \d+) failed, ending all:')
_TRACE = 'Traceback (most recent call last):'
_FRAME = re.compile(r'  File "(.*)", line (\d+)(?:, in .*)?')
#: The line after a traceback's frames.
_ERROR = re.compile(r'([A-Za-z_][\w.]*)(?:: .*)?')
_LONGEST = 1 << 16      # characters of a line that are looked at


class JobOutput:
    """Reads what one start of a job prints.

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
        self._crashed: tuple[str, str, str] | None = None   # as _has_died
        self._killed: list[str] = []    # ranks, by SIGKILL
        self._codes = b''       # of all ranks, as far as they were read
        self._died = ('', '')   # the process that died, its host
        self._still = ''        # about a job that stands still
        self._is_trace = False  # the error is to come
        self._frame = ''        # the latest of the traceback
        self._kept = ''         # perhaps the beginning of a message
        self._line = ''         # that is not complete yet
        self._printed = ''      # the same of the standard output

    def feed(self, text: str) -> str:
        """Takes the next piece of output; returns what the user shall see.

        That is everything but lines for the launcher.  Pieces of lines are
        handed on at once, as a progress bar never ends its line.
        """
        text = _MESSAGE.sub(self._hear, self._kept + text)
        end = _beginning_of_a_message(text)
        shown, self._kept = text[:end], text[end:]
        *lines, last = (self._line + shown).replace(_HEARD, '\n').split('\n')
        self._line = last[-_LONGEST:]
        for line in lines:
            self._look(line)
        return shown.replace(_HEARD, '')

    def feed_printed(self, piece: bytes) -> bytes:
        """Takes the next piece of the standard output; returns what is shown.
        """
        piece, self._codes = self._codes + piece, b''
        if found := _CODES.search(piece):   # comes in parts, the last of all
            if found.end() == len(piece):
                self._codes = found[0]
            self._look_at_codes((found[1] or b'').decode(errors='replace'))
            piece = piece[:found.start()] + piece[found.end():]
        *lines, last = (
            self._printed + piece.decode(errors='replace')).split('\n')
        self._printed = last[-_LONGEST:]
        for line in lines:
            self._look_for_death(line)
        return piece

    def _hear(self, said: re.Match[str]) -> str:
        if said['update']:
            self.latest = int(said['update'])
            if self.update is None:
                self.update = self.latest
        elif said['done']:
            self.done += 1
        else:
            self._ranks[said['pid']] = said['rank'], said['host']
        return _HEARD

    def _look(self, line: str) -> None:
        """Finds what a line says."""
        if self._look_for_death(line):
            pass
        elif found := _STALLED.search(line):
            self._still = found[1]
        elif _STALL_ENDS in line:
            self.stalled = self._still
        elif found := _FAILED.search(line):
            self.failed = self.failed or found[1]
        # Of several tracebacks the last one counts, as in a chain.
        elif self.failed and line == _TRACE:
            self._is_trace, self._frame = True, ''
        elif self._is_trace and (found := _FRAME.fullmatch(line)):
            self._frame = f'{found[1]}:{found[2]}'
        elif self._is_trace and (found := _ERROR.fullmatch(line)):
            self._is_trace = False
            self.error, self.where = line, f'{found[1]} {self._frame}'

    def _look_for_death(self, line: str) -> bool:
        if found := _NODE_FAILED.match(line):
            self.dead = self.dead or found[1]
        elif found := _PID.match(line):
            self._died = found[1], found[2]
        elif found := _SIGNAL.match(line):
            self._has_died(*(self._crashed or (*self._died, found[1])))
        elif found := _OPEN_MPI.search(line):
            self._has_died(*found.groups())
        elif (found := _SLURM.match(line)) and not self.failed:
            self.dead = self.dead or (
                f'rank {found[2]} on host {found[1]} was '
                + _killed_by(_SLURM_SIGNALS[found[3]]))
        return bool(found)

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
                self._crashed = process, host, str(code)

    def _has_died(self, process: str, host: str, number: str) -> None:
        # Who has ended all others has said why.
        if process not in self._ranks or (
                self.dead or self.failed or self.stalled):
            return
        self.dead = (f'{self._ranks[process][0]}, process {process} on host '
                     f'{host}, was {_killed_by(int(number))}')
        if int(number) in _CLEARED_UP and len(self._killed) > 1:
            self.dead = (f'one of ranks {", ".join(sorted(self._killed))} was '
                         + _killed_by(signal.SIGKILL))


def _beginning_of_a_message(text: str) -> int:
    """Where a message may begin that is not whole; else the text's end."""
    place = text.rfind('\n') + 1
    while (place := text.find(UPDATED[0], place)) >= 0:
        rest = text[place:]
        if len(rest) < _LONGEST and any(
                own.startswith(rest[:len(own)])
                for own in (UPDATED, DONE, RANK)):
            return place
        place += 1
    return len(text)


def _killed_by(number: int, is_rank: bool = True) -> str:
    names = {one.value: one.name for one in signal.Signals}
    return f'killed by {names.get(number, f"signal {number}")}' + (
        ' (the system does that when memory is short)'
        if is_rank and number == signal.SIGKILL else '')


class Ending(NamedTuple):
    """How a start has ended.

    Attributes:
        code: Exit code of what started the ranks; negative: the signal that
            killed it.
        cause: In words, for the user.
        failure: What the script itself did wrong, the same words for the
            same failure; '' if something from outside ended the job.
        first: The first update that was finished; None: none.
        latest: The latest one that is known.
        progressed: Whether the next start begins further on.
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

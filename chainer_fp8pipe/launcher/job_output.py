"""What a start of a job says on its standard error, and how it has ended."""
from __future__ import annotations

import re
import signal
from typing import NamedTuple

from ..report.going_on import DONE, UPDATED

#: Exit code of a program that was called wrongly.
USAGE = 2

_UPDATE = re.compile(re.escape(UPDATED) + r'(\d+)')
_WITNESS = re.compile(r'chainer_fp8pipe: (.*) in the middle of the job ')
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
    """Reads the standard error of one start of a job.

    Attributes:
        update: The first update that was finished; None before.
        latest: The latest one that is known.
        done: Ranks in which the script has ended in order.
        dead: What the witness says about the rank that died, or Slurm about
            its node; ''.
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
        self._still = ''        # about a job that stands still
        self._is_trace = False  # the error is to come
        self._frame = ''        # the latest of the traceback
        self._line = ''         # that is not complete yet
        self._shown = 0         # characters of it that were handed on

    def feed(self, text: str) -> str:
        """Takes the next piece of output; returns what the user shall see.

        That is everything but lines for the launcher.  Pieces of lines are
        handed on at once, as a progress bar never ends its line.
        """
        shown = []
        *lines, last = (self._line + text).split('\n')
        for line in lines:
            is_seen = self._look(line)
            if is_seen or self._shown:
                shown.append(line[self._shown:] + '\n')
            self._shown = 0
        if len(last) > _LONGEST:
            last, self._shown = last[self._shown:], 0
        if not any(own.startswith(last[:len(own)]) for own in (UPDATED, DONE)):
            shown.append(last[self._shown:])
            self._shown = len(last)
        self._line = last
        return ''.join(shown)

    def _look(self, line: str) -> bool:
        """Finds what a line says; False if it is for the launcher only."""
        if found := _UPDATE.search(line):
            self.latest = int(found[1])
            if self.update is None:
                self.update = self.latest
            return not line.startswith(UPDATED)
        if DONE in line:
            self.done += 1
            return not line.startswith(DONE)
        if found := _WITNESS.search(line) or _NODE_FAILED.match(line):
            self.dead = self.dead or found[1]
        elif found := _STALLED.search(line):
            self._still = found[1]
        elif _STALL_ENDS in line:
            self.stalled = self._still
        elif found := _FAILED.search(line):
            self.failed = self.failed or found[1]
        elif self.failed:
            self._look_at_trace(line)
        return True

    def _look_at_trace(self, line: str) -> None:
        """Of several tracebacks the last one counts, as in a chain."""
        if line == _TRACE:
            self._is_trace, self._frame = True, ''
        elif self._is_trace and (found := _FRAME.fullmatch(line)):
            self._frame = f'{found[1]}:{found[2]}'
        elif self._is_trace and (found := _ERROR.fullmatch(line)):
            self._is_trace = False
            self.error, self.where = line, f'{found[1]} {self._frame}'


class Ending(NamedTuple):
    """How a start of a job has ended.

    Attributes:
        code: Exit code of what started the ranks.
        cause: In words, for the user.
        failure: What the script itself did wrong, the same words for the
            same failure; '' if something from outside ended the job.
        has_updated: Whether an update was finished.
        progressed: Whether the next start begins further on.
    """

    code: int
    cause: str
    failure: str = ''
    has_updated: bool = False
    progressed: bool = False


def ending_of(output: JobOutput, code: int, progressed: bool,
              on_purpose: bool, has_hosts: bool) -> Ending:
    """Puts an ending into words.

    Args:
        output: What the job has said.
        code: Of the program that started the ranks; negative: the signal
            that killed it.
        progressed: Whether the next start begins further on.
        on_purpose: Whether the launcher has ended the job.
        has_hosts: Whether ranks are on other hosts, so that an exit code may
            be that of a network.
    """
    failure = ''
    if code == 0 and not on_purpose:
        cause = 'its end, in order'
    elif on_purpose:
        cause = 'the launcher, as all hosts answer again'
    elif output.stalled or output.dead:
        cause = output.stalled or output.dead
    elif output.failed:
        failure = output.where or 'an exception'
        cause = f'{output.failed}: {output.error or failure}'
    elif code < 0:
        cause = f'what starts the ranks was killed by {signal_name(-code)}'
    else:
        cause = f'exit code {code}'
        failure = cause if code == USAGE or not has_hosts else ''
    return Ending(code, cause, failure, output.update is not None,
                  progressed)


def signal_name(number: int) -> str:
    """Such as ``'SIGKILL'``; most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f'signal {number}'

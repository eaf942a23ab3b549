"""What ranks say on their standard error that the launcher acts upon."""
from __future__ import annotations

import re

from ..report.going_on import UPDATED

_UPDATE = re.compile(re.escape(UPDATED) + r'(\d+)')
_WITNESS = re.compile(r'chainer_fp8pipe: (.*) in the middle of the job ')
_STALLED = re.compile(r'chainer_fp8pipe: (the job stands still: .*)')
#: Follows where that is no mere warning.
_STALL_ENDS = 'ending all ranks with exit code 75'
_FAILED = re.compile(r'(rank \d+ of \d+) failed, ending all:')
_NODE_FAILED = re.compile(r'srun: error: (Node failure on .*)')
#: The last line of a traceback, not of srun, which may follow and differs
#: from start to start.
_ERROR = re.compile(r'(?!srun: )([A-Za-z_][\w.]*(?:: .*)?)')
_LONGEST = 1 << 16      # characters of a line that are looked at


class JobOutput:
    """Reads the standard error of one start of a job.

    Attributes:
        update: The first update that was finished; None before.
        latest: The latest one that is known.
        dead: What the witness says about the rank that died, or Slurm about
            its node; ''.
        stalled: The line about a job that stands still, and that ranks end
            therefore; ''.
        failed: The rank that raised an exception; ''.
        error: That exception.
    """

    def __init__(self) -> None:
        self.update: int | None = None
        self.latest: int | None = None
        self.dead = self.stalled = self.failed = self.error = ''
        self._still = ''        # about a job that stands still
        self._line = ''         # that is not complete yet
        self._shown = 0         # characters of it that were handed on

    def feed(self, text: str) -> str:
        """Takes the next piece of output; returns what the user shall see.

        That is everything but lines with :data:`.UPDATED`.  Pieces of
        lines are handed on at once, as a progress bar never ends its line.
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
        if not UPDATED.startswith(last[:len(UPDATED)]):
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
        if found := _WITNESS.search(line) or _NODE_FAILED.match(line):
            self.dead = self.dead or found[1]
        elif found := _STALLED.search(line):
            self._still = found[1]
        elif _STALL_ENDS in line:
            self.stalled = self._still
        elif found := _FAILED.search(line):
            self.failed = self.failed or found[1]
        elif self.failed and (found := _ERROR.fullmatch(line)):
            self.error = found[1]
        return True

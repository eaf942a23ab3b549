"""Whether and when a job that has died starts again.

A start that has brought the job further is worth another one at once.  After
one that has not, each waits twice as long as the one before.  The launcher
gives up after so many in a row that have brought nothing; and earlier where
it is the script that fails, in the same way each time: what three starts in
a row have shown, a fourth would not change.

Hosts that do not answer are no failure of the job's: they are asked again and
again for a given time, and the job starts as soon as enough of them answer.
"""
from __future__ import annotations

from typing import NamedTuple

#: Starts in a row with the same failure of the script.
SAME = 3
#: Seconds that a start waits at most.
LONGEST = 300.0
#: Seconds between two questions to hosts, at most.
_ASK = 5.0
#: Exit code of a program that was called wrongly.
USAGE = 2


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


class RestartPolicy:
    """Decides after each ending.

    Args:
        restarts: In a row without progress, at most.
        patience: Seconds that hosts may be away.
    """

    def __init__(self, restarts: int, patience: float) -> None:
        self._restarts, self._patience = restarts, patience
        self._away: list[float] = []    # when hosts were asked in vain
        self._in_vain = 0           # starts in a row
        self._failure = ''          # of the last start
        self._same = 0              # starts in a row with that failure
        #: Why there is no other start; '' while there may be one.
        self.verdict = ''

    def after(self, ending: Ending) -> float:
        """Seconds to wait before the next start; see :attr:`verdict`."""
        self._away = []
        if ending.progressed:
            self._in_vain = self._same = 0
            self._failure = ''
            return 0.0
        self._in_vain += 1
        self._same = (self._same + 1 if ending.failure == self._failure
                      else 1)
        self._failure = ending.failure
        if ending.failure:
            if ending.code == USAGE and not ending.has_updated:
                self.verdict = ('the command line or the script is refused, '
                                'which another start does not change')
            elif self._same >= SAME:
                self.verdict = (f'{SAME} starts in a row have failed in the '
                                'same way, without progress')
        if not self.verdict and self._in_vain > self._restarts:
            self.verdict = (f'{self._in_vain} starts in a row have made no '
                            f'progress (--restarts {self._restarts})')
        return self.wait()

    def without_hosts(self, now: float) -> float:
        """Seconds to wait when too few hosts answer; see :attr:`verdict`.

        ``now`` is in seconds, of any clock.
        """
        self._away.append(now)
        away = now - self._away[0]
        if away >= self._patience:
            self.verdict = (f'too few hosts have answered for {away:.0f} '
                            'seconds (--wait-for-hosts)')
        return min(2.0 ** min(len(self._away) - 1, 30), _ASK)

    def wait(self) -> float:
        """Seconds: 0, 1, 2, 4 and so on."""
        if self._in_vain < 2:
            return 0.0
        return min(2.0 ** min(self._in_vain - 2, 30), LONGEST)

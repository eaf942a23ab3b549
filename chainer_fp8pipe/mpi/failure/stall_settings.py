"""How long a job may stand still, and what happens then."""
from __future__ import annotations

import math
import os
from typing import NamedTuple

#: The environment variable with the seconds without an update after which a
#: job stands still; 0: never; not set: what :class:`StallSettings` says.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: The one that says what happens then: ``end`` or ``warn``.
ACTION = 'CHAINER_FP8PIPE_ON_STALL'
#: Exit code of a job that was ended because it stood still: that of a failure
#: that may be over when the job is started again (``EX_TEMPFAIL`` of
#: ``<sysexits.h>``).
EXIT_CODE = 75

_LEAST = 30.0           # seconds
_UPDATES = 20           # usual updates
# The same again as long as it is less certain that a job stands still.
_DEADLOCK = 4           # all ranks wait; one long message looks alike
_WORK = 10              # some rank does something that others wait for


class StallSettings(NamedTuple):
    """What the environment variables say.

    Without a number of seconds a job stands still after 20 usual updates, and
    30 seconds at least, if a rank is stopped or gone; if all ranks wait, it
    may be for one long message, and after four times as long.  If a rank does
    something else, it may be a long evaluation: after ten times as long there
    is a warning, and the job goes on.  Seconds that are given are those of all
    of this, and the job ends.

    Attributes:
        seconds: Given; None: as above; 0: nothing is watched.
        ends: The job ends; else there is a warning.
        least: Seconds that are waited for without ``seconds``, at least.
    """

    seconds: float | None = None
    ends: bool = True
    least: float = _LEAST

    def limit(self, usual: float) -> float:
        """Seconds without an update before anybody asks why.

        Args:
            usual: What an update usually takes.
        """
        if self.seconds is not None:
            return self.seconds
        return max(self.least, _UPDATES * usual)

    def patience(self, is_certain: bool, is_broken: bool) -> int:
        """How many times the limit must be over.

        Args:
            is_certain: No rank works that might be done some day.
            is_broken: A rank cannot go on at all.
        """
        if self.seconds is not None or (is_certain and is_broken):
            return 1
        return _DEADLOCK if is_certain else _WORK

    def ends_if(self, is_certain: bool) -> bool:
        """Whether the job ends, rather than that there is a warning."""
        return self.ends and (is_certain or self.seconds is not None)


def settings_of_environment() -> StallSettings:
    """The settings of this process.

    Raises:
        ValueError: A variable has a value that is not allowed.
    """
    text = os.environ.get(SECONDS, '').strip()
    seconds = None
    if text:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ValueError(f'the environment variable {SECONDS} must be '
                             f'seconds, 0 or more, not {text!r}')
    action = os.environ.get(ACTION, '').strip() or 'end'
    if action not in ('end', 'warn'):
        raise ValueError(f'the environment variable {ACTION} must be end or '
                         f'warn, not {action!r}')
    return StallSettings(seconds, action == 'end', _LEAST)

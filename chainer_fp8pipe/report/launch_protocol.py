"""How ranks tell a launcher how far the training is: by lines of output."""
from __future__ import annotations

import functools
import os
import time

#: The environment variable that ranks have if a launcher has started them.
LAUNCHED = 'CHAINER_FP8PIPE_LAUNCH'
#: The environment variable in which a launcher says, as a list in JSON, what
#: has ended its earlier starts of the job.
ENDED = 'CHAINER_FP8PIPE_ENDED'
#: Begins a line about an update that is done; its number follows.
UPDATED = 'chainer_fp8pipe run: done with update '
#: The line of a rank in which the script has ended in order.  What it has
#: left running may keep the program that starts ranks from ending.
DONE = 'chainer_fp8pipe run: the script has ended'
#: Begins a line about a rank: ``rank 1 of 4 = PID 1479 on b`` follows.  What
#: starts ranks names processes alone where one dies.
RANK = 'chainer_fp8pipe run: is there: '

_SECONDS = 0.5          # between lines about updates


def is_launched() -> bool:
    """Whether ``python -m chainer_fp8pipe launch`` has started this rank."""
    return LAUNCHED in os.environ


def tell(line: str) -> None:
    """Tells the launcher that has started this rank, if any."""
    # In one piece, so that it is a line also among others' output; Python's
    # own stream may lead nowhere meanwhile.
    if is_launched():
        os.write(2, f'{line}\n'.encode())


@functools.cache
def say_rank(rank: int, size: int) -> None:
    """Tells a launcher which process a rank is; once."""
    tell(f'{RANK}rank {rank} of {size} = PID {os.getpid()} on '
         f'{os.uname().nodename}')


class LauncherLine:
    """Tells the launcher of updates: the first one, and one now and then."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, update: int) -> None:
        """Call it after each update, with its number."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _SECONDS
            tell(f'{UPDATED}{update}')

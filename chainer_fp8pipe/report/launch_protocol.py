"""How ranks tell a launcher how far the training is: by lines of output."""
from __future__ import annotations

import contextlib
import functools
import os
import time

#: The environment variable that ranks have if a launcher has started them.
LAUNCHED = 'CHAINER_FP8PIPE_LAUNCH'
#: The environment variable with the number of its earlier starts of the job.
EARLIER = 'CHAINER_FP8PIPE_EARLIER_STARTS'
#: Begins a line about an update that is done; its number follows.
UPDATED = 'chainer_fp8pipe run: done with update '
#: The line of a rank in which the script has ended in order.  What it has
#: left running may keep the program that starts ranks from ending.
DONE = 'chainer_fp8pipe run: the script has ended'
#: Begins a line about a rank: ``rank 1 of 4 = PID 1479 on b`` follows.  What
#: starts ranks names processes alone where one dies.
RANK = 'chainer_fp8pipe run: is there: '
#: Begins a line about an exception that ends all ranks:
#: ``rank 1 of 4: KeyError: 'a'`` follows.
FAILED = 'chainer_fp8pipe run: has failed: '
#: Begins a line about ranks that stand still, and are ended; why follows.
STILL = 'chainer_fp8pipe run: stands still: '

_SECONDS = 0.5          # between lines about updates
_next = 0.0             # when there may be another one


def is_launched() -> bool:
    """Whether ``python -m chainer_fp8pipe launch`` has started this rank."""
    return LAUNCHED in os.environ


def tell(line: str) -> None:
    """Tells the launcher that has started this rank, if any."""
    # In one piece, so that it is a line also among others' output; Python's
    # own stream may lead nowhere meanwhile.
    if is_launched():
        with contextlib.suppress(OSError):      # it is closed
            os.write(2, f'{line}\n'.encode(errors='replace'))


@functools.cache
def say_rank(rank: int, size: int) -> None:
    """Tells a launcher which process a rank is; once."""
    tell(f'{RANK}rank {rank} of {size} = PID {os.getpid()} on '
         f'{os.uname().nodename}')


def say_update(update: int) -> None:
    """Tells a launcher of the first update, and of one now and then."""
    global _next
    if (now := time.monotonic()) >= _next:
        _next = now + _SECONDS
        tell(f'{UPDATED}{update}')

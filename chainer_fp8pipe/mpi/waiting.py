"""How a rank waits for a message: as briefly as it can, and politely.

Ranks may outnumber the cores, so that the one which is waited for needs the
core of the one that waits.  A wait polls, and soon yields the core between
polls, which is about as fast while nobody else wants the core.  When it has
lasted a while it sleeps between polls: the core is then free, and what the
sleep adds is little beside what has passed already.
"""
from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

_POLLS = 20             # before the first yield, about 4 us
_PATIENCE = 200e-6      # seconds of polling before the first sleep
_SLEEP = 20e-6          # seconds; Linux makes about 75 us of it

# Not every system has it.
_yield: Callable[[], object] = getattr(
    os, 'sched_yield', functools.partial(time.sleep, 0))


def wait_until(done: Callable[[], bool]) -> None:
    """Calls ``done`` until it returns something true."""
    for _ in range(_POLLS):
        if done():
            return
    end = time.perf_counter() + _PATIENCE
    while time.perf_counter() < end:
        _yield()
        if done():
            return
    while not done():
        time.sleep(_SLEEP)

"""The faults that a campaign injects."""
from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.faults_run import FaultyRun

_SMALL = 1 << 20        # bytes that a rank may have: none more than it has


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
        inject: Does it; returns a pattern of what must be named as the
            cause, or '' if there was nobody to do it to.
        kills_launcher: Whether somebody must launch the job again.
        needs: What must be there besides this package.
    """

    inject: Callable[[FaultyRun, random.Random], str]
    kills_launcher: bool = False
    needs: str = ''


def _to_a_rank(number: int, named: str) -> Callable[[FaultyRun,
                                                     random.Random], str]:
    def inject(run: FaultyRun, draw: random.Random) -> str:
        ranks = run.ranks()
        if len(ranks) < run.job.ranks:
            return ''
        rank = draw.choice(sorted(ranks))
        os.kill(ranks[rank], number)
        return rf'rank {rank} of {run.job.ranks}\b.*{named}'
    return inject


def _short_of_memory(run: FaultyRun, draw: random.Random) -> str:
    ranks = run.ranks()
    if len(ranks) < run.job.ranks:
        return ''
    rank = draw.choice(sorted(ranks))
    resource.prlimit(ranks[rank], resource.RLIMIT_AS, (_SMALL, _SMALL))
    # An error of Python's, or the end in a library that cannot go on.
    return rf'rank {rank} of {run.job.ranks}\b'


def _kill_launcher(run: FaultyRun, draw: random.Random) -> str:
    if run.launcher.poll() is not None:
        return ''
    run.launcher.kill()
    return '.'


def _damaged(damage: Callable[[bytes, random.Random], bytes]
             ) -> Callable[[FaultyRun, random.Random], str]:
    """Damages the newest snapshot, and has a rank die so that it is read."""
    kill = _to_a_rank(signal.SIGKILL, 'SIGKILL')

    def inject(run: FaultyRun, draw: random.Random) -> str:
        path = run.newest()
        if path is None:
            return ''
        path.write_bytes(damage(path.read_bytes(), draw))
        return kill(run, draw)
    return inject


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[:draw.randrange(len(data))]


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


FAULTS = {
    'SIGKILL': Fault(_to_a_rank(signal.SIGKILL, 'SIGKILL')),
    'SIGSEGV': Fault(_to_a_rank(signal.SIGSEGV, 'SIGSEGV')),
    'SIGBUS': Fault(_to_a_rank(signal.SIGBUS, 'SIGBUS')),
    'memory': Fault(_short_of_memory),
    'raises': Fault(_to_a_rank(signal.SIGUSR1, 'InjectedFault')),
    'launcher': Fault(_kill_launcher, kills_launcher=True),
    'truncated': Fault(_damaged(_cut)),
    'bit flips': Fault(_damaged(_flip)),
    'SIGSTOP': Fault(_to_a_rank(signal.SIGSTOP, ''), needs='--stall'),
    'collective': Fault(_to_a_rank(signal.SIGUSR2, ''), needs='--stall'),
}

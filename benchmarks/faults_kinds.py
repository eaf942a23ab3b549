"""The faults that a campaign injects."""
from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from faults_run import FaultyRun

_MORE = 1 << 28         # bytes of addresses until there is no memory
_DISK_FULL = 3.0        # seconds
_FIRST_SNAPSHOT = 20.0  # that is waited for, at most
_SLOW_LINK = 5.0
_BOOT = 20.0            # that a lost host needs to come back


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
        inject: Does it; returns a pattern of what must be named as the
            cause, or '' if there was nobody to do it to.
        kills_launcher: Whether somebody must launch the job again.
        lasts: Seconds of something that a job may survive.
        needs: What must be there: '', 'stall' (an option of ``launch``),
            'disk' or 'network'.
    """

    inject: Callable[[FaultyRun, random.Random], str]
    kills_launcher: bool = False
    lasts: float = 0.0
    needs: str = ''


def _to_a_rank(number: int, named: str) -> Callable[[FaultyRun,
                                                     random.Random], str]:
    def inject(run: FaultyRun, draw: random.Random) -> str:
        ranks = run.ranks()
        if len(ranks) < run.job.ranks:
            return ''
        rank = draw.choice(sorted(ranks))
        os.kill(ranks[rank], number)
        # Where one waits for the other, both are named; and all that were
        # killed where nobody knows who was the first.
        return rf'\branks? (?:\d+, )*{rank}\b.*{named}'
    return inject


def _short_of_memory(run: FaultyRun, draw: random.Random) -> str:
    ranks = run.ranks()
    if len(ranks) < run.job.ranks:
        return ''
    rank = draw.choice(sorted(ranks))
    with open(f'/proc/{ranks[rank]}/statm') as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MORE
    resource.prlimit(ranks[rank], resource.RLIMIT_AS, (limit, limit))
    os.kill(ranks[rank], signal.SIGXCPU)
    # An error of Python's, or the end in a library that cannot go on.
    return rf'rank {rank} of {run.job.ranks}\b'


def _kill_launcher(run: FaultyRun, draw: random.Random) -> str:
    if run.launcher.poll() is not None:
        return ''
    run.launcher.kill()
    return '.'


def _damaged(damage: Callable[[bytes, random.Random], bytes]
             ) -> Callable[[FaultyRun, random.Random], str]:
    """Has a rank die, and damages the snapshot that would be read then."""
    kill = _to_a_rank(signal.SIGKILL, 'SIGKILL')

    def inject(run: FaultyRun, draw: random.Random) -> str:
        end = time.monotonic() + _FIRST_SNAPSHOT
        while not run.newest() and time.monotonic() < end:
            time.sleep(0.02)
        # In this order: nobody would read a snapshot of a job that is through.
        if not run.newest() or not (expected := kill(run, draw)):
            return ''
        path = run.newest()
        assert path         # a newer one comes before an older one goes
        file = next(path.glob('rank0of*.npz'))
        file.write_bytes(damage(file.read_bytes(), draw))
        return expected
    return inject


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[:draw.randrange(len(data))]


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _fill_disk(run: FaultyRun, draw: random.Random) -> str:
    path = run.folder / 'filler'
    with contextlib.suppress(OSError), open(path, 'wb', 0) as file:
        while True:
            file.write(bytes(1 << 16))
    threading.Timer(_DISK_FULL, path.unlink).start()
    return 'No space left'


def _cut_link(seconds: float) -> Callable[[FaultyRun, random.Random], str]:
    def inject(run: FaultyRun, draw: random.Random) -> str:
        host, network = draw.randrange(2), run.network
        network.set_link(host, False)
        threading.Timer(seconds, network.set_link, [host, True]).start()
        return '.'
    return inject


def _slow_link(run: FaultyRun, draw: random.Random) -> str:
    host, network = draw.randrange(2), run.network
    network.slow_down(host, True)
    threading.Timer(_SLOW_LINK, network.slow_down, [host, False]).start()
    return '.'


def _lose_host(run: FaultyRun, draw: random.Random) -> str:
    host, network = draw.randrange(2), run.network
    network.set_link(host, False)
    network.lose(host)
    threading.Timer(_BOOT, network.set_link, [host, True]).start()
    return '.'


def _restart_host(run: FaultyRun, draw: random.Random) -> str:
    run.network.lose(draw.randrange(2))
    return '.'


FAULTS = {
    'SIGKILL': Fault(_to_a_rank(signal.SIGKILL, 'SIGKILL')),
    'SIGSEGV': Fault(_to_a_rank(signal.SIGSEGV, 'SIGSEGV')),
    'SIGBUS': Fault(_to_a_rank(signal.SIGBUS, 'SIGBUS')),
    'memory': Fault(_short_of_memory),
    'raises': Fault(_to_a_rank(
        signal.SIGUSR1, '(InjectedFault|a rank that raises)')),
    'launcher': Fault(_kill_launcher, kills_launcher=True),
    'truncated': Fault(_damaged(_cut)),
    'bit flips': Fault(_damaged(_flip)),
    'SIGSTOP': Fault(_to_a_rank(signal.SIGSTOP, ''), needs='stall'),
    'collective': Fault(_to_a_rank(signal.SIGUSR2, ''), needs='stall'),
    'disk full': Fault(_fill_disk, lasts=_DISK_FULL, needs='disk'),
    'link 1 s': Fault(_cut_link(1.0), lasts=1.0, needs='network'),
    'link slow': Fault(_slow_link, lasts=_SLOW_LINK, needs='network'),
    'host reset': Fault(_restart_host, needs='network'),
    'link 60 s': Fault(_cut_link(60.0), lasts=60.0, needs='network stall'),
    'host lost': Fault(_lose_host, needs='network stall'),
}

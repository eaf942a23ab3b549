"""Starts a job, watches it, and starts it again when it dies."""
from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import NamedTuple

from ..report.going_on import ENDED, LAUNCHED
from . import console
from .console import say
from .ending_table import EndedStart, said_seconds, table
from .endings import ending_of
from .host_watch import HostWatch
from .hosts import Probe, Share
from .interrupts import Interrupts
from .job_starters import Starter
from .one_start import OneStart
from .restart_policy import RestartPolicy
from .saved_progress import (
    SavedProgress,
    remove_unfinished,
    saved_progress,
)

#: A code above is that of a shell or of a signal.
_LAST_CODE = 125


class LaunchedJob(NamedTuple):
    """Describes the job that the launcher starts, and starts again.

    Attributes:
        program: What each rank runs.
        starter: What starts the ranks.
        room: How many ranks each host may have.
        ranks: Of the whole job.
        fewest: Ranks that may go on while hosts are away.
        multiple: The number of ranks is a multiple of it.
        probe: Tells whether a host answers.
        snapshots: The directory; None if the launcher does not know it.
        restarts: Without progress in a row, at most.
        patience: Seconds that hosts may be away.
        environment: Of the job.
    """

    program: Sequence[str]
    starter: Starter
    room: Sequence[Share]
    ranks: int
    fewest: int
    multiple: int
    probe: Probe
    snapshots: str | None
    restarts: int
    patience: float
    environment: Mapping[str, str]


class Supervisor:
    """The starts of a job, one after the other.

    Args:
        job: The job to start.
        token: By which its processes are found.
        interrupts: Signals to this process.
    """

    def __init__(self, job: LaunchedJob, token: str, interrupts: Interrupts
                 ) -> None:
        self._job, self._token, self._interrupts = job, token, interrupts
        self._policy = RestartPolicy(job.restarts, job.patience)
        self._hosts = HostWatch(job.room, job.ranks, job.fewest,
                                job.multiple, job.probe, say)
        self._ended: list[EndedStart] = []
        self._furthest = -1     # first update of a start
        self._trains = False    # the start that runs

    def run(self) -> int:
        """Runs the job to its end, however often it dies.

        Returns:
            0 once the job has ended so; 128 and the number of the signal
            that has ended it; or else the code of its last start, or 1.
        """
        code = 1
        try:
            while not self._policy.verdict:
                shares = self._hosts.shares()
                if shares is None:
                    wait = self._policy.without_hosts(time.monotonic())
                else:
                    code, wait = self._start(shares)
                    if code == 0 and not self._hosts.wants_all_back:
                        return self._finished()
                    if wait and not (self._policy.verdict
                                     or self._interrupts.received):
                        say(f'starts again in {said_seconds(wait)}')
                if self._interrupts.received or (
                        not self._policy.verdict and self._wait(wait)):
                    return self._interrupted()
        finally:
            self._hosts.close()
        say(f'gives up: {self._policy.verdict}')
        if len(self._ended) > 1:
            console.show(table(self._ended))
        return code if 0 < code <= _LAST_CODE else 1

    def _start(self, shares: Sequence[Share]) -> tuple[int, float]:
        """Starts the job once; its exit code, and seconds to wait after."""
        saved = saved_progress(self._job.snapshots)
        self._hosts.begin(saved)
        say(f'start {len(self._ended) + 1}: {self._ranks_in_words(shares)}, '
            + self._origin(saved))
        began, at = time.monotonic(), time.time()
        self._trains = False
        start = OneStart(
            self._command(shares),
            {**self._job.environment, LAUNCHED: self._token,
             ENDED: json.dumps([ended.cause for ended in self._ended])},
            f'{LAUNCHED}={self._token}', self._interrupts, console.show)
        code = start.watch(lambda: self._tick(start, began))
        remove_unfinished(self._job.snapshots)
        ending = ending_of(
            start.output, code, self._has_progressed(start, saved),
            self._hosts.wants_all_back, bool(shares[0].host))
        self._ended.append(EndedStart(
            at, sum(share.ranks for share in shares), start.output.update,
            start.output.latest, time.monotonic() - began, ending.cause))
        if code or self._hosts.wants_all_back:
            say(f'start {len(self._ended)} has ended after '
                f'{said_seconds(self._ended[-1].seconds)}'
                + ('' if start.output.latest is None else
                   f', at update {start.output.latest} or later')
                + f': {ending.cause}')
        return code, self._policy.after(ending)

    def _command(self, shares: Sequence[Share]) -> list[str]:
        own = [name for name in self._job.environment
               if name.startswith('CHAINER_FP8PIPE_')]
        return self._job.starter.command(shares, self._job.program,
                                         [*own, LAUNCHED, ENDED])

    def _tick(self, start: OneStart, began: float) -> bool:
        """Says when the job trains; returns whether it is to end."""
        if start.output.update is not None and not self._trains:
            self._trains = True
            say(f'trains: update {start.output.update} is done, '
                f'{time.monotonic() - began:.1f} s after the start')
        return self._hosts.look(lambda: saved_progress(self._job.snapshots))

    def _has_progressed(self, start: OneStart, before: SavedProgress) -> bool:
        """Whether the next start begins further on than this one."""
        if saved_progress(self._job.snapshots) > before:
            return True
        update = start.output.update
        if update is None or update <= self._furthest:
            return False
        # This one began further on than the one before, so the script has
        # snapshots that the launcher does not see.
        is_first = self._furthest < 0
        self._furthest = update
        return not is_first or self._job.snapshots is None

    def _ranks_in_words(self, shares: Sequence[Share]) -> str:
        ranks = sum(share.ranks for share in shares)
        return (f'{ranks} rank{"s" * (ranks > 1)}'
                + f' of {self._job.ranks}' * (ranks < self._job.ranks)
                + f' by {self._job.starter.family}' + (
                    ' on ' + ', '.join(share.host for share in shares)
                    if shares[0].host else ''))

    def _origin(self, saved: SavedProgress) -> str:
        if self._job.snapshots is None:
            return 'from where the script itself begins'
        return f'from {saved.path}' if saved.is_there else (
            'from the beginning')

    def _wait(self, seconds: float) -> bool:
        """Waits for the next start; True if a signal came meanwhile."""
        end = time.monotonic() + seconds
        while not self._interrupts.received and (
                left := end - time.monotonic()) > 0:
            connection.wait([self._interrupts.wakes], left)
            self._interrupts.clear()
        return bool(self._interrupts.received)

    def _interrupted(self) -> int:
        number = self._interrupts.received[-1]
        say(f'ended by {signal.Signals(number).name}')
        return 128 + number

    def _finished(self) -> int:
        if len(self._ended) > 1:
            say(f'done, after {len(self._ended)} starts')
            console.show(table(self._ended))
        return 0

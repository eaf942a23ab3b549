"""Starts a job, watches it, and starts it again when it dies."""
# A start that has brought the job further is worth another one at once.  After
# one that has not, each waits twice as long as the one before.  The launcher
# gives up after so many in a row that have brought nothing; and earlier where
# it is the script that fails, in the same way each time: what three starts in
# a row have shown, a fourth would not change; and of two that have failed
# before an update was done, the second was there to exclude a chance.
#
# Hosts that do not answer are no failure of the job's: they are asked again
# and again for a given time, and the job starts as soon as enough of them
# answer.
from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..report.launch_protocol import ENDED, LAUNCHED
from .hosts import (
    HostWatch,
    Probe,
    SavedProgress,
    Share,
    Starter,
    remove_unfinished,
    saved_progress,
)
from .one_start import (
    USAGE,
    Ending,
    Interrupts,
    OneStart,
    ending_of,
    say,
    show,
)

#: Starts in a row with the same failure of the script.
_SAME, _SAME_AT_ONCE = 3, 2
#: Seconds that a start waits at most.
_LONGEST = 300.0
#: Seconds between two questions to hosts, at most.
_ASK = 5.0
#: A code above is that of a shell or of a signal.
_LAST_CODE = 125
_HEAD = ('start', 'at', 'ranks', 'updates', 'ran', 'ended by')


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
        every: The interval between snapshots, as the user writes it.
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
    every: str
    restarts: int
    patience: float
    environment: Mapping[str, str]


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
        enough = _SAME_AT_ONCE if ending.first is None else _SAME
        if ending.failure:
            if ending.code == USAGE and ending.first is None:
                self.verdict = ('the command line or the script is refused, '
                                'which another start does not change')
            elif self._same >= enough:
                self.verdict = (f'{self._same} starts in a row have failed '
                                'in the same way, without progress')
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
        return min(2.0 ** min(self._in_vain - 2, 30), _LONGEST)


def format_duration(seconds: float) -> str:
    """A time in words, such as ``'3 min 20 s'``."""
    if seconds < 99.5:
        return f'{seconds:.0f} s' if seconds >= 9.5 else f'{seconds:.1f} s'
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours else f'{minutes} min {rest} s'


def table(starts: Sequence[Ending]) -> str:
    """A row for each start, in lines that end with a line feed."""
    rows = [_HEAD, *(
        (str(number), time.strftime('%m-%d %H:%M:%S',
                                    time.localtime(start.at)),
         str(start.ranks), 'none' if start.first is None
         else f'{start.first}-{start.latest}', format_duration(start.seconds),
         start.cause)
        for number, start in enumerate(starts, 1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ''.join('  '.join(
        cell.ljust(width) if place == len(_HEAD) - 1 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip() + '\n' for row in rows)


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
        self._ended: list[Ending] = []
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
                        say(f'starts again in {format_duration(wait)}')
                if self._interrupts.received or (
                        not self._policy.verdict and self._wait(wait)):
                    return self._interrupted()
        finally:
            self._hosts.close()
        say(f'gives up: {self._policy.verdict}')
        if len(self._ended) > 1:
            show(table(self._ended))
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
            f'{LAUNCHED}={self._token}', self._interrupts)
        ranks = sum(share.ranks for share in shares)
        code = start.watch(
            lambda: self._tick(start, began),
            () if shares[0].host else self._job.program, ranks)
        remove_unfinished(self._job.snapshots)
        ending = ending_of(
            start.output, code, self._hosts.wants_all_back,
            bool(shares[0].host))._replace(
                progressed=self._has_progressed(start, saved), ranks=ranks,
                at=at, seconds=time.monotonic() - began)
        self._ended.append(ending)
        if code or self._hosts.wants_all_back:
            say(f'start {len(self._ended)} has ended after '
                f'{format_duration(ending.seconds)}'
                + ('' if ending.latest is None else
                   f', at update {ending.latest} or later')
                + f': {ending.cause}')
            if code != USAGE:
                self._say_what_is_lost(start)
        return code, self._policy.after(ending)

    def _say_what_is_lost(self, start: OneStart) -> None:
        """After a start that the next one cannot go on from."""
        directory = self._job.snapshots
        if directory and not saved_progress(directory).is_there:
            say(f'there is no snapshot in {directory}, so that the next start '
                'begins anew: ' + (
                    'no Trainer has finished an update, and --snapshots is '
                    'for scripts that train by one'
                    if start.output.update is None else
                    'none was due, or whole, before it ended (--every '
                    f'{self._job.every})'))

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
            self._interrupts.wait(left)
        return bool(self._interrupts.received)

    def _interrupted(self) -> int:
        number = self._interrupts.received[-1]
        say(f'ended by {number.name}')
        return 128 + number

    def _finished(self) -> int:
        if len(self._ended) > 1:
            say(f'done, after {len(self._ended)} starts')
            show(table(self._ended))
        return 0

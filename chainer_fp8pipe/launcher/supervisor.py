"""Starts a job, watches it, and starts it again when it dies."""
# An attempt that has brought the job further is worth another one at once.
# After one that has not, each waits twice as long as the one before.  The
# launcher gives up after so many in a row that have brought nothing; and
# earlier where the script itself fails in the same way each time: after three
# attempts in a row, or after two that have failed before an update was done,
# the next one would fail so, too.  "Further" is a new snapshot in the
# launcher's directory, or, where the script has its own, a first update after
# that of the attempt before.
#
# Hosts that do not answer are no failure of the job's: they are asked again
# and again for a given time, and the job starts as soon as enough of them
# answer.
from __future__ import annotations

import collections
import contextlib
import glob
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..report.launch_protocol import ENDED, LAUNCHED
from ..report.quantities import columns
from ..report.quantities import seconds as in_words
from .attempt import (
    USAGE,
    Attempt,
    Ending,
    Interrupts,
    ending_of,
    say,
    show,
)
from .hosts import Hosts, Probe, Share, Starter

#: Attempts in a row with the same failure of the script.
_SAME, _SAME_AT_ONCE = 3, 2
#: Seconds between attempts, and between two questions to hosts, at most.
_LONGEST, _ASK = 300.0, 5.0
#: Seconds after which no rank adds its file to a snapshot.
_QUIET = 10.0
#: A code above is that of a shell or of a signal.
_LAST_CODE = 125
_HEAD = ('start', 'at', 'updates', 'ran', 'ended by')


class LaunchedJob(NamedTuple):
    """Describes the job that the launcher starts, and starts again.

    Attributes:
        program: What each rank runs.
        starter: What starts the ranks.
        room: How many ranks each host may have.
        ranks: Of the whole job.
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
    probe: Probe
    snapshots: str | None
    every: str
    restarts: int
    patience: float
    environment: Mapping[str, str]


# --- what is saved -----------------------------------------------------------

class SavedProgress(NamedTuple):
    """The newest snapshot; of two, the one that is further is greater.

    Attributes:
        trainer: Which of the script's Trainers it is of, from 1; 0: there
            is no snapshot.
        update: The number of updates.
        path: Of the file.
    """

    trainer: int = 0
    update: int = -1
    path: str = ''


def saved_progress(directory: str | None) -> SavedProgress:
    """Looks into a directory, which the first Trainer has for itself.

    Those that follow have its folders ``2``, ``3`` and so on.  A snapshot
    counts when it has the files of all ranks, or of those of this host: none
    has been added for some seconds.
    """
    return max([SavedProgress(), *(
        SavedProgress(trainer, int(found[1]), path)
        for trainer, path in _snapshots(directory) if (found := re.fullmatch(
            r'snapshot_iter_(\d+)\.ranks', os.path.basename(path)))
        and _is_complete(path))])


def _is_complete(folder: str) -> bool:
    found = collections.Counter(
        re.sub(r'.*of(\d+)\.npz$', r'\1', path)
        for path in glob.glob(f'{glob.escape(folder)}/rank*of*.npz'))
    with contextlib.suppress(OSError):      # it is being removed
        return any(str(count) == ranks for ranks, count in found.items()) or (
            bool(found) and time.time() - os.stat(folder).st_mtime > _QUIET)
    return False


def _snapshots(directory: str | None) -> Iterator[tuple[int, str]]:
    """Files, with the numbers of Trainers; none of a disk that is away."""
    if directory is not None:
        here = glob.escape(directory)
        yield from ((1, path) for path in glob.glob(f'{here}/snapshot*'))
        for path in glob.glob(f'{here}/*/snapshot*'):
            folder = os.path.basename(os.path.dirname(path))
            if folder.isdecimal():
                yield int(folder), path


# --- whether there is another attempt ----------------------------------------

class RestartPolicy:
    """Decides after each ending.

    Args:
        restarts: In a row without progress, at most.
        patience: Seconds that hosts may be away.

    Attributes:
        verdict: Why there is no other attempt; '' while there may be one.
    """

    def __init__(self, restarts: int, patience: float) -> None:
        self._restarts, self._patience = restarts, patience
        self._away: list[float] = []    # when hosts were asked in vain
        self._in_vain = 0           # attempts in a row
        self._failure = ''          # of the last attempt
        self._same = 0              # attempts in a row with that failure
        self.verdict = ''

    def after(self, ending: Ending) -> float:
        """Seconds to wait before the next attempt: 0, 0, 1, 2, 4 ..."""
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
        if ending.failure and ending.code == USAGE and ending.first is None:
            self.verdict = ('the command line or the script is refused, '
                            'which another start does not change')
        elif ending.failure and self._same >= enough:
            self.verdict = (f'{self._same} starts in a row have failed '
                            'in the same way, without progress')
        elif self._in_vain > self._restarts:
            self.verdict = (f'{self._in_vain} starts in a row have made no '
                            f'progress (--restarts {self._restarts})')
        return (0.0 if self._in_vain < 2 else
                min(2.0 ** min(self._in_vain - 2, 30), _LONGEST))

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


class Supervisor:
    """The attempts at a job, one after the other.

    Args:
        job: The job to start.
        token: By which its processes are found.
        interrupts: Signals to this process.
    """

    def __init__(self, job: LaunchedJob, token: str, interrupts: Interrupts
                 ) -> None:
        self._job, self._token, self._interrupts = job, token, interrupts
        self._policy = RestartPolicy(job.restarts, job.patience)
        self._hosts = Hosts(job.room, job.ranks, job.probe, say)
        self._ended: list[Ending] = []
        self._furthest = -1     # first update of an attempt

    def run(self) -> int:
        """Runs the job to its end, however often it dies.

        Returns:
            0 once the job has ended so; 128 and the number of the signal
            that has ended it; or else the code of its last attempt, or 1.
        """
        code, signals = 1, self._interrupts
        while not self._policy.verdict:
            shares = self._hosts.shares()
            if shares is None:
                wait = self._policy.without_hosts(time.monotonic())
            else:
                code, wait = self._attempt(shares)
                if code == 0:
                    self._show_table('done, after {} starts')
                    return 0
                if wait and not (self._policy.verdict or signals.received):
                    say(f'starts again in {in_words(wait)}')
            end = time.monotonic() + (0 if self._policy.verdict else wait)
            while not signals.received and (
                    left := end - time.monotonic()) > 0:
                signals.wait(left)
            if signals.received:
                say(f'ended by {signals.received[-1].name}')
                return 128 + signals.received[-1]
        say(f'gives up: {self._policy.verdict}')
        self._show_table()
        return code if 0 < code <= _LAST_CODE else 1

    def _attempt(self, shares: Sequence[Share]) -> tuple[int, float]:
        """Starts the job once; its exit code, and seconds to wait after."""
        job, number = self._job, len(self._ended) + 1
        ranks, has_hosts = job.ranks, bool(shares[0].host)
        saved = saved_progress(job.snapshots)
        say(f'start {number}: {ranks} rank{"s" * (ranks > 1)}'
            + f' by {job.starter.family}'
            + (' on ' + ', '.join(host for host, _ in shares)) * has_hosts
            + (', from where the script itself begins'
               if job.snapshots is None else
               f', from {saved.path or "the beginning"}'))
        began, at, trains = time.monotonic(), time.time(), False
        attempt = Attempt(
            job.starter.command(shares, job.program, [
                *(name for name in job.environment
                  if name.startswith('CHAINER_FP8PIPE_')), LAUNCHED, ENDED]),
            {**job.environment, LAUNCHED: self._token,
             ENDED: json.dumps([ended.cause for ended in self._ended])},
            f'{LAUNCHED}={self._token}', self._interrupts)

        def tick() -> None:
            nonlocal trains
            if attempt.output.update is not None and not trains:
                trains = True
                say(f'trains: update {attempt.output.update} is done, '
                    f'{time.monotonic() - began:.1f} s after the start')
        code = attempt.watch(tick, () if has_hosts else job.program, ranks)
        ending = ending_of(attempt.output, code, has_hosts)._replace(
            progressed=self._has_progressed(attempt.output.update, saved),
            at=at, seconds=time.monotonic() - began)
        self._ended.append(ending)
        if code:
            say(f'start {number} has ended after '
                f'{in_words(ending.seconds)}'
                + ('' if ending.latest is None else
                   f', at update {ending.latest} or later')
                + f': {ending.cause}')
            if code != USAGE:
                self._say_what_is_lost(ending)
        return code, self._policy.after(ending)

    def _say_what_is_lost(self, ending: Ending) -> None:
        """After an attempt that the next one cannot go on from."""
        directory = self._job.snapshots
        if directory and not saved_progress(directory).path:
            say(f'there is no snapshot in {directory}, so that the next start '
                'begins anew: ' + (
                    'no Trainer has finished an update (--snapshots needs '
                    'one)'
                    if ending.first is None else
                    'none was due, or whole, before it ended (--every '
                    f'{self._job.every})'))

    def _has_progressed(self, update: int | None, before: SavedProgress
                        ) -> bool:
        """Whether the next attempt begins further on than this one."""
        if saved_progress(self._job.snapshots) > before:
            return True
        if update is None or update <= self._furthest:
            return False
        # This one began further on than the one before, so the script has
        # snapshots that the launcher does not see.
        is_first = self._furthest < 0
        self._furthest = update
        return not is_first or self._job.snapshots is None

    def _show_table(self, title: str = '') -> None:
        if len(self._ended) > 1:
            if title:
                say(title.format(len(self._ended)))
            show(table(self._ended))


# --- in words ----------------------------------------------------------------

def table(attempts: Sequence[Ending]) -> str:
    """A row for each attempt, in lines that end with a line feed."""
    rows = columns([_HEAD[:-1], *(
        (str(number), time.strftime('%m-%d %H:%M:%S', time.localtime(one.at)),
         'none' if one.first is None else f'{one.first}-{one.latest}',
         in_words(one.seconds))
        for number, one in enumerate(attempts, 1))], right=True)
    return ''.join(f'{row}  {cause}\n' for row, cause in zip(
        rows, [_HEAD[-1], *(one.cause for one in attempts)], strict=True))

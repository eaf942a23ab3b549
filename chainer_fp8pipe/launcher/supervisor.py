"""Starts a job, watches it, and starts it again when it dies."""
# A start that has brought the job further is worth another one at once.  After
# one that has not, each waits twice as long as the one before.  The launcher
# gives up after so many in a row that have brought nothing; and earlier where
# the script itself fails in the same way each time: after three starts in a
# row, or after two that have failed before an update was done, the next one
# would fail so, too.  "Further" is a new snapshot in the launcher's directory,
# or, where the script has its own, a first update after that of the start
# before.
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
from .attempt import Attempt, Interrupts, say, show
from .hosts import Probe, Share, Starter, answering
from .output import USAGE, Ending, ending_of

#: Starts in a row with the same failure of the script.
_SAME, _SAME_AT_ONCE = 3, 2
#: Seconds between starts, and between two questions to hosts, at most.
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


# --- one start after the other -----------------------------------------------

def verdict(ended: Sequence[Ending], restarts: int) -> str:
    """Why there is no other start; '' if there may be one.

    Args:
        ended: The starts so far.
        restarts: Without progress in a row, at most.
    """
    last, in_vain, same = ended[-1], _in_vain(ended), 0
    for one in reversed(ended[len(ended) - in_vain:]):
        if one.failure != last.failure:
            break
        same += 1
    if not in_vain:
        return ''
    if last.failure and last.code == USAGE and last.first is None:
        return ('the command line or the script is refused, which another '
                'start does not change')
    if last.failure and same >= (_SAME_AT_ONCE if last.first is None
                                 else _SAME):
        return (f'{same} starts in a row have failed in the same way, '
                'without progress')
    return (f'{in_vain} starts in a row have made no progress (--restarts '
            f'{restarts})') if in_vain > restarts else ''


def pause_after(ended: Sequence[Ending]) -> float:
    """Seconds to wait before the next start: 0, 0, 1, 2, 4 ..."""
    in_vain = _in_vain(ended)
    return (0.0 if in_vain < 2 else
            min(2.0 ** min(in_vain - 2, 30), _LONGEST))


def _in_vain(ended: Sequence[Ending]) -> int:
    """The last starts without progress."""
    return next((number for number, one in enumerate(reversed(ended))
                 if one.progressed), len(ended))


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
        self._ended: list[Ending] = []
        self._furthest = -1     # first update of a start

    def run(self) -> int:
        """Runs the job to its end, however often it dies.

        Returns:
            0 once the job has ended so; 128 and the number of the signal
            that has ended it; or else the code of its last start, or 1.
        """
        code, end, signals = 1, '', self._interrupts
        while not end:
            if (shares := self._shares()) and not signals.received:
                code = self._start(shares)
            if not code and shares:
                self._show_table('done, after {} starts')
                return 0
            if signals.received:
                say(f'ended by {signals.received[-1].name}')
                return 128 + signals.received[-1]
            if not shares:
                end = (f'too few hosts have answered for '
                       f'{self._job.patience:.0f} seconds (--wait-for-hosts)')
            elif not (end := verdict(self._ended, self._job.restarts)) and (
                    wait := pause_after(self._ended)):
                say(f'starts again in {in_words(wait)}')
                self._wait(wait)
        say(f'gives up: {end}')
        self._show_table()
        return code if 0 < code <= _LAST_CODE else 1

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._interrupts.received and (
                left := end - time.monotonic()) > 0:
            self._interrupts.wait(left)

    def _shares(self) -> list[Share] | None:
        """What hosts get that answer; None: too few did, or a signal came."""
        job, end, last, pause = self._job, None, '', 1.0
        while True:
            shares, said = answering(job.room, job.ranks, job.probe)
            if said not in ('', last):
                say(said)
            now, last = time.monotonic(), said
            end = now + job.patience if end is None else end
            if shares or now >= end or self._interrupts.received:
                return shares
            self._wait(min(pause, _ASK, end - now))
            pause *= 2

    def _start(self, shares: Sequence[Share]) -> int:
        """Starts the job once; its exit code."""
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
        if code not in (0, USAGE) and job.snapshots and not saved_progress(
                job.snapshots).path:
            say(f'there is no snapshot in {job.snapshots}, so that the next '
                'start begins anew: '
                + ('no Trainer has finished an update (--snapshots needs one)'
                   if ending.first is None else
                   'none was due, or whole, before it ended (--every '
                   f'{job.every})'))
        return code

    def _has_progressed(self, update: int | None, before: SavedProgress
                        ) -> bool:
        """Whether the next start begins further on than this one."""
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


def table(ended: Sequence[Ending]) -> str:
    """A row for each start, in lines that end with a line feed."""
    rows = columns([_HEAD[:-1], *(
        (str(number), time.strftime('%m-%d %H:%M:%S', time.localtime(one.at)),
         'none' if one.first is None else f'{one.first}-{one.latest}',
         in_words(one.seconds))
        for number, one in enumerate(ended, 1))], right=True)
    return ''.join(f'{row}  {cause}\n' for row, cause in zip(
        rows, [_HEAD[-1], *(one.cause for one in ended)], strict=True))

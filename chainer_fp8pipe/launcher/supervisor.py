"""Starts a job, and starts it again when it dies."""
# Progress is a first update after that of the start before: whoever has taken
# the snapshot, it was worth another start.  The more starts begin at the same
# place, the longer are the pauses between them, and in the end the launcher
# gives up; earlier where the script itself fails in the same way each time.
# Hosts that are away are no failure of the job's: they are asked again and
# again for a given time.
from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import NamedTuple

from ..report.launch_protocol import ENDED, LAUNCHED
from ..report.quantities import columns, counted
from ..report.quantities import seconds as in_words
from .attempt import run_job
from .hosts import Starter, answering
from .output import USAGE, Ending, say, show

_SAME = 3       # starts in a row with the same failure of the script
#: Seconds between starts at most, and between two questions to hosts.
_LONGEST, _ASK = 300.0, 2.0
_TICK = 0.1     # seconds between looks for signals
#: A code above is that of a shell or of a signal.
_LAST_CODE = 125


class LaunchedJob(NamedTuple):
    """Describes the job that the launcher starts, and starts again."""

    program: Sequence[str]      # what each rank runs
    starter: Starter
    ranks: int
    hosts: Mapping[str, int]    # ranks of each, at most; {}: as starter says
    patience: float             # seconds that hosts may be away
    restarts: int               # in a row from the same place, at most
    environment: Mapping[str, str]


def supervise(job: LaunchedJob, received: Sequence[Signals]) -> int:
    """Runs a job to its end, however often it dies.

    Args:
        job: The job.
        received: Signals to this process, which end all.

    Returns:
        0 once the job has ended so; 128 and the number of the signal that
        has ended it; or else the code of its last start, or 1.
    """
    ended: list[Ending] = []
    token, end = secrets.token_hex(16), ''
    while not end:
        hosts = _wait_for_hosts(job, received)
        if hosts is None:
            end = 'gives up: too few hosts have answered (--wait-for-hosts)'
        elif not received:
            ended.append(_start(job, hosts, ended, token, received))
            end = verdict(ended, job.restarts)
        if received and (not ended or ended[-1].code):
            say(f'ended by {received[-1].name}')
            return 128 + received[-1]
        if not end and (wait := pause_after(ended)):
            say(f'starts again in {in_words(wait)}')
            _wait(wait, received)
    code = ended[-1].code if ended else 1
    if code or ended[1:]:
        say(end)
    if ended[1:]:
        show(table(ended).encode(errors='replace'))
    return code if 0 <= code <= _LAST_CODE else 1


def _wait_for_hosts(job: LaunchedJob, received: Sequence[Signals]
                    ) -> dict[str, int] | None:
    """What hosts get that answer; None: too few did, or a signal came."""
    end, said = time.monotonic() + job.patience, ['']
    while job.hosts:
        shares, away = answering(job.hosts, job.ranks)
        if away and away != said:
            say(f'without an answer: {", ".join(away)}'
                + '; asking again' * (shares is None))
        if shares or received or time.monotonic() >= end:
            return shares
        said = away
        _wait(_ASK, received)
    return {}


def _wait(seconds: float, received: Sequence[Signals]) -> None:
    end = time.monotonic() + seconds
    while not received and time.monotonic() < end:
        time.sleep(_TICK)


def _start(job: LaunchedJob, hosts: Mapping[str, int],
           before: Sequence[Ending], token: str, received: Sequence[Signals]
           ) -> Ending:
    number = len(before) + 1
    say(f'start {number}: {counted(job.ranks, "rank")} by {job.starter.family}'
        + (' on ' + ', '.join(hosts) if hosts else ''))
    environment = {**job.environment, LAUNCHED: token,
                   ENDED: json.dumps([one.cause for one in before])}
    ending = run_job(
        job.starter.command(job.ranks, job.program, hosts, [
            name for name in environment
            if name.startswith('CHAINER_FP8PIPE_')]),
        environment, f'{LAUNCHED}={token}', job.ranks, bool(hosts), received)
    if ending.code:
        say(f'start {number} has ended after {in_words(ending.seconds)}'
            + (f', at update {ending.updates[-1]} or later'
               if ending.updates else '') + f': {ending.cause}')
    return ending


def verdict(ended: Sequence[Ending], restarts: int) -> str:
    """Why there is no other start; '' if there may be one.

    Args:
        ended: The starts so far.
        restarts: In a row from the same place, at most.
    """
    last, tries = ended[-1], _from_the_same_place(ended)
    if not last.code:
        return f'done, after {len(ended)} starts'
    if last.failure and last.code == USAGE and not last.updates:
        return ('gives up: the command line or the script is refused, which '
                'another start does not change')
    if last.failure and tries >= _SAME and all(
            one.failure == last.failure for one in ended[-_SAME:]):
        return (f'gives up: {_SAME} starts in a row have failed in the same '
                'way, without progress')
    return (f'gives up: {tries} starts in a row have made no progress '
            f'(--restarts {restarts})') if tries >= restarts else ''


def pause_after(ended: Sequence[Ending]) -> float:
    """Seconds to wait before the next start: 0, 1, 2, 4 ..."""
    tries = _from_the_same_place(ended)
    return min(2.0 ** min(tries - 2, 30), _LONGEST) if tries > 1 else 0.0


def _from_the_same_place(ended: Sequence[Ending]) -> int:
    """How many starts, up to the last, have begun no further than others."""
    count, first = 0, -1
    for one in ended:
        if one.updates and one.updates[0] > first:
            count = 0
        count, first = count + 1, one.updates[0] if one.updates else first
    return count


def table(ended: Sequence[Ending]) -> str:
    """A row for each start, in lines that end with a line feed."""
    rows = columns([('start', 'at', 'updates', 'ran'), *(
        (str(number), time.strftime('%m-%d %H:%M:%S', time.localtime(one.at)),
         f'{one.updates[0]}-{one.updates[-1]}' if one.updates else 'none',
         in_words(one.seconds))
        for number, one in enumerate(ended, 1))], right=True)
    return ''.join(f'{row}  {cause}\n' for row, cause in zip(
        rows, ['ended by', *(one.cause for one in ended)], strict=True))

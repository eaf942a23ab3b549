"""The summary of what has ended when, and why."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = ('start', 'at', 'ranks', 'updates', 'ran', 'ended by')


class EndedStart(NamedTuple):
    """One start of a job that has ended."""

    at: float               # time.time() of its start
    ranks: int
    first: int | None       # update that was done; None: none
    latest: int | None      # that is known
    seconds: float          # that it ran
    cause: str


def said_seconds(seconds: float) -> str:
    """A time in words, such as ``'3 min 20 s'``."""
    if seconds < 99.5:
        return f'{seconds:.0f} s' if seconds >= 9.5 else f'{seconds:.1f} s'
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours else f'{minutes} min {rest} s'


def table(starts: Sequence[EndedStart]) -> str:
    """A row for each start, in lines that end with a line feed."""
    rows = [_HEAD, *(
        (str(number), time.strftime('%m-%d %H:%M:%S',
                                    time.localtime(start.at)),
         str(start.ranks), 'none' if start.first is None
         else f'{start.first}-{start.latest}', said_seconds(start.seconds),
         start.cause)
        for number, start in enumerate(starts, 1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ''.join('  '.join(
        cell.ljust(width) if place == len(_HEAD) - 1 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip() + '\n' for row in rows)

"""The record of a run: what it holds, and its files."""
# Each rank writes a file of its own, report/rankN.jsonl in the result folder:
# no messages, so that a report can neither wait for a rank nor make one wait,
# and the data of a rank that died are there.  The price: a report shows the
# ranks whose files one disk has.
#
# A file has a line of JSON for each part, ["class", fields...].  Lines are
# only appended: a kill costs the line that was being written, which a reader
# leaves out with a remark, and a job that is started again goes on in the same
# files.  Ranks share no clock but that of their hosts, as seconds since 1970:
# a start of a rank is that of rank 0 which is the nearest in time.
from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .stream import Event

_FOLDER, _HEADER = 'report', '["record of a rank", 3]\n'

#: Parts of a step, in the order of a picture.  ``exchange`` includes waiting
#: for slower ranks; ``other`` has no section of its own; ``between`` passes
#: between updates: evaluation, snapshots, other extensions.
PHASES = ('input', 'forward', 'recompute', 'backward', 'backward_weight',
          'encode', 'exchange', 'decode', 'send', 'receive', 'update',
          'other', 'between')

#: Phases in which a rank may wait for another.
COMMUNICATION = ('exchange', 'send', 'receive')

#: Lower quartile, median, upper quartile.
Quartiles = tuple[float, float, float]


class RunStart(NamedTuple):
    """The job was started; a line of each rank."""

    time: float             # seconds since 1970, UTC; so in all parts
    iteration: int          # updates done before, in earlier starts
    ranks: int              # how many there are
    host: str               # of this rank
    stage: int | None = None            # of a pipeline, this rank's
    command: tuple[str, ...] = ()       # the program and its arguments
    versions: Mapping[str, str] = {}    # Python, Chainer, NumPy, MPI, ...
    options: Mapping[str, str] = {}     # communicator, updater, ..., in words
    launched: int | None = None     # starts of the launcher before, if any
    after: str = ''                 # how the last one ended, as it says

    @property
    def is_new(self) -> bool:
        """Whether a training began, and not one of a launcher again."""
        return not self.iteration and not self.launched


class RunEnd(NamedTuple):
    """A start ended in order on a rank."""

    time: float
    iteration: int          # updates done
    error: str = ''         # what was raised; '' if nothing was


class CurvePoint(NamedTuple):
    """The means, over some updates, of values that the training reported."""

    iteration: int          # the last of these updates
    epoch: float            # passes over the data, with the part of the last
    seconds: float          # of training so far, earlier starts included
    values: Mapping[str, float]     # by name; finite or not
    time: float = 0.0


class RankInterval(NamedTuple):
    """What a rank did in all updates between two writes of its record.

    The first update of a start, which connects and allocates, is in none.
    """

    rank: int
    first: int              # update
    last: int               # update
    step: Quartiles         # seconds from the end of an update to the next's
    own: Quartiles          # seconds of a step without COMMUNICATION
    phases: Mapping[str, float]         # mean seconds of a step
    hidden: Mapping[str, float] = {}    # of the thread that exchanges beside
    # By codec, such as 'fp8', or 'to stages': the mean bytes that the rank
    # sends in an update, and those in float32.
    sent: Mapping[str, tuple[float, float]] = {}
    peak: int = 0           # most bytes of the process so far; 0: unknown
    time: float = 0.0


class RecordedUpdate(NamedTuple):
    """An update; of one rank in a file, of all ranks in a record."""

    iteration: int
    seconds: float
    events: tuple[Event, ...]   # by their start, in seconds since 1970


#: Any part of a record, and a rank's starts with the parts that follow them.
Part = RunStart | RunEnd | CurvePoint | RankInterval | RecordedUpdate
_Starts = list[tuple[RunStart, list[Part]]]

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (
    RunStart, RunEnd, CurvePoint, RankInterval, RecordedUpdate)}


@dataclass
class RunRecord:
    """All that is known of a training; lists are in the order of time."""

    name: str               # of the run: its folder
    # Of the last training in the folder, as rank 0 has them; by their place,
    # the ends of those that ended in order.
    starts: list[RunStart] = field(default_factory=list)
    ends: dict[int, RunEnd] = field(default_factory=dict)
    seconds: float = 0.0    # that were trained, over all starts
    # Of one line, without points after which a later start began.
    curves: list[CurvePoint] = field(default_factory=list)
    # Of the last start: by rank, hosts, pipeline stages, and whether it has
    # ended; intervals of all ranks; updates whose events all ranks have.
    hosts: dict[int, str] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    intervals: list[RankInterval] = field(default_factory=list)
    updates: list[RecordedUpdate] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)    # about missing parts


class RecordWriter:
    """Appends to the record of a rank, in a folder in the result folder.

    Raises:
        OSError: The folder cannot be written.
        ValueError: There is something else in the record's place.
    """

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(os.path.join(folder, _FOLDER), exist_ok=True)
        self._path = os.path.join(folder, _FOLDER, f'rank{rank}.jsonl')
        if not os.path.exists(self._path) or not os.path.getsize(self._path):
            with written_whole(self._path) as file:
                file.write(_HEADER)
            return
        if not _lines(self._path)[-1].endswith('\n'):    # a kill has cut it
            self.write((), '\n')

    def write(self, parts: Iterable[Part], before: str = '') -> None:
        """Appends parts, in one write."""
        text = before + ''.join(json.dumps([type(part).__name__, *part])
                                + '\n' for part in parts)
        with open(self._path, 'a', encoding='utf-8') as file:
            file.write(text)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str], mode: str = 'w'
                  ) -> Iterator[Any]:
    """A file to write, which takes the place of ``path`` at the end.

    Until then it is called ``path`` with the process and ``.partial`` behind
    it, so that two processes can write one file; an error removes it.
    """
    partial = f'{os.fspath(path)}.{os.getpid()}.partial'
    try:
        with open(partial, mode,
                  encoding=None if 'b' in mode else 'utf-8') as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise


def read_record(folder: str) -> RunRecord:
    """Reads the record of the last training in a folder.

    Args:
        folder: A result folder, also while ranks write it.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or a file is none; the message names
            the file and the remedy.
    """
    inner = os.path.join(folder, _FOLDER)
    if not os.path.isfile(os.path.join(inner, 'rank0.jsonl')):
        raise ValueError(
            f'{folder!r} has no record ({_FOLDER}/rank0.jsonl); add '
            'trainer.extend(RunReport(comm)) to the training, and name the '
            'folder that it writes its results to')
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    jobs = {int(name[4:-6]): _starts(os.path.join(inner, name),
                                     record.remarks)
            for name in sorted(os.listdir(inner))
            if re.fullmatch(r'rank\d+\.jsonl', name)}
    if jobs[0]:
        _join(record, jobs)
    return record


def _join(record: RunRecord, jobs: Mapping[int, _Starts]) -> None:
    """Fills a record with the last training's starts, of all ranks."""
    began = [start for start, _ in jobs[0]]
    first = max(n for n, one in enumerate(began) if one.is_new or not n)
    if first:
        record.remarks.append(
            f'The folder has {first} earlier starts, of other trainings.')
    record.starts = began[first:]
    updates: dict[int, list[RecordedUpdate]] = defaultdict(list)
    seen = [start.time for start in record.starts]
    for rank, start, parts in [(rank, *one) for rank, its in jobs.items()
                               for one in its]:
        distances = [abs(one.time - start.time) for one in began]
        place = distances.index(min(distances)) - first
        if place < 0:
            continue
        seen[place] = max([seen[place], *(
            part.time for part in parts
            if not isinstance(part, RecordedUpdate))])
        if not rank:
            points = _of(CurvePoint, parts)
            # It may have gone back behind points of the start before.
            record.curves = [*(one for one in record.curves if not points
                               or one.iteration < points[0].iteration),
                             *points]
            record.ends.update((place, end) for end in _of(RunEnd, parts))
        if place == len(record.starts) - 1:
            record.hosts[rank] = start.host
            if start.stage is not None:
                record.stages[rank] = start.stage
            record.intervals += _of(RankInterval, parts)
            record.ended |= {rank for _ in _of(RunEnd, parts)}
            for part in _of(RecordedUpdate, parts):
                updates[part.iteration].append(part)
    record.seconds = sum(end - start.time for end, start in zip(
        seen, record.starts, strict=True))
    record.updates = [
        RecordedUpdate(iteration, max(one.seconds for one in found), tuple(
            sorted((event for one in found for event in one.events),
                   key=lambda event: event.start)))
        for iteration, found in sorted(updates.items())
        if len(found) == len(record.hosts)]
    missing = [str(rank) for rank in range(record.starts[-1].ranks)
               if rank not in record.hosts]
    if missing:
        record.remarks.append(
            f'Rank {", ".join(missing[:8])}{", ..." * bool(missing[8:])} left '
            'no record here: RunReport was not added there, or the host '
            'writes to another disk.')


def _of(kind: Any, parts: Iterable[Part]) -> list[Any]:
    return [part for part in parts if isinstance(part, kind)]


def _lines(path: str) -> list[str]:
    """The lines of a rank's file, which may be anything."""
    with open(path, encoding='utf-8', errors='replace') as file:
        if file.readline() == _HEADER:
            return [_HEADER, *file]
    raise ValueError(
        f'{path!r} is not a record that this chainer_fp8pipe writes; '
        'move it away, or choose another result folder')


def _starts(path: str, remarks: list[str]) -> _Starts:
    found: _Starts = []
    for number, line in enumerate(_lines(path)[1:], 2):
        try:
            kind, *fields = json.loads(line)
            if kind == 'RecordedUpdate':
                fields[-1] = tuple(Event(*event) for event in fields[-1])
            part = _KINDS[kind](*fields)
        except (ValueError, TypeError, KeyError):
            remarks.append(
                f'Line {number} of {os.path.basename(path)} is not whole '
                'and is left out; the job may have been killed while it '
                'was written.')
            continue
        if isinstance(part, RunStart):
            found.append((part, []))
        elif found:
            found[-1][1].append(part)
    return found

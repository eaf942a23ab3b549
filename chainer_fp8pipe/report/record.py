"""The record of a run: what it holds, and its files."""
# Each rank writes a file of its own, report/rankN.jsonl in the result folder:
# no messages, so that a report can neither wait for a rank nor make one wait,
# and the data of a rank that died are there.  The price: a report shows the
# ranks whose files one disk has.
#
# A file has a line of JSON for each part, ["class", fields...], with NaN and
# infinities as Python's json has them.  Lines are only appended: a kill costs
# the line that was being written, which a reader leaves out with a remark, and
# a job that is started again goes on in the same files.  Only a file that does
# not begin as a record is an error, for it may be anything.
#
# Ranks share no clock but that of their hosts, as seconds since 1970: a start
# of a rank is that of rank 0 which is the nearest in time.
from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .events import Event

#: The folder of a record, in the result folder.
FOLDER = 'report'
_HEADER = '["record of a rank", 3]\n'

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
    """The job was started; a line of each rank.

    Attributes:
        time: Seconds since 1970, UTC.
        iteration: Updates done before, in earlier starts.
        ranks: How many there are.
        host: Of this rank.
        stage: Of a pipeline, this rank's; None without one.
        command: The program and its arguments.
        versions: By name: Python, this package, Chainer, NumPy, MPI, ...
        options: By name, in words: communicator, updater, batch size, ...
        launched: Starts of the launcher before; None without a launcher.
        after: The end of the start before, as the launcher says; '' unknown.
    """

    time: float
    iteration: int
    ranks: int
    host: str
    stage: int | None = None
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    launched: int | None = None
    after: str = ''

    @property
    def is_new(self) -> bool:
        """Whether a training began, and not one of a launcher again."""
        return not self.iteration and not self.launched


class RunEnd(NamedTuple):
    """A start ended in order on a rank; one that was killed has no end.

    Attributes:
        time: Seconds since 1970, UTC.
        iteration: Updates done.
        error: What was raised; '' if nothing was.
    """

    time: float
    iteration: int
    error: str = ''


class CurvePoint(NamedTuple):
    """The means, over some updates, of values that the training reported.

    Attributes:
        iteration: The last of these updates.
        epoch: Passes over the data so far, with the part of the last one.
        seconds: Of training so far, earlier starts included.
        values: By name, such as ``'main/loss'`` and
            ``'validation/main/accuracy'``; finite or not.
        time: When it was noted, in seconds since 1970.
    """

    iteration: int
    epoch: float
    seconds: float
    values: Mapping[str, float]
    time: float = 0.0


class RankInterval(NamedTuple):
    """What a rank did in all updates between two writes of its record.

    The first update of a start, which connects and allocates, is in none.

    Attributes:
        rank: The rank.
        first: The first update.
        last: The last update.
        step: Seconds from the end of an update to the end of the next.
        own: Seconds of a step without :data:`COMMUNICATION`.
        phases: Mean seconds of a step, by one of :data:`PHASES`.
        hidden: The same, of the thread that exchanges beside.
        sent: By codec, such as ``'fp8'``, or ``'to stages'``: the mean bytes
            that the rank sends in an update, and those in float32.
        peak: The most bytes of the process so far; 0: unknown.
        time: When it was written, in seconds since 1970.
    """

    rank: int
    first: int
    last: int
    step: Quartiles
    own: Quartiles
    phases: Mapping[str, float]
    hidden: Mapping[str, float] = {}
    sent: Mapping[str, tuple[float, float]] = {}
    peak: int = 0
    time: float = 0.0

    @property
    def updates(self) -> int:
        """How many there were."""
        return self.last - self.first + 1

    @property
    def seconds(self) -> float:
        """Of a step, the mean."""
        return sum(self.phases.values())


class RecordedUpdate(NamedTuple):
    """The events of an update; a line of each rank.

    Attributes:
        iteration: The update.
        seconds: That it took.
        events: Of one rank in a file, of all ranks in a record; by their
            start, in seconds since 1970.
    """

    iteration: int
    seconds: float
    events: tuple[Event, ...]


@dataclass
class RunRecord:
    """All that is known of a training; lists are in the order of time.

    Attributes:
        name: Of the run: its folder.
        starts: Of the last training in the folder, as rank 0 has them.
        ends: Of each start that ended in order, by its place.
        ended: The ranks that have ended the last start.
        seen: The last sign of life of each start, in seconds since 1970.
        hosts: Of the last start, by rank.
        stages: Likewise; {} without a pipeline.
        curves: Of one line, without points after which a later start began.
        intervals: Of all ranks, by start.
        updates: Whose events all ranks of the last start have.
        remarks: Sentences about missing parts.
    """

    name: str
    starts: list[RunStart] = field(default_factory=list)
    ends: dict[int, RunEnd] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    seen: list[float] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)
    curves: list[CurvePoint] = field(default_factory=list)
    intervals: list[list[RankInterval]] = field(default_factory=list)
    updates: list[RecordedUpdate] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """That were trained, over all starts."""
        return sum(max(0.0, seen - start.time) for seen, start in zip(
            self.seen, self.starts, strict=True))


#: Any part of a record.
Part = RunStart | RunEnd | CurvePoint | RankInterval | RecordedUpdate

#: Starts of a rank, each with the parts that follow it.
_Starts = list[tuple[RunStart, list[Part]]]

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (
    RunStart, RunEnd, CurvePoint, RankInterval, RecordedUpdate)}


# --- writing -----------------------------------------------------------------

class RecordWriter:
    """Appends to the record of a rank.

    Args:
        folder: The result folder; the record's is made in it.
        rank: Of this process.

    Raises:
        OSError: The folder cannot be written.
        ValueError: There is something else in the record's place.
    """

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
        self._path = os.path.join(folder, FOLDER, f'rank{rank}.jsonl')
        if not os.path.exists(self._path) or not os.path.getsize(self._path):
            with written_whole(self._path) as file:
                file.write(_HEADER)
            return
        _check(self._path)
        with open(self._path, 'rb+') as whole:      # a kill may have cut it
            whole.seek(-1, os.SEEK_END)
            if whole.read(1) != b'\n':
                whole.write(b'\n')

    def write(self, parts: Iterable[Part]) -> None:
        """Appends parts, in one write."""
        lines = ''.join(json.dumps([type(part).__name__, *part]) + '\n'
                        for part in parts)
        with open(self._path, 'a', encoding='utf-8') as file:
            file.write(lines)


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


# --- reading -----------------------------------------------------------------

def is_record(folder: str) -> bool:
    """Whether a folder has a record."""
    return os.path.isfile(os.path.join(folder, FOLDER, 'rank0.jsonl'))


def read_record(folder: str) -> RunRecord:
    """Reads the record of the last training in a folder.

    Args:
        folder: A result folder, also while ranks write it.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or a file is none; the message names
            the file and the remedy.
    """
    if not os.path.isdir(folder):
        raise ValueError(f'{folder!r} is not a folder; name the folder that '
                         'a run has written its results to')
    if not is_record(folder):
        raise ValueError(
            f'{folder!r} has no record ({FOLDER}/rank0.jsonl); add '
            'trainer.extend(RunReport(comm)) to the training, and name the '
            'folder that it writes to')
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    jobs = {int(name[4:-6]): _starts(os.path.join(folder, FOLDER, name),
                                     record.remarks)
            for name in sorted(os.listdir(os.path.join(folder, FOLDER)))
            if re.fullmatch(r'rank\d+\.jsonl', name)}
    starts = [start for start, _ in jobs[0]]
    if starts:
        first = max(n for n, one in enumerate(starts) if one.is_new or not n)
        if first:
            record.remarks.append(
                f'The folder has {first} earlier starts, of other trainings.')
        _join(record, starts, first, jobs)
    return record


def _join(record: RunRecord, starts: list[RunStart], first: int,
          jobs: Mapping[int, _Starts]) -> None:
    """Fills a record with the starts from the first on, of all ranks."""
    record.starts = starts[first:]
    record.seen = [start.time for start in record.starts]
    record.intervals = [[] for _ in record.starts]
    updates: dict[int, list[RecordedUpdate]] = defaultdict(list)
    for rank, its in jobs.items():
        for start, parts in its:
            place = min(range(len(starts)), key=lambda place: abs(
                starts[place].time - start.time)) - first
            if place >= 0:
                _add(record, rank, place, parts)
            if place == len(record.starts) - 1:
                record.hosts[rank] = start.host
                if start.stage is not None:
                    record.stages[rank] = start.stage
                for part in _of(RecordedUpdate, parts):
                    updates[part.iteration].append(part)
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


def _add(record: RunRecord, rank: int, place: int, parts: Sequence[Part]
         ) -> None:
    """Adds what a rank has of the start at a place."""
    record.intervals[place] += _of(RankInterval, parts)
    record.seen[place] = max([record.seen[place], *(
        part.time for part in parts if not isinstance(part, RecordedUpdate))])
    for end in _of(RunEnd, parts):
        if place == len(record.starts) - 1:
            record.ended.add(rank)
        if not rank:
            record.ends[place] = end
    if not rank and (points := _of(CurvePoint, parts)):
        # A start may have gone back behind later points of the one before.
        record.curves = [*itertools.takewhile(
            lambda point: point.iteration < points[0].iteration,
            record.curves), *points]


def _of(kind: Any, parts: Iterable[Part]) -> list[Any]:
    return [part for part in parts if isinstance(part, kind)]


def _check(path: str) -> None:
    with open(path, 'rb') as file:
        begin = file.readline()
    if begin != _HEADER.encode():
        raise ValueError(
            f'{path!r} is not a record that this chainer_fp8pipe writes; '
            'move it away, or choose another result folder')


def _starts(path: str, remarks: list[str]) -> _Starts:
    """Each start of a rank, with the parts that follow it."""
    _check(path)
    found: _Starts = []
    with open(path, encoding='utf-8', errors='replace') as file:
        for number, line in enumerate(file, 1):
            try:
                kind, *fields = json.loads(line)
                if kind == 'RecordedUpdate':
                    fields[-1] = tuple(Event(*event) for event in fields[-1])
                part = _KINDS[kind](*fields) if number > 1 else None
            except (ValueError, TypeError, KeyError):
                remarks.append(
                    f'Line {number} of {os.path.basename(path)} is not whole '
                    'and is left out; the job may have been killed while it '
                    'was written.')
                continue
            if isinstance(part, RunStart):
                found.append((part, []))
            elif found and part is not None:
                found[-1][1].append(part)
    return found

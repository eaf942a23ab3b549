"""The record of a run: what it holds, and its files."""
# Each rank writes a file of its own, report/rankN.jsonl in the result folder:
# no messages, so that a report can neither wait for a rank nor make one wait,
# and the data of a rank that died are there.  The price: a report shows the
# ranks whose files one disk has.
#
# A file has a line of JSON for each part, {"kind": {fields}}.  Lines are only
# appended: a kill costs the line that was being written, and a job that is
# started again goes on in the same files.  A reader leaves out a line that is
# torn, damaged or of an unknown kind, with a remark.  Only a file that does
# not begin as a record is an error, for it may be anything.
#
# Ranks share no clock but that of their hosts, as seconds since 1970: a start
# of a rank is that of rank 0 which is the nearest in time.
from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import stored
from .events import Event

#: The folder of a record, in the result folder.
FOLDER = 'report'
_FORMAT = 2
_HEADER = 'record of a rank'

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

    @staticmethod
    def before_made(data: Any, where: str) -> Any:
        """Of a line, whose events are rows of their fields."""
        return {**data, 'events': [stored.made(Event, dict(zip(
            Event._fields, row, strict=False))) for row in data['events']]}


@dataclass
class RunRecord:
    """All that is known of a training; lists are in the order of time.

    Attributes:
        name: Of the run: its folder.
        starts: Of the last training in the folder, as rank 0 has them; []
            where there is ``LogReport``'s file only.
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

_KINDS: dict[str, Any] = {
    'start': RunStart, 'end': RunEnd, 'point': CurvePoint,
    'interval': RankInterval, 'update': RecordedUpdate}
_NAMES = {kind: name for name, kind in _KINDS.items()}


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
                file.write(_line(_HEADER, {'format': _FORMAT, 'rank': rank}))
            return
        next(_lines(self._path, []), None)          # checks how it begins
        with open(self._path, 'rb+') as whole:      # a kill may have cut it
            whole.seek(-1, os.SEEK_END)
            if whole.read(1) != b'\n':
                whole.write(b'\n')

    def write(self, parts: Iterable[Part]) -> None:
        """Appends parts, in one write."""
        lines = ''.join(_line(_NAMES[type(part)], _fields(part))
                        for part in parts)
        with open(self._path, 'a', encoding='utf-8') as file:
            file.write(lines)


def _fields(part: Part) -> dict[str, Any]:
    fields = part._asdict()
    if isinstance(part, RecordedUpdate):
        fields['events'] = [[*event] for event in part.events]
    return fields


def _line(name: str, fields: dict[str, Any]) -> str:
    # JSON knows no NaN and no infinity, and losses may be both: as texts.
    return json.dumps({name: _finite(fields)}, separators=(',', ':')) + '\n'


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float('inf') else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


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
    """Whether a folder has a record, or at least ``LogReport``'s file."""
    return any(os.path.isfile(os.path.join(folder, *place)) for place in (
        (FOLDER, 'rank0.jsonl'), ('log',)))


def read_record(folder: str) -> RunRecord:
    """Reads the record of the last training in a folder.

    Args:
        folder: A result folder, also while ranks write it; one in which there
            is only the file ``log`` of Chainer's ``LogReport`` gives curves.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or a file is none; the message names
            the file and the remedy.
    """
    if not os.path.isdir(folder):
        raise ValueError(f'{folder!r} is not a folder; name the folder that '
                         'a run has written its results to')
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    log = os.path.join(folder, 'log')
    if os.path.isfile(os.path.join(folder, FOLDER, 'rank0.jsonl')):
        _read(os.path.join(folder, FOLDER), record)
    elif os.path.isfile(log):
        _read_log(log, record)
    else:
        raise ValueError(
            f'{folder!r} has neither a record ({FOLDER}/rank0.jsonl) nor a '
            'log; add trainer.extend(RunReport(comm)) to the training, and '
            'name the folder that it writes to')
    return record


def _read(folder: str, record: RunRecord) -> None:
    found = {int(match[1]): os.path.join(folder, match[0])
             for name in os.listdir(folder)
             if (match := re.fullmatch(r'rank(\d+)\.jsonl', name))}
    parts = {rank: [*_parts(path, record.remarks)]
             for rank, path in sorted(found.items())}
    starts = [part for part in parts[0] if isinstance(part, RunStart)]
    if not starts:
        return
    first = max(n for n, start in enumerate(starts) if start.is_new or not n)
    if first:
        record.remarks.append(
            f'The folder has {first} earlier starts, of other trainings.')
    record.starts = starts[first:]
    record.seen = [start.time for start in record.starts]
    record.intervals = [[] for _ in record.starts]
    updates: list[dict[int, dict[int, RecordedUpdate]]] = [
        {} for _ in record.starts]
    for rank, its in parts.items():
        place = -1
        for part in its:
            if isinstance(part, RunStart):
                place = _nearest(starts, part.time) - first
                if place == len(record.starts) - 1:
                    record.hosts[rank] = part.host
                    if part.stage is not None:
                        record.stages[rank] = part.stage
            elif place >= 0:
                _place(record, updates, rank, place, part)
    _join(record, updates[-1])
    missing = [rank for rank in range(record.starts[-1].ranks)
               if rank not in record.hosts]
    if missing:
        record.remarks.append(
            f'{"Ranks" if missing[1:] else "Rank"} '
            f'{", ".join(map(str, missing[:8]))}{" ..." * bool(missing[8:])} '
            'left no record here: RunReport was not added there, or their '
            'host writes to another disk.')


def _nearest(starts: list[RunStart], time: float) -> int:
    return min(range(len(starts)),
               key=lambda place: abs(starts[place].time - time))


def _place(record: RunRecord,
           updates: list[dict[int, dict[int, RecordedUpdate]]], rank: int,
           place: int, part: Part) -> None:
    """Adds a rank's part to the start at a place."""
    if isinstance(part, RankInterval):
        record.intervals[place].append(part)
        record.seen[place] = max(record.seen[place], part.time)
    elif isinstance(part, RecordedUpdate):
        updates[place].setdefault(part.iteration, {})[rank] = part
    elif not rank and isinstance(part, CurvePoint):
        # A start has gone back behind later points of the one before.
        while record.curves and record.curves[-1].iteration >= part.iteration:
            record.curves.pop()
        record.curves.append(part)
        record.seen[place] = max(record.seen[place], part.time)
    elif isinstance(part, RunEnd):
        record.seen[place] = max(record.seen[place], part.time)
        if place == len(record.starts) - 1:
            record.ended.add(rank)
        if not rank:
            record.ends[place] = part


def _join(record: RunRecord, updates: dict[int, dict[int, RecordedUpdate]]
          ) -> None:
    """Keeps the updates that all ranks have, with all their events."""
    for iteration, by_rank in sorted(updates.items()):
        if by_rank.keys() == record.hosts.keys():
            record.updates.append(RecordedUpdate(
                iteration, max(one.seconds for one in by_rank.values()),
                tuple(sorted((event._replace(rank=rank)
                              for rank, one in by_rank.items()
                              for event in one.events),
                             key=lambda event: event.start))))


def _parts(path: str, remarks: list[str]) -> Iterator[Part]:
    for name, fields in _lines(path, remarks):
        if name in _KINDS:
            try:
                if name == 'point':     # JSON has no NaN: it is a text
                    fields['values'] = {one: float(value) for one, value
                                        in fields['values'].items()}
                yield stored.made(_KINDS[name], fields, strict=False)
            except (AttributeError, IndexError, KeyError, TypeError,
                    ValueError) as error:
                remarks.append(
                    f'A line {name!r} of {os.path.basename(path)} is damaged '
                    f'and is left out ({type(error).__name__}: {error}).')


def _lines(path: str, remarks: list[str]
           ) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a file after the first; remarks on the others."""
    with open(path, encoding='utf-8', errors='replace') as file:
        for number, text in enumerate(file, 1):
            try:
                (name, fields), = json.loads(text).items()
                if not isinstance(fields, dict):
                    raise ValueError(name)
            except (ValueError, AttributeError):
                name, fields = '', {}
            if number == 1 and name != _HEADER:
                raise ValueError(
                    f'{path!r} is not the record of a rank: it does not begin '
                    'as one; move it away, or choose another result folder')
            if number == 1 and fields.get('format') != _FORMAT:
                raise ValueError(
                    f'{path!r} has format {fields.get("format")!r}, and this '
                    f'chainer_fp8pipe reads format {_FORMAT}; read it with '
                    'the version that wrote it')
            if name and number > 1:
                yield name, fields
            elif number > 1 and text.strip():
                remarks.append(
                    f'Line {number} of {os.path.basename(path)} is not whole '
                    'and is left out; the job may have been killed while it '
                    'was written.')


def _read_log(path: str, record: RunRecord) -> None:
    """Adds the curves of a file of ``LogReport``."""
    try:
        with open(path, encoding='utf-8') as file:
            entries = json.load(file)
        for entry in entries:
            values = {name: float(value) for name, value in entry.items()
                      if isinstance(value, (int, float))}
            record.curves.append(CurvePoint(
                int(values.pop('iteration')), values.pop('epoch'),
                values.pop('elapsed_time', 0.0), values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path!r} is not a log of LogReport: {type(error).__name__}: '
            f'{error}') from None
    record.remarks.append(
        'There is only the log of LogReport: curves, and nothing about '
        'ranks. RunReport records the rest.')

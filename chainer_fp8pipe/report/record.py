"""The record of a run: what it is, and its file."""
# A record is one file, report.jsonl in the result folder, with a line of JSON
# for each of its parts: {"kind": {fields}}.  Lines are only appended: a kill
# costs the line that was being written, and a job that is started again goes
# on in the same file.  A reader leaves out a line that is torn, damaged or of
# an unknown kind, with a remark.  Only a file that does not begin as a record
# is an error, for it may be anything.
#
# Seconds of a start count from that start, on the clock of its rank 0.  Ranks
# give events on their own clocks, which are read before and after the updates
# that are written; between two readings an offset goes along a straight line.
#
# Seldom writes bound the file (training/run_reports), and so does a limit on
# events: beyond it the file is written anew without the older half of them.
from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from . import stored
from .events import Event

#: Of the file in the result folder.
RECORD = 'report.jsonl'
_FORMAT = 1
#: A record has so many events at most.
MOST_EVENTS = 100_000

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

#: The level of bytes that go to other stages.
PIPELINE = 'pipeline'


class RunStart(NamedTuple):
    """The job was started.

    Attributes:
        number: 0 for the first start in this folder, then 1, 2, ...
        time: Seconds since 1970, UTC.
        iteration: Updates done before, in earlier starts.
        ranks: How many there are.
        hosts: The host of each rank.
        stages: The pipeline stage of each rank; () without a pipeline.
        command: Of rank 0: the program and its arguments.
        versions: By name: Python, this package, Chainer, NumPy, MPI, ...
        options: By name, in words: communicator, updater, batch size, ...
        environment: By name, variables that change how ranks run, and
            ``'cpu'``, ``'cores'``, ``'memory'`` of rank 0's host.
        launched: Starts of the launcher before; None without a launcher.
        after: The end of the start before, as the launcher says; '' unknown.
        reporting: Ranks whose data the record has.
        origin: ``time.monotonic`` of rank 0 at the start.
        plan: The choice of a plan, in words; '' without a plan.
        planned: Predicted seconds of an update, by part.
        spread: Relative, of their sum.
    """

    number: int
    time: float
    iteration: int
    ranks: int
    hosts: tuple[str, ...]
    stages: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    launched: int | None = None
    after: str = ''
    reporting: tuple[int, ...] = ()
    origin: float = 0.0
    plan: str = ''
    planned: Mapping[str, float] = {}
    spread: float = 0.0


class RunEnd(NamedTuple):
    """A start ended in an orderly way; one that was killed has no end.

    Attributes:
        start: Number of the start.
        time: Seconds since 1970, UTC.
        iteration: Updates done.
        error: What was raised, on rank 0; '' if nothing was.
    """

    start: int
    time: float
    iteration: int
    error: str = ''


class CurvePoint(NamedTuple):
    """The means, over some updates, of values that the training reported.

    Attributes:
        start: Number of the start.
        iteration: The last of these updates.
        epoch: Passes over the data so far, with the part of the last one.
        seconds: Of training so far, earlier starts included.
        values: By name, such as ``'main/loss'`` and
            ``'validation/main/accuracy'``; finite or not.
    """

    start: int
    iteration: int
    epoch: float
    seconds: float
    values: Mapping[str, float]


class RankInterval(NamedTuple):
    """What a rank did in all updates between two writes of the record.

    Attributes:
        start: Number of the start.
        rank: The rank.
        first: The first update.
        last: The last update.
        step: Seconds from the end of an update to the end of the next.
        own: Seconds of a step without :data:`COMMUNICATION`.
        phases: Mean seconds of an update, by one of :data:`PHASES`.
        hidden: The same, of the thread that exchanges beside.
        sent: By level (``'inside nodes'``, ``'between nodes'``, ``'inside
            MPI'`` where they are not counted, ``'pipeline'`` for messages to
            stages) a format, such as ``'fp8'``, the mean bytes of an update,
            and those in float32.
        resident: Bytes of the process at the end; 0: unknown.
        peak: The most bytes of the process so far.
        gpu_used: Bytes of arrays on the GPU; None without one.
        gpu_held: Bytes of the pool that they are in; None without one.
    """

    start: int
    rank: int
    first: int
    last: int
    step: Quartiles
    own: Quartiles
    phases: Mapping[str, float]
    hidden: Mapping[str, float] = {}
    sent: Mapping[str, tuple[str, float, float]] = {}
    resident: int = 0
    peak: int = 0
    gpu_used: int | None = None
    gpu_held: int | None = None

    @property
    def updates(self) -> int:
        """How many there were."""
        return self.last - self.first + 1

    @property
    def seconds(self) -> float:
        """Of an update, the mean."""
        return sum(self.phases.values())


class ClockReading(NamedTuple):
    """How far a rank's clock is ahead of rank 0's.

    Attributes:
        start: Number of the start.
        rank: The rank.
        seconds: When it was measured.
        offset: Seconds that the rank's clock is ahead.
        error: Half of the shortest round trip that measured it; 0 for ranks
            with rank 0's clock.
    """

    start: int
    rank: int
    seconds: float
    offset: float
    error: float


class LinkReading(NamedTuple):
    """How fast messages went from one host to another.

    Attributes:
        start: Number of the start.
        iteration: After which update.
        source: The rank that sent.
        target: The rank that received.
        bandwidth: Bytes per second of a long message.
        latency: Seconds of a short message.
    """

    start: int
    iteration: int
    source: int
    target: int
    bandwidth: float
    latency: float


class TensorHealth(NamedTuple):
    """What compression does to a tensor, on rank 0.

    Attributes:
        start: Number of the start.
        iteration: After which update.
        name: Of the parameter, such as ``'/l1/W'``.
        elements: How many it has.
        values: By name, as far as the codec has them: ``'scale'``, ``'q'``
            (the ratio that set it), ``'clipped'`` (share of elements
            since the last reading), ``'residual'`` and ``'gradient'`` (2-norms
            of error feedback's rest and of the mean gradient).
    """

    start: int
    iteration: int
    name: str
    elements: int
    values: Mapping[str, float]


class RecordedUpdate(NamedTuple):
    """The events of one update, on all ranks in a record.

    Attributes:
        start: Number of the start.
        iteration: The update.
        is_slow: Whether it was kept as one that took long.
        events: By their start; their ``iteration`` is None.
        seconds: That it took, on the slowest rank.
    """

    start: int
    iteration: int
    is_slow: bool
    events: tuple[Event, ...]
    seconds: float = 0.0

    @staticmethod
    def before_made(data: Any, where: str) -> Any:
        """Of a line, whose events are rows.

        They are many: one stands for all with fields of the same types.
        """
        for row in {tuple(map(type, row)): row
                    for row in data['events']}.values():
            stored.made(Event, dict(zip(Event._fields, row, strict=False)),
                        strict=False)
        return {**data, 'events': [
            Event(*row[:10], *(tuple(map(tuple, values))
                               for values in row[10:]))
            for row in data['events']]}


@dataclass
class RunRecord:
    """All that is known of a run; lists are in the order of time.

    Attributes:
        name: Of the run: its folder.
        starts: None where the folder has ``LogReport``'s file only.
        ends: Of the starts that ended in order.
        curves: Of one line, without points after which a later start began.
        intervals: Of all ranks.
        clocks: Readings of all ranks but 0.
        links: Readings of pairs of ranks.
        tensors: Readings of tensors.
        updates: Whose events were kept.
        left_out: Updates whose events were dropped again.
        last_seen: Seconds since 1970 of the last write.
        remarks: Sentences about missing parts.
    """

    name: str
    starts: list[RunStart] = field(default_factory=list)
    ends: list[RunEnd] = field(default_factory=list)
    curves: list[CurvePoint] = field(default_factory=list)
    intervals: list[RankInterval] = field(default_factory=list)
    clocks: list[ClockReading] = field(default_factory=list)
    links: list[LinkReading] = field(default_factory=list)
    tensors: list[TensorHealth] = field(default_factory=list)
    updates: list[RecordedUpdate] = field(default_factory=list)
    left_out: int = 0
    last_seen: float = 0.0
    remarks: list[str] = field(default_factory=list)


#: Any part of a record.
Part = (RunStart | RunEnd | CurvePoint | RankInterval | ClockReading
        | LinkReading | TensorHealth | RecordedUpdate)

#: By what a line is called, what it is read as, and the list it goes into.
_KINDS: dict[str, tuple[Any, str]] = {
    'start': (RunStart, 'starts'), 'end': (RunEnd, 'ends'),
    'point': (CurvePoint, 'curves'), 'interval': (RankInterval, 'intervals'),
    'clock': (ClockReading, 'clocks'), 'link': (LinkReading, 'links'),
    'tensor': (TensorHealth, 'tensors'),
    'update': (RecordedUpdate, 'updates')}
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}
_HEADER = 'record of a run', {'format': _FORMAT}


# --- writing -----------------------------------------------------------------

class RecordWriter:
    """Appends to the record of a run.

    Args:
        folder: The result folder; it is made.

    Raises:
        OSError: The folder cannot be written.
        ValueError: There is something else in the record's place.

    Attributes:
        starts: How many starts the record had.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path = os.path.join(folder, RECORD)
        self.starts = self._events = 0
        self._origin = 0.0
        # By rank, the newest two.
        self._clocks: dict[int, list[ClockReading]] = defaultdict(list)
        if not os.path.exists(self._path) or not os.path.getsize(self._path):
            with written_whole(self._path) as file:
                file.write(_line(*_HEADER))
            return
        for name, fields in _lines(self._path, []):
            self.starts += name == 'start'
            self._events += _count(name, fields)
        with open(self._path, 'rb+') as whole:      # a kill may have cut it
            whole.seek(-1, os.SEEK_END)
            if whole.read(1) != b'\n':
                whole.write(b'\n')

    def write(self, parts: Iterable[Part], now: float) -> None:
        """Appends parts, of which those about a start come first.

        Args:
            parts: Of the record; events are on their ranks' clocks, and
                readings of these clocks come before them.
            now: Seconds since 1970.
        """
        lines = [(_NAMES[type(part)], self._fields(part)) for part in parts]
        with open(self._path, 'a', encoding='utf-8') as file:
            file.writelines(_line(*line) for line in (
                *lines, ('seen', {'time': now})))
        self._events += sum(_count(*line) for line in lines)
        if self._events > MOST_EVENTS:
            self._leave_out()

    def _fields(self, part: Part) -> dict[str, Any]:
        fields = part._asdict()
        if isinstance(part, RunStart):
            self._origin = part.origin
            self._clocks.clear()
        elif isinstance(part, ClockReading):
            clock = self._clocks[part.rank]
            clock[:] = [*clock[-1:], part]
        elif isinstance(part, RecordedUpdate):
            fields['events'] = self._rows(part.events)
        return fields

    def _rows(self, events: Iterable[Event]) -> list[list[Any]]:
        """Events by their start on rank 0's clock."""
        begins: dict[int, float] = {}
        for event in events:
            begins[event.rank] = min(event.start, begins.get(
                event.rank, event.start))
        # One for a rank, as clocks do not jump.
        shifts = {rank: self._origin + clock_offset(
            self._clocks[rank], begin - self._origin)
            for rank, begin in begins.items()}
        return sorted((_row(event, shifts[event.rank]) for event in events),
                      key=lambda row: (row[2], row[3]))

    def _leave_out(self) -> None:
        """Writes the file anew without the older half of all events."""
        lines = [*_lines(self._path, [])]
        gone = 0
        with written_whole(self._path) as file:
            file.write(_line(*_HEADER))
            for name, fields in lines:
                count = _count(name, fields)
                if count and self._events > MOST_EVENTS // 2:
                    self._events -= count
                    gone += 1
                else:
                    file.write(_line(name, fields))
            file.write(_line('left_out', {'updates': gone}))


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


def _line(name: str, fields: dict[str, Any]) -> str:
    # NaN and infinity as Python's JSON has them: losses may be both.
    return json.dumps({name: fields}, separators=(',', ':')) + '\n'


def _count(name: str, fields: dict[str, Any]) -> int:
    events = fields.get('events') if name == 'update' else None
    return len(events) if isinstance(events, list) else 0


def _row(event: Event, shift: float) -> list[Any]:
    """Times to tenths of microseconds, and without what ends as usual."""
    usual = [None] * 4 + [*Event._field_defaults.values()]
    row = [event.rank, event.name, round(event.start - shift, 7),
           round(event.end - shift, 7), *event._replace(iteration=None)[4:]]
    while row[-1] == usual[len(row) - 1]:
        row.pop()
    return row


def clock_offset(readings: list[ClockReading], own: float) -> float:
    """Seconds that a rank's clock is ahead when it shows ``own``.

    Args:
        readings: Of one rank in one start, by their time; [] for rank 0.
        own: By the rank's clock, which counts from the start on rank 0's.
    """
    return float(numpy.interp(
        own, [one.seconds + one.offset for one in readings],
        [one.offset for one in readings])) if readings else 0.0


# --- reading -----------------------------------------------------------------

def is_record(folder: str) -> bool:
    """Whether a folder has a record, or at least ``LogReport``'s file."""
    return any(os.path.isfile(os.path.join(folder, name))
               for name in (RECORD, 'log'))


def read_record(folder: str) -> RunRecord:
    """Reads the record of a run, also while it is written.

    Args:
        folder: A result folder; one in which there is only the file ``log``
            of Chainer's ``LogReport`` gives curves.

    Returns:
        The record; ``remarks`` name damaged lines, which are left out.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or the file is none; the message
            names the file and the remedy.
    """
    if not os.path.isdir(folder):
        raise ValueError(f'{folder!r} is not a folder; name the folder that '
                         'a run has written its results to')
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    path, log = (os.path.join(folder, name) for name in (RECORD, 'log'))
    if os.path.isfile(path):
        _read(path, record)
    elif os.path.isfile(log):
        _read_log(log, record)
    else:
        raise ValueError(
            f'{folder!r} has neither a record ({RECORD}) nor a log; add '
            'trainer.extend(RunReport(comm)) to the training, and name the '
            'folder that it writes to')
    return record


def _read(path: str, record: RunRecord) -> None:
    for name, fields in _lines(path, record.remarks):
        try:
            if name == 'seen':
                record.last_seen = max(record.last_seen,
                                       float(fields['time']))
            elif name == 'left_out':
                record.left_out += int(fields['updates'])
            elif name in _KINDS:
                kind, place = _KINDS[name]
                getattr(record, place).append(
                    stored.made(kind, fields, strict=False))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            record.remarks.append(
                f'A line {name!r} of {RECORD} is damaged and is left out '
                f'({type(error).__name__}: {error}).')
    # A later start may have gone back behind them.
    record.curves = [point for point in record.curves if all(
        point.iteration <= start.iteration for start in record.starts
        if start.number > point.start)]


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
            if number == 1:
                _check_header(path, name, fields)
            elif name:
                yield name, fields
            elif text.strip():
                remarks.append(
                    f'Line {number} of {RECORD} is not whole and is left '
                    'out; the job may have been killed while it was written.')


def _check_header(path: str, name: str, fields: dict[str, Any]) -> None:
    if name != _HEADER[0]:
        raise ValueError(
            f'{path!r} is not a record of a run: it does not begin as one; '
            'move it away, or choose another result folder')
    if fields != _HEADER[1]:
        raise ValueError(
            f'{path!r} has format {fields.get("format")!r}, and this '
            f'chainer_fp8pipe reads format {_FORMAT}; read it with the '
            'version that wrote it, or a newer one')


def _read_log(path: str, record: RunRecord) -> None:
    """Adds the curves of a file of ``LogReport``."""
    try:
        with open(path, encoding='utf-8') as file:
            entries = json.load(file)
        for entry in entries:
            values = {name: float(value) for name, value in entry.items()
                      if isinstance(value, (int, float))}
            record.curves.append(CurvePoint(
                0, int(values.pop('iteration')), values.pop('epoch'),
                values.pop('elapsed_time', 0.0), values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path!r} is not a log of LogReport: {type(error).__name__}: '
            f'{error}') from None
    record.last_seen = os.path.getmtime(path)
    record.remarks.append(
        'There is only the log of LogReport: curves, and nothing about '
        'ranks. RunReport records the rest.')

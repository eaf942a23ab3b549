"""The files of a record: written while a run goes on, and read back.

In the folder ``report`` of a result folder, ``record.jsonl`` has a line of
JSON for each part of the record, and ``events.jsonl`` one for each update
whose events were kept.  A kill at any moment costs at most the line that was
being written; a job that is started again appends.  Events are on the clocks
of their ranks there; a reader puts them on rank 0's.

Both are bounded: there are at most as many events as the writer is told
(:class:`RecordWriter`), and readings become rarer as they become many
(:class:`Thinning`).
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import clock_line
from .events import LANES, Event
from .measured_parts import measured_parts
from .record import (
    REGULAR,
    ClockReading,
    CurvePoint,
    LinkReading,
    MemoryReading,
    PlannedStep,
    RankInterval,
    RecordedUpdate,
    RunEnd,
    RunRecord,
    RunStart,
    SentBytes,
    Spread,
    TensorHealth,
)

FOLDER, RECORD, EVENTS = 'report', 'record.jsonl', 'events.jsonl'
_FORMAT = 1

#: By what a line is called, what it is read as, and the list it goes into.
_KINDS: dict[str, tuple[Any, str]] = {
    'start': (RunStart, 'starts'), 'end': (RunEnd, 'ends'),
    'point': (CurvePoint, 'curves'), 'interval': (RankInterval, 'intervals'),
    'sent': (SentBytes, 'sent'), 'clock': (ClockReading, 'clocks'),
    'link': (LinkReading, 'links'), 'tensor': (TensorHealth, 'tensors'),
    'memory': (MemoryReading, 'memory'), 'plan': (PlannedStep, 'plans')}
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}

#: Any part of a record but the events of an update.
Part = (RunStart | RunEnd | CurvePoint | RankInterval | SentBytes
        | ClockReading | LinkReading | TensorHealth | MemoryReading
        | PlannedStep)


class RecordWriter:
    """Appends to the record of a run.

    Args:
        folder: The result folder; it is made.
        most_events: In the whole record.  Where there are more, every second
            update that was kept as a regular one is dropped, then every
            second one of those that are left, and so on.

    Raises:
        OSError: The folder cannot be written.
        ValueError: There is something else in it.

    Attributes:
        starts: How many starts the record had.
    """

    def __init__(self, folder: str, most_events: int = 100_000) -> None:
        self.folder = folder
        self._directory = os.path.join(folder, FOLDER)
        os.makedirs(self._directory, exist_ok=True)
        self._most_events = most_events
        self._kept: list[_Kept] = []
        self._left_out, self.starts = 0, 0
        for name in RECORD, EVENTS:
            self._begin(os.path.join(self._directory, name))

    def write(self, parts: Iterable[Part], now: float) -> None:
        """Appends parts; ``now`` is in seconds since 1970."""
        lines = [_line(_NAMES[type(part)], part._asdict()) for part in parts]
        self._append(RECORD, [*lines, _line('seen', {'time': now})])

    def write_updates(self, updates: Sequence[RecordedUpdate],
                      left_out: int = 0) -> None:
        """Appends the events of updates, on the clocks of their ranks.

        Args:
            updates: In the order of their numbers.
            left_out: Updates that were to be kept and are not among them.
        """
        self._left_out += left_out
        new = [_Kept(update.start, update.iteration, update.why,
                     len(update.events), _update_line(update))
               for update in updates]
        self._kept += new
        if sum(kept.events for kept in self._kept) <= self._most_events:
            self._append(EVENTS, [kept.line for kept in new])
            return
        self._thin()
        self._rewrite()

    # --- details -------------------------------------------------------------

    def _begin(self, path: str) -> None:
        """Makes a file, or makes one that a kill has cut ready for more."""
        if not os.path.exists(path):
            with open(path, 'w') as file:
                file.write(_header())
            return
        lines = [*_lines(path)]     # raises if it is no record
        with open(path, 'rb') as whole:
            whole.seek(0, os.SEEK_END)
            if whole.tell():
                whole.seek(-1, os.SEEK_END)
                cut = whole.read(1) != b'\n'
        if cut:
            with open(path, 'a') as file:
                file.write('\n')
        if os.path.basename(path) == RECORD:
            self.starts = sum(name == 'start' for name, _ in lines)
        else:
            for name, fields in lines:
                if name == 'update':
                    self._kept.append(_Kept(
                        fields['start'], fields['iteration'], fields['why'],
                        len(fields['events']), _line(name, fields)))
                elif name == 'left_out':
                    self._left_out = fields['updates']

    def _append(self, name: str, lines: Sequence[str]) -> None:
        if lines:
            with open(os.path.join(self._directory, name), 'a') as file:
                file.write(''.join(lines))

    def _thin(self) -> None:
        """Drops updates until there are few enough events, whole ones."""
        droppable: list[Callable[[_Kept], bool]] = [
            lambda kept: kept.why == REGULAR, lambda kept: True]
        for may_go in droppable:
            while sum(kept.events for kept in self._kept
                      ) > self._most_events:
                some = [kept for kept in self._kept if may_go(kept)]
                # The newest stays, or one that is larger than the limit.
                going = {id(kept) for kept in some[-2::-2]}
                if not going:
                    break
                self._left_out += len(going)
                self._kept = [kept for kept in self._kept
                              if id(kept) not in going]

    def _rewrite(self) -> None:
        path = os.path.join(self._directory, EVENTS)
        with open(f'{path}.partial', 'w') as file:
            file.write(_header())
            file.write(_line('left_out', {'updates': self._left_out}))
            file.writelines(kept.line for kept in self._kept)
        os.replace(file.name, path)


class _Kept(NamedTuple):
    start: int
    iteration: int
    why: str
    events: int
    line: str


class Thinning:
    """Says which of many readings are to be kept: all at first, then fewer.

    Of the first ``limit`` readings all are kept, then every second one until
    as many have been kept again, then every fourth, and so on.

    Args:
        limit: As above.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._seen, self._kept = limit, 0, 0

    def keep(self) -> bool:
        """Counts a reading; whether it is to be kept."""
        stride = 1 << (self._kept // self._limit)
        self._seen += 1
        keep = self._seen % stride == 0
        self._kept += keep
        return keep


def is_record(folder: str) -> bool:
    """Whether a folder has a record, or at least ``LogReport``'s file."""
    return any(os.path.isfile(os.path.join(folder, *names)) for names in (
        (FOLDER, RECORD), (RECORD,), ('log',)))


def read_record(folder: str) -> RunRecord:
    """Reads the record of a run.

    Args:
        folder: A result folder, its folder ``report``, or a folder in which
            there is only the file ``log`` of Chainer's ``LogReport``.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or what is there is none; the message
            names the file and the remedy.
    """
    if not os.path.isdir(folder):
        raise ValueError(f'{folder!r} is not a folder; name the folder that '
                         'a run has written its results to')
    directory = (folder if os.path.isfile(os.path.join(folder, RECORD))
                 else os.path.join(folder, FOLDER))
    if directory == folder:
        folder = os.path.dirname(os.path.abspath(folder))
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    path = os.path.join(directory, RECORD)
    if not os.path.isfile(path):
        log = os.path.join(folder, 'log')
        if not os.path.isfile(log):
            raise ValueError(
                f'{folder!r} has neither a record ({FOLDER}/{RECORD}) nor a '
                'log; add trainer.extend(RunReport(comm)) to the training, '
                'and name the folder that it writes to')
        read_log(log, record)
        return record
    for name, fields in _lines(path, record.remarks):
        if name == 'seen':
            record.last_seen = max(record.last_seen, _seen(path, fields))
        elif name in _KINDS:
            kind, place = _KINDS[name]
            getattr(record, place).append(_part(path, kind, fields))
    record.curves = _one_line(record)
    record.plans = [plan._replace(measured=measured_parts(
        interval for interval in record.intervals
        if interval.start == plan.start)) for plan in record.plans]
    events = os.path.join(directory, EVENTS)
    if os.path.isfile(events):
        _read_updates(events, record)
    return record


def read_log(path: str, record: RunRecord) -> None:
    """Adds the curves of a file of ``LogReport`` to a record.

    Raises:
        ValueError: The file is none.
    """
    try:
        with open(path) as file:
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


def _one_line(record: RunRecord) -> list[CurvePoint]:
    """The points that later starts have not gone back behind."""
    gone_on = {start.number: start.iteration for start in record.starts}
    return [point for point in record.curves if all(
        point.iteration <= iteration for number, iteration in gone_on.items()
        if number > point.start)]


# --- lines -------------------------------------------------------------------

def _header() -> str:
    return _line('record of a run', {'format': _FORMAT})


def _line(name: str, fields: dict[str, Any]) -> str:
    # NaN and infinity as Python's JSON has them: losses may be both.
    return json.dumps({name: fields}, separators=(',', ':')) + '\n'


def _lines(path: str, remarks: list[str] | None = None
           ) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a file after the first; names those that are not."""
    with open(path, encoding='utf-8', errors='replace') as file:
        for number, text in enumerate(file, 1):
            try:
                (name, fields), = json.loads(text).items()
            except (ValueError, AttributeError):
                if number == 1:
                    raise ValueError(_no_record(path)) from None
                if remarks is not None and text.strip():
                    remarks.append(
                        f'Line {number} of {os.path.basename(path)} is not '
                        'whole and is left out; the job was killed while it '
                        'was written.')
                continue
            if number == 1:
                _check_header(path, name, fields)
            else:
                yield name, fields


def _check_header(path: str, name: str, fields: Any) -> None:
    if name != 'record of a run' or not isinstance(fields, dict):
        raise ValueError(_no_record(path))
    if fields.get('format') != _FORMAT:
        raise ValueError(
            f'{path!r} has format {fields.get("format")!r} and this version '
            f'of chainer_fp8pipe reads format {_FORMAT}; read it with the '
            'version that wrote it, or a newer one')


def _no_record(path: str) -> str:
    return (f'{path!r} is not a record of a run: it does not begin as one; '
            'move it away, or choose another result folder')


def _seen(path: str, fields: dict[str, Any]) -> float:
    try:
        return float(fields['time'])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path!r} has a damaged line about the time of a '
                         f'write: {error}') from None


def _part(path: str, kind: Any, fields: dict[str, Any]) -> Any:
    """A part of a record; fields that this version does not know are left.
    """
    try:
        known = {name: tuple(value) if isinstance(value, list) else value
                 for name, value in fields.items() if name in kind._fields}
        if kind is RankInterval:
            known |= {name: Spread(*known[name]) for name in ('step', 'own')}
        return kind(**known)
    except (TypeError, KeyError) as error:
        raise ValueError(f'{path!r} has a damaged line about '
                         f'{kind.__name__}: {error}') from None


# --- events ------------------------------------------------------------------

# Of an event in a line, behind rank, name, start and length; those at the end
# that are as here are left out.
_USUAL: list[Any] = [None, None, 0, 0, '', []]


def _update_line(update: RecordedUpdate) -> str:
    """Times in tenths of microseconds from the first on, by rank."""
    origins: dict[int, float] = {}
    for event in update.events:
        origins[event.rank] = min(
            event.start, origins.get(event.rank, event.start))
    names = list(dict.fromkeys(event.name for event in update.events))
    return _line('update', {
        'start': update.start, 'iteration': update.iteration,
        'why': update.why, 'origins': list(origins.items()), 'names': names,
        'events': [_row(event, origins[event.rank], names)
                   for event in update.events]})


def _row(event: Event, origin: float, names: list[str]) -> list[Any]:
    start, end = (round((time - origin) * 1e7)
                  for time in (event.start, event.end))
    rest = [event.micro_batch, event.chunk,
            ('', *LANES).index(event.lane), event.bytes, event.about,
            [[name, value] for name, value in event.values]]
    while rest and rest[-1] == _USUAL[len(rest) - 1]:
        rest.pop()
    return [event.rank, names.index(event.name), start, end - start, *rest]


def _read_updates(path: str, record: RunRecord) -> None:
    clocks = {
        start.number: clock_line.clock_lines(
            reading for reading in record.clocks
            if reading.start == start.number)
        for start in record.starts}
    origins = {start.number: start.origin for start in record.starts}
    for name, fields in _lines(path, record.remarks):
        if name == 'left_out':
            record.left_out = fields['updates']
        elif name == 'update':
            try:
                number = fields['start']
                record.updates.append(_update(
                    fields, origins[number], clocks[number]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(
                    f'{path!r} has a damaged line about an update: '
                    f'{type(error).__name__}: {error}') from None


def _update(fields: dict[str, Any], origin: float,
            clocks: dict[int, clock_line.ClockLine]) -> RecordedUpdate:
    begins = {
        rank: clocks[rank].on_rank_0(begin - origin) if rank in clocks
        else begin - origin for rank, begin in fields['origins']}
    events = []
    for row in fields['events']:
        rank, name, start, length = row[:4]
        micro_batch, chunk, lane, size, about, values = (
            row[4:] + _USUAL[len(row) - 4:])
        at = begins[rank] + start * 1e-7
        events.append(Event(
            rank, fields['names'][name], at, at + length * 1e-7, micro_batch,
            chunk, fields['iteration'], ('', *LANES)[lane], size, about,
            tuple((key, value) for key, value in values)))
    events.sort(key=lambda event: (event.start, event.end))
    return RecordedUpdate(fields['start'], fields['iteration'],
                          fields['why'], tuple(events))

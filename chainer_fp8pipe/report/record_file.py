"""The files of a run's record: written while it goes on, read by a report."""
# In the folder ``report`` of a result folder, ``record.jsonl`` has a line of
# JSON for each part of the record, and ``events.jsonl`` one for each update
# whose events were kept.  Lines are only appended, so that a kill at any
# moment costs the line that was being written, and a job that is started
# again goes on in the same files.  Events are on the clocks of their ranks
# there, as later readings of clocks say more about them; the reader puts them
# on rank 0's.
#
# A reader trusts nothing: a line that is damaged, or of a kind that it does
# not know, is left out with a remark that the page shows.  Only a file that
# does not begin as a record is an error, for it may be anything.
#
# What bounds record.jsonl is that it is written seldom (training/run_reports),
# and events.jsonl that the older half of its updates goes where it has too
# many; the first ones of a run stay.
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .atomic_write import written_whole
from .clocks import ClockLine, clock_lines
from .events import Event
from .record import (
    FIRST,
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
    measured_parts,
)

_FOLDER, _RECORD, _EVENTS = 'report', 'record.jsonl', 'events.jsonl'
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


def _line(name: str, fields: dict[str, Any]) -> str:
    # NaN and infinity as Python's JSON has them: losses may be both.
    return json.dumps({name: fields}, separators=(',', ':')) + '\n'


# --- writing -----------------------------------------------------------------

class _Kept(NamedTuple):
    """An update in the file of events."""

    why: str
    events: int
    line: str


class RecordWriter:
    """Appends to the record of a run.

    Args:
        folder: The result folder; it is made.
        most_events: In the whole record.  Where there are more, the older
            half of the updates is left out, but for the first ones.

    Raises:
        OSError: The folder cannot be written.
        ValueError: There is something else in it.

    Attributes:
        starts: How many starts the record had.
    """

    def __init__(self, folder: str, most_events: int = 100_000) -> None:
        self._directory = os.path.join(folder, _FOLDER)
        os.makedirs(self._directory, exist_ok=True)
        self._most_events = most_events
        self._left_out = 0
        self.starts = sum(name == 'start' for name, _ in self._begin(_RECORD))
        self._kept: list[_Kept] = []
        for name, fields in self._begin(_EVENTS):
            if name == 'update':
                self._kept.append(_Kept(
                    str(fields.get('why')), len(fields.get('events', ())),
                    _line(name, fields)))
            elif name == 'left_out':
                self._left_out = int(fields.get('updates', 0))

    def write(self, parts: Iterable[Part], now: float) -> None:
        """Appends parts; ``now`` is in seconds since 1970."""
        self._append(_RECORD, [
            *(_line(_NAMES[type(part)], part._asdict()) for part in parts),
            _line('seen', {'time': now})])

    def write_updates(self, updates: Sequence[RecordedUpdate]) -> None:
        """Appends the events of updates, on the clocks of their ranks."""
        new = [_Kept(update.why, len(update.events), _line('update', {
            'start': update.start, 'iteration': update.iteration,
            'why': update.why, 'events': [
                _row(event) for event in update.events]}))
            for update in updates]
        self._kept += new
        if sum(kept.events for kept in self._kept) <= self._most_events:
            self._append(_EVENTS, [kept.line for kept in new])
            return
        self._leave_out(self._most_events // 2)
        with written_whole(os.path.join(self._directory, _EVENTS)) as file:
            file.write(_line('record of a run', {'format': _FORMAT}))
            file.write(_line('left_out', {'updates': self._left_out}))
            file.writelines(kept.line for kept in self._kept)

    def _leave_out(self, most: int) -> None:
        """Drops old updates until there are few enough events."""
        for stays in FIRST, None:
            for old in self._kept[:-1]:
                if sum(kept.events for kept in self._kept) > most and (
                        old.why != stays):
                    self._kept.remove(old)
                    self._left_out += 1

    def _begin(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """Makes a file, or makes one that a kill has cut ready for more."""
        path = os.path.join(self._directory, name)
        if not os.path.exists(path) or not os.path.getsize(path):
            with written_whole(path) as file:
                file.write(_line('record of a run', {'format': _FORMAT}))
            return []
        lines = [*_lines(path, [])]      # raises if it is no record
        with open(path, 'rb+') as whole:
            whole.seek(-1, os.SEEK_END)
            if whole.read(1) != b'\n':
                whole.write(b'\n')
        return lines

    def _append(self, name: str, lines: Sequence[str]) -> None:
        if lines:
            with open(os.path.join(self._directory, name), 'a') as file:
                file.write(''.join(lines))


def _row(event: Event) -> list[Any]:
    """Times to tenths of microseconds; fields at the end that are as usual
    are left out."""
    row = [event.rank, event.name, round(event.start, 7),
           round(event.end, 7), *event[4:]]
    row[Event._fields.index('iteration')] = None    # the line has it
    while Event._field_defaults.get(
            Event._fields[len(row) - 1], row) == row[-1]:
        row.pop()
    return row


# --- reading -----------------------------------------------------------------

def is_record(folder: str) -> bool:
    """Whether a folder has a record, or at least ``LogReport``'s file."""
    return any(os.path.isfile(os.path.join(folder, *names)) for names in (
        (_FOLDER, _RECORD), (_RECORD,), ('log',)))


def read_record(folder: str) -> RunRecord:
    """Reads the record of a run.

    Args:
        folder: A result folder, its folder ``report``, or a folder in which
            there is only the file ``log`` of Chainer's ``LogReport``.

    Returns:
        The record; what is damaged in its files is left out, and
        ``remarks`` say so.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no record, or what is there is none; the message
            names the file and the remedy.
    """
    if not os.path.isdir(folder):
        raise ValueError(f'{folder!r} is not a folder; name the folder that '
                         'a run has written its results to')
    directory = (folder if os.path.isfile(os.path.join(folder, _RECORD))
                 else os.path.join(folder, _FOLDER))
    if directory == folder:
        folder = os.path.dirname(os.path.abspath(folder))
    record = RunRecord(os.path.basename(os.path.abspath(folder)))
    path = os.path.join(directory, _RECORD)
    if not os.path.isfile(path):
        log = os.path.join(folder, 'log')
        if not os.path.isfile(log):
            raise ValueError(
                f'{folder!r} has neither a record ({_FOLDER}/{_RECORD}) nor '
                'a log; add trainer.extend(RunReport(comm)) to the training, '
                'and name the folder that it writes to')
        _read_log(log, record)
        return record
    for name, fields in _lines(path, record.remarks):
        try:
            if name == 'seen':
                record.last_seen = max(record.last_seen,
                                       float(fields['time']))
            elif name in _KINDS:
                kind, place = _KINDS[name]
                getattr(record, place).append(_part(kind, fields))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            record.remarks.append(_damaged(path, name, error))
    _tidy(record)
    events = os.path.join(directory, _EVENTS)
    if os.path.isfile(events):
        _read_updates(events, record)
    return record


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
                if number == 1:
                    raise ValueError(_no_record(path)) from None
                if text.strip():
                    remarks.append(
                        f'Line {number} of {os.path.basename(path)} is not '
                        'whole and is left out; the job may have been killed '
                        'while it was written.')
                continue
            if number > 1:
                yield name, fields
            elif name != 'record of a run':
                raise ValueError(_no_record(path))
            elif fields.get('format') != _FORMAT:
                raise ValueError(
                    f'{path!r} has format {fields.get("format")!r} and this '
                    f'version of chainer_fp8pipe reads format {_FORMAT}; '
                    'read it with the version that wrote it, or a newer one')


def _no_record(path: str) -> str:
    return (f'{path!r} is not a record of a run: it does not begin as one; '
            'move it away, or choose another result folder')


def _damaged(path: str, name: str, error: Exception) -> str:
    return (f'A line {name!r} of {os.path.basename(path)} is damaged and is '
            f'left out ({type(error).__name__}: {error}).')


_TYPES: dict[str, Any] = {
    'bool': bool, 'int': int, 'float': (int, float), 'str': str,
    'tuple': tuple, 'Mapping': dict, 'Spread': Spread, 'None': type(None)}


def _part(kind: Any, fields: dict[str, Any]) -> Any:
    """A part of a record; fields that this version does not know are left.

    Raises:
        TypeError: Fields are missing, or are of other types.
    """
    known = {key: tuple(value) if isinstance(value, list) else value
             for key, value in fields.items() if key in kind._fields}
    if kind is RankInterval:
        known |= {key: Spread(*known[key]) for key in ('step', 'own')}
    for key, value in known.items():
        hint = kind.__annotations__[key]
        hint = getattr(hint, '__forward_arg__', hint)
        inner = [value]
        if hint == 'Mapping[str, float]' and isinstance(value, dict):
            inner += [[]] * any(not isinstance(one, (int, float))
                                for one in value.values())
        if not all(any(isinstance(one, _TYPES[name.split('[')[0].strip()])
                       for name in hint.split('|')) for one in inner):
            raise TypeError(f'{key} is {value!r}, no {hint}')
    return kind(**known)


def _tidy(record: RunRecord) -> None:
    """Takes out points that later starts went back behind; plans' times."""
    record.curves = [point for point in record.curves if all(
        point.iteration <= start.iteration for start in record.starts
        if start.number > point.start)]
    record.plans = [plan._replace(measured=measured_parts(
        one for one in record.intervals if one.start == plan.start))
        for plan in record.plans]


def _read_log(path: str, record: RunRecord) -> None:
    """Adds the curves of a file of ``LogReport``."""
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


def _read_updates(path: str, record: RunRecord) -> None:
    starts = {start.number: (start.origin, clock_lines(
        reading for reading in record.clocks
        if reading.start == start.number)) for start in record.starts}
    for name, fields in _lines(path, record.remarks):
        try:
            if name == 'left_out':
                record.left_out = int(fields['updates'])
            elif name == 'update' and fields['start'] in starts:
                record.updates.append(
                    _update(fields, *starts[fields['start']]))
            elif name == 'update':
                remark = (f'Events of start {fields["start"]} are left out: '
                          f'the line about that start is missing in '
                          f'{_RECORD}.')
                if remark not in record.remarks:
                    record.remarks.append(remark)
        except (AttributeError, KeyError, IndexError, TypeError,
                ValueError) as error:
            record.remarks.append(_damaged(path, name, error))


def _update(fields: dict[str, Any], origin: float,
            clocks: dict[int, ClockLine]) -> RecordedUpdate:
    """An update, its events on rank 0's clock."""
    found = [Event(*row) for row in fields['events']]
    shifts: dict[int, float] = {}       # one for a rank: clocks do not jump
    events = []
    for event in found:
        if event.rank not in shifts:
            begin = min(other.start for other in found
                        if other.rank == event.rank) - origin
            shifts[event.rank] = origin + (
                clocks[event.rank].offset(begin)
                if event.rank in clocks else 0.0)
        shift = shifts[event.rank]
        events.append(event._replace(
            start=event.start - shift, end=event.end - shift,
            iteration=fields['iteration'],
            values=tuple((key, value) for key, value in event.values)))
    events.sort(key=lambda event: (event.start, event.end))
    return RecordedUpdate(int(fields['start']), int(fields['iteration']),
                          str(fields['why']), tuple(events))

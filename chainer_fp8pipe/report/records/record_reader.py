"""Reads the record of a run."""
from __future__ import annotations

import json
import os
from typing import Any

from .clock_line import clock_lines
from .record_lines import (
    EVENTS,
    FOLDER,
    KINDS,
    RECORD,
    update_from,
    whole_lines,
)
from .run_record import (
    CurvePoint,
    RankInterval,
    RunRecord,
    Spread,
    measured_parts,
)


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
    for name, fields in whole_lines(path, record.remarks):
        if name == 'seen':
            record.last_seen = max(
                record.last_seen, _number(path, name, fields, 'time'))
        elif name in KINDS:
            kind, place = KINDS[name]
            getattr(record, place).append(_part(path, name, kind, fields))
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


def _number(path: str, name: str, fields: Any, key: str) -> float:
    try:
        return float(fields[key])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, name, error) from None


def _damaged(path: str, name: str, error: Exception) -> ValueError:
    return ValueError(f'{path!r} has a damaged line {name!r} '
                      f'({type(error).__name__}: {error}); remove that line')


_TYPES: dict[str, Any] = {
    'bool': bool, 'int': int, 'float': (int, float), 'str': str,
    'tuple': tuple, 'Mapping': dict, 'Spread': Spread, 'None': type(None)}


def _part(path: str, name: str, kind: Any, fields: Any) -> Any:
    """A part of a record; fields that this version does not know are left.
    """
    try:
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in fields.items() if key in kind._fields}
        if kind is RankInterval:
            known |= {key: Spread(*known[key]) for key in ('step', 'own')}
        for key, value in known.items():
            hint = kind.__annotations__[key]
            hint = getattr(hint, '__forward_arg__', hint)
            if not any(isinstance(value, _TYPES[one.split('[')[0].strip()])
                       for one in hint.split('|')) or (
                    hint == 'Mapping[str, float]' and not all(
                        isinstance(one, (int, float))
                        for one in value.values())):
                raise TypeError(f'{key} is {value!r}, no {hint}')
        return kind(**known)
    except (AttributeError, TypeError, KeyError) as error:
        raise _damaged(path, name, error) from None


def _read_updates(path: str, record: RunRecord) -> None:
    clocks = {
        start.number: clock_lines(
            reading for reading in record.clocks
            if reading.start == start.number)
        for start in record.starts}
    origins = {start.number: start.origin for start in record.starts}
    for name, fields in whole_lines(path, record.remarks):
        if name == 'left_out':
            record.left_out = int(_number(path, name, fields, 'updates'))
        elif name == 'update':
            number = int(_number(path, name, fields, 'start'))
            if number not in origins:
                remark = (f'Events of start {number} are left out: the line '
                          f'about that start is missing in {RECORD}.')
                if remark not in record.remarks:
                    record.remarks.append(remark)
                continue
            try:
                record.updates.append(update_from(
                    fields, origins[number], clocks[number]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise _damaged(path, name, error) from None

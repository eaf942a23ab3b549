"""The lines of a record's files.

In the folder ``report`` of a result folder, ``record.jsonl`` has a line of
JSON for each part of the record, and ``events.jsonl`` one for each update
whose events were kept.  A kill at any moment costs at most the line that was
being written; a job that is started again appends.  Events are on the clocks
of their ranks there; a reader puts them on rank 0's.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from ..events import LANES, Event
from .clock_line import ClockLine
from .run_record import (
    ClockReading,
    CurvePoint,
    LinkReading,
    MemoryReading,
    PlannedStep,
    RankInterval,
    RecordedUpdate,
    RunEnd,
    RunStart,
    SentBytes,
    TensorHealth,
)

FOLDER, RECORD, EVENTS = 'report', 'record.jsonl', 'events.jsonl'
_FORMAT = 1

#: By what a line is called, what it is read as, and the list it goes into.
KINDS: dict[str, tuple[Any, str]] = {
    'start': (RunStart, 'starts'), 'end': (RunEnd, 'ends'),
    'point': (CurvePoint, 'curves'), 'interval': (RankInterval, 'intervals'),
    'sent': (SentBytes, 'sent'), 'clock': (ClockReading, 'clocks'),
    'link': (LinkReading, 'links'), 'tensor': (TensorHealth, 'tensors'),
    'memory': (MemoryReading, 'memory'), 'plan': (PlannedStep, 'plans')}

#: Any part of a record but the events of an update.
Part = (RunStart | RunEnd | CurvePoint | RankInterval | SentBytes
        | ClockReading | LinkReading | TensorHealth | MemoryReading
        | PlannedStep)


def header() -> str:
    """The first line of both files."""
    return json_line('record of a run', {'format': _FORMAT})


def json_line(name: str, fields: dict[str, Any]) -> str:
    """A line of its own, with fields under a name."""
    # NaN and infinity as Python's JSON has them: losses may be both.
    return json.dumps({name: fields}, separators=(',', ':')) + '\n'


def whole_lines(path: str, remarks: list[str] | None = None
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


# --- events ------------------------------------------------------------------

# Of an event in a line, behind rank, name, start and length; those at the end
# that are as here are left out.
_USUAL: list[Any] = [None, None, 0, 0, '', []]


def update_line(update: RecordedUpdate) -> str:
    """Times in tenths of microseconds from the first on, by rank."""
    origins: dict[int, float] = {}
    for event in update.events:
        origins[event.rank] = min(
            event.start, origins.get(event.rank, event.start))
    names = list(dict.fromkeys(event.name for event in update.events))
    return json_line('update', {
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


def update_from(fields: dict[str, Any], origin: float,
            clocks: dict[int, ClockLine]) -> RecordedUpdate:
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

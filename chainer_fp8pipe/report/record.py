"""The record of a run: what it holds, and its files."""
# Each rank appends to a file of its own, report/rankN.jsonl in the result
# folder, a line of JSON for each part, ["class", fields...].  There are no
# messages: a report can neither wait for a rank nor make one wait, and the
# data of a rank that died are there.  The price: a report shows the ranks
# whose files one disk has.
#
# A kill costs the line that was being written, which a reader leaves out with
# a remark.  A job that is started again goes on in the same files.  Ranks
# share no clock but that of their hosts, as seconds since 1970: a start of a
# rank is that of rank 0 which is the nearest in time.
from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from .quantities import counted
from .stream import Event

_FOLDER, _HEADER = 'report', '["record of a rank", 4]\n'

#: Parts of a step, in the order of a picture.  ``exchange`` includes waiting
#: for slower ranks; ``other`` has no section of its own; ``between`` passes
#: between updates: evaluation, snapshots, other extensions.
PHASES = ('input', 'forward', 'recompute', 'backward', 'backward_weight',
          'encode', 'exchange', 'decode', 'send', 'receive', 'update',
          'other', 'between')

#: Phases in which a rank may wait for another.
COMMUNICATION = ('exchange', 'send', 'receive')


class RunStart(NamedTuple):
    """The job was started; a line of each rank."""

    time: float             # seconds since 1970, UTC; so in all parts
    iteration: int          # updates done before, in earlier starts
    ranks: int              # how many there are
    host: str               # of this rank
    stage: int | None = None            # of a pipeline, this rank's
    settings: Mapping[str, str] = {}    # command, codec, versions, ...
    launched: int | None = None     # starts of the launcher before, if any


class RunEnd(NamedTuple):
    """A start ended in order on a rank."""

    time: float
    iteration: int          # updates done
    error: str = ''         # what was raised; '' if nothing was


class CurvePoint(NamedTuple):
    """The means, over some updates, of values that the training reported."""

    time: float
    iteration: int          # the last of these updates
    epoch: float            # passes over the data, with the part of the last
    values: Mapping[str, float]     # by name; finite or not


class RankInterval(NamedTuple):
    """What a rank did in all updates between two writes of its record.

    The first update of a start, which connects and allocates, is in none.
    """

    time: float
    rank: int
    first: int              # update
    last: int               # update
    # Seconds of a step without COMMUNICATION: lower quartile and median.
    own: tuple[float, float]
    phases: Mapping[str, float]         # mean seconds of a step
    hidden: Mapping[str, float] = {}    # of the thread that exchanges beside
    # By codec, such as 'fp8', or 'to stages': the mean bytes that the rank
    # sends in an update, and those in float32.
    sent: Mapping[str, float] = {}
    float32: Mapping[str, float] = {}


class RecordedUpdate(NamedTuple):
    """An update; of one rank in a file, of all ranks in a record."""

    time: float             # when it began
    iteration: int
    seconds: float
    events: tuple[Event, ...]   # in seconds since 1970


Part = RunStart | RunEnd | CurvePoint | RankInterval | RecordedUpdate
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Part)}


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
    stages: dict[int, int | None] = field(default_factory=dict)
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
        if os.path.exists(self._path) and os.path.getsize(self._path):
            _lines(self._path)
        else:
            with written_whole(self._path) as file:
                file.write(_HEADER)

    def write(self, parts: Iterable[Part]) -> None:
        """Appends parts, in one write."""
        # A kill may have cut the line before.
        with open(self._path, 'a', encoding='utf-8') as file:
            file.write('\n' + ''.join(
                json.dumps([type(part).__name__, *(
                    _finite(one) for one in part)]) + '\n'
                for part in parts))


def _finite(value: Any) -> Any:
    """Of a dictionary's numbers those that JSON has not, as texts."""
    return {key: str(one) if isinstance(one, float) and not math.isfinite(one)
            else one for key, one in value.items()} if isinstance(
                value, dict) else value


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
    ranks = {int(name[4:-6]): _read(os.path.join(inner, name), record.remarks)
             for name in sorted(os.listdir(inner))
             if re.fullmatch(r'rank\d+\.jsonl', name)}
    if began := [part for part in ranks[0] if isinstance(part, RunStart)]:
        _join(record, ranks, began)
    return record


def _join(record: RunRecord, ranks: Mapping[int, list[Part]],
          began: list[RunStart]) -> None:
    """Fills a record with the last training's starts, of all ranks."""
    # A launcher's later starts may begin at update 0, too.
    first = max((place for place, one in enumerate(began)
                 if not one.iteration and not one.launched), default=0)
    if first:
        record.remarks.append(
            f'The folder has {counted(first, "start")} of other trainings, '
            'too.')
    record.starts = began[first:]
    parts = _placed(ranks, began)
    for place, start in enumerate(began[first:], first):
        record.seconds += max(
            part.time for kind in get_args(Part)
            for _, part in parts[place, kind]) - start.time
        for rank, end in parts[place, RunEnd]:
            if not rank:
                record.ends[place - first] = end
        for _, point in parts[place, CurvePoint]:
            while record.curves and (
                    record.curves[-1].iteration >= point.iteration):
                record.curves.pop()     # after which this start began
            record.curves.append(point)
    record.hosts = {rank: one.host for rank, one in parts[place, RunStart]}
    record.stages = {rank: one.stage for rank, one in parts[place, RunStart]}
    record.ended = {rank for rank, _ in parts[place, RunEnd]}
    record.intervals = [one for _, one in parts[place, RankInterval]]
    updates: dict[int, list[RecordedUpdate]] = defaultdict(list)
    for _, one in parts[place, RecordedUpdate]:
        updates[one.iteration].append(one)
    record.updates = [
        RecordedUpdate(its[0].time, iteration, max(
            one.seconds for one in its), sum((one.events for one in its), ()))
        for iteration, its in sorted(updates.items())
        if len(its) == len(record.hosts)]
    if missing := {*range(began[-1].ranks)} - record.hosts.keys():
        record.remarks.append(
            f'Rank {", ".join(map(str, sorted(missing)))} left no record '
            'here: RunReport was not added there, or the host writes to '
            'another disk.')


def _placed(ranks: Mapping[int, list[Part]], began: list[RunStart]
            ) -> dict[Any, list[tuple[int, Any]]]:
    """Ranks and parts, by place of the start and kind."""
    found: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for rank, parts in ranks.items():
        place = -1
        for part in parts:
            if isinstance(part, RunStart):
                place = min(range(len(began)), key=lambda number: abs(
                    began[number].time - part.time))
            found[place, type(part)].append((rank, part))
    return found


def _lines(path: str) -> list[str]:
    """The lines of a rank's file, which may be anything."""
    with open(path, encoding='utf-8', errors='replace') as file:
        if file.readline() == _HEADER:
            return [_HEADER, *file]
    raise ValueError(
        f'{path!r} is not a record that this chainer_fp8pipe writes; '
        'move it away, or choose another result folder')


def _read(path: str, remarks: list[str]) -> list[Part]:
    found: list[Part] = []
    for number, line in enumerate(_lines(path)[1:], 2):
        if not line.strip():
            continue
        try:
            kind, *fields = json.loads(line)
            if kind == 'RecordedUpdate':
                fields[-1] = tuple(Event(*event) for event in fields[-1])
            elif kind == 'CurvePoint':
                fields[-1] = {name: float(value)
                              for name, value in fields[-1].items()}
            found.append(_KINDS[kind](*fields))
        except (ValueError, TypeError, LookupError, AttributeError):
            remarks.append(
                f'Line {number} of {os.path.basename(path)} is not whole '
                'and is left out; the job may have been killed while it '
                'was written.')
    return found

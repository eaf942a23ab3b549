"""Writes the record of a run while the run goes on."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..atomic_write import written_whole
from .record_lines import (
    EVENTS,
    FOLDER,
    KINDS,
    RECORD,
    Part,
    header,
    json_line,
    update_line,
    whole_lines,
)
from .run_record import REGULAR, RecordedUpdate

_NAMES = {kind: name for name, (kind, _) in KINDS.items()}


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
        lines = [json_line(_NAMES[type(part)], part._asdict())
                 for part in parts]
        self._append(RECORD, [*lines, json_line('seen', {'time': now})])

    def write_updates(self, updates: Sequence[RecordedUpdate],
                      left_out: int = 0) -> None:
        """Appends the events of updates, on the clocks of their ranks.

        Args:
            updates: In the order of their numbers.
            left_out: Updates that were to be kept and are not among them.
        """
        self._left_out += left_out
        new = [_Kept(update.start, update.iteration, update.why,
                     len(update.events), update_line(update))
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
        if not os.path.exists(path) or not os.path.getsize(path):
            with written_whole(path) as file:
                file.write(header())
            return
        lines = [*whole_lines(path)]     # raises if it is no record
        with open(path, 'rb') as whole:
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
                        len(fields['events']), json_line(name, fields)))
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
        with written_whole(os.path.join(self._directory, EVENTS)) as file:
            file.write(header())
            file.write(json_line('left_out', {'updates': self._left_out}))
            file.writelines(kept.line for kept in self._kept)


class _Kept(NamedTuple):
    start: int
    iteration: int
    why: str
    events: int
    line: str

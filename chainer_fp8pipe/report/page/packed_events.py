"""The events of updates, packed for the page's script."""
from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy

from ..events import BUCKETS, EXCHANGE, Event, in_rows
from ..looks import Look, Looks
from .base_figure import css

# Where a rank's row has its lanes: from the middle down, and how high.
_WHOLE = (-0.4, 0.8)
_MAIN, _EXCHANGE, _BUCKETS = (-0.45, 0.56), (0.13, 0.12), (0.27, 0.18)

#: Of a clock: the least time that the page tells apart, in seconds.
_TICK = 1e-7


class PackedEvents:
    """Packs updates one after the other, with what they share.

    Attributes:
        looks: Of all events so far, for the script.
        texts: What events are about.
    """

    def __init__(self) -> None:
        self.looks: list[dict[str, str]] = []
        self.texts: list[str] = []
        self._numbers: dict[Look, int] = {}
        self._places: dict[str, int] = {}

    def add(self, label: str, events: Sequence[Event]) -> dict[str, Any]:
        """One update, as JSON can have it.

        Args:
            label: What the page calls it.
            events: That took some time, at least one, waits explained.

        Returns:
            ``columns`` are the compressed bytes of, for all events by row
            and start: bytes (float64); start and length, in units
            (uint32); text, micro-batch, chunk (int32, -1: none); row
            and look (uint16).
        """
        placed = in_rows(events)
        rows = _rows({place for _, place in placed})
        numbers = {row[0]: number for number, row in enumerate(rows)}
        placed.sort(key=lambda item: (numbers[item[1]], item[0].start,
                                      -item[0].end))
        looks = self._looks_of(events)
        origin = min(event.start for event in events)
        span = max(event.end for event in events) - origin
        unit = max(_TICK, span / 2 ** 31)
        fields = numpy.array([(
            event.bytes, (event.start - origin) / unit,
            (event.end - event.start) / unit, self._text(event.about),
            -1 if event.micro_batch is None else event.micro_batch,
            -1 if event.chunk is None else event.chunk, numbers[place],
            looks[event.rank, event.name, event.chunk])
            for event, place in placed]).T
        kinds = ('<f8', '<u4', '<u4', '<i4', '<i4', '<i4', '<u2', '<u2')
        columns = b''.join(column.round().astype(kind).tobytes()
                           for column, kind in zip(fields, kinds,
                                                   strict=True))
        return {'label': label, 'unit': unit, 'span': span,
                'count': len(placed),
                'rows': [{'rank': place[0],
                          'lane': ('', EXCHANGE, BUCKETS)[place[1]],
                          'top': round(place[0] + top, 4),
                          'bottom': round(place[0] + top + height, 4)}
                         for place, top, height in rows],
                'columns': base64.b64encode(zlib.compress(columns)).decode()}

    def _text(self, text: str) -> int:
        if not text:
            return -1
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]

    def _looks_of(self, events: Sequence[Event]
                  ) -> dict[tuple[int, str, int | None], int]:
        """Numbers of looks by all of an event that these depend on."""
        looks = Looks(events)
        return {place: self._look(looks.of(event)) for place, event in {
            (event.rank, event.name, event.chunk): event
            for event in events}.items()}

    def _look(self, look: Look) -> int:
        if look not in self._numbers:
            self._numbers[look] = len(self.looks)
            self.looks.append({
                'label': look.label, 'colour': css(look.colour), 'hatch': {
                    '/': 'right_diagonal_line',
                    '\\': 'left_diagonal_line'}.get(look.hatch[:1], '')})
        return self._numbers[look]


def _rows(places: set[tuple[int, int, int]]
          ) -> list[tuple[tuple[int, int, int], float, float]]:
    """Each row with its place beside its rank's number, and its height."""
    lanes = any(lane for _, lane, _ in places)
    buckets = 1 + max((row for _, lane, row in places if lane == 2),
                      default=0)
    found = []
    for rank, lane, row in sorted(places):
        top, height = ((_MAIN, _EXCHANGE, _BUCKETS)[lane] if lanes
                       else _WHOLE)
        if lane == 2:
            height /= buckets
            top += row * height
        found.append(((rank, lane, row), top, 0.92 * height))
    return found

"""How events look, and the picture of what ranks did when."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import svg
from .events import (
    BUCKETS,
    COMPUTATION,
    WAITING,
    Event,
    idle_share,
    in_rows,
    part_waits,
)
from .quantities import seconds, share


class Look(NamedTuple):
    """How events look, and where they come in the legend."""

    order: int
    label: str
    colour: str


_LOOKS = {
    'input': Look(0, 'input', '#f0e342'),
    'forward': Look(1, 'forward', '#3366ab'),
    'recompute': Look(2, 'forward again', '#73add9'),
    'backward': Look(3, 'backward', '#de701f'),
    'backward_weight': Look(4, 'backward, weight half', '#f5b359'),
    'update': Look(5, 'update', '#218738'),
    'send': Look(6, 'send and receive', '#9e2973'),
    'receive': Look(6, 'send and receive', '#9e2973'),
    'exchange': Look(7, 'exchange', '#d978bd'),
    'encode': Look(8, 'encode', '#0d8c99'),
    'decode': Look(9, 'decode', '#73bfb3'),
    'bucket': Look(10, 'bucket in flight', '#595959'),
    'between': Look(11, 'between updates', '#bfb380'),
    WAITING: Look(12, 'waiting', '#cfcfcf'),
}

# Where a rank's row has its lanes, and how high.
_WHOLE, _LANES = (0.0, 1.0), ((0.0, 0.64), (0.68, 0.12), (0.82, 0.18))


def look_of(name: str) -> Look:
    """How events of a name look; those without a look of their own: grey."""
    return _LOOKS.get(name, Look(13, name, '#737373'))


def draw_timeline(title: str, events: Iterable[Event]) -> str:
    """A row for each rank, as SVG; '' if no event takes time.

    Shades tell the chunks of a rank apart, the first one being the darkest.

    Args:
        title: For those who cannot see it.
        events: Of all ranks, on one clock.
    """
    events = [event for event in part_waits(events)
              if event.end > event.start]
    if not events:
        return ''
    ranks = sorted({event.rank for event in events})
    origin = min(event.start for event in events)
    shades, has_lanes = _shades(events), any(event.lane for event in events)
    placed = in_rows(events)
    rows: dict[int, int] = defaultdict(int)     # of buckets, by rank
    for _, (rank, _, row) in placed:
        rows[rank] = max(rows[rank], row + 1)
    found, looks = [], {}
    for event, (rank, lane, row) in placed:
        look = look_of(event.name)
        white = (shades.get((rank, event.chunk), 0.0)
                 if event.name in COMPUTATION else 0.0)
        colour = _lighter(look.colour, white)
        looks[look.label] = look
        top, height = _LANES[lane] if has_lanes else _WHOLE
        if event.lane == BUCKETS:
            height /= rows[rank]
            top += row * height
        found.append(svg.Box(
            ranks.index(rank), top, height, 1e3 * (event.start - origin),
            1e3 * (event.end - origin), colour, _words(event, look)))
    found.sort(key=lambda box: box.right - box.left, reverse=True)
    return svg.boxes(title, 'ms', [f'rank {rank}' for rank in ranks], found, {
        look.label: look.colour for look in sorted(looks.values())})


def _shades(events: Sequence[Event]) -> dict[tuple[int, int | None], float]:
    """How light the chunks of a rank are that has several."""
    chunks: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.chunk is not None:
            chunks[event.rank].add(event.chunk)
    return {(rank, chunk): 0.55 * place / (len(its) - 1)
            for rank, its in chunks.items() if len(its) > 1
            for place, chunk in enumerate(sorted(its))}


def _lighter(colour: str, white: float) -> str:
    parts = (int(colour[place:place + 2], 16) for place in (1, 3, 5))
    return '#' + ''.join(f'{round(part + white * (255 - part)):02x}'
                         for part in parts)


def _words(event: Event, look: Look) -> str:
    """What the pointer shows."""
    parts = [f'rank {event.rank}: {look.label}'
             + f', chunk {event.chunk}' * (event.chunk is not None)
             + f', micro-batch {event.micro_batch}' * (
                 event.micro_batch is not None),
             seconds(event.end - event.start)]
    if event.name == WAITING:
        parts.append(f'for {event.about}')
    elif event.about:
        parts.append(event.about)
    return ', '.join(parts)


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file, with the share of idle time in its title."""
    events = [*events]
    title += f' (ranks idle {share(round(idle_share(events), 3))})'
    return svg.as_file(draw_timeline(title, events), title)

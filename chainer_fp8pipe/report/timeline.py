"""How events look, and the picture of what ranks did when."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from . import svg
from .events import (
    BUCKETS,
    COMPUTATION,
    LANES,
    WAITING,
    Event,
    idle_share,
    in_rows,
    part_waits,
)
from .quantities import seconds, share

#: Of events by name, in the order of the legend: label and colour.
_LOOKS = {
    'input': ('input', '#f0e342'),
    'forward': ('forward', '#3366ab'),
    'recompute': ('forward again', '#73add9'),
    'backward': ('backward', '#de701f'),
    'backward_weight': ('backward, weight half', '#f5b359'),
    'update': ('update', '#218738'),
    'send': ('send and receive', '#9e2973'),
    'receive': ('send and receive', '#9e2973'),
    'exchange': ('exchange', '#d978bd'),
    'encode': ('encode', '#0d8c99'),
    'decode': ('decode', '#73bfb3'),
    'bucket': ('bucket in flight', '#595959'),
    'between': ('between updates', '#bfb380'),
    WAITING: ('waiting', '#cfcfcf'),
}

# Where a rank's row has its lanes, and how high.
_PLACES = {lane: place for lane, place in zip(
    ('', *LANES), ((0.0, 0.64), (0.68, 0.12), (0.82, 0.18)), strict=True)}


def look_of(name: str) -> tuple[str, str]:
    """Label and colour of events; those without a look of their own: grey."""
    return _LOOKS.get(name, (name, '#737373'))


def draw_timeline(title: str, events: Iterable[Event]) -> str:
    """A row for each rank, as SVG; '' if no event takes time.

    Shades tell the chunks of a rank apart, the first one being the darkest.

    Args:
        title: For those who cannot see it.
        events: Of all ranks, on one clock.
    """
    events = [event for event in part_waits(events)
              if event.end > event.start]
    ranks = sorted({event.rank for event in events})
    origin = min((event.start for event in events), default=0.0)
    has_lanes = any(event.lane for event in events)
    chunks: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.chunk is not None:
            chunks[event.rank].add(event.chunk)
    placed = in_rows(events)
    rows: dict[int, int] = defaultdict(int)     # of buckets, by rank
    for event, row in placed:
        rows[event.rank] = max(rows[event.rank], row + 1)
    found, looks = [], {}
    for event, row in placed:
        label, colour = look_of(event.name)
        looks[label] = colour
        if event.name in COMPUTATION and event.chunk is not None:
            its = sorted(chunks[event.rank])
            colour = _lighter(colour, 0.55 * its.index(event.chunk)
                              / max(1, len(its) - 1))
        top, height = _PLACES[event.lane] if has_lanes else (0.0, 1.0)
        if event.lane == BUCKETS:
            height /= rows[event.rank]
            top += row * height
        found.append(svg.Box(
            ranks.index(event.rank), top, height,
            1e3 * (event.start - origin), 1e3 * (event.end - origin), colour,
            _words(event, label)))
    found.sort(key=lambda box: box.right - box.left, reverse=True)
    return svg.boxes(title, 'ms', [f'rank {rank}' for rank in ranks], found, {
        label: colour for label, colour in (*_LOOKS.values(), *looks.items())
        if label in looks})


def _lighter(colour: str, white: float) -> str:
    parts = (int(colour[place:place + 2], 16) for place in (1, 3, 5))
    return '#' + ''.join(f'{round(part + white * (255 - part)):02x}'
                         for part in parts)


def _words(event: Event, label: str) -> str:
    """What the pointer shows."""
    return ', '.join([
        f'rank {event.rank}: {label}',
        *(f'{what} {number}' for what, number in (
            ('chunk', event.chunk), ('micro-batch', event.micro_batch))
          if number is not None),
        seconds(event.end - event.start),
        *[f'for {event.about}' if event.name == WAITING else event.about
          ] * bool(event.about)])


def picture(events: Iterable[Event], title: str) -> str:
    """A timeline as a file, with the share of idle time in its title."""
    events = [*events]
    title += f' (ranks idle {share(round(idle_share(events), 3))})'
    return svg.as_file(draw_timeline(title, events), title)

"""How events look, where they stand, and a picture of what ranks did when."""
# Pages (Bokeh) and pictures (matplotlib) take colours, names, their order, and
# the places of boxes from here.  The colour-blind tell the colours apart, too
# (the tests simulate it).  A picture is so wide that the numbers of
# micro-batches fit into most boxes.
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .events import (
    BUCKETS,
    COMPUTATION,
    WAITING,
    Event,
    explain_waits,
    idle_share,
    in_rows,
)

# Inches: a box with a number, the picture, a row, a row of the legend.
_BOX, _NARROWEST, _WIDEST = 0.175, 8.0, 24.0
_ROW, _LEGEND_ROW, _LEGEND_COLUMN = 0.42, 0.25, 2.1

# Points.
_FONT, _DIGIT, _LEAST_BOX = 7.5, 5.0, 3.0

# Where a rank's row has its lanes: from the middle down, and how high.
_WHOLE, _LANES = (-0.4, 0.8), ((-0.45, 0.56), (0.13, 0.12), (0.27, 0.18))


class Look(NamedTuple):
    """How events look, and where they come in the legend.

    Attributes:
        order: By name, by chunk.
        label: In the legend.
        colour: Red, green and blue, from 0 to 1.
        hatch: As matplotlib has it.
    """

    order: tuple[int, int]
    label: str
    colour: tuple[float, float, float]
    hatch: str = ''

    @property
    def css(self) -> str:
        """The colour as pages have it."""
        return '#' + ''.join(f'{round(255 * part):02x}'
                             for part in self.colour)


class Box(NamedTuple):
    """An event in a timeline whose row n goes from n - 0.5 to n + 0.5."""

    event: Event
    look: Look
    top: float
    height: float


_COMMUNICATION = Look((5, 0), 'stage send and receive', (0.62, 0.16, 0.45))

_WAITING = Look((8, 0), 'waiting', (0.90, 0.90, 0.90))

_LOOKS = {
    'input': Look((-1, 0), 'input', (0.94, 0.89, 0.26)),
    'forward': Look((0, 0), 'forward', (0.20, 0.40, 0.67)),
    'recompute': Look((1, 0), 'forward again', (0.45, 0.68, 0.85), r'\\'),
    'backward': Look((2, 0), 'backward', (0.87, 0.44, 0.12)),
    'backward_weight': Look((3, 0), 'backward, weight half',
                            (0.96, 0.70, 0.35), '//'),
    'update': Look((4, 0), 'update', (0.13, 0.53, 0.20)),
    'send': _COMMUNICATION,
    'receive': _COMMUNICATION,
    'exchange': Look((6, 0), 'all-reduce', (0.85, 0.47, 0.74)),
    # Behind 'exchange', in which these are.
    'encode': Look((6, 1), 'encode', (0.05, 0.55, 0.60)),
    'decode': Look((6, 2), 'decode', (0.45, 0.75, 0.70)),
    'bucket': Look((6, 3), 'bucket in flight', (0.35, 0.35, 0.35)),
    WAITING: _WAITING,
    'between': Look((7, 1), 'between updates', (0.75, 0.70, 0.50)),
}


def look_of_name(name: str) -> Look:
    """How events of a name look; those without a look of their own: grey."""
    return _LOOKS.get(name, Look((7, 0), name, (0.45, 0.45, 0.45)))


def boxes_of(events: Sequence[Event], ranks: Sequence[int]) -> list[Box]:
    """Looks and places of events.

    Shades tell the chunks of a rank apart, the first one being the darkest.

    Args:
        events: All of one timeline.
        ranks: That have a row, the first of them on top.
    """
    found: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.chunk is not None:
            found[event.rank].add(event.chunk)
    chunks = {rank: sorted(numbers) for rank, numbers in found.items()}
    most = max(map(len, chunks.values()), default=0)
    has_halves = any(event.name == 'backward_weight' for event in events)
    has_lanes = any(event.lane for event in events)
    placed = in_rows(events)
    buckets: dict[int, int] = defaultdict(int)     # rows of each rank
    for _, (rank, _, row) in placed:
        buckets[rank] = max(buckets[rank], row + 1)

    def look_of(event: Event) -> Look:
        look = look_of_name(event.name)
        if event.name == 'backward' and has_halves:
            look = look._replace(label='backward, input half')
        if event.name not in COMPUTATION or event.chunk is None or most < 2:
            return look
        place = chunks[event.rank].index(event.chunk)
        white = 0.55 * place / (most - 1)
        red, green, blue = (value + white * (1 - value)
                            for value in look.colour)
        return look._replace(
            order=(look.order[0], place), colour=(red, green, blue),
            label=f'{look.label}, chunk {place + 1} of {most}')
    boxes = []
    for event, (rank, lane, row) in placed:
        top, height = _LANES[lane] if has_lanes else _WHOLE
        if event.lane == BUCKETS:
            height /= buckets[rank]
            top += row * height
        boxes.append(Box(event, look_of(event), ranks.index(rank) + top,
                         height))
    return boxes


def plot_timeline(events: Iterable[Event], path: str | os.PathLike[str],
                  title: str | None = None) -> None:
    """Writes a picture with one row per rank, and time to the right.

    Colours tell forward, backward, update and communication; where a row is
    grey its rank waits.  The numbers are those of the micro-batches.  Shades
    tell a rank's chunks apart, the first one being the darkest.  Thin bars
    below a row, where there are any, are the thread that exchanges gradients
    and the time in which buckets travel.

    Args:
        events: Measured or simulated; waits are parted by
            :func:`~chainer_fp8pipe.report.events.explain_waits`.
        path: A file that matplotlib can write, e.g. ``timeline.png``.
        title: Put in front of the idle share.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: There are no events, or they took no time.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as reason:
        raise ImportError('a timeline is drawn with matplotlib (pip install '
                          'matplotlib)') from reason
    events = explain_waits(events)
    span = (max((event.end for event in events), default=0.0)
            - min((event.start for event in events), default=0.0))
    if span <= 0:
        raise ValueError('there are no events to draw that took any time')
    ranks = sorted({event.rank for event in events})
    boxes: dict[Look, list[Box]] = defaultdict(list)
    for box in boxes_of(events, ranks):
        if box.event.name not in (WAITING, 'compression'):
            boxes[box.look].append(box)
    width = min(max(_BOX * _wide_boxes(events, span, len(ranks)), _NARROWEST),
                _WIDEST)
    columns = int(width // _LEGEND_COLUMN)
    figure = Figure(layout='constrained', figsize=(
        width, 1.0 + _ROW * len(ranks)
        + _LEGEND_ROW * -(-(len(boxes) + 1) // columns)))
    axes = figure.add_subplot()
    scale, unit = next((scale, unit) for least, scale, unit in (
        (2.0, 1.0, 's'), (2e-3, 1e3, 'ms'), (0.0, 1e6, 'µs'))
        if span >= least)
    top, height = (_LANES[0] if any(event.lane for event in events)
                   else _WHOLE)
    axes.barh([row + top for row in range(len(ranks))], span * scale, height,
              align='edge', color=_WAITING.colour)
    for look, found in sorted(boxes.items()):
        _draw_boxes(axes, look, found, events[0].start, scale,
                    72 * width / (span * scale))
    axes.set_xlim(0, span * scale)
    axes.set_ylim(len(ranks) - 0.5, -0.5)       # rank 0 on top
    axes.set_yticks(range(len(ranks)), [f'rank {rank}' for rank in ranks])
    axes.tick_params(left=False)
    axes.set_xlabel(f'time ({unit})')
    axes.spines[['left', 'right', 'top']].set_visible(False)
    idle = f'idle {100 * idle_share(events):.1f} %'
    figure.suptitle(f'{title}: {idle}' if title else idle, fontsize=11)
    figure.legend(
        handles=[Patch(facecolor=look.colour, hatch=2 * look.hatch,
                       edgecolor='white', label=look.label)
                 for look in (*sorted(boxes), _WAITING)],
        loc='outside lower center', ncols=columns, frameon=False,
        fontsize=8.5)
    figure.savefig(path, dpi=150)


def _wide_boxes(events: Sequence[Event], span: float, ranks: int) -> float:
    """How many boxes with a number, rather short ones, fit in a row."""
    times = sorted(event.end - event.start for event in events if (
        event.name in COMPUTATION and event.micro_batch is not None))
    if not times:
        return 0.0
    short = times[len(times) // 8]
    # Measured times may have some that are very short.
    most = 2.5 * len(times) / ranks
    return min(span / short, most) if short else most


def _draw_boxes(axes: Any, look: Look, boxes: Sequence[Box], origin: float,
                scale: float, points: float) -> None:
    """Boxes of one look; ``points`` are those of a unit of time."""
    from matplotlib.collections import PolyCollection
    places = [((box.event.start - origin) * scale,
               (box.event.end - origin) * scale) for box in boxes]
    # White edges would hide a box of few points.
    axes.add_collection(PolyCollection(
        [[(start, box.top), (end, box.top), (end, box.top + box.height),
          (start, box.top + box.height)]
         for box, (start, end) in zip(boxes, places, strict=True)],
        facecolor=look.colour, hatch=look.hatch, linewidth=0.5, edgecolor=[
            'white' if (end - start) * points > _LEAST_BOX else look.colour
            for start, end in places]))
    red, green, blue = look.colour
    # Black or white, whichever is easier to read (luma of BT.601).
    is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
    for box, (start, end) in zip(boxes, places, strict=True):
        number = ('' if box.event.micro_batch is None
                  else str(box.event.micro_batch))
        if box.event.name in COMPUTATION and number and (
                (end - start) * points > _DIGIT * len(number) + 6):
            axes.text((start + end) / 2, box.top + box.height / 2, number,
                      ha='center', va='center', fontsize=_FONT,
                      color='black' if is_bright else 'white',
                      bbox={'facecolor': look.colour, 'linewidth': 0,
                            'pad': 0.8})

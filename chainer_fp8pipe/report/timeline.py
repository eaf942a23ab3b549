"""How events look, and a picture of what ranks did when."""
# Pages and pictures take colours, names and their order from here.  People who
# are colour-blind tell the colours apart, too (the tests simulate it).
# Matplotlib lays the picture out by itself; what is chosen here is how wide it
# is, so that the numbers of micro-batches fit into most boxes.
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .events import (
    BUCKETS,
    COMPUTATION,
    EXCHANGE,
    WAITING,
    Event,
    explain_waits,
    idle_share,
)

# Inches: a box with a number, the picture, a row, a row of the legend.
_BOX, _NARROWEST, _WIDEST = 0.175, 8.0, 24.0
_ROW, _LEGEND_ROW, _LEGEND_COLUMN = 0.42, 0.25, 2.1

# Points.
_FONT, _DIGIT, _LEAST_BOX = 7.5, 5.0, 3.0

# Where a rank's row has its lanes: from the middle down, and how high.
_WHOLE = {'': (-0.4, 0.8)}
_LANES = {'': (-0.45, 0.6), EXCHANGE: (0.18, 0.13), BUCKETS: (0.34, 0.06)}


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


_COMMUNICATION = Look((5, 0), 'stage send and receive', (0.62, 0.16, 0.45))

#: Of a rank that waits.
WAITING_LOOK = Look((8, 0), 'waiting', (0.90, 0.90, 0.90))

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
    'wait': WAITING_LOOK,
    'between': Look((7, 1), 'between updates', (0.75, 0.70, 0.50)),
}


def look_of_name(name: str) -> Look:
    """How events of a name look; those without a look of their own: grey."""
    return _LOOKS.get(name, Look((7, 0), name, (0.45, 0.45, 0.45)))


def looks_of(events: Iterable[Event]) -> Callable[[Event], Look]:
    """What gives the look of each event of one timeline.

    Shades tell the chunks of a rank apart, the first one being the darkest.

    Args:
        events: All of the timeline.
    """
    events = list(events)
    found: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.chunk is not None:
            found[event.rank].add(event.chunk)
    chunks = {rank: sorted(numbers) for rank, numbers in found.items()}
    count = max(map(len, chunks.values()), default=0)
    has_halves = any(event.name == 'backward_weight' for event in events)

    def look_of(event: Event) -> Look:
        look = look_of_name(event.name)
        if event.name == 'backward' and has_halves:
            look = look._replace(label='backward, input half')
        if event.name not in COMPUTATION or event.chunk is None or count < 2:
            return look
        place = chunks[event.rank].index(event.chunk)
        white = 0.55 * place / (count - 1)
        red, green, blue = (value + white * (1 - value)
                            for value in look.colour)
        return look._replace(
            order=(look.order[0], place), colour=(red, green, blue),
            label=f'{look.label}, chunk {place + 1} of {count}')
    return look_of


def plot_timeline(events: Iterable[Event], path: str | os.PathLike[str],
                  title: str | None = None) -> None:
    """Writes a picture with one row per rank, and time to the right.

    Colours tell forward, backward, update and communication; where a row is
    grey its rank waits.  The numbers are those of the micro-batches.  Shades
    tell a rank's chunks apart, the first one being the darkest.  Two thin
    bars below a row, where there are any, are the thread that exchanges
    gradients and the time in which buckets travel.

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
    look_of = looks_of(events)
    groups: dict[tuple[int, Look, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.name not in (WAITING, 'compression'):
            groups[event.rank, look_of(event), event.lane].append(event)
    looks = sorted({look for _, look, _ in groups})
    width = min(max(_BOX * _boxes(events, span, len(ranks)), _NARROWEST),
                _WIDEST)
    columns = int(width // _LEGEND_COLUMN)
    figure = Figure(layout='constrained', figsize=(
        width, 1.0 + _ROW * len(ranks)
        + _LEGEND_ROW * -(-(len(looks) + 1) // columns)))
    axes = figure.add_subplot()
    scale, unit = next((scale, unit) for least, scale, unit in (
        (2.0, 1.0, 's'), (2e-3, 1e3, 'ms'), (0.0, 1e6, 'µs'))
        if span >= least)
    lanes = _LANES if any(event.lane for event in events) else _WHOLE
    top, height = lanes['']
    for row in range(len(ranks)):
        axes.broken_barh([(0, span * scale)], (row + top, height),
                         linewidth=0, facecolor=WAITING_LOOK.colour)
    for (rank, look, lane), found in sorted(groups.items()):
        top, height = lanes[lane]
        _draw_boxes(axes, (ranks.index(rank) + top, height), look, found,
                    events[0].start, scale, 72 * width / (span * scale))
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
                 for look in (*looks, WAITING_LOOK)],
        loc='outside lower center', ncols=columns, frameon=False,
        fontsize=8.5)
    figure.savefig(path, dpi=150)


def _boxes(events: Sequence[Event], span: float, ranks: int) -> float:
    """How many boxes with a number, rather short ones, fit in a row."""
    times = sorted(event.end - event.start for event in events if (
        event.name in COMPUTATION and event.micro_batch is not None))
    if not times:
        return 0.0
    short = times[len(times) // 8]
    # Measured times may have some that are very short.
    most = 2.5 * len(times) / ranks
    return min(span / short, most) if short else most


def _draw_boxes(axes: Any, where: tuple[float, float], look: Look,
                events: list[Event], origin: float, scale: float,
                points: float) -> None:
    """Boxes of one look in one lane; ``points`` are those of a unit."""
    boxes = [((event.start - origin) * scale,
              (event.end - event.start) * scale) for event in events]
    for wide in (False, True):
        # White edges would hide a box of few points.
        axes.broken_barh(
            [box for box in boxes if (box[1] * points > _LEAST_BOX) == wide],
            where, facecolor=look.colour, linewidth=0.5,
            edgecolor='white' if wide else look.colour,
            hatch=look.hatch if wide else '')
    red, green, blue = look.colour
    # Black or white, whichever is easier to read (luma of BT.601).
    is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
    for event, (start, length) in zip(events, boxes, strict=True):
        number = '' if event.micro_batch is None else str(event.micro_batch)
        if event.name in COMPUTATION and number and (
                length * points > _DIGIT * len(number) + 6):
            axes.text(start + length / 2, where[0] + where[1] / 2, number,
                      ha='center', va='center', fontsize=_FONT,
                      color='black' if is_bright else 'white',
                      bbox={'facecolor': look.colour, 'linewidth': 0,
                            'pad': 0.8})

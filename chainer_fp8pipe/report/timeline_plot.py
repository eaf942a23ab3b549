"""Draws what the ranks of a pipeline did when."""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .events import (
    BUCKETS,
    COMPUTATION,
    EXCHANGE,
    WAITING,
    Event,
    idle_share,
    part_waits,
)
from .looks import WAITING_LOOK, Look, Looks

# Where a rank's row has its lanes: from the middle down, and how high.
_WHOLE = {'': (-0.4, 0.8)}
_LANES = {'': (-0.45, 0.6), EXCHANGE: (0.18, 0.13), BUCKETS: (0.34, 0.06)}

# Inches.
_LEFT, _RIGHT, _TOP, _TICKS = 0.75, 0.2, 0.4, 0.6
_ROW, _LEGEND_ROW, _LEGEND_COLUMN = 0.42, 0.22, 2.1
_BOX, _NARROWEST, _WIDEST = 0.175, 8.0, 24.0

# Points.
_FONT, _DIGIT, _LEAST_BOX = 7.5, 5.0, 3.0


def plot_timeline(events: Iterable[Event], path: str | os.PathLike[str],
                  title: str | None = None) -> None:
    """Writes a picture with one row per rank, and time to the right.

    Colours tell forward, backward, update and communication; where a row is
    grey its rank waits.  The numbers are those of the micro-batches.  Shades
    tell a rank's chunks apart, the first one being the darkest.  Two thin
    bars below a row, where there are any, are the thread that exchanges
    gradients and the time in which buckets travel.

    Args:
        events: Measured or simulated; receives are parted by
            :func:`~chainer_fp8pipe.report.events.part_waits`.
        path: A file that matplotlib can write, e.g. ``timeline.png``.
        title: Put in front of the idle share.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: There are no events, or they took no time.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ImportError('a timeline is drawn with matplotlib (pip install '
                          'matplotlib)') from reason
    picture = _Picture(part_waits(events))
    width, height = picture.width, picture.height
    figure = Figure(figsize=(width, height))
    picture.draw(figure.add_axes((
        _LEFT / width, picture.bottom / height,
        (width - _LEFT - _RIGHT) / width,
        (height - picture.bottom - _TOP) / height)))
    idle = f'idle {100 * picture.idle_share:.1f} %'
    figure.suptitle(f'{title}: {idle}' if title else idle, fontsize=11,
                    y=1 - 0.1 / height, va='top')
    figure.legend(handles=picture.legend(), loc='lower center',
                  ncol=picture.columns, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=150)


class _Picture:
    """The sizes of a timeline, and what is drawn into its axes.

    Attributes:
        width: Of the figure, in inches.
        height: Of the figure, in inches.
        bottom: From the figure's edge up to the axes, in inches.
        columns: Of the legend.
        idle_share: Of the ranks' time.
    """

    def __init__(self, events: list[Event]) -> None:
        self.idle_share = idle_share(events)
        self._start = min((event.start for event in events), default=0.0)
        span = max((event.end for event in events),
                   default=0.0) - self._start
        if span <= 0:
            raise ValueError('there are no events to draw that took any time')
        self._scale, self._unit = next(
            (scale, unit) for least, scale, unit in (
                (2.0, 1.0, 's'), (2e-3, 1e3, 'ms'), (0.0, 1e6, 'µs'))
            if span >= least)
        self._span = span * self._scale
        self._sort(events)
        across = min(max(_BOX * self._boxes(events), _NARROWEST), _WIDEST)
        self._points = across * 72 / self._span     # per unit of time
        self.width = _LEFT + across + _RIGHT
        entries = len(self.legend())
        rows = -(-entries // int(self.width // _LEGEND_COLUMN))
        self.columns = -(-entries // rows)
        self.bottom = _TICKS + _LEGEND_ROW * rows
        self.height = self.bottom + _ROW * len(self._ranks) + _TOP

    def draw(self, axes: Any) -> None:
        """Rows, boxes, numbers and the axis of time."""
        for row, rank in enumerate(self._ranks):
            top, height = self._lanes['']
            axes.broken_barh([(0, self._span)], (row + top, height),
                             linewidth=0, facecolor=WAITING_LOOK.colour)
            for look in self._looks:
                for lane, (top, height) in self._lanes.items():
                    self._draw_boxes(axes, (row + top, height), look,
                                     self._groups.get((rank, look, lane), []))
        axes.set_xlim(0, self._span)
        axes.set_ylim(len(self._ranks) - 0.5, -0.5)     # rank 0 on top
        axes.set_yticks(range(len(self._ranks)),
                        [f'rank {rank}' for rank in self._ranks])
        axes.tick_params(left=False)
        axes.set_xlabel(f'time ({self._unit})')
        for side in ('left', 'right', 'top'):
            axes.spines[side].set_visible(False)

    def legend(self) -> list[Any]:
        """One patch for each look that there is, waiting at the end."""
        from matplotlib.patches import Patch
        return [Patch(facecolor=look.colour, hatch=2 * look.hatch,
                      edgecolor='white', label=look.label)
                for look in (*self._looks, WAITING_LOOK)]

    def _boxes(self, events: list[Event]) -> float:
        """How many boxes with a number, rather short ones, fit in a row."""
        numbered = [event for event in events if event.name in COMPUTATION
                    and event.micro_batch is not None]
        if not numbered:
            return 0.0
        times = sorted(event.end - event.start for event in numbered)
        short = times[len(times) // 8] * self._scale
        # Measured times may have some that are very short.
        most = 2.5 * len(numbered) / len(self._ranks)
        return min(self._span / short, most) if short else most

    def _sort(self, events: list[Event]) -> None:
        """Events by their rank and look."""
        self._ranks = sorted({event.rank for event in events})
        looks = Looks(events)
        self._digits = max((len(str(event.micro_batch)) for event in events
                            if event.micro_batch is not None), default=0)
        self._groups: dict[tuple[int, Look, str], list[Event]] = {}
        for event in events:
            if event.name not in (WAITING, 'compression'):
                self._groups.setdefault((event.rank, looks.of(event),
                                         event.lane), []).append(event)
        self._looks = sorted({look for _, look, _ in self._groups})
        self._lanes = (_LANES if any(event.lane for event in events)
                       else _WHOLE)

    def _draw_boxes(self, axes: Any, where: tuple[float, float], look: Look,
                    events: list[Event]) -> None:
        boxes = [((event.start - self._start) * self._scale,
                  (event.end - event.start) * self._scale)
                 for event in events]
        for wide in (False, True):
            # White edges would hide a box of few points.
            axes.broken_barh(
                [box for box in boxes
                 if (box[1] * self._points > _LEAST_BOX) == wide],
                where, facecolor=look.colour, linewidth=0.5,
                edgecolor='white' if wide else look.colour,
                hatch=look.hatch if wide else '')
        for event, (start, length) in zip(events, boxes, strict=True):
            if (event.name in COMPUTATION and event.micro_batch is not None
                    and length * self._points > _DIGIT * self._digits + 2):
                axes.text(start + length / 2, where[0] + where[1] / 2,
                          str(event.micro_batch), ha='center', va='center',
                          fontsize=_FONT, color=_text_colour(look.colour),
                          bbox={'facecolor': look.colour, 'linewidth': 0,
                                'pad': 0.8})


def _text_colour(colour: tuple[float, float, float]) -> str:
    """Black or white, whichever is easier to read (luma of BT.601)."""
    red, green, blue = colour
    return ('black' if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
            else 'white')

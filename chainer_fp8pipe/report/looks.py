"""How events look, in pictures and on pages: colours, names, order.

People who are colour-blind tell the colours apart, too
(``tests/report/test_looks.py`` simulates it).
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .events import COMPUTATION, Event


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


_COMMUNICATION = Look((5, 0), 'communication', (0.62, 0.16, 0.45))

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
    'exchange': Look((6, 0), 'collective communication', (0.85, 0.47, 0.74)),
    # Behind 'exchange', in which these are.
    'encode': Look((6, 1), 'encode', (0.05, 0.55, 0.60)),
    'decode': Look((6, 2), 'decode', (0.45, 0.75, 0.70)),
    'bucket': Look((6, 3), 'bucket on its way', (0.35, 0.35, 0.35)),
    'wait': WAITING_LOOK,
    'between': Look((7, 1), 'between updates', (0.75, 0.70, 0.50)),
}


def look_of_name(name: str) -> Look:
    """How events of a name look; those without a look of their own: grey."""
    return _LOOKS.get(name, Look((7, 0), name, (0.45, 0.45, 0.45)))


class Looks:
    """How the events of one timeline look.

    Shades tell the chunks of a rank apart, the first one being the darkest.

    Args:
        events: All of the timeline.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        chunks: dict[int, set[int]] = {}
        self._halves = False
        for event in events:
            mine = chunks.setdefault(event.rank, set())
            if event.chunk is not None:
                mine.add(event.chunk)
            self._halves |= event.name == 'backward_weight'
        self._chunks = {rank: sorted(found)
                        for rank, found in chunks.items()}
        self._most = max(map(len, self._chunks.values()), default=0)

    def of(self, event: Event) -> Look:
        """How one of the events looks."""
        look = look_of_name(event.name)
        if event.name == 'backward' and self._halves:
            look = look._replace(label='backward, input half')
        count = self._most
        if event.name not in COMPUTATION or event.chunk is None or count < 2:
            return look
        place = self._chunks[event.rank].index(event.chunk)
        white = 0.55 * place / (count - 1)
        red, green, blue = (value + white * (1 - value)
                            for value in look.colour)
        return look._replace(
            order=(look.order[0], place), colour=(red, green, blue),
            label=f'{look.label}, chunk {place + 1} of {count}')

"""Makes the lines of a long record fewer: what is older becomes coarser."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .record_lines import json_line

#: Of the newest start, lines about one thing that stay as they are; the
#: diagnosis looks at half as many.
_NEWEST = 16

#: By the name of lines that may become fewer, what each is about.
_ABOUT = {'interval': ('rank',), 'point': (), 'clock': ('rank',),
          'sent': ('rank', 'level', 'codec'), 'link': ('source', 'target'),
          'tensor': ('name',), 'memory': ('rank',)}

#: Of older starts, one line about each thing stays of these; of readings
#: none has to.
_ONE_STAYS = 'interval', 'point', 'clock'


class _Line(NamedTuple):
    name: str
    fields: dict[str, Any]
    text: str


def shortened(lines: Iterable[tuple[str, dict[str, Any]]], most: int
              ) -> list[str]:
    """The lines of a record, fewer of them where it is too long.

    As long as there are too many bytes, the lines of the name that has most
    of them are halved: of two neighbours about the same thing, one after
    the other, one remains.  Intervals become the mean of both, weighted by
    their updates; so do points of curves.  Of readings the later one stays.
    The newest 16 of each stay as they are.

    Args:
        lines: Names and fields in the order of time, as
            :func:`.whole_lines` gives them.
        most: Bytes that the lines may have.

    Returns:
        Lines of JSON: more than ``most`` bytes only where nothing more may
        go.
    """
    kept = [_Line(name, fields, json_line(name, fields))
            for name, fields in lines]
    # When the record was last written is only said once.
    seen = [line for line in kept if line.name == 'seen'][-1:]
    kept = [*(line for line in kept if line.name != 'seen'), *seen]
    begun = {line.fields['number']: line.fields['iteration']
             for line in kept if line.name == 'start'}
    may_go = {*_ABOUT}
    while True:
        sizes: Counter[str] = Counter()
        for line in kept:
            sizes[line.name] += len(line.text)
        if sizes.total() <= most or not may_go & {*sizes}:
            return [line.text for line in kept]
        largest = max(may_go & {*sizes}, key=lambda name: sizes[name])
        count = len(kept)
        kept = _halved(kept, largest, begun)
        if len(kept) == count:
            may_go.remove(largest)


def _halved(lines: list[_Line], name: str, begun: Mapping[int, int]
            ) -> list[_Line]:
    """Without every second of the older lines of a name.

    Args:
        lines: All.
        name: Of those that become fewer.
        begun: By number of each start, the updates done before.
    """
    last = max(begun, default=0)
    about: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, line in enumerate(lines):
        if line.name == name:
            about[tuple(line.fields.get(field) for field in (
                'start', *_ABOUT[name]))].append(place)
    gone: set[int] = set()
    made: dict[int, _Line] = {}
    for (start, *_), places in about.items():
        if start == last:
            places = places[:-_NEWEST]
        elif len(places) == 1 and name not in _ONE_STAYS:
            gone.update(places)
        before = begun.get(start, 0)
        for one, other in zip(places[::2], places[1::2], strict=False):
            fields = lines[other].fields
            if name == 'interval':
                fields = _interval(lines[one].fields, fields)
            elif name == 'point':
                fields = _point(before, lines[one].fields, fields)
                before = fields['iteration']
            made[other] = _Line(name, fields, json_line(name, fields))
            gone.add(one)
    return [made.get(place, line) for place, line in enumerate(lines)
            if place not in gone]


def _interval(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two intervals of a rank as one.

    Means are those over the updates of both.  Quartiles, which two
    quartiles do not determine, are the weighted means of theirs.
    """
    updates, more = (fields['last'] - fields['first'] + 1
                     for fields in (one, other))
    found = other | {'first': one['first']}
    for name in 'step', 'own':
        *quartiles, most = (
            (updates * mine + more * yours) / (updates + more)
            for mine, yours in zip(one[name], other[name], strict=True))
        found[name] = [*quartiles, max(one[name][-1], other[name][-1])]
    for name in 'phases', 'hidden':
        found[name] = _means(updates, one[name], more, other[name], 0.0)
    sizes = 'bytes', 'stage_bytes', 'stage_arrays'
    return found | _means(updates, {name: one[name] for name in sizes},
                          more, {name: other[name] for name in sizes})


def _point(before: int, one: dict[str, Any], other: dict[str, Any]
           ) -> dict[str, Any]:
    """Two points of curves as one, at the later one's place.

    Args:
        before: The last update of the point before.
        one: The earlier point.
        other: The later one.
    """
    return other | {'values': _means(
        one['iteration'] - before, one['values'],
        other['iteration'] - one['iteration'], other['values'])}


def _means(weight: float, one: Mapping[str, float], other_weight: float,
           other: Mapping[str, float], absent: float | None = None
           ) -> dict[str, float]:
    """Weighted means by name.

    Args:
        weight: Of what is in ``one``.
        one: Numbers by name.
        other_weight: Of what is in ``other``.
        other: Numbers by name.
        absent: What stands for a number that is only in one of them; None:
            the number of the other.
    """
    found, whole = {}, weight + other_weight
    for name, either in {**one, **other}.items():
        if absent is not None:
            either = absent
        mine, yours = one.get(name, either), other.get(name, either)
        found[name] = (mine if mine == yours or whole <= 0 else
                       (weight * mine + other_weight * yours) / whole)
    return found

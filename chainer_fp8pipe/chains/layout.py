"""Where each call of a program is made, and which values cross."""
# This follows from what calls read.  It is found once for all programs in
# which the same functions read the same values, and has a digest, by which
# ranks tell that they are about to do the same.
from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import nested
from .calls import Order, Source, positions
from .placeholder import sources
from .plan import PartitionPlan

#: So many layouts are kept.
_LAYOUTS = 512


def sources_in(value: Any) -> tuple[Source, ...]:
    """Names the calls that made a value, or the values in a tuple."""
    return tuple([source for leaf in nested.leaves(value)[0]
                  for source in sources(nested.array_of(leaf))])


class Layout:
    """The chunk of each call of a program, and what chunks send.

    Args:
        calls: Of the program.
        order: Of the plan.
        cuts: The first position of each chunk but the first one.
        results: Values that the last chunk must have: the loss.
        homes: Chunks for some calls, by number, which override the cuts; a
            call with an input on a later chunk still runs on that chunk.
        having: The chunks that have a parameter, by its path.
        reports: Reported values, by name.
    """

    def __init__(self, calls: Sequence[Any], order: Order,
                 cuts: Sequence[tuple[int, ...]],
                 results: Sequence[Source] = (),
                 homes: Mapping[int, int] | None = None,
                 having: Mapping[str, tuple[int, ...]] | None = None,
                 reports: Mapping[str, Any] | None = None) -> None:
        place, homes = positions(calls, order), dict(homes or {})
        while True:
            #: Of each call.
            self.chunks = _chunks(calls, place, cuts, homes)
            # Where control flow is another one, a call may come before the
            # cut that it came after in the example: its parameter is later.
            late = {number: min(later) for number, (call, chunk) in enumerate(
                zip(calls, self.chunks, strict=True))
                for name in call.parameters
                if having and chunk not in having.get(name, (chunk,))
                and (later := [one for one in having[name] if one > chunk])}
            if late.items() <= homes.items():
                break
            homes.update(late)
        holders: dict[str, set[int]] = {}
        until: dict[Source, int] = dict.fromkeys(results, len(cuts))
        for call, chunk in zip(calls, self.chunks, strict=True):
            for name in call.parameters:
                holders.setdefault(name, set()).add(chunk)
            for source in call.inputs:
                until[source] = max(until.get(source, 0), chunk)
        #: The chunks that use a parameter, by its path.
        self.holders = {name: tuple(sorted(of))
                        for name, of in holders.items()}
        crossing: list[tuple[Source, ...]] = [tuple([
            source for source in sorted(until, key=lambda one: (
                one.call, str(one.output)))
            if self.chunks[source.call] <= boundary < until[source]])
            for boundary in range(len(cuts))]
        #: For each chunk the values that it receives, and sends on, also on
        #: the way from an earlier to a later chunk; for the last one what the
        #: result is made of.
        self.incoming = ((), *crossing)
        self.outgoing = (*crossing, tuple(results))
        #: The chunk that knows a reported value, by its name.
        self.reporters = {
            name: max([self.chunks[source.call] for source
                       in sources_in(value)], default=len(cuts))
            for name, value in (reports or {}).items()}
        text = hashlib.blake2b()
        for call in calls:
            text.update(repr((
                call.name, call.link, call.inputs, call.parameters,
                [(key, value.shape, str(value.dtype))
                 for key, value in call.outputs.items()])).encode())
        text.update(repr((self.chunks, sorted(self.reporters))).encode())
        #: The same on ranks with the same calls in the same places.
        self.digest = text.hexdigest()


def _chunks(calls: Sequence[Any], place: Sequence[tuple[int, ...]],
            cuts: Sequence[tuple[int, ...]], homes: Mapping[int, int]
            ) -> tuple[int, ...]:
    # No call may be later than what reads it and has a home.
    latest = [homes.get(number, len(cuts)) for number in range(len(calls))]
    for number in reversed(range(len(calls))):
        for source in calls[number].inputs:
            latest[source.call] = min(latest[source.call], latest[number])
    chunks: list[int] = []
    for number, call in enumerate(calls):
        chunk = call.pinned
        if chunk is None:
            chunk = min(max(bisect.bisect_right(cuts, place[number]),
                            homes.get(number, 0)), latest[number])
        chunks.append(max([chunk, *(chunks[source.call]
                                    for source in call.inputs)]))
    return tuple(chunks)


class Layouts:
    """The layouts of a model's programs.

    Attributes:
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        having: The chunks that have a parameter, by its path.
        ranks: The stages that have a parameter, once they do.
    """

    def __init__(self, plan: PartitionPlan) -> None:
        self._plan = plan
        self.keepers: dict[str, int] = {}
        self.having: Mapping[str, tuple[int, ...]] = {}
        self.ranks: Mapping[str, tuple[int, ...]] = {}
        # The chunk that makes a value which a link keeps for the next batch,
        # which uses it there, by attribute, and place in it.
        self._states: dict[tuple[Any, int], int] = {}
        self._found: dict[Any, Layout] = {}

    def of(self, program: Any) -> Layout:
        """The layout of a program.

        Raises:
            ValueError: The calls of a link with running values would be on
                two chunks, or a call where its parameter is not.
        """
        key = program.key()
        if key not in self._found:
            if len(self._found) > _LAYOUTS:
                self.forget()
            self._found[key] = self._make(program)
        return self._found[key]

    def forget(self) -> None:
        """Has all layouts found anew."""
        self._found.clear()

    def _make(self, program: Any) -> Layout:
        links = [(number, name) for number, call in enumerate(program.calls)
                 for name in (*call.whole, *call.reads)]

        def made() -> Layout:
            return Layout(program.calls, self._plan.order, (
                self._plan.cuts), sources_in(program.result), {
                source.call: self._states[key]
                for key, source in _kept(program) if key in self._states
            } | {number: self.keepers[name] for number, name in links
                 if name in self.keepers}, self.having, program.reports)
        known, layout = set(self.keepers), made()
        for call, chunk in zip(program.calls, layout.chunks, strict=True):
            for name in set(call.whole) - known:
                self.keepers[name] = max(chunk, self.keepers.get(name, 0))
        if len(self.keepers) > len(known):
            # Programs that only read these values may do so elsewhere.
            self.forget()
            layout = made()
        self._check(links, layout)
        for key, source in _kept(program):
            self._states.setdefault(key, layout.chunks[source.call])
        return layout

    def _check(self, links: list[tuple[int, str]], layout: Layout) -> None:
        for number, name in links:
            chunk = layout.chunks[number]
            if self.keepers.get(name, chunk) != chunk:
                raise ValueError(
                    f'link {name} keeps running values, and its calls would '
                    'be on two ranks for inputs of this form; make the '
                    'partition with such an example')
        for name, chunks in layout.holders.items():
            for chunk in chunks:
                stage = chunk % self._plan.stages
                if stage not in self.ranks.get(name, (stage,)):
                    raise ValueError(
                        f'this batch needs parameter {name} on stage {stage}, '
                        'which has not got it; make the partition with such '
                        'an example')


def _kept(program: Any) -> list[tuple[tuple[Any, int], Source]]:
    """Values that links keep of a program, by attribute and place in it."""
    return [((key, place), source) for key, value in program.kept.items()
            for place, source in enumerate(sources_in(value))]

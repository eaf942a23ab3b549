"""Where each call of a program is made, and which values cross."""
# This follows from what calls read, and is found once for all programs in
# which the same functions read the same values (placement).
from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from ..mpi.agreement import digest
from . import nested
from .calls import Order, Source, positions
from .placeholder import is_placeholder


def sources_in(value: Any) -> tuple[Source, ...]:
    """Names the calls that made a value, or the values in a tuple."""
    return tuple([array.source for array in nested.arrays(value)
                  if is_placeholder(array) and type(array.source) is Source])


class Layout:
    """The chunk of each call of a program, and what chunks send.

    Args:
        program: Its calls, and what it returns, reports and keeps.
        order: Of the plan.
        cuts: The first position of each chunk but the first one.
        keepers: Chunks for the calls of some links, by path, which override
            the cuts; a call with an input on a later chunk still runs there.
    """

    def __init__(self, program: Any, order: Order,
                 cuts: Sequence[tuple[int, ...]],
                 keepers: Mapping[str, int] = {}) -> None:
        calls, results = program.calls, sources_in(program.result)
        homes = {number: keepers[name] for number, call in enumerate(calls)
                 for name in (*call.whole, *call.reads) if name in keepers}
        chunks: list[int] = []
        # No call may be later than what reads it and has a home.
        latest = [homes.get(number, len(cuts))
                  for number in range(len(calls))]
        for number in reversed(range(len(calls))):
            for source in calls[number].inputs:
                latest[source.call] = min(latest[source.call], latest[number])
        for number, (call, here) in enumerate(zip(
                calls, positions(calls, order), strict=True)):
            chunk = call.pinned
            if chunk is None:
                chunk = min(max(bisect.bisect_right(cuts, here),
                                homes.get(number, 0)), latest[number])
            chunks.append(max([chunk, *(chunks[source.call]
                                        for source in call.inputs)]))
        #: Of each call.
        self.chunks = tuple(chunks)
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
        self.outgoing = (*crossing, results)
        # What no later call of the chunk reads, and nobody at its end.
        read = {*results, *sources_in([program.reports, program.kept])}
        later = [read.union(one) for one in self.outgoing]
        unread: list[set[Source]] = []
        for number in reversed(range(len(calls))):
            after = later[self.chunks[number]]
            unread.append({*calls[number].inputs, *[
                Source(number, key) for key in calls[number].outputs]} - after)
            after |= unread[-1]
        #: For each call the values that go when it was made.
        self.unread = unread[::-1]
        #: The chunk that knows a reported value, by its name.
        self.reporters = {
            name: max([self.chunks[source.call] for source
                       in sources_in(value)], default=len(cuts))
            for name, value in program.reports.items()}
        #: The same on ranks with the same calls in the same places.
        self.digest = digest({
            'chunks': repr(self.chunks), 'reports': repr(sorted(
                self.reporters)), **{str(number): repr((
                    call.name, call.link, call.inputs, call.parameters,
                    [(key, value.shape, str(value.dtype))
                     for key, value in call.outputs.items()]))
                    for number, call in enumerate(calls)}})

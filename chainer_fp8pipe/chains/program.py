"""A trace, and the stage of each of its calls."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..planning.calls import Assignment, Source, assign
from ..planning.partition_plan import PartitionPlan
from . import nested
from .attributes import LinkState
from .ghost import describe_source, is_ghost, sources
from .trace import Trace


class StagedTrace:
    """The calls of a trace, each on a chunk: the program of a micro-batch.

    Args:
        trace: Of the model.
        plan: Where the model is cut.
        state: What links kept before the run that was traced.
        live: Whether a later run reads what this one leaves in links.
        keepers: As the attribute, of earlier traces.

    Attributes:
        stages: The chunk of each call.
        incoming: For each chunk the values that it receives.
        outgoing: For each chunk the values that it sends on; for the last
            one the values that the model returned.
        wanted: For each chunk the values to keep of its calls.
        reporters: The chunk that knows a reported value, by its name.
        holders: The chunks that use a parameter, by its path.
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        inner: Paths of the parameters that are read inside of calls.
        after: What links keep for the next run; None: nothing.
        missing: Paths of parameters that a rank lacks, with the chunk's
            number; set by the :class:`.Partition`.

    Raises:
        ValueError: The model returns something else than variables, or the
            calls of such a link would be on two chunks.
    """

    missing: set[tuple[str, int]]

    def __init__(self, trace: Trace, plan: PartitionPlan,
                 state: LinkState | None,
                 live: bool, keepers: Mapping[str, int]) -> None:
        self.trace, self.state = trace, state
        self.form, results = _results(trace)
        together = [*map(_sources_of, trace.reports.values()),
                    *(trace.state.sources() if live else [])]

        def assigned(homes: dict[int, int]) -> Assignment:
            return assign(trace.calls, plan.order, plan.cuts, results,
                          together, homes)

        self.keepers = self._keepers(assigned(self._homes(keepers)).stages)
        keepers = {**self.keepers, **keepers}
        assignment = assigned(self._homes(keepers))
        self.stages, self.holders = assignment.stages, assignment.holders
        self._check(keepers)
        last = len(plan.cuts)
        crossing = assignment.crossing
        self.incoming = ((), *crossing)
        self.outgoing = (*crossing, results)
        self.reporters = {
            name: max([self.stages[source.call]
                       for source in _sources_of(value)],
                      default=self.stages[trace.inside[name]]
                      if name in trace.inside else last)
            for name, value in trace.reports.items()}
        self.after = (trace.state.placed(
            lambda source: self.stages[source.call]) if live else None)
        self.inner = frozenset(name for call in trace.calls
                               for name in call.inner)
        wanted = {source for several in (
            *self.outgoing, *map(_sources_of, trace.reports.values()))
            for source in several}
        self.wanted = tuple(frozenset(
            source for source in wanted if self.stages[source.call] == chunk)
            for chunk in range(last + 1))

    def wants_gradient(self, source: Source) -> bool:
        """Whether backward needs the gradient of a value."""
        value = self.trace.calls[source.call].outputs[source.output]
        return value.wants and value.dtype.kind == 'f'

    def _homes(self, keepers: Mapping[str, int]) -> dict[int, int]:
        """The chunks of the calls that use links' running values."""
        return {number: keepers[name]
                for number, call in enumerate(self.trace.calls)
                for name in (*call.whole, *call.reads)
                if name in keepers}

    def _keepers(self, stages: Sequence[int]) -> dict[str, int]:
        chunks: dict[str, int] = {}
        for call, stage in zip(self.trace.calls, stages, strict=True):
            for name in call.whole:
                chunks[name] = max(stage, chunks.get(name, 0))
        return chunks

    def _check(self, keepers: Mapping[str, int]) -> None:
        for call, stage in zip(self.trace.calls, self.stages, strict=True):
            for name in (*call.whole, *call.reads):
                if keepers.get(name, stage) != stage:
                    raise ValueError(
                        f'the calls of link {name}, which keeps running '
                        'values, would be on two ranks for inputs of this '
                        'form; make the partition with such an example')


def _results(trace: Trace) -> tuple[Any, tuple[Source, ...]]:
    """The form of what a model returned, and its sources."""
    leaves, tree = nested.leaves(trace.result)
    found: list[Source] = []
    for leaf in leaves:
        array = nested.array_of(leaf)
        if not is_ghost(array) or not isinstance(array.source, Source):
            said = (describe_source(array) if is_ghost(array)
                    else 'an array that no function of Chainer has made')
            raise ValueError(f'the model returned {said}; it must return '
                             'what Chainer\'s functions give')
        found.append(array.source)
    return tree, tuple(found)


def _sources_of(value: Any) -> tuple[Source, ...]:
    """What a value is made of, or those in a tuple of values."""
    return tuple(source for leaf in nested.leaves(value)[0]
                 for source in sources(nested.array_of(leaf)))

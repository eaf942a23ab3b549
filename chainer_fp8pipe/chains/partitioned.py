"""A divided model on one rank: its programs, and the class that it gets."""
# Each rank keeps the links of the whole model, and placeholders for the
# parameters of others.  It records the micro-batches of a step, one after the
# other; a layout says which calls are its own.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import chainer

from ..intercept.function_calls import current, hold
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.randomness import Place
from .adapter import ChainAdapter
from .attributes import State, on_copies
from .deferred import fetching
from .layout import Layouts, sources_in
from .names import parameters_of
from .placeholder import PlaceholderError, user_line
from .placement import Placement
from .plan import PartitionPlan, table
from .program import Program
from .recorder import Recorder
from .saving import check_whole


class Chunk:
    """The calls of one chunk, see :class:`.Part`."""

    def __init__(self, partition: Partition, chunk: int) -> None:
        self.name = partition.name_of(chunk)
        self._partition, self._chunk = partition, chunk
        self.parameters: list[chainer.Parameter] = [
            partition.names.parameters[name]
            for name in partition.placement.used[chunk]]
        self.statistics: Any = None     # of batch normalisations

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Makes this chunk's calls."""
        program = self._partition.programs[micro_batch]
        # Of links that run as a whole: they are called here.
        with self.statistics.counting(self._chunk, self._keeps) if any(
                call.figures is not None and call.figures.normalises
                for call in program.calls) else contextlib.nullcontext():
            tape, outputs, normalised = program.run(self._chunk, inputs,
                                                    self.name)
        uses: collections.Counter[Any] = collections.Counter()
        for link, *found in normalised:
            self.statistics.note(link, self._chunk, uses[link], *found)
            uses[link] += 1
        return tape, outputs

    def _keeps(self, link: chainer.Link) -> bool:
        """Whether a link's running values are here; all ranks have all."""
        part = self._partition
        return part.layouts.keepers.get(
            part.names.of(link) or '', self._chunk) == self._chunk


class Partition:
    """A divided model as one rank has it.

    Args:
        recorder: Of the whole model.
        plan: Where the model is cut.
        grid: The ranks.
        example: Calls the model with a micro-batch.
        loss_func: What is called with a micro-batch; None: the model.

    Raises:
        ValueError: The model cannot be cut so.
    """

    def __init__(self, recorder: Recorder, plan: PartitionPlan, grid: Any,
                 example: Callable[[], Any],
                 loss_func: Callable | None = None) -> None:
        self.recorder, self.names = recorder, recorder.names
        self.plan, self.grid = plan, grid
        self.loss_func, self.optimizer = loss_func, None
        self.programs: list[Program] = []       # of this step's micro-batches
        self.layouts, self.state = Layouts(plan), State(self.names.links)
        program, late = self._of_example(example)
        layout, homes, calls = program.layout, plan.homes(), program.calls
        for source in itertools.chain(*layout.incoming):
            dtype = calls[source.call].outputs[source.output].dtype
            if dtype.kind not in 'biufc':
                raise ValueError(
                    f'{program.describe(source)} gives {dtype}, which cannot '
                    'be sent to another rank; return numbers, or mark a '
                    'function around what reads them: '
                    'chainer_fp8pipe.atomic(function)')
        self.placement = Placement(self.names, plan, grid, {
            name: tuple(sorted(
                {*layout.holders.get(name, ()), *late.get(name, ())}
                or {homes.get(name, len(plan.cuts))},
                key=lambda chunk: chunk % plan.stages))
            for name in self.names.parameters}, self.layouts.keepers)
        self.layouts.having = self.placement.chunks
        hold(self)

    def _of_example(self, example: Callable[[], Any]
                    ) -> tuple[Program, dict[str, tuple[int, ...]]]:
        """The program of an example; notes which state links go on from.

        Also the chunks of parameters that a batch after the first uses, as
        those of an LSTM that multiply its state.
        """
        recorder, state, layouts = self.recorder, self.state, self.layouts
        late: dict[str, tuple[int, ...]] = {}

        def settled() -> None:
            layouts.forget()
            program.settle(layouts.of(program), ())
        with on_copies(self.names.links), recorder.placeholders():
            state.begin('train')
            state.resume(0)
            program = recorder.record(example)
            found = state.note(program)
            if found:
                state.read = frozenset(found)
                state.keep(program, found)
                settled()
                again = recorder.record(example)
                state.read = frozenset(
                    key for key, value in found.items()
                    if any((id(program), source) in again.notes.pins
                           for source in sources_in(value)))
                state.note(again)       # what it keeps is where it is made
                # What reads a late value of the last batch's is late itself.
                for _ in range(2 * bool(state.read)):
                    layouts.having = layouts.of(again).holders
                    settled()
                    for call in again.calls:
                        if call.before is not None:
                            call.pinned = program.chunk_of(call.before[1])
                late = layouts.of(again).holders
                state.keep(program, found)
            settled()
            state.forget()
        return program, late

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all parameters now."""
        return len(self.placement.own) == len(self.names.parameters)

    @property
    def chunks(self) -> range:
        """The numbers of this rank's chunks."""
        return range(self.grid.stage_index, len(self.plan.cuts) + 1,
                     self.plan.stages)

    def name_of(self, chunk: int) -> str:
        """A chunk in messages."""
        stages = self.plan.stages
        return f'stage {chunk % stages}' + (
            f' (its chunk {chunk // stages})' if self.plan.chunks > 1 else '')

    #: What the ranks of a pipeline do with a batch.
    adapter = ChainAdapter

    def parts(self) -> dict[int, Chunk]:
        """This rank's parts of the model, by number of chunk."""
        return {chunk: Chunk(self, chunk) for chunk in self.chunks}

    def end(self) -> None:
        """Ends a step; what only it needed is dropped."""
        for program in self.programs:
            program.forget()
        self.programs = []

    @contextlib.contextmanager
    def own_alone(self) -> Iterator[None]:
        """A block in which links have registered what is this rank's only."""
        links = [(link, link._params, link._persistent)
                 for link in self.names.links.values()]
        try:
            for link, *both in links:
                link._params, link._persistent = (
                    {name for name in names
                     if self.placement.is_own(link, name)} for names in both)
            yield
        finally:
            for link, parameters, persistent in links:
                link._params, link._persistent = parameters, persistent

    def counted(self) -> list[chainer.Parameter]:
        """The parameters whose first rank this is, as ``params()`` does."""
        return [parameter for name, parameter in self.placement.own.items()
                for _ in range(self.names.times[name])
                if self.placement.ranks[name][0] == self.grid.stage_index]


class PartitionedChain:
    """The class of a model that :func:`partition` has cut.

    Attributes:
        partition: This rank's side of the cut.
    """

    partition: Partition

    @property
    def plan(self) -> PartitionPlan:
        """Where the model is cut."""
        return self.partition.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is None and fetching.now is not None:
            fetching.now()
        elif current() is None and not self.partition.is_whole:
            raise PlaceholderError(
                f'{user_line()}: each rank has a part of this model only; '
                "call the updater's update(), evaluate() or predict() on all "
                'ranks')
        model: Any = super()
        return model.__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model that is not divided; an error where values are missing."""
        if fetching.now is not None:
            fetching.now()
        found = memo[id(self)] = _undivided(self)
        vars(found).update(copy.deepcopy(vars(found), memo))
        return found

    def copy(self, mode: str = 'share') -> Any:
        """A model that is not divided; see ``chainer.Link.copy``."""
        if fetching.now is not None:
            fetching.now()
        model: Any = super()
        found = model.copy(mode)
        return _undivided(found) if isinstance(
            found, PartitionedChain) else found

    def params(self, include_uninit: bool = True
               ) -> Iterator[chainer.Parameter]:
        """Each parameter as often as links have it, as plain Chainer does."""
        times = self.partition.names.times
        for name, parameter in self.namedparams(include_uninit):
            yield from [parameter] * times[name]

    def namedparams(self, include_uninit: bool = True
                    ) -> Iterator[tuple[str, chainer.Parameter]]:
        """The parameters on this rank; all in forward, or where fetched."""
        found = (self.partition.placement.own
                 if current() is None and fetching.now is None
                 else self.partition.names.parameters)
        for name, parameter in found.items():
            if include_uninit or parameter.is_initialized:
                yield name, parameter

    def serialize(self, serializer: Any) -> None:
        """Saves or loads what is here; an error if that looked whole."""
        check_whole(serializer, self, self.partition.is_whole)
        model: Any = super()
        with self.partition.own_alone():
            model.serialize(serializer)

    def __str__(self) -> str:
        return table(self.partition, type(self).__name__,
                     parameters_of(self.partition.names))

    def __repr__(self) -> str:
        plan = self.partition.plan
        return (f'<{type(self).__name__}: stage '
                f'{self.partition.grid.stage_index} of {plan.stages}>')


@functools.lru_cache(None)
def class_of(kind: Any) -> Any:
    """The class that a partitioned model of a class gets."""
    return type(kind.__name__, (PartitionedChain, kind), {
        '__module__': kind.__module__, '__qualname__': kind.__qualname__})


def _undivided(model: Any) -> Any:
    """A copy of the same attributes, of the class that the script knows."""
    found = copy.copy(model)
    found.__class__ = type(model).__bases__[1]
    del found.partition
    return found

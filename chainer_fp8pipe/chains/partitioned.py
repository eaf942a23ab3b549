"""A divided model on one rank: its programs, and the class that it gets."""
# Each rank keeps the links of the whole model, and placeholders for the
# parameters of others.  It records the micro-batches of a step, one after the
# other; a layout says which calls are its own.
from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import current, hold
from ..report.quantities import columns, counted, size
from . import nested
from .adapter import ChainAdapter
from .attributes import (
    Attribute,
    State,
    attributes,
    changed,
    on_copies,
    parameters_of,
)
from .deferred import fetching
from .layout import sources_in
from .placeholder import is_placeholder
from .placement import Placement
from .plan import PartitionPlan
from .program import Program
from .recorder import Recorder
from .saving import OPTIMIZERS, check_whole


class Partition:
    """A divided model as one rank has it.

    Args:
        recorder: Of the whole model.
        plan: Where the model is cut.
        grid: The ranks.
        example: A micro-batch's arguments by place and by name.
        loss_func: What is called with a micro-batch; None: the model.

    Raises:
        ValueError: The model cannot be cut so.
    """

    def __init__(self, recorder: Recorder, plan: PartitionPlan, grid: Any,
                 example: tuple[tuple, dict[str, Any]],
                 loss_func: Callable | None = None) -> None:
        self.recorder, self.names = recorder, recorder.names
        self.plan, self.grid, self.loss_func = plan, grid, loss_func
        self.placement = Placement(self.names, plan, grid)
        self.state = State(self.names.links)
        program, later = self._of_example(example)
        layout, calls = program.layout, program.calls
        for chunk in {*range(len(plan.cuts) + 1)}.difference(layout.chunks):
            raise ValueError(
                f"the plan's chunk {chunk} has no calls; move its cut, or "
                'leave plan= out')
        homes = {name: bisect.bisect_right(plan.cuts, (place, 0))
                 for place, group in enumerate(plan.order) for name in group}
        for source in itertools.chain(*layout.incoming):
            dtype = calls[source.call].outputs[source.output].dtype
            if dtype.kind not in 'biufc':
                raise ValueError(
                    f'{program.describe(source)} gives {dtype}, which cannot '
                    'be sent to another rank; return numbers, or mark a '
                    'function around what reads them: '
                    'chainer_fp8pipe.atomic(function)')
        first, other = layout.holders, later.layout.holders
        self.placement.place({
            name: tuple(sorted(
                {*first.get(name, ()), *other.get(name, ())}
                or [homes.get(name, len(plan.cuts))],
                key=lambda chunk: chunk % plan.stages))
            for name in self.names.parameters})
        hold(self)
        OPTIMIZERS.hold(self)

    def _of_example(self, both: Any) -> tuple[Program, Program]:
        """The program of an example, and of a batch after it.

        An LSTM multiplies its state by parameters that the first does not
        use.  Notes which state links go on from.
        """
        links = self.names.links
        function = self.loss_func or links['/']
        with on_copies(links, function), self.recorder.placeholders():
            program, kept = self._recorded(function, both)
            later, _ = (self._recorded(function, both) if program.kept
                        else (program, {}))
        read = {key for key, value in program.kept.items()
                if any((program, source) in later.notes.pins
                       for source in sources_in(value))}
        kept = {key: value for key, value in kept.items()
                if key in read or not nested.arrays(value)
                or not all(map(is_placeholder, nested.arrays(value)))}
        if kept:
            self.state.kinds = self._kinds(function, both, kept, read)
        return program, later

    def _recorded(self, function: Callable, both: Any
                  ) -> tuple[Program, dict[Attribute, Any]]:
        """A program, and the attributes that it has changed."""
        links = self.names.links
        before = attributes(links)
        program = self.recorder.record(function, both)
        found = changed(links, before)
        program.kept = {key: value for key, value in found.items()
                        if any(map(is_placeholder, nested.arrays(value)))}
        program.settle(self.placement.layout_of(program), ())
        return program, found

    def _kinds(self, function: Callable, both: Any,
               kept: dict[Attribute, Any], read: set[Attribute]
               ) -> dict[Attribute, str]:
        """See :attr:`.State.kinds`; a later program reads some.

        What is of samples has another form with a sample more; where forward
        takes so many samples only, what Chainer's links keep is.  Numbers
        that are the same then move once a batch.
        """
        def form(value: Any) -> Any:
            return [one.shape for one in nested.arrays(value)] or value
        (args, kwargs), links = both, self.names.links
        count = len((*args, *kwargs.values())[0])
        more = [*range(count), 0]
        numbers = {key for key, value in kept.items()
                   if not nested.arrays(value)}
        samples = kept.keys() - numbers
        try:
            with on_copies(links, function), self.recorder.placeholders():
                _, others = self._recorded(function, nested.taken(both, more))
        except Exception as error:      # of any class
            # An argument itself is of its samples, too.
            given = nested.arrays(both)
            samples = {key for key in samples if type(
                links[key[0]]).__module__.startswith('chainer.') or all(
                    not is_placeholder(array) and any(
                        numpy.array_equal(array, one) for one in given)
                    for array in nested.arrays(kept[key]))}
            for path, name in sorted(kept.keys() - numbers - samples):
                if self.plan.micro_batches > 1:
                    raise ValueError(
                        f'link {path} keeps {name!r} for the next batch, and '
                        'nobody can tell what of it is of which sample, as '
                        f'forward takes {count} samples only ('
                        f'{type(error).__name__}: {error}); train with '
                        'micro_batches=1 (--micro-batches 1)') from error
        else:
            alike = {key for key in kept.keys() & others.keys()
                     if form(kept[key]) == form(others[key])}
            samples, numbers = samples - alike, numbers & alike
        return {**dict.fromkeys(read, 'together'),
                **dict.fromkeys(samples, 'samples'),
                **dict.fromkeys(numbers, 'numbers')}

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
        model: Any = super()
        return model.__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the class that the script knows, and not divided."""
        if fetching.now is not None:
            fetching.now()
        state = dict(vars(self))
        del state['partition']
        return object.__new__, (type(self).__bases__[1],), state

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
        """A line per chunk: ranks, time, memory, and what is sent on."""
        part, plan = self.partition, self.partition.plan
        sizes = parameters_of(part.names)
        total = sum(plan.seconds)
        rows = [['stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
                 'first parameter']]
        for chunk, again in enumerate(plan.recompute):
            stage, own = chunk % plan.stages, part.placement.on_chunk(chunk)
            rows.append([
                part.name_of(chunk).removeprefix('stage '),
                ' '.join(map(str, part.grid.ranks[stage])),
                f'{100 * plan.seconds[chunk] / total:.0f} %' if total else '',
                size(sum(sizes[name].nbytes for name in own)),
                size(plan.memory[stage]),
                ''.join(map(size, plan.crossing[chunk:chunk + 1])),
                next((name for group in plan.order for name in group
                      if name in own), 'none') + ', forward twice' * again])
        return '\n'.join([
            f'{type(self).__name__}: {counted(plan.stages, "stage")}'
            + f' x {part.grid.replicas} replicas' * (part.grid.replicas > 1)
            + f', {plan.schedule} with '
            + counted(plan.micro_batches, 'micro-batch'), *columns(rows),
            *(f'{name} is on stages {" and ".join(map(str, ranks))}, which '
              'sum its gradient'
              for name, ranks in part.placement.ties.items()),
            *part.recorder.undivided()])

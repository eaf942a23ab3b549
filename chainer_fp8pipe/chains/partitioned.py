"""What a rank knows of a model that was cut."""
# Each rank keeps the links of the whole model, and placeholders for the
# parameters of others.  It records the micro-batches of a step, one after the
# other; a layout says which calls are its own.
#
# Links that keep computed values (an LSTM's state) have placeholders of them.
# The next batch's same micro-batch goes on from these: the rank that has made
# the value has kept it.  The gradient ends there, as after Chainer's
# `unchain_backward`.  Python's own things (a counter, a list of numbers) go on
# from micro-batch to micro-batch, as in one process.
#
# A parameter stays where the example has put it.  Between steps a rank may
# fetch the whole model (`fetch`), for code that calls it.  Links with
# running values are on one chunk for good, as nobody could say whose values
# count.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..intercept.function_calls import current, hold
from ..mpi.agreement import raise_together
from ..mpi.waiting import wait_until
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.randomness import Place, preserved, seed_at
from . import nested
from .attributes import Attribute, on_copies
from .deferred import draw, fetching, settle, take_away
from .names import parameters_of
from .placeholder import PlaceholderError, is_placeholder, user_line
from .plan import PartitionPlan, table
from .program import Layout, Program, sources_in
from .recorder import Recorder
from .saving import check_whole
from .work import ChainWork

#: So many layouts are kept.
_LAYOUTS = 512
_CONTAINERS = list, dict, set, collections.deque


class Chunk:
    """The calls of one chunk, see :class:`.Part`.

    Args:
        partition: Of the model.
        chunk: Number of the chunk.
    """

    def __init__(self, partition: Partition, chunk: int) -> None:
        self.name = partition.name_of(chunk)
        self._partition, self._chunk = partition, chunk
        self.parameters: list[chainer.Parameter] = [
            partition.names.parameters[name]
            for name in partition.used[chunk]]
        self.links = list(partition.names.links.values())
        self.statistics: Any = None     # of batch normalisations

    def normalises(self, micro_batch: int) -> bool:
        """See :meth:`.Part.normalises`; of links run as a whole."""
        return any(call.figures is not None and call.figures.normalises
                   for call in self._partition.programs[micro_batch].calls)

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Makes this chunk's calls."""
        tape, outputs, normalised = self._partition.programs[micro_batch].run(
            self._chunk, inputs, self.name)
        uses: collections.Counter[Any] = collections.Counter()
        for link, *found in normalised:
            self.statistics.note(link, self._chunk, uses[link], *found)
            uses[link] += 1
        return tape, outputs

    def keeps(self, link: chainer.Link) -> bool:
        """See :meth:`.Part.keeps`; all ranks call all links."""
        part = self._partition
        return part.keepers.get(
            part.names.of(link) or '', self._chunk) == self._chunk


class State:
    """What links keep, from step to step.

    Args:
        links: By path.

    Attributes:
        read: The attributes with computed values that a later program reads;
            values of others are not kept.
    """

    def __init__(self, links: dict[str, chainer.Link]) -> None:
        self._links = links
        self.read: frozenset[Attribute] = frozenset()
        # By step: what links kept of each micro-batch, and had at the end.
        self._kept: dict[str, list[dict[Attribute, Any]]] = {}
        self._last: dict[Attribute, Any] = {}

    def begin(self, step: str) -> None:
        """Begins to record the micro-batches of a step."""
        self._step = step
        self._before = {path: dict(vars(link))
                        for path, link in self._links.items()}
        self._contents = [
            (value, copy.copy(value)) for own in self._before.values()
            for name, value in own.items()
            if isinstance(value, _CONTAINERS) and name not in (
                '_params', '_persistent', '_children')]
        if step == 'train':
            self._kept.pop('evaluate', None)
            gone = {key for key, value in self._last.items()
                    if not _is_same(value, self._now(key))}
            for kept in self._kept.get('train', ()):
                for key in gone:        # somebody has set it
                    kept.pop(key, None)
        self._from = self._kept.pop(step, [])
        self._kept[step] = []
        self._changed: set[Attribute] = set()

    def resume(self, number: int) -> None:
        """Gives links what they kept of the last batch's micro-batch."""
        kept = self._from[number] if number < len(self._from) else {}
        for path, name in self._changed:
            self._restore(path, name)
        for (path, name), value in kept.items():
            vars(self._links[path])[name] = _copied(value)

    def note(self, program: Program) -> None:
        """Notes what links keep of a micro-batch."""
        found: dict[Attribute, Any] = {}
        for path, link in self._links.items():
            before = self._before[path]
            for name, value in vars(link).items():
                if (value is before.get(name) and not isinstance(
                        value, _CONTAINERS) or name in link._params
                        or name in link._persistent):
                    continue
                leaves = nested.leaves(list(value) if isinstance(
                    value, collections.deque) else value)[0]
                if any(is_placeholder(nested.array_of(one))
                       for one in leaves):
                    found[path, name] = value
        self._changed |= found.keys()
        program.kept = {key: value for key, value in found.items()
                        if key in self.read}
        self._kept[self._step].append({
            key: _copied(value) for key, value in program.kept.items()})

    def end(self) -> None:
        """Ends the recording of a step; only training leaves something."""
        if self._step == 'train':
            self._last = {(path, name): _copied(value)
                          for path, name in self._changed
                          if (value := self._now((path, name))) is not None}
            return
        for path, name in self._changed:
            self._restore(path, name)

    def left(self) -> dict[Attribute, Any]:
        """Attributes with computed values, after a step of training."""
        return self._last

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self._last = {}

    def _now(self, key: Attribute) -> Any:
        return vars(self._links[key[0]]).get(key[1])

    def _restore(self, path: str, name: str) -> None:
        own, before = vars(self._links[path]), self._before[path]
        if name not in before:
            own.pop(name, None)
            return
        value = own[name] = before[name]
        for container, content in self._contents:
            if container is value:
                container.clear()
                (container.update if hasattr(container, 'update')
                 else container.extend)(content)


class Partition:
    """What a rank knows of a model that was cut.

    Args:
        model: The whole model.
        recorder: Of the model.
        plan: Where the model is cut.
        grid: The ranks.
        limit: Bytes that each rank may use; None: no limit.
        example: Calls the model with a micro-batch.
        loss_func: What is called with a micro-batch; None: the model.

    Raises:
        ValueError: The model cannot be cut so.

    Attributes:
        crossing: For each boundary name and form of the values that are sent
            in training.
        programs: Of this step's micro-batches.
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        used: The paths of the parameters of each chunk.
        own: The parameters on this rank, by path.
        ranks: The ranks of the pipeline that have a parameter, by its path;
            its home comes first.
        ties: The same of the parameters on several ranks.
    """

    def __init__(self, model: chainer.Link, recorder: Recorder,
                 plan: PartitionPlan, grid: Any, limit: float | None,
                 example: Callable[[], Any],
                 loss_func: Callable | None = None) -> None:
        self.names, self.plan, self.grid = recorder.names, plan, grid
        self.recorder, self.limit = recorder, limit
        self.loss_func = loss_func
        self.title = type(model).__name__
        self.optimizer: Any = None
        self.programs: list[Program] = []
        self.keepers: dict[str, int] = {}
        self._states: dict[tuple[str, str], int] = {}
        self.state = State(self.names.links)
        self._bytes = {name: parameter.nbytes for name, parameter
                       in parameters_of(self.names).items()}
        self._layouts: dict[Any, Layout] = {}
        self._forms: set[Any] = set()
        # The chunks of each parameter, before fetch() has changed them.
        self._before: dict[str, tuple[int, ...]] | None = None
        self._having: dict[str, tuple[int, ...]] | None = None
        program = self._of_example(example)
        layout, homes, calls = program.layout, plan.homes(), program.calls
        for source in itertools.chain(*layout.incoming):
            dtype = calls[source.call].outputs[source.output].dtype
            if dtype.kind not in 'biufc':
                raise ValueError(
                    f'{program.describe(source)} gives {dtype}, which cannot '
                    'be sent to another rank; return numbers, or mark a '
                    'function around what reads them: '
                    'chainer_fp8pipe.atomic(function)')
        self.crossing = [
            [(calls[source.call].name,
              calls[source.call].outputs[source.output])
             for source in sources] for sources in layout.incoming[1:]]
        self._place({name: tuple(sorted(
            {*layout.holders.get(name, ()), *self._later.get(name, ())}
            or {homes.get(name, self.last)},
            key=lambda chunk: chunk % plan.stages))
            for name in self.names.parameters})
        self._having = self._chunks
        hold(self)

    def _of_example(self, example: Callable[[], Any]) -> Program:
        """The program of an example; notes which state links go on from."""
        recorder, state = self.recorder, self.state
        # Of parameters that only a batch after the first uses, as those of an
        # LSTM that multiply its state.
        self._later: Mapping[str, tuple[int, ...]] = {}
        with on_copies(self.names.links), recorder.placeholders():
            state.begin('train')
            program = recorder.record(example)
            state.note(program)
            if state._changed:
                state.read = frozenset(state._changed)
                state.note(program)
                program.settle(self._layout(program), ())
                again = recorder.record(example)
                state.read = frozenset(
                    key for key, value in program.kept.items()
                    if any((id(program), source) in again.pins
                           for source in sources_in(value)))
                # What reads a late value of the last batch's is late itself.
                for _ in range(2 * bool(state.read)):
                    self._having = self._layout(again).holders
                    self._layouts.clear()
                    program.settle(self._layout(program), ())
                    for call in again.calls:
                        if call.before is not None:
                            call.pinned = program.chunk_of(call.before[1])
                self._later = self._layout(again).holders
                state.resume(0)
                program = recorder.record(example)
                state.note(program)
            program.layout = self._layout(program)
            state.forget()
        return program

    def name_of(self, chunk: int) -> str:
        """A chunk in messages."""
        stages = self.plan.stages
        return f'stage {chunk % stages}' + (
            f' (its chunk {chunk // stages})' if self.last >= stages else '')

    @property
    def chunks(self) -> range:
        """The numbers of this rank's chunks."""
        return range(self.grid.stage_index, len(self.plan.cuts) + 1,
                     self.plan.stages)

    @property
    def last(self) -> int:
        """The number of the last chunk."""
        return len(self.plan.cuts)

    def where(self, chunk: int) -> str:
        """The name of a chunk's rank in messages."""
        stage = chunk % self.plan.stages
        ranks = self.grid.ranks[stage]
        return f'stage {stage} (rank {ranks[self.grid.replica_index]})'

    #: What the ranks of a pipeline do with a batch.
    work = ChainWork

    def parts(self) -> dict[int, Chunk]:
        """This rank's parts of the model, by number of chunk."""
        return {chunk: Chunk(self, chunk) for chunk in self.chunks}

    # --- a step --------------------------------------------------------------

    def record(self, step: str, function: Callable,
               batches: list[tuple[tuple, dict[str, Any]]],
               places: list[Place]) -> None:
        """Records a step: ``'train'``, ``'evaluate'`` or ``'predict'``.

        Args:
            step: Its name.
            function: Is called with each micro-batch.
            batches: Arguments and keyword arguments of the micro-batches.
            places: Of the micro-batches.

        Raises:
            ValueError: The model cannot be run so.
        """
        self.end()
        shaped = len(self.names.shaped)
        self.state.begin(step)
        try:
            with self.recorder.placeholders():
                for number, (both, place) in enumerate(zip(
                        batches, places, strict=True)):
                    self.state.resume(number)
                    self._record(step, function, both, place)
        finally:
            self.state.end()
        for number, name in enumerate(self.names.shaped[shaped:]):
            if name in self.own:    # with the same values on every replica
                with preserved():
                    seed_at(places[0]._replace(
                        iteration=0, first_sample=0, layer=number))
                    draw(self.names.parameters[name])

    def _record(self, step: str, function: Callable,
                both: tuple[tuple, dict[str, Any]], place: Place) -> None:
        leaves, tree = nested.leaves(both)
        form = (step, getattr(function, '__func__', function),
                repr(tree), tuple([(one.shape, one.dtype.str)
                                   for one in leaves]))
        # Forward may write to its batch, which the script still has.
        args, kwargs = nested.rebuilt(tree, [one.copy() for one in leaves])
        program = self.recorder.record(
            lambda: function(*args, **kwargs), place,
            is_new=form not in self._forms)
        self._forms.add(form)
        if step != 'predict':
            check_result(program.result)
        self.state.note(program)
        self.programs.append(program)
        layout = self._layout(program)
        for name, chunks in layout.holders.items():
            for chunk in chunks:
                if chunk % self.plan.stages not in self.ranks[name]:
                    raise ValueError(
                        f'this batch needs parameter {name} on '
                        f'{self.where(chunk)}, which has not got it; make '
                        'the partition with such an example')
        program.settle(layout, self.chunks)

    def _layout(self, program: Program) -> Layout:
        key = program.key()
        found = self._layouts.get(key)
        if found is None:
            known = len(self.keepers)
            found = Layout(program, self.plan, self.keepers, self._states,
                           self._having)
            if len(self.keepers) > known or len(self._layouts) > _LAYOUTS:
                # Programs that only read these values may do so elsewhere.
                self._layouts.clear()
            self._layouts[key] = found
        return found

    def digest(self) -> tuple[int, int]:
        """Equal on ranks that have recorded the same."""
        return (hash(tuple([one.layout.digest for one in self.programs])),
                hash(tuple([hash(tuple(one.numbers))
                            for one in self.programs])))

    def description(self) -> dict[str, str]:
        """All that ranks must have recorded alike, by name."""
        return {name: one for index, program in enumerate(self.programs)
                for name, one in program.description(
                    f' of micro-batch {index}').items()}

    def means_in_links(self) -> list[tuple[Attribute, str, Any]]:
        """Attributes with a number of which a step of training has the mean.

        Path and name of each, the name of the report ('': the loss), and the
        number's placeholder.
        """
        if not self.programs:
            return []
        last = self.programs[-1]
        names = {sources_in(value): name
                 for name, value in last.reports.items()}
        names[sources_in(last.result)] = ''
        names.pop((), None)
        return [(key, names[found], value._data[0])
                for key, value in self.state.left().items()
                if isinstance(value, chainer.Variable) and not value.shape
                and key not in self.state.read
                and (found := sources_in(value)) in names
                and value._data[0].program is last]

    def end(self) -> None:
        """Ends a step; what only it needed is dropped."""
        for program in self.programs:
            program.forget()
        self.programs = []

    # --- parameters ----------------------------------------------------------

    def fetch(self) -> None:
        """Gives all ranks the whole model, until :meth:`give_back`.

        Call it on all ranks of the pipeline, between steps.

        Raises:
            ValueError: A value cannot be sent; on all ranks.
        """
        comm, before = self.grid.pipeline, self.ranks
        me = self.grid.stage_index
        names = [name for name, parameter in self.names.parameters.items()
                 if parameter._data[0] is not None
                 and len(before[name]) < comm.size]

        def own_values() -> dict[str, Any]:
            return {name: self._host_value(name) for name in names
                    if before[name][0] == me}
        # Before the first message: who waits for one learns of no error.
        values = raise_together(comm, own_values, error=ValueError)
        self._before = self._chunks
        for name in names:
            home, *_ = before[name]
            if home != me:
                values[name] = numpy.empty(
                    self.names.parameters[name].shape,
                    self.names.parameters[name].dtype)
            wait_until(comm.Ibcast([values[name].reshape(-1).view(
                numpy.uint8), MPI.BYTE], home).Test)
        self._place({name: (*chunks, *(
            stage for stage in range(comm.size * (name in values))
            if stage not in before[name]))
            for name, chunks in self._chunks.items()})

        def settle_all() -> None:
            for name, value in values.items():
                if me not in before[name]:
                    parameter = self.names.parameters[name]
                    settle(parameter, parameter._initial_device.send(value))
        try:
            raise_together(comm, settle_all, error=ValueError)
        except ValueError:
            self.give_back()
            raise
        for stage in range(comm.size):
            values = comm.bcast({
                (path, name): chainer.backends.cuda.to_cpu(value)
                if isinstance(value := vars(link)[name],
                              chainer.get_array_types()) else value
                for path, link in self.names.links.items()
                if path in self.keepers
                and self.keepers[path] % self.plan.stages == stage
                for name in link._persistent} if stage == me else None, stage)
            for (path, name), value in ({} if stage == me else values).items():
                link = self.names.links[path]
                setattr(link, name, link.device.send(value) if isinstance(
                    value, numpy.ndarray) else value)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all parameters now."""
        return len(self.own) == len(self.names.parameters)

    def give_back(self) -> bool:
        """Leaves placeholders of what was fetched; whether anything was."""
        if self._before is None:
            return False
        fetched = set(self.own)
        self._place(self._before)
        self._before = None
        for name in fetched.difference(self.own):
            take_away(name, self.names.parameters[name])
        return True

    def _host_value(self, name: str) -> numpy.ndarray:
        array = self.names.parameters[name]._data[0]
        if array is None or is_placeholder(array):
            raise ValueError(
                f'parameter {name} has no values yet; make the partition with '
                'an example that gives it its shape')
        return numpy.asarray(chainer.backends.cuda.to_cpu(array), order='C')

    def parameter_bytes(self, name: str) -> int:
        """Bytes of a parameter, which may be on another rank."""
        return self._bytes[name]

    def _place(self, chunks: dict[str, tuple[int, ...]]) -> None:
        """Notes the chunks that use each parameter, its home's first."""
        self._chunks = chunks
        self.used = {chunk: sorted(name for name, of in chunks.items()
                                   if chunk in of)
                     for chunk in range(self.last + 1)}
        self.ranks = {name: tuple(dict.fromkeys(
            chunk % self.plan.stages for chunk in of))
            for name, of in chunks.items()}
        self.ties = {name: ranks for name, ranks in self.ranks.items()
                     if len(ranks) > 1}
        self.own = {name: parameter for name, parameter
                    in self.names.parameters.items()
                    if self.grid.stage_index in self.ranks[name]}

    @contextlib.contextmanager
    def own_alone(self) -> Iterator[None]:
        """A block in which links have registered what is this rank's only."""
        links = [(link, link._params, link._persistent)
                 for link in self.names.links.values()]
        try:
            for link, *both in links:
                link._params, link._persistent = (
                    {name for name in names if self.is_own(link, name)}
                    for names in both)
            yield
        finally:
            for link, parameters, persistent in links:
                link._params, link._persistent = parameters, persistent

    def is_own(self, link: chainer.Link, name: str) -> bool:
        """Whether this rank saves and loads an attribute of a link."""
        value = vars(link).get(name)
        if isinstance(value, chainer.Parameter):
            return self.names.of(value) in self.own
        me, path = self.grid.stage_index, self.names.of(link)
        return path is not None and (
            self.keepers.get(path, me) % self.plan.stages == me)

    def counted(self) -> list[chainer.Parameter]:
        """This rank's parameters, as the model's ``params()`` has them.

        Those on several ranks are on the first.
        """
        return [parameter for name, parameter in self.own.items()
                for _ in range(self.names.times[name])
                if self.ranks[name][0] == self.grid.stage_index]

    def problem(self) -> str:
        """Names a parameter that was replaced since the cut; '' if none."""
        for path, parameter in self.names.parameters.items():
            link, _, name = path.rpartition('/')
            if vars(self.names.links[link or '/']).get(name) is not parameter:
                return (f'parameter {path} was replaced after partition(); '
                        'change its array, or call partition() afterwards')
            array = parameter._data[0]
            if array is None:       # its link makes it, in forward
                continue
            if (path in self.own) == is_placeholder(array):
                return (f'parameter {path} has '
                        + ('no values' if path in self.own else 'values')
                        + f' on stage {self.grid.stage_index}; change '
                        'parameters on the rank that has them only, or use '
                        'chainer.serializers.load_npz')
        return ''


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
        """A model that is not divided, with the values that are here."""
        if fetching.now is not None:
            fetching.now()
        found = memo[id(self)] = _undivided(self)
        vars(found).update(copy.deepcopy(vars(found), memo))
        return found

    def copy(self, mode: str = 'share') -> Any:
        """As :meth:`__deepcopy__`; see ``chainer.Link.copy``."""
        if fetching.now is not None:
            fetching.now()
        model: Any = super()
        found = model.copy(mode)
        return _undivided(found) if isinstance(
            found, PartitionedChain) else found

    def params(self, include_uninit: bool = True
               ) -> Iterator[chainer.Parameter]:
        """The parameters on this rank, each as often as links have it.

        So a shared one is updated as often as by plain Chainer.
        """
        times = self.partition.names.times
        for name, parameter in self.namedparams(include_uninit):
            yield from [parameter] * times[name]

    def namedparams(self, include_uninit: bool = True
                    ) -> Iterator[tuple[str, chainer.Parameter]]:
        """The parameters on this rank, with their names in the model.

        In the model's own forward, and where somebody fetches the others'
        values: all parameters.
        """
        found = (self.partition.own
                 if current() is None and fetching.now is None
                 else self.partition.names.parameters)
        for name, parameter in found.items():
            if include_uninit or parameter.is_initialized:
                yield name, parameter

    def serialize(self, serializer: Any) -> None:
        """Saves or loads what is on this rank, under the model's names.

        Raises:
            NotWhole: A part would be saved as if it were the model.
        """
        check_whole(serializer, self, self.partition.is_whole)
        model: Any = super()
        with self.partition.own_alone():
            model.serialize(serializer)

    def __str__(self) -> str:
        return table(self.partition)

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


def check_result(result: Any) -> None:
    """Raises ValueError if what a model has returned is no loss."""
    if not isinstance(result, chainer.Variable) or result.size != 1:
        raise ValueError(
            f'the model returned {type(result).__name__} of shape '
            f'{getattr(result, "shape", "unknown")}; called with a '
            'batch, it must return its loss, a scalar variable, as '
            'chainer.links.Classifier does, or be cut with '
            'partition(..., loss_func=)')


def _copied(value: Any) -> Any:
    """A copy of a list or another container, so that it does not grow."""
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_same(before: Any, now: Any) -> bool:
    """Whether an attribute is what it was, also what it contains."""
    if before is now:
        return True
    if type(before) is not type(now) or not isinstance(now, _CONTAINERS) or (
            len(before) != len(now)):
        return False
    one, other = ((value.items() if isinstance(value, dict) else
                   [(item, item) for item in value])
                  for value in (before, now))
    return all(a is c and b is d for (a, b), (c, d)
               in zip(one, other, strict=True))

"""What a rank knows of a model that was cut."""
# Each rank keeps the links of the whole model, placeholders for the parameters
# of others, and the traces (programs) that batches have made, by the form of
# the batch.  Python may call something else for the next batch, so programs
# are looked up by a rehearsal (`rehearsed`), which one rank does for each
# micro-batch; the others take its word, and look the program up by its digest
# (`known`).  All ranks must know the same programs, or they would do other
# calls: they note and forget them together, in the same order.
#
# Links that keep computed values (an LSTM's state) get the values of the last
# batch's same micro-batch on the rank that has them, and placeholders
# elsewhere.  Between steps they have placeholders, so that reset_state() can
# be told from a state that was left alone.
#
# A parameter stays where the example has put it.  A batch whose program needs
# it elsewhere (tied weights in another branch) borrows its values for one step
# (`lend`); gradients go home.  Between steps a rank may borrow the whole model
# (`borrow`), for code that calls it.  Links with running values are on one
# chunk for good, as nobody could say whose values count.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import warnings
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import current, hold, intercepting
from ..mpi.agreement import raise_together
from ..mpi.arrays import receive_array, send_array
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.randomness import Place, at, preserved
from ..planning.calls import Source
from ..planning.partition_plan import PartitionPlan, table
from . import nested
from .attributes import State, put_state, restore, saved
from .names import Names, parameters_of
from .placeholder import (
    PlaceholderError,
    is_placeholder,
    placeholder,
    user_line,
)
from .recorder import OTHER_CALLS, Tracer
from .replay import Kept, MicroBatch, Run, rehearse
from .trace import StagedTrace, Trace
from .valueless_parameters import draw, fetching, settle, take_away

#: Traces are kept for so many shapes of inputs, and for each of these so many
#: that make different calls.
_FORMS, _ALIKE = 64, 8


class ChainPart:
    """The calls of one chunk, see :class:`.Part`.

    Args:
        partition: Of the model.
        chunk: Number of the chunk.
    """

    def __init__(self, partition: Partition, chunk: int) -> None:
        self.name = f'stage {chunk}'
        self._partition, self._chunk = partition, chunk
        self.parameters: list[chainer.Parameter] = [
            partition.names.parameters[name]
            for name in partition.used[chunk]]
        self.links = list(partition.names.links.values())

    def normalises(self, micro_batch: int) -> bool:
        """See :meth:`.Part.normalises`."""
        return self._partition.micro_batches[
            micro_batch].program.trace.normalises

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Runs the model's forward, in which this chunk's calls are done."""
        part, chunk = self._partition, self._chunk
        one = part.micro_batches[micro_batch]
        program = one.program
        incoming = program.incoming[chunk]
        if len(inputs) != len(incoming):
            raise RuntimeError(
                f'{len(inputs)} values came, {len(incoming)} were expected; '
                'the ranks have different plans')
        variables = tuple([
            chainer.Variable(array,
                             requires_grad=program.wants_gradient(source))
            for source, array in zip(incoming, inputs, strict=True)])
        # A link may keep a value that only a later chunk uses.
        values = dict(zip(incoming, variables, strict=True)) | {
            source: chainer.Variable(value, requires_grad=False)
            for source, value in one.before.items()
            if source in program.wanted[chunk]}
        run = Run(program, chunk, values, part.names, place, part.where)
        reports: dict[str, Any] = {}
        with self._state(one), part.names.reporter.scope(reports), \
                intercepting(run):
            one()
            run.finish()
            self._keep(program.after, one.kept, run)
        for name, value in reports.items():
            if program.reporters.get(name) == chunk:
                leaves, tree = nested.leaves(value)
                one.reports[name] = nested.rebuilt(tree, [
                    nested.array_of(run.real(leaf)) for leaf in leaves])
        outputs = tuple([values[source]
                         for source in program.outgoing[chunk]])
        inner = {part.names.parameters[name].node for name in program.inner}
        uses = {node: count for node, count in run.uses.items()
                if node not in inner}
        return (Tape(variables, outputs, uses, said=run.said),
                tuple([output.array for output in outputs]))

    def keeps(self, link: chainer.Link) -> bool:
        """See :meth:`.Part.keeps`; all ranks call all links."""
        part = self._partition
        return part.keepers.get(
            part.names.of(link) or '', self._chunk) == self._chunk

    @contextlib.contextmanager
    def _state(self, micro_batch: MicroBatch) -> Iterator[None]:
        """A block in which links have the state of this micro-batch.

        Python counts once per micro-batch in attributes: later runs, of
        another chunk or before backward, begin with the attributes that the
        first run began with, and restore those that it left.
        """
        links, program = self._partition.names.links, micro_batch.program
        again, restored = micro_batch.found, program.attributes
        if again is None:
            # Not the persistent arrays that a link makes in its first call.
            micro_batch.found = saved(links, {
                (path, name) for path, name
                in program.trace.touched - program.attributes
                if name not in links[path]._persistent
                or vars(links[path]).get(name) is not None}).note()
        else:
            restored |= program.trace.touched
        with saved(links, restored):
            if again is not None:
                again.put_back()
            program.put_state(links, micro_batch.before, self._chunk)
            yield

    def _keep(self, after: State, into: dict[Source, Any], run: Run) -> None:
        """Keeps this chunk's state, by its pinned calls in the next trace."""
        links = self._partition.names.links
        pairs = [pair for entry in after for pair in zip(
            entry.leaves, nested.leaves(getattr(
                links[entry.link], entry.name))[0], strict=True)]
        into.update({
            Source(number, 0): run.real(nested.array_of(found))
            for number, (leaf, found) in enumerate(pairs)
            if leaf.stage == self._chunk})


class Partition:
    """What a rank knows of a model that was cut.

    Args:
        model: The whole model.
        names: Of its links and parameters.
        tracer: Of the model.
        plan: Where the model is cut.
        grid: The ranks.
        limit: Bytes that each rank may use; None: no limit.
        trace: Of the example, in training.
        example: A micro-batch.

    Raises:
        ValueError: The model cannot be cut so.

    Attributes:
        crossing: For each boundary name and form of the values that are sent
            in training.
        micro_batches: Of this step.
        mismatch: Why a rehearsal has failed, if a constant was another one.
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path.
        used: The paths of the parameters of each chunk.
        own: The parameters on this rank, by path.
        ranks: The ranks of the pipeline that have a parameter, by its path;
            its home comes first.
        ties: The same of the parameters on several ranks.
    """

    def __init__(self, model: chainer.Link, names: Names, tracer: Tracer,
                 plan: PartitionPlan, grid: Any, limit: float | None,
                 trace: Trace, example: MicroBatch) -> None:
        self.names, self.plan, self.grid = names, plan, grid
        self.tracer, self.limit = tracer, limit
        self.title = type(model).__name__
        self.optimizer: Any = None
        self.micro_batches: Sequence[MicroBatch] = []
        self.mismatch = ''
        self.keepers: dict[str, int] = {}
        self._bytes = {name: parameter.nbytes for name, parameter
                       in parameters_of(names).items()}
        # By step: whether it goes on from what links kept in the last one.
        self._live: dict[str, bool] = {}
        self._programs: collections.OrderedDict[Any, list[StagedTrace]] = (
            collections.OrderedDict())
        self._told = False
        # The chunks of each parameter, before lend() has changed them.
        self._before: dict[str, tuple[int, ...]] | None = None
        # By step: what links kept of the last one's micro-batches.
        self._kept: dict[str, list[Kept]] = {}
        self._after: State = ()
        # By link and name: the attribute before the step, and a placeholder.
        self._marks: dict[Any, tuple[Any, Any]] = {}
        program, homes = self._program('train', trace, example), plan.homes()
        calls = trace.calls
        self.crossing = [
            [(calls[source.call].name,
              calls[source.call].outputs[source.output])
             for source in sources] for sources in program.incoming[1:]]
        self._place({name: tuple(sorted(
            program.holders.get(name) or (homes.get(name, self.last),),
            key=lambda chunk: chunk % plan.stages))
            for name in names.parameters})
        self._learn('train', program, example)
        hold(self)

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
        ranks = self.grid.placement.ranks[stage]
        return f'stage {stage} (rank {ranks[self.grid.replica_index]})'

    def parts(self) -> dict[int, ChainPart]:
        """This rank's parts of the model, by number of chunk."""
        return {chunk: ChainPart(self, chunk) for chunk in self.chunks}

    # --- a step --------------------------------------------------------------

    def begin(self, step: str) -> None:
        """Starts a step: ``'train'``, ``'evaluate'`` or ``'predict'``."""
        self._kept[step] = [(one.program.after, one.kept)
                            for one in self.micro_batches]
        if step == 'train':
            self._after = self.micro_batches[-1].program.after

    def end(self) -> None:
        """Ends a step; sets attributes that keep state to placeholders."""
        self._marks = put_state(
            self._after, self.names.links, lambda leaf, path: placeholder(
                leaf.shape, leaf.dtype, 'of an earlier batch', leaf.xp))

    def resume(self, step: str) -> list[Kept]:
        """The state that links go on from in a step, by micro-batch.

        They do not if one of the attributes was set since the last step
        (``reset_state()``).  Evaluation has a state of its own.
        """
        for (path, name), (initial, mark) in self._marks.items():
            link = self.names.links[path]
            if vars(link).get(name) is mark:
                restore(link, name, initial)
            else:
                self._kept.pop('train', None)
                self._after = ()
        self._marks = {}
        if step == 'train':
            self._kept.pop('evaluate', None)
        return self._kept.get(step, [])

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self.micro_batches, self._after = [], ()

    # --- programs ------------------------------------------------------------

    def rehearse(self, program: StagedTrace, micro_batch: MicroBatch
                 ) -> list[tuple[int, int]] | None:
        """See :attr:`.Rehearsal.labels`; None: other calls were made."""
        found = rehearse(program, micro_batch, self.names)
        self.mismatch = found.why or self.mismatch
        return found.labels if found.fits else None

    def rehearsed(self, mode: str, micro_batch: MicroBatch
                 ) -> tuple[StagedTrace, Any] | None:
        """The known program of a micro-batch, and its labels.

        Args:
            mode: ``'train'``, ``'evaluate'`` or ``'predict'``.
            micro_batch: Of such a step.

        Returns:
            The program, and what a rehearsal has counted; None: the model is
            to be traced.
        """
        for program in self._programs.get(micro_batch.key(mode), []):
            labels = self.rehearse(program, micro_batch)
            if labels is not None:
                return program, labels
        return None

    def known(self, mode: str, micro_batch: MicroBatch, digest: str
              ) -> StagedTrace | None:
        """The program that a rank has found by a rehearsal.

        Call it on all ranks for each micro-batch, one after the other, so
        that they forget the same programs: those used longest ago.

        Args:
            mode: As for :meth:`rehearsed`.
            micro_batch: As for :meth:`rehearsed`.
            digest: Of the program's trace.
        """
        key = micro_batch.key(mode)
        known = self._programs.get(key, [])
        for number, program in enumerate(known):
            if program.trace.digest == digest:
                known.insert(0, known.pop(number))
                self._programs.move_to_end(key)
                return program
        return None

    def traced(self, mode: str, micro_batch: MicroBatch
               ) -> tuple[StagedTrace, Any]:
        """As :meth:`rehearsed`, for a micro-batch that is traced first.

        Raises:
            ValueError: The model cannot be cut so for such inputs.
        """
        shaped, place = len(self.names.shaped), micro_batch.place
        trace = self.tracer.trace(micro_batch, micro_batch.state,
                                  timed=False)
        for number, name in enumerate(self.names.shaped[shaped:]):
            if name in self.own:    # with the same values on every replica
                with preserved(), at(place._replace(
                        iteration=0, first_sample=0, layer=number)):
                    draw(self.names.parameters[name])
        program = self._program(mode, trace, micro_batch)
        return program, self._learn(mode, program, micro_batch)

    def _learn(self, mode: str, program: StagedTrace, micro_batch: MicroBatch
               ) -> Any:
        """Notes a program, which is new; a rehearsal's labels."""
        labels = self.rehearse(program, micro_batch)
        if labels is None:
            raise ValueError(OTHER_CALLS)
        program.missing = self._missing(program)
        key = micro_batch.key(mode)
        self._programs.setdefault(key, []).insert(0, program)
        del self._programs[key][_ALIKE:]
        self._programs.move_to_end(key)
        if len(self._programs) > _FORMS:
            self._programs.popitem(last=False)
        return labels

    def _program(self, mode: str, trace: Trace, micro_batch: MicroBatch
                 ) -> StagedTrace:
        if mode != 'predict':
            check_result(trace.result)
        if mode not in self._live:
            self._live[mode] = reads_state(
                self.tracer, trace, micro_batch)
        program = StagedTrace(trace, self.plan, micro_batch.state,
                              self._live[mode], self.keepers)
        if not program.keepers.keys() <= self.keepers.keys():
            # Programs that only read these values may do so on other chunks.
            self._programs.clear()
            self.keepers.update(program.keepers)
        return program

    def _missing(self, program: StagedTrace) -> set[tuple[str, int]]:
        """Paths of parameters that a rank lacks, with the chunk's number."""
        return {(name, chunk) for name, chunks in program.holders.items()
                for chunk in chunks
                if chunk % self.plan.stages not in self.ranks[name]}

    # --- parameters ----------------------------------------------------------

    def lend(self, missing: set[tuple[str, int]]) -> None:
        """Gives ranks the missing parameters' values for a step.

        Call it on all ranks of the pipeline.  Whoever has a parameter stays
        its home: gradients are added up there, and its optimizer's state
        stays where it is.

        Raises:
            ValueError: A value cannot be sent; on all ranks, and nothing is
                lent.
        """
        comm, before = self.grid.pipeline, self.ranks
        me = self.grid.stage_index
        chunks, names = dict(self._chunks), sorted({
            name for name, _ in missing})
        for name, chunk in sorted(missing):
            chunks[name] += chunk,

        def own_values() -> dict[str, Any]:
            return {name: self._host_value(name) for name in names
                    if before[name][0] == me}
        # Before the first message: who waits for one learns of no error.
        values = raise_together(comm, own_values, error=ValueError)
        self._before, received = self._chunks, {}
        self._place(chunks)
        for name in names:
            home, *_ = before[name]
            for stage in self.ranks[name][len(before[name]):]:
                if home == me:
                    send_array(comm, values[name], stage)
                elif stage == me:
                    received[name] = receive_array(comm, home)

        def settle_all() -> None:
            for name, value in received.items():
                parameter = self.names.parameters[name]
                settle(parameter, parameter._initial_device.send(value))
        try:
            raise_together(comm, settle_all, error=ValueError)
        except ValueError:
            self.give_back()
            raise

    def borrow(self) -> None:
        """Gives all ranks the whole model, until :meth:`give_back`.

        Call it on all ranks of the pipeline, between steps.
        """
        comm, me = self.grid.pipeline, self.grid.stage_index
        self.lend({
            (name, stage) for name, ranks in self.ranks.items()
            for stage in range(comm.size) if stage not in ranks
            and self.names.parameters[name]._data[0] is not None})
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
        """Leaves placeholders of what was lent; whether anything was."""
        if self._before is None:
            return False
        lent = set(self.own)
        self._place(self._before)
        self._before = None
        for name in lent.difference(self.own):
            take_away(name, self.names.parameters[name])
        return True

    def _host_value(self, name: str) -> numpy.ndarray:
        array = self.names.parameters[name]._data[0]
        if array is None or is_placeholder(array):
            raise ValueError(
                f'parameter {name} gets its shape in this batch, on another '
                'stage; make the partition with such an example')
        return numpy.asarray(chainer.backends.cuda.to_cpu(array))

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

    def tell_once(self, text: str) -> None:
        """Warns on the first rank, the first time only."""
        if not self._told and self.grid.comm.rank == 0:
            warnings.warn(text, stacklevel=2)
        self._told = True


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
        """Saves or loads what is on this rank, under the model's names."""
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
            'chainer.links.Classifier does')


def reads_state(tracer: Tracer, trace: Trace, call: Callable) -> bool:
    """Whether a second run reads what the first one left in links."""
    if not trace.state:
        return False
    again = tracer.trace(call, trace.state, timed=False)
    return any(source.call < again.first for other in again.calls
               for source in other.inputs)

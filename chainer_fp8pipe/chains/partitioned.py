"""What a rank knows of a model that was cut."""
# Each rank keeps the links of the whole model, ghosts for the parameters of
# others, and the traces (programs) that batches have made, by the form of the
# batch.  Python may call something else for the next batch, so programs are
# looked up by a rehearsal (`rehearsed`), which one rank does for each
# micro-batch; the others take its word, and look the program up by its digest
# (`known`).  All ranks must know the same programs, or they would do other
# calls: they note and forget them together, in the same order.
#
# A parameter stays where the example has put it.  A batch whose program needs
# it elsewhere (tied weights in another branch) borrows its values for one step
# (`lend`); gradients go home.  Between steps a rank may borrow the whole model
# (`borrow`), for code that calls it.  Links with running values are on one
# chunk for good, as nobody could say whose values count.
from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ..intercept import function_calls
from ..mpi.agreement import raise_together
from ..mpi.arrays import receive_array, send_array
from ..pipeline.randomness import at, preserved
from ..planning.partition_plan import PartitionPlan
from .ghost import is_ghost
from .names import Names, parameters_of
from .part import ChainPart, MicroBatch, Passes, between_calls
from .program import StagedTrace
from .recorder import OTHER_CALLS, Tracer
from .trace import Trace
from .valueless_parameters import draw, settle, take_away

#: Traces are kept for so many shapes of inputs, and for each of these so many
#: that make different calls.
_FORMS, _ALIKE = 64, 8


class Partition:
    """What a rank knows of a model that was cut.

    Args:
        model: The whole model.
        names: Of its links and parameters.
        tracer: Of the model.
        plan: Where the model is cut.
        grid: The ranks.
        program: Of the example, in training.

    Attributes:
        used: The paths of the parameters of each chunk.
        own: The parameters on this rank, by path.
        ranks: The ranks of the pipeline that have a parameter, by its path;
            its home comes first.
        ties: The same of the parameters on several ranks.
    """

    def __init__(self, model: chainer.Link, names: Names, tracer: Tracer,
                 plan: PartitionPlan, grid: Any,
                 program: StagedTrace) -> None:
        self.names, self.plan, self.grid = names, plan, grid
        self.tracer = tracer
        self.passes = Passes(names, self.where)
        self.title = type(model).__name__
        self.crossing: list[list[tuple[str, Any]]] = []
        self.optimizer: Any = None
        self.device = model.device
        self.own: dict[str, chainer.Parameter] = {}
        self._programs: collections.OrderedDict[Any, list[StagedTrace]] = (
            collections.OrderedDict())
        self._told = False
        #: The chunk with the calls of a link that keeps running values.
        self._keepers: dict[str, int] = {}
        self.live_state: dict[str, bool] = {}
        #: Bytes that each rank may use; None: no limit.
        self.limit: float | None = None
        # What lend() has changed: used, ranks, ties and own of before.
        self._placed: Any = None
        self.place(program)
        function_calls.hold(self)

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
        return {chunk: ChainPart(
            self.passes, chunk,
            {name: self.names.parameters[name]
             for name in self.used[chunk]})
            for chunk in self.chunks}

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
            labels = self.passes.rehearse(program, micro_batch)
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
        with between_calls(place):
            trace = self.tracer.trace(micro_batch, micro_batch.state,
                                      timed=False)
        for number, name in enumerate(self.names.shaped[shaped:]):
            if name in self.own:    # with the same values on every replica
                with preserved(), at(place._replace(
                        iteration=0, first_sample=0, layer=number)):
                    draw(self.names.parameters[name])
        with between_calls(place):
            program = self._program(mode, trace, micro_batch)
        labels = self.passes.rehearse(program, micro_batch)
        if labels is None:
            raise ValueError(OTHER_CALLS)
        key = micro_batch.key(mode)
        self._programs.setdefault(key, []).insert(0, program)
        del self._programs[key][_ALIKE:]
        self._programs.move_to_end(key)
        if len(self._programs) > _FORMS:
            self._programs.popitem(last=False)
        return program, labels

    def _program(self, mode: str, trace: Trace, micro_batch: MicroBatch
                 ) -> StagedTrace:
        if mode != 'predict':
            check_result(trace.result)
        if mode not in self.live_state:
            self.live_state[mode] = reads_state(
                self.tracer, trace, micro_batch)
        program = StagedTrace(trace, self.plan, micro_batch.state,
                              self.live_state[mode], self._keepers)
        if not program.keepers.keys() <= self._keepers.keys():
            # Programs that only read these values may do so on other chunks.
            self._programs.clear()
            self._note_keepers(program)
        program.missing = self.missing(program)
        return program

    def missing(self, program: StagedTrace) -> set[tuple[str, int]]:
        """Paths of parameters that a rank lacks, with the chunk's number."""
        return {(name, chunk) for name, chunks in program.holders.items()
                for chunk in chunks
                if chunk % self.plan.stages not in self.ranks[name]}

    def lend(self, missing: set[tuple[str, int]]) -> None:
        """Gives ranks the :meth:`missing` parameters' values for a step.

        Call it on all ranks of the pipeline.  Whoever has a parameter stays
        its home: gradients are added up there, and its optimizer's state
        stays where it is.

        Raises:
            ValueError: A value cannot be sent; on all ranks, and nothing is
                lent.
        """
        comm, before = self.grid.pipeline, self.ranks
        me = self.grid.stage_index
        used = {chunk: list(names) for chunk, names in self.used.items()}
        ranks, names = dict(before), sorted({name for name, _ in missing})
        for name, chunk in sorted(missing):
            used[chunk] = sorted({*used[chunk], name})
            ranks[name] = tuple(dict.fromkeys((
                *ranks[name], chunk % self.plan.stages)))

        def own_values() -> dict[str, Any]:
            return {name: self._host_value(name) for name in names
                    if before[name][0] == me}
        # Before the first message: who waits for one learns of no error.
        values = raise_together(comm, own_values, error=ValueError)
        received = {}
        for name in names:
            home, *_ = before[name]
            for stage in ranks[name][len(before[name]):]:
                if home == me:
                    send_array(comm, values[name], stage)
                elif stage == me:
                    received[name] = receive_array(comm, home)

        def settle_all() -> None:
            for name, value in received.items():
                parameter = self.names.parameters[name]
                settle(parameter, parameter._initial_device.send(value))
        self._placed = self.used, self.ranks, self.ties, self.own
        self._note_ranks(used, ranks)
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
                if self._owners.get(path) == stage
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
        """Leaves ghosts of what was lent; whether anything was."""
        if self._placed is None:
            return False
        lent = set(self.own)
        self.used, self.ranks, self.ties, self.own = self._placed
        self._placed = None
        for name in lent.difference(self.own):
            take_away(name, self.names.parameters[name])
        return True

    def _host_value(self, name: str) -> numpy.ndarray:
        array = self.names.parameters[name]._data[0]
        if array is None or is_ghost(array):
            raise ValueError(
                f'parameter {name} gets its shape in this batch, on another '
                'stage; make the partition with such an example')
        return numpy.asarray(chainer.backends.cuda.to_cpu(array))

    def describe(self, program: StagedTrace) -> None:
        """Notes the values that are sent in training, for the table."""
        calls = program.trace.calls
        self.crossing = [
            [(calls[source.call].name,
              calls[source.call].outputs[source.output])
             for source in sources] for sources in program.incoming[1:]]
        self._bytes = {name: parameter.nbytes for name, parameter
                       in parameters_of(self.names).items()}

    def parameter_bytes(self, name: str) -> int:
        """Bytes of a parameter, which may be on another rank."""
        return self._bytes[name]

    def place(self, program: StagedTrace) -> None:
        """Notes which rank has which parameter, by the calls of training."""
        homes = self.plan.homes()
        used: dict[int, set[str]] = {
            chunk: set() for chunk in range(self.last + 1)}
        for name in self.names.parameters:
            chunks = program.holders.get(name)
            for chunk in chunks or (homes.get(name, self.last),):
                used[chunk].add(name)
        self._note_ranks(
            {chunk: sorted(names) for chunk, names in used.items()},
            {name: tuple(sorted({
                chunk % self.plan.stages for chunk, names in used.items()
                if name in names})) for name in self.names.parameters})
        self._note_keepers(program)

    def _note_keepers(self, program: StagedTrace) -> None:
        self._keepers.update(program.keepers)
        me = self.grid.stage_index
        self._owners = {name: chunk % self.plan.stages
                        for name, chunk in self._keepers.items()}
        self._own_links = {name for name in self.names.links
                           if self._owners.get(name, me) == me}

    def _note_ranks(self, used: dict[int, list[str]],
                    ranks: dict[str, tuple[int, ...]]) -> None:
        self.used, self.ranks = used, ranks
        self.ties = {name: ranks for name, ranks in self.ranks.items()
                     if len(ranks) > 1}
        self.own = {name: parameter for name, parameter
                    in self.names.parameters.items()
                    if self.grid.stage_index in self.ranks[name]}

    def is_own(self, link: chainer.Link, name: str) -> bool:
        """Whether this rank saves and loads an attribute of a link."""
        value = vars(link).get(name)
        if isinstance(value, chainer.Parameter):
            return self.names.of(value) in self.own
        return self.names.of(link) in self._own_links

    def counted(self) -> list[chainer.Parameter]:
        """This rank's parameters; those on several ranks on the first."""
        return [parameter for name, parameter in self.own.items()
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
            if (path in self.own) == is_ghost(array):
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
    if not trace.state.entries:
        return False
    again = tracer.trace(call, trace.state, timed=False)
    return any(source.call < again.first for other in again.calls
               for source in other.inputs)

"""The calls of a chunk of a traced Chain, as a block of a pipeline."""
from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import chainer

from ..intercept.function_calls import intercepting
from ..pipeline.backprop import Tape
from ..pipeline.batch_statistics import BatchStatistics
from ..pipeline.block import Arrays
from ..pipeline.randomness import Place, at
from ..planning.calls import Source
from . import nested
from .ghost import ghost
from .names import Names, reporter_of
from .profiling.laps import Laps
from .rehearsal import Mismatch, Rehearsal
from .run import Run
from .staged_trace import StagedTrace
from .tracing.link_state import Attribute, LinkState, saved
from .valueless_parameters import settled, untouched

#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1


class Passes:
    """The forward passes of a step, for all chunks of a rank.

    Args:
        names: Of the model's links and parameters.
        where: Says which rank has a chunk.
    """

    def __init__(self, names: Names, where: Callable[[int], str]) -> None:
        self.names, self.where = names, where
        self.programs: list[StagedTrace] = []
        #: Why a rehearsal has failed, if a constant was another one.
        self.mismatch = ''
        self._calls: Sequence[Callable[[], Any]] = []
        self.reports: list[dict[str, Any]] = []
        #: Times calls; None: nothing is timed.
        self.laps: Laps | None = None
        #: Of batch normalisations; None: there are none.
        self.statistics: BatchStatistics | None = None
        # Arrays that links keep of each micro-batch: by step; of this step;
        # of the step before.
        self._kept: dict[str, dict[int, dict[Source, Any]]] = {}
        self._now: dict[int, dict[Source, Any]] = {}
        self._before: dict[int, dict[Source, Any]] = {}
        self._after: LinkState | None = None
        # Attributes before each micro-batch's first run on this rank.
        self._found: dict[int, saved] = {}
        # By link and name: the attribute before the step, and a ghost.
        self._marks: dict[Any, tuple[Any, Any]] = {}
        self._reporter = reporter_of(names)

    def begin(self, step: str, programs: list[StagedTrace],
              calls: Sequence[Callable[[], Any]]) -> None:
        """Starts a step.

        Args:
            step: ``'train'``, ``'evaluate'`` or ``'predict'``.
            programs: That of each micro-batch.
            calls: Call the model with each micro-batch.
        """
        self.programs, self._calls = programs, calls
        self._found = {}
        self.reports = [{} for _ in programs]
        kept = self._kept.get(step, {})
        self._before = {
            number: kept.get(number, {}) if program.state else {}
            for number, program in enumerate(programs)}
        self._now = self._kept[step] = {
            number: {} for number in range(len(programs))}
        if step == 'train':
            self._after = programs[-1].after

    def end(self) -> None:
        """Ends a step; sets attributes that keep state to ghosts."""
        self._marks = {}
        for entry in self._after.entries if self._after else ():
            ghosts = [ghost(leaf.shape, leaf.dtype, 'of an earlier batch',
                            leaf.xp) for leaf in entry.leaves]
            mark = nested.rebuilt(entry.tree, [
                chainer.Variable(array, requires_grad=False)
                if leaf.is_variable else array
                for leaf, array in zip(entry.leaves, ghosts, strict=True)])
            link = self.names.links[entry.link]
            self._marks[link, entry.name] = getattr(link, entry.name), mark
            setattr(link, entry.name, mark)

    def resume(self, step: str) -> bool:
        """Before a step: whether links go on from what they kept.

        They do not if one of the attributes was set since the last step
        (``reset_state()``).  Evaluation has a state of its own.
        """
        for (link, name), (initial, mark) in self._marks.items():
            if getattr(link, name) is mark:
                setattr(link, name, initial)
            else:
                self._kept.pop('train', None)
                self._after = None
        self._marks = {}
        if step == 'train':
            self._kept.pop('evaluate', None)
        return step in self._kept

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self._found = {}
        self.programs, self._calls, self._after = [], [], None

    def run(self, micro_batch: int, chunk: int,
            received: dict[Source, chainer.Variable], place: Place) -> Run:
        """Runs the model's forward, in which one chunk's calls are done."""
        program = self.programs[micro_batch]
        laps = self.laps
        run = Run(program.trace, program.stages, chunk, received,
                  program.wanted[chunk], self.names, place, self.where,
                  None if laps is None else laps.forward)
        if laps is not None:
            laps.start()
        self._reporter.observation = {}
        with self._state(micro_batch, chunk, program), \
                between_calls(place), self._reporter, settled(), \
                self._counting(program, chunk), intercepting(run):
            self._calls[micro_batch]()
            run.finish()
            if program.after:
                self._keep(program.after, self._now[micro_batch], chunk, run)
            reports = dict(self._reporter.observation)
        for name, value in reports.items():
            if program.reporters.get(name) == chunk:
                self.reports[micro_batch][name] = _real(run, value)
        self._reporter.observation = {}
        return run

    def rehearse(self, program: StagedTrace, call: Callable[[], Any],
                 place: Place) -> list[tuple[int, int]] | None:
        """See :attr:`.Rehearsal.labels`; None: other calls were made.

        Args:
            program: Of a similar forward pass.
            call: Calls the model.
            place: Seeds what Python draws between calls.
        """
        rehearsal = Rehearsal(program.trace, self.names)
        inside = program.trace.inside.keys()
        self._reporter.observation = {}
        try:
            with self._untouched(program), between_calls(place), \
                    self._reporter, untouched(), intercepting(rehearsal):
                self._put_state(program, {}, None)
                call()
                rehearsal.finish()
            if (self._reporter.observation.keys() - inside
                    != program.trace.reports.keys() - inside):
                return None
        except Exception as error:  # a new trace raises the model's own
            if isinstance(error, Mismatch):
                self.mismatch = str(error) or self.mismatch
            return None
        finally:
            self._reporter.observation = {}
        return rehearsal.labels

    def _counting(self, program: StagedTrace, chunk: int
                  ) -> contextlib.AbstractContextManager[None]:
        """Leaves out the statistics of links that other chunks have."""
        if self.statistics is None:
            return contextlib.nullcontext()
        return self.statistics.counting(
            lambda link: program.keepers.get(
                self.names.of(link) or '', chunk) == chunk)

    def _put_state(self, program: StagedTrace, values: dict[Source, Any],
                  chunk: int | None) -> None:
        """Gives links their state: values of this chunk, else ghosts."""
        if program.state:
            calls = iter(program.trace.calls)

            def pin(shape: Any, dtype: Any, stage: int, *_: Any) -> Any:
                ghost = next(calls).ghosts[0].array
                return values[ghost.source] if stage == chunk else ghost
            program.state.put(self.names.links, pin)

    def _untouched(self, program: StagedTrace) -> saved:
        """A block after which links have the attributes of before."""
        return saved(self.names.links,
                     program.trace.touched | _state_of(program))

    @contextlib.contextmanager
    def _state(self, micro_batch: int, chunk: int,
               program: StagedTrace) -> Iterator[None]:
        """A block in which links have the state of this micro-batch.

        Python counts once per micro-batch in attributes: later runs, of
        another chunk or before backward, begin with the attributes that the
        first run began with, and restore those that it left.
        """
        found = self._found.get(micro_batch)
        if found is None:
            self._found[micro_batch] = saved(
                self.names.links, self._counted(program)).note()
        with saved(self.names.links, _state_of(program)) if (
                found is None) else self._untouched(program):
            if found is not None:
                found.put_back()
            self._put_state(program, self._before[micro_batch], chunk)
            yield

    def _counted(self, program: StagedTrace) -> set[Attribute]:
        """Attributes that Python sets in forward.

        Not the persistent arrays that a link makes in its first call.
        """
        links = self.names.links
        return {(path, name) for path, name
                in program.trace.touched - _state_of(program)
                if name not in links[path]._persistent
                or vars(links[path]).get(name) is not None}

    def _keep(self, after: LinkState, into: dict[Source, Any],
              chunk: int, run: Run) -> None:
        """Keeps this chunk's state, by its pinned calls in the next trace."""
        number = 0
        for entry in after.entries:
            leaves, _ = nested.leaves(
                getattr(self.names.links[entry.link], entry.name))
            for leaf, found in zip(entry.leaves, leaves, strict=True):
                if leaf.stage == chunk:
                    into[Source(number, 0)] = run.real(
                        nested.array_of(found))
                number += 1


class ChainPart:
    """The calls of one chunk.

    Args:
        passes: Of this rank.
        chunk: Number of the chunk.
        parameters: That the chunk uses, by path.
    """

    def __init__(self, passes: Passes, chunk: int,
                 parameters: dict[str, chainer.Parameter]) -> None:
        self.name = f'stage {chunk}'
        self._passes, self._chunk = passes, chunk
        self._parameters = parameters

    def record(self, micro_batch: int, inputs: Arrays,
               wanted: tuple[bool, ...] | None, place: Place
               ) -> tuple[Tape, Arrays]:
        """See :meth:`.Block.record`."""
        variables, outputs, run = self._run(micro_batch, inputs, place)
        inner = {self._parameters[name].node for name
                 in self._passes.programs[micro_batch].inner
                 if name in self._parameters}
        uses = {node: count for node, count in run.uses.items()
                if node not in inner}
        return (Tape(variables, outputs, uses, self._passes.laps),
                tuple([output.array for output in outputs]))

    def infer(self, micro_batch: int, inputs: Arrays,
              place: Place) -> Arrays:
        """See :meth:`.Block.infer`."""
        _, outputs, _ = self._run(micro_batch, inputs, place)
        return tuple([output.array for output in outputs])

    def params(self) -> Iterable[chainer.Parameter]:
        """See :meth:`.Block.params`."""
        return self._parameters.values()

    def links(self) -> Iterable[chainer.Link]:
        """See :meth:`.Block.links`."""
        return self._passes.names.links.values()

    def _run(self, micro_batch: int, inputs: Arrays, place: Place
             ) -> tuple[tuple, tuple, Run]:
        program = self._passes.programs[micro_batch]
        incoming = program.incoming[self._chunk]
        if len(inputs) != len(incoming):
            raise RuntimeError(
                f'{len(inputs)} values came, {len(incoming)} were expected; '
                'the ranks have different plans')
        variables = tuple([
            chainer.Variable(array,
                             requires_grad=program.wants_gradient(source))
            for source, array in zip(incoming, inputs, strict=True)])
        run = self._passes.run(micro_batch, self._chunk, dict(zip(
            incoming, variables, strict=True)), place)
        outputs = tuple([
            run.value(source) for source in program.outgoing[self._chunk]])
        return variables, outputs, run


@contextlib.contextmanager
def between_calls(place: Place) -> Iterator[None]:
    """A block in which Python draws the same between calls on all ranks.

    By ``numpy.random`` and ``random``; the latter goes on afterwards as if
    nothing had been drawn.
    """
    state = random.getstate()
    random.seed(repr(place))
    try:
        with at(place._replace(layer=_BETWEEN)):
            yield
    finally:
        random.setstate(state)


def _state_of(program: StagedTrace) -> set[Attribute]:
    """Attributes of links that hold outputs of calls."""
    return {(entry.link, entry.name)
            for state in (program.trace.state, program.state)
            for entry in (state.entries if state else ())}


def _real(run: Run, value: Any) -> Any:
    """What was reported, with the arrays that ghosts stand for."""
    found, tree = nested.leaves(value)
    return nested.rebuilt(tree, [nested.array_of(run.real(leaf))
                                 for leaf in found])

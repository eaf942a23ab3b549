"""Micro-batches of a traced Chain, and a chunk's part in them."""
# A rank with a chunk runs the model's own forward for every micro-batch, and
# once more for recomputation, as if it were the only pass.  What Python does
# between calls must be the same each time, and on all ranks: the arrays of the
# batch are copied for each pass, as forward may write to them; random numbers
# between calls are seeded by the place of the micro-batch in the training;
# and what a pass counts in attributes of links begins where the first pass of
# this micro-batch began.
#
# Links that keep computed values (an LSTM's state) get the values of the last
# batch's same micro-batch on the rank that has them, and ghosts elsewhere.
# Between steps they have ghosts, so that reset_state() can be told from a
# state that was left alone.
from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import chainer

from ..intercept.function_calls import intercepting
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.batch_statistics import BatchStatistics
from ..pipeline.randomness import Place, at
from ..planning.calls import Source
from . import nested
from .attributes import Attribute, LinkState, saved
from .ghost import ghost
from .names import Names, reporter_of
from .program import StagedTrace
from .replay import Rehearsal, Run
from .trace import TracedCall

#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
#: What links keep of a micro-batch: the program's ``after``, and the values of
#: this rank by their pinned calls in the next trace.
Kept = tuple[LinkState | None, dict[Source, Any]]


class MicroBatch(nested.Fresh):
    """A micro-batch that a model, or a method of it, is called with.

    Args:
        function: Is called with ``args`` and ``kwargs``.
        args: Arrays.
        kwargs: Arrays, by name.
        place: Where in the training the micro-batch is; seeds what Python
            draws in forward.
        before: What links kept of the last batch's.

    Attributes:
        program: The calls that the function makes; known before the step.
        reports: What was reported in the calls of this rank, by name.
        kept: What links keep of it on this rank.
        found: The attributes before the first run on this rank.
    """

    program: StagedTrace

    def __init__(self, function: Callable, args: tuple,
                 kwargs: dict[str, Any], place: Place,
                 before: Kept = (None, {})) -> None:
        super().__init__(function, args, kwargs)
        self.place = place
        self.state, self.before = before
        self.reports: dict[str, Any] = {}
        self.kept: dict[Source, Any] = {}
        self.found: saved | None = None

    def key(self, mode: str) -> Any:
        """A key that micro-batches share if one trace may do for both."""
        return (mode, getattr(self.function, '__func__', self.function),
                nested.signature(self._tree),
                tuple((leaf.shape, leaf.dtype.str) for leaf in self._leaves),
                self.state.signature() if self.state else None)


class Passes:
    """The forward passes of a step, for all chunks of a rank.

    Args:
        names: Of the model's links and parameters.
        where: Says which rank has a chunk.
    """

    def __init__(self, names: Names, where: Callable[[int], str]) -> None:
        self.names, self.where = names, where
        self.micro_batches: Sequence[MicroBatch] = []
        #: Why a rehearsal has failed, if a constant was another one.
        self.mismatch = ''
        #: Of batch normalisations; None: there are none.
        self.statistics: BatchStatistics | None = None
        # By step: what links kept of the last one's micro-batches.
        self._kept: dict[str, list[Kept]] = {}
        self._after: LinkState | None = None
        # By link and name: the attribute before the step, and a ghost.
        self._marks: dict[Any, tuple[Any, Any]] = {}
        self.reporter = reporter_of(names)

    def begin(self, step: str, micro_batches: Sequence[MicroBatch]) -> None:
        """Starts a step: ``'train'``, ``'evaluate'`` or ``'predict'``."""
        self.micro_batches = micro_batches
        self._kept[step] = [(one.program.after, one.kept)
                            for one in micro_batches]
        if step == 'train':
            self._after = micro_batches[-1].program.after

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

    def resume(self, step: str) -> list[Kept]:
        """The state that links go on from in a step, by micro-batch.

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
        return self._kept.get(step, [])

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self.micro_batches, self._after = [], None

    def rehearse(self, program: StagedTrace, micro_batch: MicroBatch
                 ) -> list[tuple[int, int]] | None:
        """See :attr:`.Rehearsal.labels`; None: other calls were made.

        Args:
            program: Of a similar forward pass.
            micro_batch: Calls the model.
        """
        rehearsal = Rehearsal(program.trace, self.names)
        inside = program.trace.inside.keys()
        self.reporter.observation = {}
        try:
            with saved(self.names.links, program.trace.touched
                       | state_of(program)), \
                    between_calls(micro_batch.place), \
                    self.reporter, intercepting(rehearsal):
                self.put_state(program, {}, None)
                micro_batch()
                rehearsal.finish()
            if (self.reporter.observation.keys() - inside
                    != program.trace.reports.keys() - inside):
                return None
        except Exception:       # a new trace raises the model's own
            self.mismatch = rehearsal.why or self.mismatch
            return None
        finally:
            rehearsal.end()
            self.reporter.observation = {}
        return rehearsal.labels

    def put_state(self, program: StagedTrace, values: dict[Source, Any],
                  chunk: int | None) -> None:
        """Gives links their state: values of this chunk, else ghosts."""
        if program.state:
            calls = iter(program.trace.calls)

            def pin(shape: Any, dtype: Any, stage: int, *_: Any) -> Any:
                ghost = next(calls).ghosts[0].array
                return values[ghost.source] if stage == chunk else ghost
            program.state.put(self.names.links, pin)


class ChainPart:
    """The calls of one chunk, see :class:`.Part`.

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

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Runs the model's forward, in which this chunk's calls are done."""
        passes, chunk = self._passes, self._chunk
        one = passes.micro_batches[micro_batch]
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
        run = Run(program.trace, program.stages, chunk,
                  dict(zip(incoming, variables, strict=True)),
                  program.wanted[chunk], passes.names, place, passes.where)
        # What a link has kept here may be needed by later chunks only.
        run.made.update({
            source: chainer.Variable(value, requires_grad=False)
            for source, value in one.before.items()
            if source in program.wanted[chunk]})
        args, kwargs = one.arguments()
        passes.reporter.observation = {}
        with self._state(one), between_calls(place), \
                passes.reporter, self._counting(program), intercepting(run):
            one.function(*args, **kwargs)
            run.finish()
            if program.after:
                self._keep(program.after, one.kept, run)
            reports = passes.reporter.observation
        for name, value in reports.items():
            if program.reporters.get(name) == chunk:
                one.reports[name] = _real(run, value)
        passes.reporter.observation = {}
        outputs = tuple([run.value(source)
                         for source in program.outgoing[chunk]])
        inner = {self._parameters[name].node for name in program.inner
                 if name in self._parameters}
        uses = {node: count for node, count in run.uses.items()
                if node not in inner}
        return (Tape(variables, outputs, uses,
                     said=functools.partial(_said, run.own, self.name)),
                tuple([output.array for output in outputs]))

    def params(self) -> Iterable[chainer.Parameter]:
        """See :meth:`.Part.params`."""
        return self._parameters.values()

    def links(self) -> Iterable[chainer.Link]:
        """See :meth:`.Part.links`."""
        return self._passes.names.links.values()

    def _counting(self, program: StagedTrace
                  ) -> contextlib.AbstractContextManager[None]:
        """Leaves out the statistics of links that other chunks have."""
        statistics, names = self._passes.statistics, self._passes.names
        if statistics is None:
            return contextlib.nullcontext()
        return statistics.counting(
            lambda link: program.keepers.get(
                names.of(link) or '', self._chunk) == self._chunk)

    @contextlib.contextmanager
    def _state(self, micro_batch: MicroBatch) -> Iterator[None]:
        """A block in which links have the state of this micro-batch.

        Python counts once per micro-batch in attributes: later runs, of
        another chunk or before backward, begin with the attributes that the
        first run began with, and restore those that it left.
        """
        links, program = self._passes.names.links, micro_batch.program
        again = micro_batch.found
        # Not the persistent arrays that a link makes in its first call.
        counted = {(path, name) for path, name
                   in program.trace.touched - state_of(program)
                   if name not in links[path]._persistent
                   or vars(links[path]).get(name) is not None
                   } if again is None else program.trace.touched
        if again is None:
            micro_batch.found = saved(links, counted).note()
        with saved(links, state_of(program) if again is None
                   else counted | state_of(program)):
            if again is not None:
                again.put_back()
            self._passes.put_state(program, micro_batch.before, self._chunk)
            yield

    def _keep(self, after: LinkState, into: dict[Source, Any],
              run: Run) -> None:
        """Keeps this chunk's state, by its pinned calls in the next trace."""
        number = 0
        for entry in after.entries:
            leaves, _ = nested.leaves(getattr(
                self._passes.names.links[entry.link], entry.name))
            for leaf, found in zip(entry.leaves, leaves, strict=True):
                if leaf.stage == self._chunk:
                    into[Source(number, 0)] = run.real(
                        nested.array_of(found))
                number += 1


def _said(own: dict[int, TracedCall], name: str, function: Any) -> str:
    call = own.get(id(function))
    return f'{call.name} in {call.link}, on {name}' if call else name


@contextlib.contextmanager
def between_calls(place: Place) -> Iterator[None]:
    """A block in which all ranks draw the same numbers between calls.

    The place seeds ``numpy.random`` and ``random``; the latter gets its state
    back.
    """
    state = random.getstate()
    random.seed(repr(place))
    try:
        with at(place._replace(layer=_BETWEEN)):
            yield
    finally:
        random.setstate(state)


def state_of(program: StagedTrace) -> set[Attribute]:
    """Attributes of links that hold outputs of calls."""
    return {(entry.link, entry.name)
            for state in (program.trace.state, program.state)
            for entry in (state.entries if state else ())}


def _real(run: Run, value: Any) -> Any:
    """What was reported, with the arrays that ghosts stand for."""
    found, tree = nested.leaves(value)
    return nested.rebuilt(tree, [nested.array_of(run.real(leaf))
                                 for leaf in found])

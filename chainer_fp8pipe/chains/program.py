"""The calls of a forward pass, which a rank makes in part, or makes again."""
# A program has the calls of one micro-batch, in their order, each with its
# arguments, attributes and configuration as they were when forward made the
# call.  A chunk of the model is the calls between two cuts.  A rank makes the
# calls of its own chunks, on real values, whose graph begins and ends there;
# others it forgets as soon as it knows where they are made.  So nothing but
# functions runs here: no code of the user's that counts, draws or branches,
# however often a chunk is made.
#
# Where each call is made (`Layout`) follows from what calls read.  It is found
# once for all programs in which the same functions read the same values, and
# has a digest, by which ranks tell that they are about to do the same.
from __future__ import annotations

import collections
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import (
    Interceptor,
    call_unchecked,
    intercepting,
    suspended,
)
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.randomness import Place, preserved, seed_at
from . import nested
from .calls import Assignment, Call, Source, assign
from .functions import again, attributes_of
from .measure import Figures
from .names import Names
from .placeholder import (
    PlaceholderError,
    describe_source,
    evaluated,
    is_placeholder,
    known,
    sources,
    user_line,
)
from .plan import PartitionPlan
from .whole_call import WholeCall

LOCAL: Any = chainer.config._local


class CallError(RuntimeError):
    """A call of a function failed; the cause is the exception."""


@dataclass(eq=False)
class RecordedCall(Call):
    """A call that is not made yet, with all that making it takes.

    Attributes:
        figures: Of all calls of this form; None: a value that a link has kept
            from an earlier program.
        node: The function; it is not run itself, but copies of it.
        attributes: Its attributes from before the call.
        arguments: Arrays and variables, with placeholders among them.
        results: The outputs that forward went on with.
        hidden: Names of attributes with placeholders inside.
        config: Settings of Chainer's that forward has changed.
        reads: Paths of the links whose persistent arrays the call uses.
        line: The code and the number of the line of the user's.
        before: Of a kept value: the program and name of it there.
        known: What it gives, where that depends on the batch alone.
        made: The :class:`.WholeCall` that has run and will run again.
        elements: Of each channel, if it normalises over several ranks.
    """

    figures: Figures | None = None
    node: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    hidden: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    line: tuple[Any, int] | None = None
    before: tuple[Program, Source] | None = None
    known: tuple | None = None
    made: Any = None
    elements: Any = None

    def error(self, number: int, text: str) -> CallError:
        """The error for this call."""
        where = '' if self.line is None else (
            f'{self.line[0].co_filename}:{self.line[1]}: ')
        return CallError(
            f'{where}call {number} ({self.name} in {self.link}){text}')

    def forget(self) -> None:
        """Drops what making the call takes."""
        self.node = self.before = self.known = None
        self.attributes, self.arguments = {}, ()


class Layout:
    """Where the calls of a program are made, and what crosses.

    Args:
        program: One of those with this layout.
        plan: Where the model is cut.
        keepers: The chunk with the calls of a link that keeps running
            values, by the link's path; those of this program are added.
        states: The chunk that makes a value which a link keeps for the next
            batch, by the link's path and the attribute; those of this program
            are added.  Where it is made decides where the next batch uses it.
        having: The chunks that have a parameter, by its path; None: any.

    Raises:
        ValueError: The calls of such a link would be on two chunks, or a
            call needs a parameter where it is not.

    Attributes:
        chunks: Of each call.
        incoming: For each chunk the values that it receives.
        outgoing: For each chunk the values that it sends on; for the last
            one what the result is made of.
        reporters: The chunk that knows a reported value, by its name.
        holders: The chunks that use a parameter, by its path.
        digest: The same on ranks with the same calls in the same places.
    """

    def __init__(self, program: Program, plan: PartitionPlan,
                 keepers: dict[str, int],
                 states: dict[tuple[str, str], int],
                 having: Mapping[str, tuple[int, ...]] | None) -> None:
        calls, results = program.calls, sources_in(program.result)
        made = {key: sources_in(value) for key, value in program.kept.items()}
        groups = [*map(sources_in, program.reports.values()), *made.values()]
        late: dict[int, int] = {}

        def assigned() -> Assignment:
            return assign(calls, plan.order, plan.positions, results, groups, {
                source.call: states[key] for key, one in made.items()
                for source in one if key in states
            } | {
                number: keepers[name] for number, call in enumerate(calls)
                for name in (*call.whole, *call.reads) if name in keepers
            } | late)
        known, found = set(keepers), assigned()
        more = _late(calls, found, having or {})
        while more and not more.items() <= late.items():
            late.update(more)
            found = assigned()
            more = _late(calls, found, having or {})
        for call, chunk in zip(calls, found.chunks, strict=True):
            for name in set(call.whole) - known:
                keepers[name] = max(chunk, keepers.get(name, 0))
        found = assigned()
        problem = [name for call, chunk in zip(
            calls, found.chunks, strict=True)
            for name in (*call.whole, *call.reads)
            if keepers.get(name, chunk) != chunk]
        if problem:
            raise ValueError(
                f'link {problem[0]} keeps running values, and its calls would '
                'be on two ranks for inputs of this form; make the partition '
                'with such an example')
        last = len(plan.cuts)
        self.chunks, self.holders = found.chunks, found.holders
        for key, one in made.items():
            if one:
                states.setdefault(key, max(self.chunks[source.call]
                                           for source in one))
        self.incoming = ((), *found.crossing)
        self.outgoing = (*found.crossing, results)
        self.reporters = {
            name: max([self.chunks[source.call] for source
                       in sources_in(value)], default=last)
            for name, value in program.reports.items()}
        text = hashlib.blake2b(digest_size=8)
        for call in calls:
            text.update(repr((
                call.name, call.link, call.inputs, call.parameters,
                [(key, value.shape, str(value.dtype))
                 for key, value in call.outputs.items()])).encode())
        text.update(repr((self.chunks, sorted(self.reporters))).encode())
        self.digest = int.from_bytes(text.digest(), 'big') >> 1


def _late(calls: Sequence[RecordedCall], found: Assignment,
          having: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """Calls that are before their parameters' chunk, and that chunk.

    Where control flow is another one, a call may come before the cut that it
    came after in the example.
    """
    return {
        number: min(of) for number, (call, chunk) in enumerate(
            zip(calls, found.chunks, strict=True))
        for name in call.parameters
        if chunk not in having.get(name, (chunk,))
        and (of := [one for one in having[name] if one > chunk])}


class Program:
    """The calls of one micro-batch, and on this rank their values.

    Args:
        names: Of the model's links and parameters.
        place: Where in the training the micro-batch is; seeds what calls draw.

    Attributes:
        calls: In the order in which forward made them.
        result: What forward returned, made of placeholders.
        reports: What forward has reported, by name.
        guards: By name of a report: what a question after it expected to hear.
        kept: Attributes of links, by path and name, that a later program may
            read.
        labels: For each loss that leaves labels out, how many labels count
            (-1: unknown), and how many it leaves out.
        numbers: Of the calls' attributes, which all ranks must share.
        normalised: Batch normalisations: number of the call, link, arrays of
            mean and variance, whether it is finetuned.
        layout: Where calls are made.
        values: Of ``kept``, on this rank.
    """

    layout: Layout

    def __init__(self, names: Names, place: Place) -> None:
        self.names, self.place = names, place
        self.calls: list[RecordedCall] = []
        self.result: Any = None
        self.reports: dict[str, Any] = {}
        self.guards: dict[str, tuple[bool, str]] = {}
        self.kept: dict[tuple[str, str], Any] = {}
        self.labels: list[tuple[int, int]] = []
        self.numbers: list[Any] = []
        self.normalised: list[tuple[int, Any, Any, Any, bool]] = []
        self.pins: dict[tuple[int, Source], Source] = {}
        self.unchained: set[Source] = set()
        self.values: dict[Source, Any] = {}
        self.found: dict[str, Any] = {}
        self._began: set[int] = set()           # chunks

    # --- while it is recorded ------------------------------------------------

    def describe(self, source: Source) -> str:
        """The name of a value in messages."""
        if source.call >= len(self.calls):
            return 'a value of an earlier batch'
        call = self.calls[source.call]
        return f'call {source.call} ({call.name} in {call.link})'

    def guard(self, array: Any, expected: bool) -> None:
        """Notes a question that was answered before the value is known."""
        name = f'\0guard {len(self.guards)}'
        self.guards[name] = expected, user_line()
        self.reports[name] = array

    def known(self, source: Source) -> Any:
        """A value that depends on the batch alone; None: it does not."""
        call = self.calls[source.call]
        if call.known is None:
            call.known = self._known(call)
        return call.known[source.output] if call.known and isinstance(
            source.output, int) else None

    def _known(self, call: RecordedCall) -> tuple:
        if (call.node is None or call.parameters or call.draws or call.hidden
                or isinstance(call.node, WholeCall)):
            return ()
        arguments = []
        for x in call.arguments:
            array = nested.array_of(x)
            value = known(array)
            if value is None or isinstance(x, chainer.Parameter):
                return ()
            arguments.append(value)
        with suspended(), chainer.no_backprop_mode(), preserved():
            return tuple([out.array for out in again(
                call.node, call.attributes).apply(tuple(arguments))])

    def description(self, where: str = '') -> dict[str, str]:
        """What all ranks must have recorded alike, by name."""
        found = {
            f'call {number}{where}': f'{call.name} in {call.link} giving '
            + ', '.join(str(value.shape) for value in call.outputs.values())
            for number, call in enumerate(self.calls)}
        return found | {f'number {index} in the calls{where}': repr(one)
                        for index, one in enumerate(self.numbers)}

    def key(self) -> Any:
        """Equal for programs with one layout."""
        return (tuple([(call.figures, call.link, call.inputs,
                        call.parameters, call.whole, call.reads, call.pinned)
                       for call in self.calls]),
                tuple([(name, sources_in(value))
                       for name, value in self.reports.items()]),
                tuple(map(sources_in, self.kept.values())),
                sources_in(self.result))

    def settle(self, layout: Layout, own: Iterable[int]) -> None:
        """Notes where calls are made; forgets those of other ranks."""
        self.layout, mine = layout, set(own)
        for call, chunk in zip(self.calls, layout.chunks, strict=True):
            call.known = None
            if chunk not in mine:
                call.forget()

    def chunk_of(self, source: Source) -> int | None:
        """The chunk that keeps a value; None: none does."""
        return self.layout.chunks[source.call] if any(
            source in sources_in(value) for value in self.kept.values()
        ) else None

    def forget(self) -> None:
        """Drops all but the values that a later program may read."""
        self.calls, self.result = [], None
        self.reports, self.found, self.normalised = {}, {}, []

    # --- a chunk -------------------------------------------------------------

    def run(self, chunk: int, arrays: Arrays, name: str
            ) -> tuple[Tape, Arrays, list[Any]]:
        """Makes the calls of a chunk.

        Args:
            chunk: Its number.
            arrays: What comes from chunks before.
            name: Of the chunk in messages.

        Returns:
            The way back, what goes on, and the batch normalisations among
            the calls: link, elements of each channel, mean, variance,
            whether it is finetuned.
        """
        layout, is_first = self.layout, chunk not in self._began
        incoming = layout.incoming[chunk]
        if len(arrays) != len(incoming):
            raise RuntimeError(
                f'{len(arrays)} values came, {len(incoming)} were expected; '
                'the ranks have different plans')
        self._began.add(chunk)
        inputs = tuple([
            chainer.Variable(array, requires_grad=self._wants(source))
            for source, array in zip(incoming, arrays, strict=True)])
        values: dict[Source, Any] = dict(zip(incoming, inputs, strict=True))
        uses: collections.Counter[Any] = collections.Counter()
        numbers: dict[int, int] = {}
        inner: set[Any] = set()
        found: dict[str, Any] = {}
        with intercepting(_MAKING), self.names.reporter.scope(found):
            for number, of in enumerate(layout.chunks):
                call = self.calls[number]
                if of != chunk:
                    continue
                if call.figures is None:        # kept from an earlier batch
                    assert call.before is not None
                    program, source = call.before
                    values[Source(number, 0)] = chainer.Variable(
                        program.values[source], requires_grad=False)
                    continue
                node, arguments = self._ready(call, values, is_first)
                numbers[id(node)] = number
                uses.update({x._node for x in arguments
                             if isinstance(x, chainer.Parameter)})
                inner.update(self.names.parameters[name].node
                             for name in call.figures.inner)
                self._make(number, call, node, arguments, values)
        outputs = tuple([
            values[one] for one in layout.outgoing[chunk]
        ] if chunk + 1 < len(layout.outgoing) else [
            chainer.as_variable(self.real(leaf, values))
            for leaf in nested.leaves(self.result)[0]])
        normalised = []
        if is_first:
            self._note_reports(chunk, values, found)
            for source in {one for value in self.kept.values()
                           for one in sources_in(value)}:
                if layout.chunks[source.call] == chunk:
                    self.values[source] = values[source].array
            normalised = [
                (link, self._elements(self.calls[number], mean), mean,
                 variance, finetuned)
                for number, link, mean, variance, finetuned
                in self.normalised if layout.chunks[number] == chunk]
        calls = self.calls

        def describe(function: Any) -> str:
            number = numbers.get(id(function))
            return name if number is None else (
                f'{calls[number].name} in {calls[number].link}, on {name}')
        tape = Tape(inputs, outputs, {
            node: count for node, count in uses.items() if node not in inner},
            describe=describe, numbers=numbers)
        return tape, tuple([one.array for one in outputs]), normalised

    def _ready(self, call: RecordedCall, values: dict, is_first: bool
               ) -> tuple[Any, tuple]:
        """The function of a call, ready to be run, and its arguments."""
        node, call.made = call.made, None
        if node is None:
            own = dict(call.attributes)
            if not is_first and call.figures:
                own.update((name, own[name].copy())     # it has written
                           for name in call.figures.writes)
            node = again(call.node, own)
        own = attributes_of(node)
        for name in call.hidden:
            leaves, tree = nested.leaves(own[name])
            own[name] = nested.rebuilt(tree, [
                self.real(leaf, values) for leaf in leaves])
        if is_first and isinstance(node, WholeCall) and chainer.config.train:
            node.repeats = not chainer.config.enable_backprop
            call.made = node if node.repeats else None
        return node, tuple([self.real(x, values) for x in call.arguments])

    def _make(self, number: int, call: RecordedCall, node: Any,
              arguments: tuple, values: dict) -> None:
        """Makes one call; checks the shapes of its outputs."""
        try:
            with settings(call.config), (
                    self._seeded(number, node, arguments) if call.draws
                    else _NO_BLOCK):
                outs = node.apply(arguments)
        except PlaceholderError:
            raise
        except Exception as error:
            raise call.error(
                number, f': {type(error).__name__}: {error}') from error
        call.elements = getattr(node, 'elements', None)
        if len(outs) != len(call.results):
            raise call.error(number, f' gave {len(outs)} arrays, and '
                             f'{len(call.results)} were expected')
        for key, value in call.outputs.items():
            source = Source(number, key)
            if isinstance(key, str):
                values[source] = chainer.Variable(
                    attributes_of(node)[key], requires_grad=False)
                continue
            out = values[source] = outs[key]
            if out.shape != value.shape or out.dtype != value.dtype:
                raise call.error(
                    number, f' gave {out.dtype} {out.shape}, and '
                    f'{value.dtype} {value.shape} was expected for inputs '
                    'of these shapes; what a function, or a link that is run '
                    'as a whole, returns must follow from them')
            if source in self.unchained:
                out.unchain()

    def real(self, value: Any, values: Mapping[Source, Any]) -> Any:
        """What a placeholder stands for; other values as they are."""
        array = nested.array_of(value)
        if not is_placeholder(array):
            return value
        is_variable = isinstance(value, chainer.Variable)
        if array.recipe is not None:
            with suspended():
                made = evaluated(array.recipe, [
                    nested.array_of(self.real(leaf, values))
                    for leaf in array.recipe.leaves])
            return chainer.Variable(made) if is_variable else made
        source = array.source
        if isinstance(source, str):
            if isinstance(value, chainer.Parameter):
                return value
            found = self.names.parameters[source]
            return chainer.Variable(found.array) if is_variable else (
                found.array)
        if array.program is not self:
            source = self.pins[id(array.program), source]
        found = values.get(source)
        if found is None:
            raise PlaceholderError(
                f'{describe_source(array)} is needed and did not come')
        if is_variable and isinstance(source.output, int) and any(
                one._node is value._node
                for one in self.calls[source.call].results):
            return found
        # A variable that the user made of the array has no way back.
        return chainer.Variable(found.array) if is_variable else found.array

    # --- details -------------------------------------------------------------

    def _wants(self, source: Source) -> bool:
        value = self.calls[source.call].outputs[source.output]
        return value.wants and value.dtype.kind == 'f'

    def _note_reports(self, chunk: int, values: dict, inside: dict) -> None:
        for name, value in inside.items():      # in links run as a whole
            leaves, tree = nested.leaves(value)
            self.found[name] = nested.rebuilt(
                tree, list(map(nested.array_of, leaves)))
        for name, value in self.reports.items():
            if self.layout.reporters[name] != chunk:
                continue
            leaves, tree = nested.leaves(value)
            made = nested.rebuilt(tree, [
                nested.array_of(self.real(leaf, values)) for leaf in leaves])
            if name not in self.guards:
                self.found[name] = made
            elif bool(made) is not self.guards[name][0]:
                raise FloatingPointError(
                    f'{self.guards[name][1]}: the question whether numbers '
                    'are finite was answered by yes, and they are not')

    def _elements(self, call: RecordedCall, mean: Any) -> Any:
        """Elements of each channel."""
        return call.elements or numpy.prod(
            nested.array_of(call.arguments[0]).shape,
            dtype=int) // max(mean.size, 1)

    @contextlib.contextmanager
    def _seeded(self, number: int, node: Any, arguments: tuple
                ) -> Iterator[None]:
        """A block in which the call's place seeds what the call draws."""
        xp = chainer.backend.get_array_module(
            *map(nested.array_of, arguments))
        place = self.place
        link = getattr(node, 'run', None)
        if isinstance(link, chainer.Link) and any(
                parameter._data[0] is None for parameter in link.params()):
            # Initial values, which are the same on every replica.
            place = place._replace(iteration=0, first_sample=0)
        with preserved():
            seed_at(place._replace(layer=number), xp)
            yield


class _Making(Interceptor):
    """Makes calls without Chainer's checks, which recording has done."""

    apply = staticmethod(call_unchecked)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        # A link that was recorded, but not run, would give a shape again.
        return parameter._data[0] is not None


_MAKING = _Making()


def sources_in(value: Any) -> tuple[Source, ...]:
    """Names the calls that made a value, or the values in a tuple."""
    return tuple(source for leaf in nested.leaves(value)[0]
                 for source in sources(nested.array_of(leaf)))


def settings(config: Mapping[str, Any]) -> Any:
    """A block with settings of Chainer's."""
    return _with(config) if config else _NO_BLOCK


@contextlib.contextmanager
def _with(config: Mapping[str, Any]) -> Iterator[None]:
    own = vars(LOCAL)
    before = dict(own)
    own.update(config)
    try:
        yield
    finally:
        own.clear()
        own.update(before)


_NO_BLOCK: Any = contextlib.nullcontext()

"""The calls of a forward pass, which a rank makes in part, or makes again."""
# A program has the calls of one micro-batch, in their order, and what making
# them takes: the functions, with their attributes and arguments as they were
# when forward made the call.  A chunk of the model is the calls between two
# cuts.  A rank makes the calls of its own chunks, on real values, whose graph
# begins and ends there; what others take it forgets as soon as it knows where
# they are made.  So nothing but functions runs here: no code of the user's
# that counts, draws or branches, however often a chunk is made.
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import chainer

from ..intercept.function_calls import (
    Interceptor,
    again,
    call_unchecked,
    intercepting,
)
from ..pipeline.backprop import Arrays, Tape
from ..pipeline.means import BatchStatistics
from ..pipeline.randomness import Place, seed_at
from . import nested
from .attributes import Names
from .calls import Call, Source, Value
from .layout import Layout, sources_in
from .measure import attributes_of
from .placeholder import (
    Ahead,
    PlaceholderError,
    describe_source,
    is_placeholder,
    user_line,
)
from .whole_call import WholeCall

LOCAL: Any = chainer.config._local
_NO_BLOCK: Any = contextlib.nullcontext()


class CallError(RuntimeError):
    """A call of a function failed; the cause is the exception."""


@dataclass(eq=False)
class Notes:
    """What recording a program notes beside its calls."""

    #: For each loss that leaves labels out, how many labels count (-1:
    #: unknown), and how many it leaves out.
    labels: list[tuple[int, int]] = field(default_factory=list)
    #: Among the calls' attributes, which all ranks must share.
    numbers: list[Any] = field(default_factory=list)
    #: What stands for values of earlier programs, by program and name there.
    pins: dict[tuple[Program, Source], Source] = field(default_factory=dict)


class Program:
    """The calls of one micro-batch, and on this rank their values.

    Its place in the training seeds what the calls draw.
    """

    layout: Layout

    def __init__(self, names: Names, place: Place) -> None:
        self.names, self.place = names, place
        self.calls: list[Call] = []
        #: What making each call takes: the function, which is not run itself,
        #: but copies of it; its attributes from before; and its arguments,
        #: with placeholders in both.  None: it is not made here.
        self.takes: list[tuple[Any, Any, tuple] | None] = []
        self.notes = Notes()
        self.result: Any = None                 # what forward returned
        self.reports: dict[str, Any] = {}       # by name
        #: Attributes of links that a later program may read; their values.
        self.kept: dict[tuple[str, str], Any] = {}
        self.values: dict[Source, Any] = {}
        self.found: dict[str, Any] = {}         # values of reports

    # --- while it is recorded ------------------------------------------------

    def describe(self, source: Source) -> str:
        """The name of a value in messages."""
        if source.call >= len(self.calls):
            return 'a value of an earlier batch'
        call = self.calls[source.call]
        return f'call {source.call} ({call.name} in {call.link})'

    def pin(self, array: Any) -> Source:
        """Names a value that a link has kept from an earlier program."""
        pins, key = self.notes.pins, (array.program, array.source)
        if key not in pins:
            chunk = array.program.chunk_of(array.source)
            if chunk is None:
                raise ValueError(
                    f'{user_line()}: a value of an earlier batch or '
                    'micro-batch is used, which nobody has kept; keep state '
                    'in attributes of links, and call partition() with an '
                    'example that reads it in its second call')
            pins[key] = Source(len(self.calls), 0)
            self.calls.append(Call(
                'state', outputs={0: Value(array.shape, array.dtype)},
                pinned=chunk))
            self.takes.append(None)
        return pins[key]

    def description(self, where: str = '') -> dict[str, str]:
        """What all ranks must have recorded alike, by name."""
        return {
            f'call {number}{where}': f'{call.name} in {call.link} giving '
            + ', '.join(str(value.shape) for value in call.outputs.values())
            for number, call in enumerate(self.calls)} | {
            f'number {index} in the calls{where}': repr(one)
            for index, one in enumerate(self.notes.numbers)}

    def key(self) -> Any:
        """Equal for programs with one layout."""
        return (tuple([call if call.pinned is None else
                       (call.pinned, *call.outputs.values())
                       for call in self.calls]),
                tuple([(name, sources_in(value))
                       for name, value in self.reports.items()]),
                tuple(map(sources_in, self.kept.values())),
                sources_in(self.result))

    def settle(self, layout: Layout, own: Iterable[int]) -> None:
        """Notes where calls are made; forgets what others take."""
        self.layout, mine = layout, set(own)
        self.takes = [one if chunk in mine else None for one, chunk in zip(
            self.takes, layout.chunks, strict=True)]

    def chunk_of(self, source: Source) -> int | None:
        """The chunk that keeps a value; None: none does."""
        return self.layout.chunks[source.call] if any(
            source in sources_in(value) for value in self.kept.values()
        ) else None

    def forget(self) -> None:
        """Drops all but the values that a later program may read."""
        self.calls, self.takes, self.result = [], [], None
        self.reports, self.found, self.notes = {}, {}, Notes()

    # --- a chunk -------------------------------------------------------------

    def run(self, chunk: int, arrays: Arrays, name: str,
            statistics: BatchStatistics) -> tuple[Tape, Arrays]:
        """Makes the calls of a chunk, named ``name``, on what has come.

        Returns the way back, and what goes on.  Links that run as one call
        have their statistics counted.
        """
        layout, is_first = self.layout, not chainer.config.in_recomputing
        incoming = layout.incoming[chunk]
        calls = self.calls
        if len(arrays) != len(incoming):
            raise ValueError(
                'another rank has recorded other calls of this micro-batch, '
                'which must not depend on the rank')
        inputs = tuple([chainer.Variable(array, requires_grad=calls[
            source.call].outputs[source.output].wants)
            for source, array in zip(incoming, arrays, strict=True)])
        values: dict[Source, Any] = dict(zip(incoming, inputs, strict=True))
        real = functools.partial(self.real, values)
        values.update({
            pin: chainer.Variable(before.values[source], requires_grad=False)
            for (before, source), pin in self.notes.pins.items()
            if layout.chunks[pin.call] == chunk})
        numbers: dict[int, int] = {}
        found: dict[str, Any] = {}
        with intercepting(_Making(statistics)), \
                self.names.reporter.scope(found):
            for number, taken in enumerate(self.takes):
                if taken and layout.chunks[number] == chunk:
                    node = self._ready(number, real, is_first)
                    numbers[id(node)] = number
                    self._make(number, node, list(map(real, taken[2])), values)
                    for source in layout.unread[number]:
                        values.pop(source, None)
        outputs = tuple([
            values[one] for one in layout.outgoing[chunk]
        ] if chunk + 1 < len(layout.outgoing) else [
            chainer.as_variable(real(leaf))
            for leaf in nested.leaves(self.result)[0]])
        if is_first:
            found.update({      # beside those of links run as a whole
                key: nested.mapped(value, real)
                for key, value in self.reports.items()
                if layout.reporters[key] == chunk})
            self.found.update({key: nested.mapped(value, _without_graph)
                               for key, value in found.items()})
            self.values.update({
                source: values[source].array for source in sources_in(
                    list(self.kept.values()))
                if layout.chunks[source.call] == chunk})

        def describe(function: Any) -> str:
            number = numbers.get(id(function))
            return name if number is None else (
                f'{calls[number].name} in {calls[number].link}, on {name}')
        return (Tape(inputs, outputs, describe, numbers),
                tuple([one.array for one in outputs]))

    def _ready(self, number: int, real: Callable, is_first: bool) -> Any:
        """The function of a call, ready to be run."""
        call = self.calls[number]
        node, attributes, arguments = self.takes[number] or (None, None, ())
        if attributes is not None:      # else it has run already
            node = again(node, attributes)
            own = attributes_of(node)
            for name in () if is_first else call.writes:
                own[name] = own[name].copy()        # it has written
            for name in call.hidden:
                own[name] = nested.mapped(own[name], real)
            if is_first and type(node) is WholeCall and chainer.config.train:
                node.repeats = not chainer.config.enable_backprop
                if node.repeats:
                    self.takes[number] = node, None, arguments
        return node

    def _make(self, number: int, node: Any, arguments: list, values: dict
              ) -> None:
        """Makes one call; checks the shapes of its outputs."""
        call = self.calls[number]

        def error(text: str) -> CallError:
            return CallError(f'{self.describe(Source(number, 0))}{text}')
        try:
            with (self._as_recorded(number, call, node, arguments)
                  if call.draws or call.config else _NO_BLOCK):
                outs: Any = call_unchecked(node, arguments,
                                           chainer.FunctionNode.apply)
        except PlaceholderError:
            raise
        except Exception as problem:
            raise error(f': {type(problem).__name__}: {problem}') from problem
        if len(outs) in call.outputs or len(outs) - 1 not in call.outputs:
            raise error(f' gave {len(outs)} arrays, which were others before')
        for key, value in call.outputs.items():
            source = call.forms[key].source
            if type(key) is str:
                values[source] = chainer.Variable(
                    attributes_of(node)[key], requires_grad=False)
                continue
            out = values[source] = outs[key]
            if out.shape != value.shape or out.dtype != value.dtype:
                raise error(
                    f' gave {out.dtype} {out.shape}, and '
                    f'{value.dtype} {value.shape} was expected for inputs '
                    'of these shapes; what a function, or a link that is run '
                    'as a whole, returns must follow from them')

    def real(self, values: Mapping[Source, Any], value: Any) -> Any:
        """What a placeholder stands for; other values as they are."""
        array = nested.array_of(value)
        if not is_placeholder(array) or isinstance(value, chainer.Parameter):
            return value
        source = array.source
        if isinstance(source, str):
            found: Any = self.names.parameters[source]
        elif array.program is not self:
            found = values.get(self.notes.pins[array.program, source])
        else:
            found = values.get(source)
            if found is not None and type(value) is Ahead:
                return found
        if found is None:
            raise PlaceholderError(
                f'{describe_source(array)} is needed and did not come')
        # A variable that the user made of the array has no way back.
        return chainer.Variable(found.array) if isinstance(
            value, chainer.Variable) else (
            found.array[()] if array.scalar else found.array)

    @contextlib.contextmanager
    def _as_recorded(self, number: int, call: Call, node: Any,
                     arguments: list) -> Iterator[None]:
        """A block of the call's configuration, where its place seeds draws.
        """
        xp = chainer.backend.get_array_module(
            *map(nested.array_of, arguments))
        place = self.place
        link = getattr(node, 'run', None)
        if isinstance(link, chainer.Link) and any(
                parameter._data[0] is None for parameter in link.params()):
            # Initial values, which are the same on every replica.
            place = place._replace(iteration=0, first_sample=0)
        with contextlib.ExitStack() as stack:
            for name, value in call.config.items():
                stack.enter_context(chainer.using_config(name, value))
            if call.draws:
                seed_at(place._replace(layer=number), xp)
            yield


class _Making(Interceptor):
    """Makes calls without Chainer's checks, which recording has done."""

    apply = staticmethod(call_unchecked)

    def __init__(self, statistics: BatchStatistics) -> None:
        self._statistics = statistics

    def call_link(self, *call: Any) -> Any:
        return self._statistics.call_link(*call)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        # A link that was recorded, but not run, would give a shape again.
        return parameter._data[0] is not None


def _without_graph(value: Any) -> Any:
    return (chainer.Variable(value.array, requires_grad=False)
            if isinstance(value, chainer.Variable) else value)

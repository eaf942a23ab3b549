"""One chunk's forward pass of one micro-batch, by the user's own forward."""
from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ..intercept import unchecked_calls
from ..intercept.function_calls import suspended
from ..pipeline.randomness import Place, at, preserved
from ..planning.calls import Source
from . import nested
from .ghost import GhostError, describe_source, evaluated, is_ghost, user_line
from .names import Names
from .tracing.traced_call import (
    Replay,
    Trace,
    TracedCall,
    attributes_of,
    kind_of,
    label_of,
)
from .tracing.whole_call import link_of


class Diverged(RuntimeError):
    """A forward pass made other calls than its trace."""


class CallError(RuntimeError):
    """A call of a function failed; the cause is the exception."""


class Run(Replay):
    """Does the calls of one chunk in a forward pass.

    Args:
        trace: Of such a pass.
        stages: The chunk of each call.
        chunk: Number of this chunk.
        received: Values of other chunks.
        wanted: The values of this chunk that others, or reports, need.
        names: Of the model's links and parameters.
        place: Where in the training the pass is; seeds what calls draw.
        where: Says which rank has a chunk.
        clock: Is told of each call that was done; None: nothing is timed.

    Attributes:
        made: The wanted values that were made here.
        uses: How many of the calls that were done use a parameter, by its
            node.
    """

    def __init__(self, trace: Trace, stages: tuple[int, ...], chunk: int,
                 received: Mapping[Source, chainer.Variable],
                 wanted: frozenset[Source], names: Names, place: Place,
                 where: Callable[[int], str],
                 clock: Callable[[int, Any], None] | None) -> None:
        super().__init__(trace, names)
        self.made: dict[Source, chainer.Variable] = {}
        self.uses: collections.Counter[Any] = collections.Counter()
        self._stages, self._chunk, self._received = stages, chunk, received
        self._wanted, self._asked = wanted, {one.call for one in wanted}
        self._place, self._where, self._clock = place, where, clock
        self._own: set[int] = set()     # ids of the functions that were run

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        if self._inside:
            return unchecked_calls.apply(node, inputs, original)
        number = self._number
        self._number = number + 1
        if number >= len(self._calls):
            raise Diverged(
                f'{user_line()}: {label_of(node)} is called, and no such call '
                f'was there when the model was traced. {_REMEDY}')
        call = self._calls[number]
        if call.kind is not type(node) and call.kind is not kind_of(node):
            raise Diverged(
                f'{user_line()}: call {number} is {label_of(node)}, and was '
                f'{call.name} in {call.link} when the model was traced. '
                f'{_REMEDY}')
        if self._stages[number] == self._chunk:
            return self._do(number, call, node, inputs, original)
        if call.error is not None:
            raise call.error.with_traceback(None)   # it holds the batch
        if call.attributes:
            attributes_of(node).update(call.attributes)
        return call.ghosts

    def finish(self) -> None:
        """Raises Diverged if calls of the trace were not made."""
        if self._number != len(self._calls):
            call = self._calls[self._number]
            raise Diverged(
                f'the forward pass ended before call {self._number}, '
                f'{call.name} in {call.link}, of its trace. {_REMEDY}')

    def real(self, value: Any) -> Any:
        """The value that a ghost stands for; others as they are."""
        array = nested.array_of(value)
        if not is_ghost(array):
            return value
        is_variable = isinstance(value, chainer.Variable)
        if array.recipe is not None:
            with suspended():
                made = evaluated(array.recipe, [
                    nested.array_of(self.real(leaf))
                    for leaf in array.recipe.leaves])
            return chainer.Variable(made) if is_variable else made
        source = array.source
        if not isinstance(source, Source) or array.traced is not self._trace:
            raise GhostError(
                f'{user_line()}: {describe_source(array)} is needed here; '
                'a value of an earlier micro-batch, or of a parameter that '
                'moved, cannot be used')
        leaf = self._received.get(source)
        if leaf is None:
            raise GhostError(
                f'{user_line()}: {describe_source(array)} is needed and did '
                f'not come from {self._where(self._stages[source.call])}')
        if is_variable and isinstance(source.output, int) and (
                self._calls[source.call].ghosts[source.output] is value):
            return leaf
        # A variable that the user made of the array has no way back.
        return chainer.Variable(leaf.array) if is_variable else leaf.array

    def value(self, source: Source) -> chainer.Variable:
        """A wanted value, made here or received."""
        found = self.made.get(source)
        return self._received[source] if found is None else found

    # --- details -------------------------------------------------------------

    def _do(self, number: int, call: TracedCall, node: Any, inputs: tuple,
            original: Callable) -> tuple:
        arguments = self._arguments(inputs)
        own = attributes_of(node) if call.hidden else {}
        for name in call.hidden:
            leaves, tree = nested.leaves(own[name])
            own[name] = nested.rebuilt(tree, list(map(self.real, leaves)))
        self._inside = True
        try:
            outs = (self._seeded(number, node, arguments, original)
                    if call.draws
                    else unchecked_calls.apply(node, arguments, original))
        except (GhostError, Diverged):
            raise
        except Exception as error:
            if type(error) is type(call.error):     # ends an iteration
                raise
            raise CallError(
                f'{user_line()}: call {number} ({call.name} in {call.link}): '
                f'{type(error).__name__}: {error}') from error
        finally:
            self._inside = False
        self._note(number, call, node, outs)
        if self._clock is not None:
            self._clock(number, node)
        return outs

    def _arguments(self, inputs: tuple) -> tuple:
        """The inputs of a call with their values; counts parameters."""
        arguments = []
        read = set()
        for x in inputs:
            if is_ghost(nested.array_of(x)):
                x = self.real(x)
            if isinstance(x, chainer.Parameter):
                read.add(x.node)
            elif isinstance(x, chainer.Variable):
                creator = x.creator_node
                # Backward would go through an earlier micro-batch's graph.
                if creator is not None and id(creator) not in self._own:
                    raise ValueError(
                        f'{user_line()}: a variable of an earlier batch or '
                        'micro-batch is used, with its graph; keep state in '
                        'attributes of links, where it is cut off, or call '
                        'its unchain()')
            arguments.append(x)
        for parameter in read:
            self.uses[parameter] += 1
        return tuple(arguments)

    def _seeded(self, number: int, node: Any, arguments: tuple,
                original: Callable) -> tuple:
        xp = chainer.backend.get_array_module(
            *map(nested.array_of, arguments))
        place = self._place
        if _draws_initial_values(node):
            # The same on every replica.
            place = place._replace(iteration=0, first_sample=0)
        with preserved(), at(
                place._replace(layer=number - self._trace.first), xp):
            return unchecked_calls.apply(node, arguments, original)

    def _note(self, number: int, call: TracedCall, node: Any,
              outs: tuple) -> None:
        """Keeps wanted values; checks their shapes."""
        for index, out in enumerate(outs):
            value = call.outputs[index]
            if out.shape != value.shape or out.dtype != value.dtype:
                raise Diverged(
                    f'{user_line()}: call {number} ({call.name} in '
                    f'{call.link}) gave {out.dtype} {out.shape}, and '
                    f'{value.dtype} {value.shape} when the model was traced. '
                    f'{_REMEDY}')
            if number in self._asked:
                source = Source(number, index)
                if source in self._wanted:
                    self.made[source] = out
        self._own.add(id(node))
        for name in call.attributes:
            source = Source(number, name)
            if source in self._wanted:
                self.made[source] = chainer.Variable(
                    attributes_of(node)[name], requires_grad=False)


def _draws_initial_values(node: Any) -> bool:
    """Whether a link gives its parameters values in this call."""
    link = link_of(node)
    return link is not None and any(
        parameter._data[0] is None for parameter in link.params())


_REMEDY = ('What a model calls must depend on its inputs, on chainer.config '
           'and on numpy.random only; mark a function that branches on '
           'computed values by chainer_fp8pipe.atomic')

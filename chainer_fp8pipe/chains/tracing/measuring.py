"""One call, run alone for its shapes, its time and its memory."""
from __future__ import annotations

import contextlib
import copy
import hashlib
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import chainer
import numpy

from ...pipeline.backprop import SEPARABLE
from ...pipeline.randomness import preserved
from ...planning.calls import Value
from .. import nested
from ..ghost import is_ghost, made_up
from ..profiling.laps import clock_of
from .traced_call import CHAINERS, PLAIN, attributes_of, kind_of
from .whole_call import WholeCall

#: Attributes that Chainer's functions read from their node after ``apply``,
#: by class.
_READ_AFTERWARDS = {
    'MaxPoolingND': ('indexes',), 'MaxPooling2D': ('indexes',),
    'Dropout': ('mask',), 'Gaussian': ('eps',), 'RReLU': ('r',),
    'SimplifiedDropconnect': ('mask',)}

#: Functions that draw random numbers, which is not seen on a device.
_DRAWING = frozenset(('Dropout', 'Gaussian', 'RReLU', 'SimplifiedDropconnect',
                      'Zoneout'))

#: Seconds; a shorter call is timed several times.
_SHORT, _TIMES = 2e-3, 3


class Measured(NamedTuple):
    """The figures of a call, see :class:`.TracedCall`.

    Attributes:
        modules: ``numpy`` or ``cupy``, by output.
        kept_inputs: Numbers of the inputs that are kept for backward.
        kept_outputs: Numbers of the outputs that are kept for backward.
        parameters: Paths of the parameters that are read inside.
        views: By output in the memory of an input, the input's number.
        parts: Numbers of the views of another size than the input.
    """

    outputs: dict[int | str, Value]
    modules: dict[int | str, Any]
    forward: float
    backward: float
    deferrable: float
    kept: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    temporary: int
    draws: bool
    parameters: tuple[str, ...]
    form: Any
    views: Mapping[int, int]
    parts: frozenset[int]


class CallMeasurement:
    def __init__(self, node: Any, inputs: tuple, original: Callable,
                 timed: bool) -> None:
        self._node, self._inputs, self._original = node, inputs, original
        self._timed = timed
        self._own = dict(attributes_of(node))

    def run(self, seen: Callable[[], tuple[str, ...]]) -> Measured:
        """Runs the call; ``seen`` then gives the parameters read inside."""
        node, whole = self._node, isinstance(self._node, WholeCall)
        with preserved():
            state = numpy.random.get_state()
            with memory_traced():
                outs, kept, temporary = self._weigh()
            # Whether a whole function draws may depend on data.
            draws = (_has_moved(state) or whole
                     or kind_of(node).__name__ in _DRAWING)
            outputs, modules = _outputs(node, outs)
            kept_inputs = tuple(node._input_indexes_to_retain or ())
            kept_outputs = tuple(node._output_indexes_to_retain or ())
            form = (node.result, node.variables) if whole else None
            forward, backward, deferrable = self._time()
        return Measured(outputs, modules, forward, backward, deferrable,
                        kept, kept_inputs, kept_outputs, temporary, draws,
                        seen(), form, self._views, self._parts)

    def constants(self, factor: float) -> list[str]:
        """What a :class:`.WholeCall` returns beside arrays.

        Args:
            factor: The made-up floats are multiplied by it.
        """
        node = _again(self._node, self._own)
        with preserved():
            self._original(node, self._arguments(factor))
        return _constants(node.result)

    def _weigh(self) -> tuple[tuple, int, int]:
        """The outputs, bytes that are kept, and bytes in use for a time."""
        arguments = self._arguments()
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        outs = self._original(self._node, arguments)
        after, peak = tracemalloc.get_traced_memory()
        made = sum(nested.array_of(out).nbytes for out in outs)
        kept = max(after - start - made, 0)
        temporary = peak - after
        tracemalloc.reset_peak()
        self._backward(outs)
        _, peak = tracemalloc.get_traced_memory()
        self._views, self._parts = _shared(arguments, outs)
        # Small objects of Python's count as nothing.
        return outs, kept if kept > 16384 else 0, max(temporary,
                                                      peak - after)

    def _time(self) -> tuple[float, float, float]:
        """Seconds forward and backward, and the weights' share of backward."""
        if not self._timed:
            return 0.0, 0.0, 0.0
        weights = self._weights()
        separate = float('inf')
        now = clock_of(chainer.backend.get_device_from_array(
            *map(nested.array_of, self._arguments())))
        best = [float('inf'), float('inf')]
        for _ in range(_TIMES):
            node = _again(self._node, self._own)
            arguments = self._arguments()
            start = now()
            outs = self._original(node, arguments)
            middle = now()
            self._backward(outs)
            end = now()
            best = [min(best[0], middle - start), min(best[1], end - middle)]
            if weights:
                self._backward_of(node, weights, outs)
                separate = min(separate, now() - end)
            if end - start > _SHORT:
                break
        return best[0], best[1], (min(separate / best[1], 1.0)
                                  if weights and best[1] else 0.0)

    def _weights(self) -> tuple[int, ...]:
        """The inputs whose gradients can be put off."""
        if type(self._node) not in SEPARABLE or (
                not chainer.config.enable_backprop):
            return ()
        return tuple(index for index, x in enumerate(self._inputs)
                     if isinstance(x, chainer.Parameter) and x.requires_grad)

    def _backward_of(self, node: Any, indexes: tuple[int, ...],
                     outs: tuple) -> None:
        with chainer.using_config('enable_backprop', False):
            node.backward(indexes, tuple(_gradients(outs)))

    def _arguments(self, factor: float = 1.0) -> tuple:
        return tuple(
            chainer.Variable(_real(x._data[0], factor),
                             requires_grad=x.requires_grad)
            if isinstance(x, chainer.Variable) else _real(x, factor)
            for x in self._inputs)

    def _backward(self, outs: tuple) -> None:
        if not chainer.config.enable_backprop:
            return
        roots = [out for out in outs if out.requires_grad
                 and out.dtype.kind == 'f' and out.creator_node is not None]
        if roots:
            chainer.backward(roots, _gradients(roots))


@contextlib.contextmanager
def memory_traced() -> Iterator[None]:
    """A block in which ``tracemalloc`` counts what is allocated."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


def _gradients(outs: Iterable[Any]) -> list[chainer.Variable]:
    return [chainer.Variable(out.xp.full(out.shape, .01, out.dtype))
            for out in outs]


def _outputs(node: Any, outs: tuple) -> tuple[dict, dict]:
    values: dict[int | str, Value] = {}
    modules: dict[int | str, Any] = {}
    for index, out in enumerate(outs):
        array = nested.array_of(out)
        values[index] = Value(tuple(out.shape), array.dtype,
                              bool(out.requires_grad))
        modules[index] = chainer.backend.get_array_module(array)
    for name in _READ_AFTERWARDS.get(kind_of(node).__name__, ()):
        array = attributes_of(node).get(name)
        if isinstance(array, chainer.get_array_types()):
            values[name] = Value(tuple(array.shape), array.dtype, False)
            modules[name] = chainer.backend.get_array_module(array)
    return values, modules


def _shared(arguments: tuple, outs: tuple
            ) -> tuple[dict[int, int], frozenset[int]]:
    """See ``views`` and ``parts`` of :class:`Measured`."""
    views: dict[int, int] = {}
    parts = set()
    for number, out in enumerate(map(nested.array_of, outs)):
        xp = chainer.backend.get_array_module(out)
        for index, given in enumerate(map(nested.array_of, arguments)):
            if xp.may_share_memory(out, given):
                views[number] = index
                if out.nbytes != given.nbytes:
                    parts.add(number)
    return views, frozenset(parts)


def key_of(node: Any, inputs: tuple) -> Any:
    """Equal for calls that cost the same; None if that is not known."""
    if isinstance(node, WholeCall) or type(node).__name__ == 'Forget':
        return None
    own = attributes_of(node)
    kind = kind_of(node)
    # The shapes of what Chainer's functions give do not depend on the values
    # of inputs, and each call of an EmbedID gets other words.
    form = (_shape if kind.__module__.partition('.')[0] == 'chainer'
            else _hashable)
    try:
        return (kind, tuple(sorted(
            (name, _hashable(value)) for name, value in own.items()
            if name not in CHAINERS)),
            tuple((form(nested.array_of(x)), isinstance(x, chainer.Variable)
                   and x.requires_grad) for x in inputs),
            chainer.config.enable_backprop, chainer.config.train)
    except TypeError:
        return None


def _hashable(value: Any) -> Any:
    """Equal for values with which a call gives the same shapes."""
    if isinstance(value, chainer.Variable):
        value = value._data[0]
    if isinstance(value, chainer.get_array_types()):
        # Numbers and conditions may be an index.
        if value.dtype.kind not in 'biu' or is_ghost(value):
            return is_ghost(value), _shape(value)
        content = value.tobytes()
        return _shape(value), (content if len(content) < 4096
                               else hashlib.sha256(content).digest())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable, value))
    if isinstance(value, slice):
        return slice, _hashable((value.start, value.stop, value.step))
    hash(value)
    return type(value), value


def _shape(array: Any) -> Any:
    return array.shape, array.dtype.str


def _real(array: Any, factor: float = 1.0) -> Any:
    if not is_ghost(array):
        return array
    found = made_up(array)
    if factor != 1.0 and found.dtype.kind == 'f':
        found *= factor
    return found


def _constants(tree: Any) -> list[str]:
    """Numbers and texts in the tree of a result, and its form."""
    kind, content = tree
    if kind == 'constant':
        return [repr(content) if isinstance(content, PLAIN)
                else type(content).__name__]
    if kind == 'leaf':
        return ['leaf']
    items = ([item for _, item in content] if kind is dict else content)
    return [kind.__name__, *(
        one for item in items for one in _constants(item))]


def with_real(value: Any) -> Any:
    """A copy of an attribute with made-up arrays for ghosts."""
    leaves, tree = nested.leaves(value)
    if not leaves:
        return value
    return nested.rebuilt(tree, [
        chainer.Variable(_real(leaf._data[0]))
        if isinstance(leaf, chainer.Variable) else
        made_up(leaf) if is_ghost(leaf) else leaf.copy() for leaf in leaves])


def _again(node: Any, own: Mapping[str, Any]) -> Any:
    """A copy of a function with its attributes from before its run."""
    if isinstance(node, chainer.function.FunctionAdapter):
        function = copy.copy(node.function)
        function.__dict__.clear()
        function.__dict__.update(own)
        adapter = chainer.function.FunctionAdapter(function)
        # As Function.__call__ swaps the ownership.
        adapter._function, adapter._weak_function = function, None
        function._node, function._owned_node = weakref.ref(adapter), None
        return adapter
    other = copy.copy(node)
    other.__dict__.clear()
    other.__dict__.update(own)
    return other


def _has_moved(state: Any) -> bool:
    now: Any = numpy.random.get_state()
    return bool(state[2] != now[2] or (state[1] != now[1]).any())

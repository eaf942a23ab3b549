"""One call, run alone for its shapes, its time and its memory."""
from __future__ import annotations

import contextlib
import copy
import hashlib
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy

from ..pipeline.backprop import SEPARABLE
from ..pipeline.randomness import preserved
from ..planning.calls import Value
from . import nested
from .ghost import is_ghost, made_up
from .trace import CHAINERS, PLAIN, TracedCall, attributes_of, kind_of
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


class Measurement:
    """A call that is run alone, on made-up values.

    Args:
        node: The function.
        inputs: Of the call; ghosts, or real ones.
        original: Makes the call.
        timed: Whether it is timed, for which it is run again.
    """

    def __init__(self, node: Any, inputs: tuple, original: Callable,
                 timed: bool) -> None:
        self._node, self._inputs, self._original = node, inputs, original
        self._timed = timed
        self._own = dict(attributes_of(node))

    def run(self, call: TracedCall) -> None:
        """Runs the call, and writes down its figures."""
        node, whole = self._node, isinstance(self._node, WholeCall)
        with preserved():
            state = numpy.random.get_state()
            with memory_traced():
                arguments, outs = self._weigh(call)
            # Whether a whole function draws may depend on data.
            call.draws = (_has_moved(state) or whole
                          or kind_of(node).__name__ in _DRAWING)
            call.outputs, call.modules = _outputs(node, outs)
            call.views, call.parts = _shared(arguments, outs)
            call.kept_inputs = tuple(node._input_indexes_to_retain or ())
            call.kept_outputs = tuple(node._output_indexes_to_retain or ())
            if whole:
                call.form = node.result, node.variables
            if self._timed:
                self._time(call)

    def constants(self, factor: float) -> list[str]:
        """What a :class:`.WholeCall` returns beside arrays.

        Args:
            factor: The made-up floats are multiplied by it.
        """
        node = _again(self._node, self._own)
        with preserved():
            self._original(node, self._arguments(factor))
        return _constants(node.result)

    def _weigh(self, call: TracedCall) -> tuple[tuple, tuple]:
        """Notes what a call keeps, and needs for a time, in bytes."""
        arguments = self._arguments()
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        outs = self._original(self._node, arguments)
        after, peak = tracemalloc.get_traced_memory()
        made = sum(nested.array_of(out).nbytes for out in outs)
        kept = max(after - start - made, 0)
        tracemalloc.reset_peak()
        self._backward(outs)
        _, later = tracemalloc.get_traced_memory()
        # Small objects of Python's count as nothing.
        call.kept = kept if kept > 16384 else 0
        call.temporary = max(peak, later) - after
        return arguments, outs

    def _time(self, call: TracedCall) -> None:
        """Notes seconds, and the weights' share of backward."""
        weights = self._weights()
        now = clock_of(chainer.backend.get_device_from_array(
            *map(nested.array_of, self._arguments())))
        best = [float('inf')] * 3
        for _ in range(_TIMES):
            node = _again(self._node, self._own)
            arguments = self._arguments()
            times = [now()]
            outs = self._original(node, arguments)
            times.append(now())
            self._backward(outs)
            times.append(now())
            if weights:
                self._backward_of(node, weights, outs)
            times.append(now())
            best = list(map(min, best, numpy.diff(times).tolist()))
            if times[2] - times[0] > _SHORT:
                break
        call.forward, call.backward, separate = best
        if weights and call.backward:
            call.deferrable = min(separate / call.backward, 1.0)

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


def clock_of(device: Any) -> Callable[[], float]:
    """Seconds of what is computed on one of Chainer's devices.

    On a processor, what other processes compute on the same core does not
    count; a GPU is waited for.
    """
    gpu: Any = getattr(device, 'device', None)
    if not isinstance(device, chainer.backend.GpuDevice):
        return time.thread_time

    def now() -> float:
        gpu.synchronize()
        return time.perf_counter()
    return now


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
    """See ``views`` and ``parts`` of :class:`.TracedCall`."""
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
    if is_ghost(value):
        return True, _shape(value)
    if isinstance(value, chainer.get_array_types()):
        # Numbers and conditions may be an index.
        if value.dtype.kind not in 'biu':
            return False, _shape(value)
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

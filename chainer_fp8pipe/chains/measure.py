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
from .placeholder import is_placeholder, made_up
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


def measured(node: Any, inputs: tuple, original: Callable, timed: bool
             ) -> TracedCall:
    """The figures of a call, which is run alone on made-up values.

    Args:
        node: The function.
        inputs: Of the call; placeholders, or real ones.
        original: Makes the call.
        timed: Whether it is timed, for which it is run again.
    """
    call, whole = TracedCall(''), isinstance(node, WholeCall)
    own = dict(attributes_of(node))
    with preserved():
        state = numpy.random.get_state()
        with memory_traced():
            arguments, outs = _weighed(call, node, inputs, original)
        # Whether a whole function draws may depend on data.
        call.draws = (_has_moved(state) or whole
                      or kind_of(node).__name__ in _DRAWING)
        _note_outputs(call, node, outs)
        call.views, call.parts = _shared(arguments, outs)
        call.kept_inputs = tuple(node._input_indexes_to_retain or ())
        call.kept_outputs = tuple(node._output_indexes_to_retain or ())
        if whole:
            call.form = node.result, node.variables
        if timed:
            _time(call, node, own, inputs, original)
    return call


def returned_constants(node: Any, inputs: tuple, original: Callable,
                       factor: float) -> list[str]:
    """The numbers and texts in the result of a :class:`.WholeCall`.

    Args:
        node: Has not run.
        inputs: Of the call.
        original: Makes the call.
        factor: The made-up floats are multiplied by it.

    Returns:
        Their ``repr``, among the names of the containers that hold them.
    """
    node = _again(node, attributes_of(node))
    with preserved():
        original(node, _made_up(inputs, factor))
    return _constants(node.result)


def _weighed(call: TracedCall, node: Any, inputs: tuple, original: Callable
             ) -> tuple[tuple, tuple]:
    """Measures the bytes that a call keeps, and those of its peak."""
    arguments = _made_up(inputs)
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    outs = original(node, arguments)
    after, peak = tracemalloc.get_traced_memory()
    made = sum(nested.array_of(out).nbytes for out in outs)
    kept = max(after - start - made, 0)
    tracemalloc.reset_peak()
    _backward(outs)
    _, later = tracemalloc.get_traced_memory()
    # Small objects of Python's count as nothing.
    call.kept = kept if kept > 16384 else 0
    call.temporary = max(peak, later) - after
    return arguments, outs


def _time(call: TracedCall, node: Any, own: dict[str, Any], inputs: tuple,
          original: Callable) -> None:
    """Times a call, its backward, and the weights' share of the latter."""
    weights = tuple([
        index for index, x in enumerate(inputs)
        if isinstance(x, chainer.Parameter) and x.requires_grad]) if (
        type(node) in SEPARABLE and chainer.config.enable_backprop) else ()
    now = clock_of(chainer.backend.get_device_from_array(
        *map(nested.array_of, _made_up(inputs))))
    best = [float('inf')] * 3
    for _ in range(_TIMES):
        node, arguments = _again(node, own), _made_up(inputs)
        times = [now()]
        outs = original(node, arguments)
        times.append(now())
        _backward(outs)
        times.append(now())
        if weights:
            with chainer.using_config('enable_backprop', False):
                node.backward(weights, tuple(_gradients(outs)))
        times.append(now())
        best = list(map(min, best, numpy.diff(times).tolist()))
        if times[2] - times[0] > _SHORT:
            break
    call.forward, call.backward, separate = best
    if weights and call.backward:
        call.deferrable = min(separate / call.backward, 1.0)


def _backward(outs: tuple) -> None:
    roots = [out for out in outs if out.requires_grad
             and out.dtype.kind == 'f' and out.creator_node is not None]
    if roots and chainer.config.enable_backprop:
        chainer.backward(roots, _gradients(roots))


def clock_of(device: Any) -> Callable[[], float]:
    """A clock, in seconds, of the computation on a device of Chainer's.

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


def _note_outputs(call: TracedCall, node: Any, outs: tuple) -> None:
    found: dict[int | str, Any] = dict(enumerate(map(nested.array_of, outs)))
    for name in _READ_AFTERWARDS.get(kind_of(node).__name__, ()):
        array = attributes_of(node).get(name)
        if isinstance(array, chainer.get_array_types()):
            found[name] = array
    for key, array in found.items():
        call.outputs[key] = Value(
            tuple(array.shape), array.dtype,
            isinstance(key, int) and bool(outs[key].requires_grad))
        call.modules[key] = chainer.backend.get_array_module(array)


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
    """A key that only calls of equal cost share; None: it has none."""
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
    if is_placeholder(value):
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


def _made_up(inputs: tuple, factor: float = 1.0) -> tuple:
    """Inputs with made-up values for placeholders, floats times ``factor``."""
    def real(array: Any) -> Any:
        if not is_placeholder(array):
            return array
        found = made_up(array)
        if factor != 1.0 and found.dtype.kind == 'f':
            found *= factor
        return found
    return tuple([
        chainer.Variable(real(x._data[0]), requires_grad=x.requires_grad)
        if isinstance(x, chainer.Variable) else real(x) for x in inputs])


def _constants(tree: Any) -> list[str]:
    """Numbers and texts in the tree of a result, and its form."""
    kind, content = tree
    if kind == 'constant':
        return [repr(content) if isinstance(content, PLAIN)
                else type(content).__name__]
    if kind == 'leaf':
        return ['leaf']
    items = [item for _, item in content] if kind is dict else content
    return [kind.__name__, *(
        one for item in items for one in _constants(item))]


def with_real(value: Any) -> Any:
    """A copy of an attribute with made-up arrays for placeholders."""
    leaves, tree = nested.leaves(value)
    if not leaves:
        return value
    return nested.rebuilt(tree, [
        found if isinstance(leaf, chainer.Variable) or is_placeholder(leaf)
        else found.copy() for leaf, found in zip(
            leaves, _made_up(tuple(leaves)), strict=True)])


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

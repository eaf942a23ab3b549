"""One call, run alone for its shapes, its time and its memory."""
# Chainer has no shape inference, so a call of a form that was not seen before
# is run alone, on made-up values; what was found (`Figures`) serves all calls
# of this form (`key_of`).
from __future__ import annotations

import contextlib
import hashlib
import time
import tracemalloc
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import chainer
import numpy

from ..pipeline.backprop import SEPARABLE
from ..pipeline.randomness import preserved
from ..planning.calls import Value
from . import nested
from .functions import CHAINERS, PLAIN, again, attributes_of, kind_of
from .placeholder import (
    PlaceholderError,
    is_placeholder,
    known,
    looked_at,
    made_up,
)
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
#: The attribute with an array whose values decide about the output's shape,
#: by class.
_DECIDING = {'SplitAxis': 'indices', 'Pad': 'pad_width', 'Tile': 'reps',
             'Reshape': 'shape', 'Transpose': 'axes'}
#: Module of the functions whose attribute ``value`` decides about no shape.
_ARITHMETIC = 'chainer.functions.math.basic_math'
#: The attribute with an index.
_INDEX = 'slices'

#: Seconds; a shorter call is timed several times.
_SHORT, _TIMES = 2e-3, 3


@dataclass(eq=False)
class Figures:
    """What is known of all calls of one form.

    Attributes:
        name: Of the function.
        outputs: By index, or name of an attribute that is read afterwards.
        modules: ``numpy`` or ``cupy``, by output.
        forward: See :class:`.Call`, as of the others without a word here.
        kept_inputs: Numbers of the inputs that are kept for backward.
        kept_outputs: Numbers of the outputs that are kept for backward.
        views: By output in the memory of an input, the input's number.
        writes: Names of attributes with arrays to which the function writes.
        inner: Paths of the parameters that are read inside of the call.
        form: Tree of the result of a :class:`.WholeCall`, and which of its
            leaves are variables.
        ignored: The labels that losses inside leave out of their means, and
            the index of the input that has the labels (None if unknown).
        label: The label that the function leaves out of its mean, if any.
        forms: Placeholders like the outputs.
        normalises: Whether a batch normalisation runs inside.
        timed: Whether seconds are known.
    """

    name: str
    outputs: dict[int | str, Value] = field(default_factory=dict)
    modules: dict[int | str, Any] = field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0
    deferrable: float = 0.0
    kept: int = 0
    temporary: int = 0
    draws: bool = False
    once: bool = False
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    views: dict[int, int] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    form: Any = None
    ignored: tuple[tuple[int, int | None], ...] = ()
    label: int | None = None
    forms: dict[int | str, Any] = field(default_factory=dict)
    normalises: bool = False
    timed: bool = False


def measured(node: Any, inputs: tuple, original: Callable, timed: bool
             ) -> Figures:
    """The figures of a call, which is run alone on made-up values.

    Args:
        node: The function.
        inputs: Of the call; placeholders, or real ones.
        original: Makes the call.
        timed: Whether it is timed, for which it is run again.
    """
    call, whole = Figures(_label_of(node)), isinstance(node, WholeCall)
    call.timed = timed
    own = dict(attributes_of(node))
    arrays = {name: value.copy() for name, value in own.items() if isinstance(
        value, chainer.get_array_types()) and not is_placeholder(value)}
    with preserved():
        state = numpy.random.get_state()
        with memory_traced():
            arguments, outs = _weighed(call, node, inputs, original)
        # Whether a whole function draws may depend on data.
        call.draws = (_has_moved(state) or whole
                      or kind_of(node).__name__ in _DRAWING)
        _note_outputs(call, node, outs)
        call.writes = tuple([
            name for name, before in arrays.items()
            if bool((own[name] != before).any())])
        call.views = _shared(arguments, outs)
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
    node = again(node, attributes_of(node))
    with preserved():
        original(node, _made_up(inputs, factor))
    return _constants(node.result)


def _weighed(call: Figures, node: Any, inputs: tuple, original: Callable
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


def _time(call: Figures, node: Any, own: dict[str, Any], inputs: tuple,
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
        node, arguments = again(node, own), _made_up(inputs)
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


def _note_outputs(call: Figures, node: Any, outs: tuple) -> None:
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


def _shared(arguments: tuple, outs: tuple) -> dict[int, int]:
    """See ``views`` of :class:`.Figures`."""
    return {
        number: index for number, out in enumerate(map(nested.array_of, outs))
        for index, given in enumerate(map(nested.array_of, arguments))
        if chainer.backend.get_array_module(out).may_share_memory(out, given)}


def key_of(node: Any, own: dict[str, Any], inputs: tuple) -> Any:
    """A key that only calls of equal shapes and cost share; None: none.

    Of Chainer's functions: numbers that are no integers, and the values of
    inputs (each call of an EmbedID gets other words), decide about no shape.

    Args:
        node: The function.
        own: Its attributes.
        inputs: Of the call.
    """
    kind = kind_of(node)
    config = chainer.config
    found: list[Any] = [kind, config.enable_backprop, config.train]
    theirs = kind.__module__.startswith('chainer.')
    form = _shape if theirs else _hashable
    try:
        if kind is WholeCall:
            found += [_identity(node.run), nested.signature(node.tree)]
            form = _shape
        elif theirs and kind.__name__ == 'Forget':
            found.append(_identity(own['func']))
        else:
            _add_attributes(found, kind, own, theirs)
        for x in inputs:
            if isinstance(x, chainer.Variable):
                found.append((form(x._data[0]), x.requires_grad))
            else:
                found.append(form(x))
        key = tuple(found)
        hash(key)
    except TypeError:
        return None
    return key


def _add_attributes(found: list[Any], kind: Any, own: dict[str, Any],
                    theirs: bool) -> None:
    """Adds what decides about shapes in a function's attributes."""
    deciding = _DECIDING.get(kind.__name__)
    for name, value in own.items():
        if name in CHAINERS:
            continue
        of = type(value)
        if of in (int, float) and name == 'value' and (
                kind.__module__ == _ARITHMETIC):
            found.append(of)
        elif not theirs or of is int or of is bool or of is str:
            found.append((name, _hashable(value)))
        elif of is float:
            found.append(name)
        elif name == _INDEX:
            found.append(_index(value))
        else:
            found.append((name, _loose(value, name == deciding)))


def _loose(value: Any, deciding: bool) -> Any:
    """Equal for attributes with which Chainer's functions give one shape."""
    if isinstance(value, chainer.Variable):
        value = value._data[0]
    if is_placeholder(value):
        return _shape(value)
    if isinstance(value, chainer.get_array_types()):
        return _hashable(value) if deciding else _shape(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_loose(one, deciding) for one in value])
    if isinstance(value, (float, numpy.inexact)):
        return type(value)
    return _hashable(value)


def _index(index: Any) -> Any:
    """Equal for indexes that give the same shape."""
    return tuple([
        _hashable(item) if isinstance(item, slice) else _item(item)
        for item in (index if type(index) is tuple else (index,))])


def _item(item: Any) -> Any:
    """What decides about the result's shape in an item of an index.

    The number of conditions that hold, or of positions.
    """
    if isinstance(item, list):
        item = numpy.array(item)
    kinds: Any = (nested.Dataless, *chainer.get_array_types())
    if not isinstance(item, kinds):
        return type(item), item
    if item.dtype.kind != 'b':
        return item.shape, item.dtype
    value = known(item)
    if value is None:
        raise looked_at(item, 'indexing by a condition')
    return item.shape, item.dtype, int(value.sum())


def _identity(run: Any) -> Any:
    """Equal for the same link, or function with the same things around it."""
    if isinstance(run, chainer.Link):
        return id(run)
    function = getattr(run, '__func__', run)
    if not isinstance(function, types.FunctionType):
        raise TypeError
    owner = getattr(run, '__self__', None)
    return (function.__code__, id(owner), tuple(map(_around, (
        *(function.__defaults__ or ()),
        *(cell.cell_contents for cell in function.__closure__ or ())))))


def _around(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return _identity(value)
    if isinstance(value, chainer.Link):
        return id(value)
    return _hashable(value)


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


def _label_of(node: Any) -> str:
    """Chainer's name for a function."""
    try:
        return node.label
    except PlaceholderError:    # it would name a number that it computes with
        return kind_of(node).__name__


def _has_moved(state: Any) -> bool:
    now: Any = numpy.random.get_state()
    return bool(state[2] != now[2] or (state[1] != now[1]).any())

"""What calls give and cost, found out by making them alone."""
# Chainer has no shape inference, so a call of a form that was not seen before
# is made alone, on made-up values.  What was found serves all calls of this
# form.  A link or function that runs as one call is made on two kinds of
# values, as numbers that it returns must not be of data.
from __future__ import annotations

import contextlib
import copy
import functools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer.functions.array.as_strided import AsStrided

from ..intercept.function_calls import (
    Interceptor,
    again,
    function_of,
    intercepting,
)
from ..intercept.training_objects import own_work
from ..pipeline.backprop import SEPARABLE
from ..pipeline.randomness import preserved
from . import nested
from .attributes import on_copies
from .calls import Call, Value
from .collectives import Answering
from .deferred import place_array
from .placeholder import (
    PlaceholderError,
    is_placeholder,
    looked_at,
    made_up,
    placeholder,
    user_line,
)
from .whole_call import ArrayCall, WholeCall

#: Attributes that Chainer's functions read from their node after ``apply``,
#: by class.
_READ_AFTERWARDS = {
    'MaxPoolingND': ('indexes',), 'MaxPooling2D': ('indexes',),
    'Dropout': ('mask',), 'Gaussian': ('eps',), 'RReLU': ('r',),
    'SimplifiedDropconnect': ('mask',)}
#: Functions that draw random numbers, which is not seen on a device.
_DRAWING = frozenset(('Dropout', 'Gaussian', 'RReLU', 'SimplifiedDropconnect',
                      'Zoneout'))
#: Attributes of functions that Chainer itself sets.
CHAINERS = frozenset([*vars(chainer.FunctionNode), *vars(chainer.Function),
                      *vars(chainer.function.FunctionAdapter), 'node',
                      'func', '_node', '_owned_node'])
#: Types of values that say all of themselves, and can be sent.
PLAIN = (int, float, complex, str, bytes, slice, numpy.dtype, numpy.generic,
         type(None))
#: Seconds; a shorter call is run so many times more, others once.
_SHORT, _TIMES = 2e-3, 3


def measured(node: Any, inputs: tuple, original: Callable, recorder: Any
             ) -> Call:
    """Makes a call on made-up values, again where times are taken.

    Raises:
        PlaceholderError: What it gives depends on data.
    """
    twin = again(node, {
        name: value if name in CHAINERS else _with_real(value)
        for name, value in attributes_of(node).items()})
    if type(node) is AsStrided and is_placeholder(
            array := nested.array_of(inputs[0])):
        raise looked_at(array, 'as_strided')
    links = recorder.names.links if isinstance(node, WholeCall) else {}
    with contextlib.ExitStack() as stack:
        inside = _Inside(recorder, stack)
        seen = functools.partial(inside.apply, original=original)
        stack.enter_context(recorder.names.reporter.scope({}))
        stack.enter_context(on_copies(links))
        run = getattr(node, 'run', None)
        for one in run.params() if isinstance(run, chainer.Link) else ():
            inside.fill(one)
        stack.enter_context(intercepting(inside))
        if isinstance(node, ArrayCall):
            _refuse_looks(twin, inputs, original, links)
        stack.enter_context(preserved())
        own, kind = attributes_of(twin), type(function_of(twin)).__name__
        arrays = {name: value.copy() for name, value in own.items()
                  if isinstance(value, chainer.get_array_types())}
        untouched, before = own.copy(), numpy.random.get_state()
        with _memory_traced():      # which takes time
            call = _made(twin, inputs, seen)
        # Whether a whole function draws may depend on data.
        call.draws = bool(links) or kind in _DRAWING or not all(map(
            numpy.array_equal, before, numpy.random.get_state()))
        call.writes = tuple([
            name for name, value in arrays.items()
            if bool((untouched[name] != value).any())])
        for _ in range(_TIMES * recorder.timed):
            once = _made(again(twin, untouched), inputs, seen)
            call.forward = min(call.forward, once.forward)
            call.backward = min(call.backward, once.backward)
            if once.forward + once.backward > _SHORT:
                break
    call.ignored = inside.labels(inputs)
    call.inner = tuple(sorted(inside.seen))
    return call


def _refuse_looks(node: Any, inputs: tuple, original: Callable,
                  links: Mapping[str, chainer.Link]) -> None:
    """Raises an error if the call gives, or a link keeps, a number of data.

    Or if a function of arrays, which has no links, writes to one.
    """
    one = next(filter(is_placeholder, map(nested.array_of, inputs)), None)
    found: list[dict[str, Any]] = []
    for otherwise in (False, True):
        twin = again(node, attributes_of(node))
        try:
            with preserved(), numpy.errstate(all='ignore'), \
                    on_copies(links):
                outs = original(twin, tuple([
                    _real(x, otherwise) for x in inputs]))
                found.append({
                    f'link {path} keeps a number in {name!r}, which':
                    repr(value) for path, link in links.items()
                    for name, value in vars(link).items()
                    if isinstance(value, PLAIN)} | {
                    f'what {node.label} returns beside values of arrays': (
                        repr(twin.result), [out.shape for out in outs])})
        except (IndexError, ValueError) as error:
            if not links and any(text in str(error) for text in (
                    'read-only', 'output array is not acceptable')):
                raise looked_at(
                    one, f'{node.label}, which writes,') from None
            if links or not otherwise:
                raise
            return              # 1 is no index
    apart = [what for what, value in found[0].items()
             if value != found[1].get(what)]
    if apart or not (links or outs):
        raise PlaceholderError(
            f'{user_line()}: {[*apart, *found[0]][0]} depends on data that '
            'other ranks have not got. Return or keep a variable or an array, '
            'or mark a function around its use, too: '
            'chainer_fp8pipe.atomic(function)')


class SeesLabels(Interceptor):
    """Is told of the labels that losses leave out of their means."""

    def apply(self, node: Any, inputs: Any, original: Callable) -> Any:
        label = ignored_label(node)
        if label is not None:
            self.leave_out(inputs[1], label)
        return original(node, inputs)


class _Inside(SeesLabels, Answering):
    """Sees a call that is made on made-up values, and what runs inside.

    At the end of the stack, parameters get their placeholders back.
    """

    def __init__(self, recorder: Any, stack: contextlib.ExitStack) -> None:
        self.recorder, self.pipeline = recorder, recorder.pipeline
        self._stack = stack
        self.seen: set[str] = set()             # paths of parameters
        self._ignored: list[tuple[int, Any]] = []

    def fill(self, parameter: chainer.Parameter) -> None:
        """Gives a parameter that is used made-up values."""
        name = self.recorder.names.of(parameter)
        array = parameter._data[0]
        if name is not None:
            self.seen.add(name)
        if is_placeholder(array):
            self._stack.callback(place_array, parameter, array)
            place_array(parameter, made_up(array))

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                self.fill(x)
        return super().apply(node, inputs, original)

    def leave_out(self, labels: Any, label: int) -> None:
        self._ignored.append((label, nested.array_of(labels)))

    def labels(self, inputs: tuple) -> tuple[tuple[int, int | None], ...]:
        """See :attr:`.Call.ignored`; labels may be reshaped inside."""
        arrays = list(map(nested.array_of, inputs))
        return tuple(dict.fromkeys([(label, next((
            index for index, array in enumerate(arrays) if array is labels or (
                array.size == labels.size
                and getattr(labels, 'base', None) is array)), None))
            for label, labels in self._ignored]))


def _made(node: Any, inputs: tuple, original: Callable) -> Call:
    """Makes a call; what it gives, keeps and takes."""
    call = Call(node.label, deferrable=type(node) in SEPARABLE and any(
        isinstance(x, chainer.Parameter) and x.requires_grad for x in inputs))
    arguments = tuple(map(_real, inputs))
    xp = chainer.backend.get_array_module(*map(nested.array_of, arguments))
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    begin = clock(xp)
    outs = original(node, arguments)
    call.forward = clock(xp) - begin
    after, peak = tracemalloc.get_traced_memory()
    kept = after - start - sum(nested.array_of(out).nbytes for out in outs)
    tracemalloc.reset_peak()
    begin = clock(xp)
    roots = [out for out in outs if out.requires_grad
             and out.dtype.kind == 'f' and out.creator_node is not None]
    if roots and chainer.config.enable_backprop:
        chainer.backward(roots, [
            chainer.Variable(out.xp.full(out.shape, .01, out.dtype))
            for out in roots])
    call.backward = clock(xp) - begin
    _, later = tracemalloc.get_traced_memory()
    # Small objects of Python's count as nothing.
    call.kept = kept if kept > 16384 else 0
    call.temporary = max(peak, later) - after
    xp_of = chainer.backend.get_array_module
    found: dict[int | str, Any] = dict(enumerate(map(nested.array_of, outs)))
    for number, out in enumerate(outs):
        for index, given in enumerate(map(nested.array_of, arguments)):
            if xp_of(given).may_share_memory(nested.array_of(out), given):
                call.views[number] = index
    for name in _READ_AFTERWARDS.get(type(function_of(node)).__name__, ()):
        array = attributes_of(node).get(name)
        if isinstance(array, chainer.get_array_types()):
            found[name] = array
    for key, array in found.items():
        call.outputs[key] = Value(
            tuple(array.shape), array.dtype, isinstance(key, int)
            and outs[key].requires_grad and array.dtype.kind == 'f')
        call.forms[key] = placeholder(array.shape, array.dtype, None,
                                      xp_of(array))
    call.kept_inputs = tuple(node._input_indexes_to_retain or ())
    call.kept_outputs = tuple(node._output_indexes_to_retain or ())
    if isinstance(node, ArrayCall):
        call.form = node.result
    return call


def clock(xp: Any) -> float:
    """Seconds on a clock of what ``numpy`` or ``cupy`` computes."""
    if xp is numpy:
        return time.thread_time()   # without what other processes compute
    xp.cuda.Device().synchronize()
    return time.perf_counter()


def _real(x: Any, otherwise: bool = False) -> Any:
    """An array or variable, with made-up values for a placeholder."""
    array = nested.array_of(x)
    made = made_up(array, otherwise) if is_placeholder(array) else array
    return chainer.Variable(made, requires_grad=x.requires_grad) if isinstance(
        x, chainer.Variable) else made


def _with_real(value: Any) -> Any:
    """A copy of an attribute with made-up arrays for placeholders."""
    return nested.mapped(value, lambda leaf: _real(leaf) if isinstance(
        leaf, chainer.Variable) or is_placeholder(leaf) else leaf.copy())


# --- what is asked of Chainer's functions ------------------------------------

def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a function."""
    return function_of(node).__dict__


def counted(labels: Any, label: int) -> tuple[int, int]:
    """How many labels count (-1: unknown), and how many a loss leaves out."""
    array = nested.array_of(labels)
    if array is None or is_placeholder(array):
        return -1, 1
    left = int((array == label).sum())
    return array.size - left, left


def ignored_label(node: Any) -> int | None:
    """The label that a loss leaves out of its mean; None: it has none."""
    function = function_of(node)
    is_mean = getattr(function, 'normalize', False) and (
        getattr(function, 'reduce', 'mean') != 'no')
    return getattr(function, 'ignore_label', None) if is_mean else None


@own_work()
def optimizer_arrays(optimizer: Any, dtype: Any, device: Any
                     ) -> tuple[int, float]:
    """The memory that an optimizer keeps, and that an update takes.

    As a number of arrays of a parameter's size, and a multiple of its bytes.
    """
    link = chainer.Link()
    with link.init_scope():
        link.p = parameter = chainer.Parameter(numpy.full(1 << 17, .5, dtype))
    link.to_device(device)
    clone = copy.copy(optimizer)
    clone.hyperparam = copy.copy(optimizer.hyperparam)
    clone.setup(link)
    parameter.grad = parameter.array * 1e-3
    with _memory_traced():
        for _ in range(2):      # the first makes what it keeps
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            parameter.update()
        temporary = tracemalloc.get_traced_memory()[1] - before - (1 << 13)
    return (sum(getattr(value, 'shape', ()) == parameter.shape for value in (
        parameter.update_rule.state or {}).values()),
        max(temporary, 0) / parameter.array.nbytes)


@contextlib.contextmanager
def _memory_traced() -> Iterator[None]:
    """A block in which ``tracemalloc`` counts what is allocated."""
    with contextlib.ExitStack() as stack:
        if not tracemalloc.is_tracing():
            tracemalloc.start(1)
            stack.callback(tracemalloc.stop)
        yield

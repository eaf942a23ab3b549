"""What calls of a form give and cost, found out on made-up values."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from chainer.links import BatchNormalization

from ..intercept.function_calls import Interceptor, intercepting
from ..pipeline.batch_statistics import why_once
from ..pipeline.randomness import preserved
from . import collectives, nested
from .attributes import on_copies
from .deferred import place_array
from .functions import CHAINERS, PLAIN, again, attributes_of, ignored_label
from .measure import (
    Figures,
    constants,
    key_of,
    made_up_inputs,
    measured,
    with_real,
)
from .names import Names
from .placeholder import (
    PlaceholderError,
    is_placeholder,
    looked_at,
    made_up,
    user_line,
)
from .whole_call import ArrayCall, WholeCall

#: So many forms are kept.
_FORMS = 4096
_NO_BLOCK: Any = contextlib.nullcontext()


class KnownCalls:
    """The figures of calls that were seen before.

    Args:
        names: Of the model's links and parameters.
        pipeline: The ranks over which it is to be cut; None: unknown.
    """

    def __init__(self, names: Names, pipeline: Any) -> None:
        self._names, self._pipeline = names, pipeline
        self._found: dict[Any, Figures] = {}

    def figures(self, node: Any, inputs: tuple, original: Callable,
                timed: bool, link: str) -> Figures:
        """The figures of a call, which is made on made-up values if new.

        Raises:
            PlaceholderError: What it gives depends on data.
        """
        own = attributes_of(node)
        key = key_of(node, own, inputs)
        found = self._found.pop(key, None)
        if found is None or timed and not found.timed:
            found = self._measured(node, own, inputs, original, timed, link)
        if key is not None:
            self._found[key] = found        # the last one is the latest
            if len(self._found) > _FORMS:
                del self._found[next(iter(self._found))]
        return found

    def _measured(self, node: Any, own: dict[str, Any], inputs: tuple,
                  original: Callable, timed: bool, link: str) -> Figures:
        twin, whole = again(node, own), isinstance(node, WholeCall)
        attributes_of(twin).update({
            name: with_real(value) for name, value in own.items()
            if name not in CHAINERS})
        inside = _Inside(self._names, self._pipeline)
        with self._names.reporter.scope({}), (
                on_copies(self._names.links) if whole else _NO_BLOCK), \
                inside.filling(getattr(node, 'run', None)), \
                intercepting(inside):
            if whole:
                self._refuse_numbers(twin, inputs, original, link)
            elif isinstance(node, ArrayCall):
                _refuse_looks(twin, inputs, original)
            found = measured(twin, inputs, original, timed)
        label = ignored_label(node)
        if label is not None:
            found.ignored = (label, 1),
        if whole:
            found.ignored = inside.labels(inputs)
        found.inner = tuple(sorted(inside.seen))
        found.once, found.normalises = inside.once, inside.normalises
        return found

    def _refuse_numbers(self, node: Any, inputs: tuple, original: Callable,
                        where: str) -> None:
        """Raises an error if numbers that it returns or keeps are of data."""
        links = self._names.links
        returned, kept = [], []
        for otherwise in (False, True):
            twin = again(node, attributes_of(node))
            with on_copies(links), preserved():
                original(twin, made_up_inputs(inputs, otherwise))
                returned.append(constants(twin.result[0]))
                kept.append({(path, name, repr(value))
                             for path, link in links.items()
                             for name, value in vars(link).items()
                             if isinstance(value, PLAIN)})
        if returned[0] != returned[1]:
            raise PlaceholderError(
                f'{user_line()}: what {where} returns beside arrays '
                f'({", ".join(set(returned[0]) - set(returned[1]))}) depends '
                'on data that other ranks have not got. Return a variable, '
                'or mark a function around its use, too: '
                'chainer_fp8pipe.atomic(function)')
        for path, name, _ in kept[0] - kept[1]:
            raise PlaceholderError(
                f'{user_line()}: link {path} keeps a number in {name!r} '
                'that depends on data that other ranks have not got. '
                'Keep an array or a variable, or nothing')


def _refuse_looks(node: Any, inputs: tuple, original: Callable) -> None:
    """Raises an error if a function of arrays writes to one.

    Or if what it gives has another form for other values.
    """
    one = next(filter(is_placeholder, inputs))

    def form(otherwise: bool) -> list[Any]:
        twin = again(node, attributes_of(node))
        with numpy.errstate(all='ignore'):
            outs = original(twin, made_up_inputs(inputs, otherwise))
        return [*constants(twin.result[0]), *[out.shape for out in outs]]
    try:
        first = form(False)
    except ValueError as error:
        if not any(text in str(error) for text in (
                'read-only', 'output array is not acceptable')):
            raise
        raise looked_at(one, f'{node.label}, which writes,') from None
    with contextlib.suppress(IndexError, ValueError):   # 1 is no index
        if 'leaf' not in first or form(True) != first:
            raise looked_at(one, f'the form of what {node.label} gives')


class _Inside(Interceptor):
    """Sees what runs inside of a call that is made on made-up values."""

    def __init__(self, names: Names, pipeline: Any) -> None:
        self._names, self._pipeline = names, pipeline
        self.seen: set[str] = set()             # paths of parameters
        self.once = self.normalises = False     # see Figures
        self._filled: list[tuple[chainer.Parameter, Any]] = []
        self._ignored: list[tuple[int, Any]] = []

    @contextlib.contextmanager
    def filling(self, run: Any) -> Iterator[None]:
        """A block in which parameters that are used get made-up values."""
        try:
            for one in run.params() if isinstance(run, chainer.Link) else ():
                self._fill(one)
            yield
        finally:
            for parameter, array in reversed(self._filled):
                place_array(parameter, array)

    def _fill(self, parameter: chainer.Parameter) -> None:
        name, array = self._names.of(parameter), parameter._data[0]
        if name is not None:
            self.seen.add(name)
        if is_placeholder(array):
            self._filled.append((parameter, array))
            place_array(parameter, made_up(array))

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        self.normalises |= isinstance(link, BatchNormalization)
        self.once |= bool(why_once(link))
        return original(link, *args, **kwargs)

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                self._fill(x)
        label = ignored_label(node)
        if label is not None:
            self.leave_out(inputs[1], label)
        return original(node, inputs)

    def communicate(self, name: str, comm: Any,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        return collectives.answered(name, comm, answer, self._pipeline)

    def leave_out(self, labels: Any, label: int) -> None:
        self._ignored.append((label, nested.array_of(labels)))

    def labels(self, inputs: tuple) -> tuple[tuple[int, int | None], ...]:
        """See :attr:`.Figures.ignored`."""
        if not self._ignored:
            return ()
        label, labels = self._ignored[0]
        several = len({id(array) for _, array in self._ignored}) > 1
        return ((label, next((
            index for index, x in enumerate(() if several else inputs)
            if (array := nested.array_of(x)) is labels or (
                labels is not None and array.size == labels.size
                and getattr(labels, 'base', None) is array)), None)),)

"""Runs a model's forward once, on placeholders, and writes down its calls."""
# Every rank runs the user's own forward, for every micro-batch, and each of
# its calls comes here: it is written down and not made, and forward goes on
# with placeholders for the outputs.  What shape they have, and what planning
# asks of a call (seconds, bytes, whose memory outputs lie in), is found out on
# made-up values where no call of this form was seen before.
#
# So Python runs once for a micro-batch on each rank, and all ranks have drawn,
# counted and appended the same: nothing is put back, and control flow may be
# another one in each batch.
#
# A link whose own code looks at data cannot be cut.  The error of the
# placeholder says so in the middle of the run; then forward is run again with
# the innermost link around the look as one call, and what it has done to links
# is put back for once.  A look in the model's own forward is the user's to
# mark.
from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
from chainer import Variable
from chainer.functions.array.as_strided import AsStrided
from chainer.links import BatchNormalization, BatchRenormalization
from mpi4py import MPI

from ..intercept.function_calls import _variable, hold_calls, intercepting
from ..pipeline.batch_statistics import why_once
from ..pipeline.randomness import Place, preserved, seed_at
from ..planning.calls import Source, Value
from . import collectives, nested
from .attributes import saved
from .deferred import place_array, set_placeholder
from .functions import CHAINERS, PLAIN, again, attributes_of, ignored_label
from .measure import Figures, key_of, measured, returned_constants, with_real
from .names import Names
from .placeholder import (
    PlaceholderError,
    describe_source,
    is_placeholder,
    known,
    looked_at,
    made_up,
    placeholder,
    reads,
    remade,
    user_line,
)
from .program import LOCAL, Program, RecordedCall
from .whole_call import Pass, WholeCall, is_marked

#: Figures of so many forms of calls are kept.
_MEASURED = 4096
#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
NOWHERE = Place(0, 0, 0, 0)
_SIMPLE = frozenset((int, bool, float, str, type(None), slice, type))
_NUMBERS = frozenset((int, bool, float))


class Recorder:
    """Records a model's forward passes.

    Args:
        names: Of the model's links and parameters, which may be placeholders.
        pipeline: The ranks over which the model is to be cut; None: unknown.

    Attributes:
        atomic: Paths of the links that are run as one call.
        reasons: Why, by path.
    """

    def __init__(self, names: Names, pipeline: Any = None) -> None:
        self.names, self.pipeline = names, pipeline
        collectives.hold(self)
        hold_calls(map(type, names.links.values()), self)
        self.memo: dict[Any, Figures] = {}
        self.moving: set[int] = set()       # ids of links, see why_once()
        self.reasons: dict[str, str] = {}
        self.atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def undivided(self) -> list[str]:
        """The links that are run as one call because they look at data."""
        return [f'link {path} is not divided: {reason.partition(". ")[0]}'
                for path, reason in self.reasons.items()]

    def record(self, run: Callable[[], Any], place: Place = NOWHERE,
               timed: bool = False, is_new: bool = True,
               planned: bool = False) -> Program:
        """The program of what ``run`` calls.

        Use it in a block of :meth:`placeholders`.

        Args:
            run: Calls the model.
            place: Where in the training that is.
            timed: Whether calls are timed, for which they are run again.
            is_new: Whether a link may look at data that has not done so yet.
            planned: Whether planning is to know which links are around calls.

        Raises:
            PlaceholderError: The model's own forward looks at computed data.
        """
        shaped = len(self.names.shaped)
        while True:
            program = Program(self.names, place)
            one = _Recording(self, program, timed, planned)
            before = saved(self.names.links).note() if is_new else None
            try:
                with self.names.reporter.scope(program.reports), \
                        collectives.refusing(self.names.links), \
                        between_calls(place), intercepting(one):
                    program.result = run()
                one.refuse_placeholders()
                return program
            except PlaceholderError as error:
                found = one.innermost()
                if found is None:
                    raise
                self.atomic |= {found}
                self.reasons[found] = str(error)
                if before is not None:
                    before.put_back()
                for name in self.names.shaped[shaped:]:
                    place_array(self.names.parameters[name], None)
                del self.names.shaped[shaped:]

    @contextlib.contextmanager
    def placeholders(self) -> Iterator[None]:
        """A block in which every parameter with a shape is a placeholder."""
        names = self.names
        self.moving = {id(link) for link in names.links.values()
                       if why_once(link)}
        shaped = len(names.shaped)
        before = [(name, parameter, parameter._data[0], parameter._grad)
                  for name, parameter in names.parameters.items()]
        for name, parameter, array, _ in before:
            if array is not None and not is_placeholder(array):
                place_array(parameter, placeholder(
                    array.shape, array.dtype, name,
                    chainer.backend.get_array_module(array)))
        done = False
        try:
            yield
            done = True
        finally:
            for name, parameter, array, gradient in before:
                # A parameter whose shape was found keeps its placeholder.
                # Not after an error: its link may have to run again.
                if array is not None or not done or (
                        not is_placeholder(parameter._data[0])):
                    if array is None and parameter._data[0] is not None:
                        # Made by its link, which will do so again.
                        names.made[name] = placeholder(
                            parameter.shape, parameter.dtype)
                    place_array(parameter, array)
                parameter._grad = gradient
            if not done:
                del names.shaped[shaped:]


class Ahead(chainer.Variable):
    """An output of a call that is not made yet."""

    def unchain(self) -> None:
        """See ``chainer.Variable``; holds when the call is made."""
        array = self._data[0]
        array.program.unchained.add(array.source)

    @property
    def array(self) -> Any:
        """A placeholder."""
        return self._data[0]

    @array.setter
    def array(self, value: Any) -> None:
        raise PlaceholderError(
            f'{user_line()}: an array that is assigned to a variable would '
            'change what one rank computes, and not the way back of another; '
            'write h + (value - h.array), or mark the function around it: '
            'chainer_fp8pipe.atomic(function)')

    data = array


class _Recording(Pass):
    """Writes down the calls of one forward pass."""

    def __init__(self, recorder: Recorder, program: Program, timed: bool,
                 planned: bool) -> None:
        self._recorder, self._names = recorder, recorder.names
        self.program, self._calls = program, program.calls
        self._timed, self._planned = timed, planned
        self._memo = recorder.memo
        self._stack: list[chainer.Link] = []
        self._first_call: dict[int, int] = {}   # of each link, by its id
        # The links around the first look at data, from the model inwards.
        self._looking: list[str] | None = None
        self._config = dict(vars(LOCAL))
        self._found = {path: parameter._data[0] for path, parameter
                       in self._names.parameters.items()}
        # Paths of the links with persistent arrays, by these arrays' ids.
        self._owners: dict[int, str] = {
            id(value): path for path, link in self._names.links.items()
            for value in _persistent(link)}
        # Of a call that is being measured: parameters that are read inside,
        # those of them that were given values, labels that are left out, and
        # what kinds of links run.
        self._seen: list[str] = []
        self._filled: list[tuple[chainer.Parameter, Any]] = []
        self._ignored: list[tuple[int, Any]] = []
        self._once = self._normalises = False

    # --- the interceptor -----------------------------------------------------

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        is_bn = isinstance(link, BatchNormalization)
        if self.inside:
            self._normalises |= is_bn
            self._once |= bool(why_once(link))
            return original(link, *args, **kwargs)
        self._stack.append(link)
        try:
            if is_bn and type(link) is not BatchRenormalization and (
                    chainer.config.train and not self.is_whole(link)
                    and not chainer.config.in_recomputing):
                return self._normalise(link, args, kwargs, original)
            return super().call_link(link, args, kwargs, original)
        except PlaceholderError:
            if self._looking is None:
                self._looking = list(filter(None, map(self._names.of,
                                                      self._stack)))
            raise
        finally:
            self._stack.pop()

    def is_whole(self, link: chainer.Link) -> bool:
        return self._names.of(link) in self._recorder.atomic

    def last_form(self) -> Any:
        figures = self._calls[-1].figures
        assert figures is not None
        return figures.form

    def communicate(self, name: str, comm: MPI.Comm,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        if answer is None:
            raise collectives.refusal(name)
        collectives.check_ranks(comm, self._recorder.pipeline)
        return answer()

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """Leaves a placeholder of a parameter of the model's."""
        name = self._names.of(parameter)
        if name is None or self.inside:
            return False            # the link does it itself
        if parameter._data[0] is None:
            self._names.shaped.append(name)
            set_placeholder(parameter, shape, name)
        return True

    def leave_out(self, labels: Any, label: int) -> None:
        """Counts labels, of which a mean leaves out some."""
        array = nested.array_of(labels)
        if self.inside:
            self._ignored.append((label, array))
            return
        value = known(array)
        if value is None:
            self.program.labels.append((-1, 1))
        else:
            left = int((value == label).sum())
            self.program.labels.append((value.size - left, left))

    def before_backward(self, outputs: Any) -> None:
        """Refuses placeholders, which have no graph."""
        if self.inside:
            return
        for leaf in nested.leaves(outputs)[0]:
            if is_placeholder(nested.array_of(leaf)):
                raise looked_at(nested.array_of(leaf), 'a gradient')

    def before_unchain(self, output: chainer.Variable) -> None:
        """Has all that an output was made of unchained where it is made."""
        array = nested.array_of(output)
        if self.inside or not is_placeholder(array) or (
                array.program is not self.program):
            return
        to_do = [one for one in reads(array) if isinstance(one, Source)]
        while to_do:
            source = to_do.pop()
            if source not in self.program.unchained:
                self.program.unchained.add(source)
                to_do += self._calls[source.call].inputs

    # --- after the run -------------------------------------------------------

    def innermost(self) -> str | None:
        """The link to run as one call after a look at data; None: none."""
        for name in reversed(self._looking or []):
            if name not in self._recorder.atomic:
                return name if name != '/' else None
        return None

    def refuse_placeholders(self) -> None:
        """Raises an error for values that forward must not set so."""
        for path, link in self._names.links.items():
            own = vars(link)
            for name in link._persistent:
                if is_placeholder(nested.array_of(own.get(name))):
                    self._looking = [path]
                    raise PlaceholderError(
                        f'link {path} sets its persistent {name!r} to '
                        f'{own[name]!r}, so that the link cannot be cut')
        for path, parameter in self._names.parameters.items():
            if parameter._data[0] is not self._found[path] and (
                    self._found[path] is not None):
                self._looking = [path.rpartition('/')[0] or '/']
                raise PlaceholderError(
                    f'forward sets the array of parameter {path}; mark the '
                    'function that does so: chainer_fp8pipe.atomic(function)')

    # --- one call ------------------------------------------------------------

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here on each rank: what most
        # calls have not got is looked for in loops that are run anyway.
        if self.inside:
            return self._apply_inside(node, inputs, original)
        own = attributes_of(node)
        read: list[Source | str] = []
        arguments, given = [], []
        for x in inputs:
            array = x._data[0] if isinstance(x, Variable) else x
            if is_placeholder(array) or isinstance(x, chainer.Parameter):
                read += self._read(x)
                arguments.append(x)
            else:
                self._read(x)
                given.append(array)
                arguments.append(_kept(x))
        hidden, arrays = self._scan(own, read)
        whole, used = self._together(given, arrays) if (
            given or arrays or self._recorder.atomic) else ((), ())
        if type(node) is AsStrided:
            self._refuse_afar(inputs)
        figures = self._figures(node, own, inputs, original)
        number = len(self._calls)
        self._count_labels(inputs, figures)
        sources = tuple([one for one in read if type(one) is Source])
        names = tuple(dict.fromkeys([one for one in read
                                     if type(one) is str]))
        if figures.form is not None:
            whole += tuple(self._keeping((*figures.inner, *names)))
        if figures.inner:
            names = tuple(dict.fromkeys((*names, *figures.inner)))
        call = RecordedCall(
            figures.name, (self._names.of(self._stack[-1]) or '/')
            if self._stack else '/', (), sources, names, figures.outputs,
            figures.forward, figures.backward, figures.deferrable,
            figures.kept, (), figures.temporary, figures.draws,
            tuple(dict.fromkeys(whole)) if whole else (), None,
            figures.once or self._moves(),
            figures, node, self._attributes(own, figures) if arrays
            else dict(own), tuple(arguments))
        if self._planned:
            call.path = self._path(number)
        call.hidden, call.reads = tuple(hidden), used
        if vars(LOCAL) != self._config:
            call.config = self._changed_config()
        call.line = _line()
        call.results = self._results(number, figures, own)
        self._calls.append(call)
        return call.results

    def _scan(self, own: dict[str, Any], read: list[Source | str]
              ) -> tuple[list[str], list[Any]]:
        """Names of attributes with placeholders, and arrays in others.

        Adds what placeholders are made of to ``read``, and numbers to the
        program's.
        """
        hidden, arrays = [], []
        numbers = self.program.numbers
        for name, value in own.items():
            kind = type(value)
            if kind in _SIMPLE:
                if kind in _NUMBERS:
                    # NaN has another hash each time.
                    numbers.append(value if value == value else None)
            elif name not in CHAINERS:
                for leaf in nested.leaves(value)[0]:
                    array = nested.array_of(leaf)
                    if is_placeholder(array):
                        read += self._read(leaf)
                        if name not in hidden:
                            hidden.append(name)
                    else:
                        arrays.append(array)
        return hidden, arrays

    def _results(self, number: int, figures: Figures, own: dict[str, Any]
                 ) -> tuple:
        """Outputs to go on with; attributes that may be read are set."""
        results = []
        for key, form in figures.forms.items():
            array = remade(form, Source(number, key), self.program)
            if type(key) is int:
                results.append(_ahead(array, figures.outputs[key].wants))
            else:
                own[str(key)] = array
        return tuple(results)

    def _changed_config(self) -> dict[str, Any]:
        """Settings of Chainer's that forward has changed."""
        return {name: value for name, value in vars(LOCAL).items()
                if name not in self._config or self._config[name] != value}

    def _count_labels(self, inputs: tuple, figures: Figures) -> None:
        if figures.label is not None:
            self.leave_out(inputs[1], figures.label)
        for label, index in figures.ignored:
            self.leave_out(None if index is None else inputs[index], label)

    def _path(self, number: int) -> tuple[int, ...]:
        for link in self._stack:
            self._first_call.setdefault(id(link), number)
        return tuple([self._first_call[id(link)] for link in self._stack])

    def _moves(self) -> bool:
        """Whether a link around moves on with every forward pass."""
        moving = self._recorder.moving
        return bool(moving) and any(id(link) in moving
                                    for link in self._stack)

    def _apply_inside(self, node: Any, inputs: tuple, original: Callable
                      ) -> tuple:
        """Makes a call of a link or function that is run as a whole."""
        for x in inputs:
            if isinstance(x, chainer.Parameter):
                name = self._names.of(x)
                if name is not None:
                    self._seen.append(name)
                self._fill(x)
        label = ignored_label(node)
        if label is not None:
            self._ignored.append((label, nested.array_of(inputs[1])))
        return original(node, inputs)

    def _read(self, x: Any) -> tuple:
        """What an input is made of: outputs of calls, and parameters."""
        if isinstance(x, chainer.Parameter):
            name = self._names.of(x)
            if name is None:
                raise ValueError(
                    f'{user_line()}: the model uses a parameter that is not '
                    'among its own; register it in init_scope')
            return (name,)
        array = x._data[0] if isinstance(x, chainer.Variable) else x
        if not is_placeholder(array):
            if array is not x and x._node._creator_node is not None:
                raise ValueError(
                    f'{user_line()}: a variable of an earlier batch or '
                    'micro-batch brings its graph; keep it in an attribute '
                    'of a link, or call its unchain()')
            return ()
        if array.recipe is not None:
            return tuple([one for leaf in array.recipe.leaves
                          for one in self._read(leaf)])
        source = array.source
        if array.program is self.program:
            return (source,)
        if array.program is not None:
            return (self._pin(array, source),)
        if source not in self._names.parameters:
            raise PlaceholderError(
                f'{user_line()}: {describe_source(array)} is used, which is '
                'not here')
        return (source,)

    def _pin(self, array: Any, source: Source) -> Source:
        """Names a value that a link has kept from an earlier program."""
        program, key = self.program, (id(array.program), source)
        if key not in program.pins:
            chunk = array.program.chunk_of(source)
            if chunk is None:
                raise ValueError(
                    f'{user_line()}: a value of an earlier batch or '
                    'micro-batch is used, which nobody has kept; keep state '
                    'in attributes of links, and call partition() with an '
                    'example that reads it in its second call')
            program.pins[key] = Source(len(self._calls), 0)
            self._calls.append(RecordedCall(
                'state', outputs={0: Value(array.shape, array.dtype)},
                pinned=chunk, before=(array.program, source)))
        return program.pins[key]

    def _attributes(self, own: dict[str, Any], figures: Figures
                    ) -> dict[str, Any]:
        """Attributes, with copies of arrays: Python may write to them.

        Not of those to which the function itself writes, or which links keep.
        """
        types = chainer.get_array_types()
        return {name: value.copy() if isinstance(value, types) and not (
            is_placeholder(value) or name in figures.writes
            or id(value) in self._owners) else value
            for name, value in own.items()}

    def _refuse_afar(self, inputs: tuple) -> None:
        """Refuses the memory around an array that another rank makes."""
        array = nested.array_of(inputs[0])
        if known(array) is None:
            raise PlaceholderError(
                f'{user_line()}: as_strided reads the memory around '
                f'{describe_source(array)}, which another rank has not got. '
                'Mark the function around it: '
                'chainer_fp8pipe.atomic(function)')

    def _together(self, inputs: list[Any], arrays: list[Any]
                  ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Links whose calls must be on one chunk, and those it reads.

        The first are those that are run as one call, and those whose
        persistent arrays are attributes of the function, which writes to
        them.
        """
        whole: tuple[str, ...] = ()
        if self._recorder.atomic:
            for link in self._stack:
                name = self._names.of(link)
                if name in self._recorder.atomic:
                    whole += (name, *self._keeping(
                        path for path in self._names.links
                        if path.startswith(name.rstrip('/') + '/')))
        used: tuple[str, ...] = ()
        given = [*arrays, *inputs]
        if given:
            owners = self._owners
            for link in self._stack:
                if link._persistent:    # some make them in forward
                    path = self._names.of(link)
                    owners.update((id(value), path)
                                  for value in _persistent(link) if path)
            used = tuple(dict.fromkeys([
                owners[one] for array in given
                for one in (id(array), id(getattr(array, 'base', None)))
                if one in owners]))
            written = {owners.get(id(array)) for array in arrays}
            whole += tuple([name for link in self._stack if (
                name := self._names.of(link)) in written and name])
        return whole, used

    def _keeping(self, names: Iterable[str]) -> list[str]:
        """Paths of links that have persistent arrays, by parameters or links.
        """
        found = []
        for name in names:
            path = name if name in self._names.links else (
                name.rpartition('/')[0] or '/')
            if _persistent(self._names.links[path]):
                found.append(path)
        return found

    def _normalise(self, link: Any, args: Any, kwargs: Any,
                   original: Callable) -> Any:
        """Calls a batch normalisation with averages of this micro-batch only.

        The link's own are updated once per batch, from these.
        """
        x = args[0] if args else kwargs['x']
        if link.avg_mean is None:
            link._initialize_params(tuple(
                length for axis, length in enumerate(x.shape)
                if axis not in link.axis))
        before = link.avg_mean, link.avg_var, link.decay, link.N
        path = self._names.of(link)
        link.avg_mean = link.xp.zeros_like(link.avg_mean)
        link.avg_var = link.xp.zeros_like(link.avg_var)
        link.decay, link.N = 0.0, 0
        for array in (link.avg_mean, link.avg_var):
            if path is not None:
                self._owners[id(array)] = path
        try:
            result = Pass.call_link(self, link, args, kwargs, original)
            for number in range(len(self._calls) - 1, -1, -1):
                if any(value is link.avg_mean for value
                       in self._calls[number].attributes.values()):
                    self.program.normalised.append(
                        (number, link, link.avg_mean, link.avg_var,
                         link.N > 0))
                    break
            return result
        finally:
            link.avg_mean, link.avg_var, link.decay, link.N = before

    # --- a form of calls that is new -----------------------------------------

    def _figures(self, node: Any, own: dict[str, Any], inputs: tuple,
                 original: Callable) -> Figures:
        """The figures of a call: known, or found out on made-up values."""
        key = key_of(node, own, inputs)
        found = self._memo.get(key)
        if found is None or self._timed and not found.timed:
            found = self._measure(node, own, inputs, original)
        if key is not None:
            self._memo.pop(key, None)
            self._memo[key] = found         # the last one is the latest
            if len(self._memo) > _MEASURED:
                del self._memo[next(iter(self._memo))]
        return found

    def _measure(self, node: Any, own: dict[str, Any], inputs: tuple,
                 original: Callable) -> Figures:
        twin, whole = again(node, own), isinstance(node, WholeCall)
        attributes_of(twin).update({
            name: with_real(value) for name, value in own.items()
            if name not in CHAINERS and type(value) not in _SIMPLE})
        self._seen, self._ignored, self._filled = [], [], []
        self._once = self._normalises = False
        self.inside = True
        link = getattr(node, 'run', None)
        try:
            if isinstance(link, chainer.Link):
                for parameter in link.params():
                    self._seen.append(self._names.of(parameter) or '')
                    self._fill(parameter)
            with saved(self._names.links if whole else {}), \
                    self._names.reporter.scope({}):
                if whole:
                    self._refuse_values(twin, inputs, original)
                found = measured(twin, inputs, original, self._timed)
            found.inner = tuple(sorted(set(filter(None, self._seen))))
            found.label = ignored_label(node)
            found.forms = {
                key: placeholder(value.shape, value.dtype, None,
                                 found.modules[key])
                for key, value in found.outputs.items()}
            found.once, found.normalises = self._once, self._normalises
            if whole:
                found.ignored = self._labels(inputs)
            return found
        finally:
            self.inside = False
            for parameter, array in reversed(self._filled):
                place_array(parameter, array)

    def _fill(self, parameter: chainer.Parameter) -> None:
        """Gives a parameter made-up values while a call is measured."""
        array = parameter._data[0]
        if is_placeholder(array):
            self._filled.append((parameter, array))
            place_array(parameter, made_up(array))

    def _labels(self, inputs: tuple) -> tuple[tuple[int, int | None], ...]:
        """See :attr:`.Figures.ignored`; ``_ignored`` has each run's."""
        if not self._ignored:
            return ()
        label, labels = self._ignored[0]
        several = len({id(array) for _, array in self._ignored}) > 1
        for index, x in enumerate(() if several else inputs):
            array = nested.array_of(x)
            if array is labels or (
                    labels is not None and array.size == labels.size
                    and getattr(labels, 'base', None) is array):
                return ((label, index),)
        return ((label, None),)

    def _refuse_values(self, node: Any, inputs: tuple, original: Callable
                       ) -> None:
        """Runs a whole function on different values.

        Raises:
            PlaceholderError: Numbers that it returns or keeps in attributes
                differ, so that other ranks cannot know them.
        """
        found = []
        for factor in (1.0, -37.0):
            with saved(self._names.links) as attributes:
                found.append((returned_constants(
                    node, inputs, original, factor), {
                    (path, name): repr(value)
                    for path, name in attributes.replaced()
                    if isinstance(value := vars(
                        self._names.links[path])[name], PLAIN)}))
        (returned, kept), (others, later) = found
        where = (self._names.of(self._stack[-1]) or '/'
                 ) if self._stack else '/'
        if returned != others:
            raise PlaceholderError(
                f'{user_line()}: what {where} returns beside arrays '
                f'({", ".join(set(returned) - set(others))}) depends on '
                'data that other ranks have not got. Return a variable, or '
                'mark a function around its use, too: '
                'chainer_fp8pipe.atomic(function)')
        for path, name in kept:
            if kept[path, name] != later.get((path, name)):
                raise PlaceholderError(
                    f'{user_line()}: link {path} keeps a number in {name!r} '
                    'that depends on data that other ranks have not got. '
                    'Keep an array or a variable, or nothing')


@contextlib.contextmanager
def between_calls(place: Place) -> Iterator[None]:
    """A block in which all ranks draw the same numbers between calls.

    The place seeds ``numpy.random`` and ``random``; both get their states
    back.
    """
    state = random.getstate()
    random.seed(repr(place))
    try:
        with preserved():
            seed_at(place._replace(layer=_BETWEEN))
            yield
    finally:
        random.setstate(state)


def record_example(recorder: Recorder, run: Callable[[], Any], timed: bool
                   ) -> Program:
    """The program of a call in training, after which links are as before."""
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True), preserved(), \
            saved(recorder.names.links), recorder.placeholders():
        program = recorder.record(run, timed=timed, planned=True)
    note_memory(program)
    return program


def note_memory(program: Program) -> None:
    """Notes which values calls retain for backward, for planning.

    Outputs may lie in the memory of other values, which are retained then.
    """
    memory: dict[Source, Source | None] = {}
    for number, call in enumerate(program.calls):
        figures = call.figures
        if figures is None:
            continue
        read = [reads(nested.array_of(x)) if not isinstance(
            x, chainer.Parameter) else () for x in call.arguments]
        for output, index in figures.views.items():
            memory[Source(number, output)] = next(
                (memory.get(source, source) for source in read[index]
                 if isinstance(source, Source)), None)
        retained = [
            *(source for index in figures.kept_inputs
              for source in read[index] if isinstance(source, Source)),
            *(Source(number, index) for index in figures.kept_outputs)]
        call.retained = tuple(filter(None, dict.fromkeys(
            memory.get(source, source) for source in retained)))


def _persistent(link: chainer.Link) -> list[Any]:
    """The persistent arrays of a link."""
    return [value for name in link._persistent if isinstance(
        value := vars(link).get(name), chainer.get_array_types())]


def _kept(x: Any) -> Any:
    """An input that Python may write to afterwards: a copy of it."""
    if isinstance(x, chainer.Parameter):
        return x
    if isinstance(x, chainer.Variable):
        array = x._data[0]
        return x if is_placeholder(array) else chainer.Variable(
            array.copy(), requires_grad=x.requires_grad)
    return x if is_placeholder(x) or not hasattr(x, 'copy') else x.copy()


def _ahead(array: Any, wants: bool) -> chainer.Variable:
    made = _variable(array, wants)
    made.__class__ = Ahead
    return made


_is_users: dict[Any, bool] = {}


def _line() -> tuple[Any, int] | None:
    """The code and line of the user's that calls a function."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        found = _is_users.get(code)
        if found is None:
            module = frame.f_globals.get('__name__', '').partition('.')[0]
            found = _is_users[code] = module not in (
                'chainer', 'chainermn', 'numpy', 'cupy', 'chainer_fp8pipe',
                'contextlib', 'copy')
        if found:
            return code, frame.f_lineno
        frame = frame.f_back
    return None

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
# the innermost link around the look as one call, and links get the attributes
# that they had.  A look in the model's own forward is the user's to mark.
from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
from chainer import Variable
from chainer.functions.array.as_strided import AsStrided
from chainer.links import BatchNormalization, BatchRenormalization
from mpi4py import MPI

from ..intercept.function_calls import (
    Interceptor,
    _variable,
    hold_calls,
    intercepting,
)
from ..pipeline.batch_statistics import why_once
from ..pipeline.randomness import Place, preserved, seed_at
from . import collectives, nested
from .attributes import copied, on_copies, set_attributes
from .calls import Source, Value
from .deferred import place_array, set_placeholder
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
    describe_source,
    frames_of_users,
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
from .whole_call import WholeCall, call_whole, is_marked

#: Figures of so many forms of calls are kept.
_MEASURED = 4096
#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
NOWHERE = Place(0, 0, 0, 0)
_SIMPLE = frozenset((int, bool, float, str, type(None), slice, type))
_NUMBERS = frozenset((int, bool, float))
_NO_BLOCK: Any = contextlib.nullcontext()


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
        self._forms: set[Any] = set()
        self.moving: set[int] = set()       # ids of links, see why_once()
        self.reasons: dict[str, str] = {}
        self.atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def undivided(self) -> list[str]:
        """The links that are run as one call because they look at data."""
        return [f'link {path} is not divided: {reason.partition(". ")[0]}'
                for path, reason in self.reasons.items()]

    def record(self, run: Callable[[], Any], place: Place = NOWHERE,
               timed: bool = False, form: Any = None) -> Program:
        """The program of what ``run`` calls.

        Use it in a block of :meth:`placeholders`.

        Args:
            run: Calls the model.
            place: Where in the training that is.
            timed: Whether calls are timed, for which they are run again.
            form: Of the call.  No link looks at data in a second one that has
                not done so in the first; None: nobody knows.

        Raises:
            PlaceholderError: The model's own forward looks at computed data.
        """
        names, shaped = self.names, len(self.names.shaped)
        while True:
            program = Program(names, place)
            one = _Recording(self, program, timed)
            before = None if form in self._forms else copied(names.links)
            try:
                with names.reporter.scope(program.reports), \
                        collectives.refusing(names.links), \
                        between_calls(place), intercepting(one):
                    program.result = run()
                one.refuse_placeholders()
                if form is not None:
                    self._forms.add(form)
                return program
            except PlaceholderError as error:
                found = one.innermost()
                if found is None:
                    raise
                self.atomic |= {found}
                self.reasons[found] = str(error)
                if before is not None:
                    set_attributes(names.links, before)
                for name in names.shaped[shaped:]:
                    place_array(names.parameters[name], None)
                del names.shaped[shaped:]

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
        array.program.notes.unchained.add(array.source)

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


class _Recording(Interceptor):
    """Writes down the calls of one forward pass."""

    def __init__(self, recorder: Recorder, program: Program, timed: bool
                 ) -> None:
        self._recorder, self._names = recorder, recorder.names
        self._program, self._timed = program, timed
        self._stack: list[chainer.Link] = []
        self._first_call: dict[int, int] = {}   # of each link, by its id
        # The links around the first look at data, from the model inwards.
        self._looking: list[str] | None = None
        self._config = dict(vars(LOCAL))
        self._arrays = {path: parameter._data[0] for path, parameter
                        in self._names.parameters.items()}
        # Paths of the links with persistent arrays, by these arrays' ids.
        self._owners: dict[int, str] = {
            id(value): path for path, link in self._names.links.items()
            for value in _persistent(link)}

    # --- the interceptor -----------------------------------------------------

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        self._stack.append(link)
        try:
            if self._names.of(link) in self._recorder.atomic:
                return call_whole(link, functools.partial(original, link),
                                  args, kwargs, self._last_form)
            if isinstance(link, BatchNormalization) and (
                    type(link) is not BatchRenormalization
                    and chainer.config.train
                    and not chainer.config.in_recomputing):
                return self._normalise(link, args, kwargs, original)
            return original(link, *args, **kwargs)
        except PlaceholderError:
            if self._looking is None:
                self._looking = list(filter(None, map(self._names.of,
                                                      self._stack)))
            raise
        finally:
            self._stack.pop()

    def call_whole(self, function: Callable, args: Any, kwargs: Any) -> Any:
        return call_whole(function, function, args, kwargs, self._last_form)

    def _last_form(self) -> Any:
        figures = self._program.calls[-1].figures
        assert figures is not None
        return figures.form

    def communicate(self, name: str, comm: MPI.Comm,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        return collectives.answered(name, comm, answer,
                                    self._recorder.pipeline)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """Leaves a placeholder of a parameter of the model's."""
        name = self._names.of(parameter)
        if name is None:
            return False            # the link does it itself
        if parameter._data[0] is None:
            self._names.shaped.append(name)
            set_placeholder(parameter, shape, name)
        return True

    def leave_out(self, labels: Any, label: int) -> None:
        """Counts labels, of which a mean leaves out some."""
        value = known(nested.array_of(labels))
        left = 1 if value is None else int((value == label).sum())
        self._program.notes.labels.append(
            (-1 if value is None else value.size - left, left))

    def before_backward(self, outputs: Any) -> None:
        """Refuses placeholders, which have no graph."""
        for leaf in nested.leaves(outputs)[0]:
            if is_placeholder(nested.array_of(leaf)):
                raise looked_at(nested.array_of(leaf), 'a gradient')

    def before_unchain(self, output: chainer.Variable) -> None:
        """Has all that an output was made of unchained where it is made."""
        array, program = nested.array_of(output), self._program
        if not is_placeholder(array) or array.program is not program:
            return
        to_do = [one for one in reads(array) if isinstance(one, Source)]
        while to_do:
            source = to_do.pop()
            if source not in program.notes.unchained:
                program.notes.unchained.add(source)
                to_do += program.calls[source.call].inputs

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
            for name in link._persistent:
                value = vars(link).get(name)
                if is_placeholder(nested.array_of(value)):
                    self._looking = [path]
                    raise PlaceholderError(
                        f'link {path} sets its persistent {name!r} to '
                        f'{value!r}, so that the link cannot be cut')
        for path, parameter in self._names.parameters.items():
            before = self._arrays[path]
            if before is not None and before is not parameter._data[0]:
                self._looking = [path.rpartition('/')[0] or '/']
                raise PlaceholderError(
                    f'forward sets the array of parameter {path}; mark the '
                    'function that does so: chainer_fp8pipe.atomic(function)')

    # --- one call ------------------------------------------------------------

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here on each rank: what most
        # calls have not got is looked for in loops that are run anyway.
        own, program = attributes_of(node), self._program
        read: list[Source | str] = []
        arguments, given = [], []
        for x in inputs:
            array = x._data[0] if isinstance(x, Variable) else x
            read += self._read(x)
            if is_placeholder(array) or isinstance(x, chainer.Parameter):
                arguments.append(x)
            else:
                given.append(array)
                arguments.append(_kept(x))
        hidden, arrays = self._scan(own, read)
        whole, used = self._persistent_in(given, arrays) if (
            given or arrays or self._recorder.atomic) else ((), ())
        if type(node) is AsStrided:
            self._refuse_afar(inputs)
        figures = self._figures(node, own, inputs, original)
        number = len(program.calls)     # after what an earlier batch gave
        for label, index in figures.ignored:
            self.leave_out(None if index is None else inputs[index], label)
        names = tuple(dict.fromkeys([
            *(one for one in read if type(one) is str), *figures.inner]))
        if figures.form is not None:
            whole += tuple(self._keeping(names))
        link = self._stack[-1] if self._stack else None
        call = RecordedCall(
            figures.name, self._names.of(link) or '/', self._path(number),
            tuple([one for one in read if type(one) is Source]), names,
            figures.outputs, figures.forward, figures.backward,
            figures.deferrable, figures.kept, (), figures.temporary,
            figures.draws, tuple(dict.fromkeys(whole)), None,
            figures.once or any(id(link) in self._recorder.moving
                                for link in self._stack),
            figures, node, self._attributes(own, figures) if arrays
            else dict(own), tuple(arguments), hidden=hidden, reads=used,
            line=_line())
        if vars(LOCAL) != self._config:
            call.config = {
                name: value for name, value in vars(LOCAL).items()
                if name not in self._config or self._config[name] != value}
        results = []
        for key, form in figures.forms.items():
            array = remade(form, Source(number, key), program)
            if type(key) is int:
                results.append(_ahead(array, figures.outputs[key].wants))
            else:
                own[str(key)] = array       # it may be read
        call.results = tuple(results)
        program.calls.append(call)
        return call.results

    def _scan(self, own: dict[str, Any], read: list[Source | str]
              ) -> tuple[tuple[str, ...], list[Any]]:
        """Names of attributes with placeholders, and arrays in others.

        Adds what placeholders are made of to ``read``, and numbers to the
        program's.
        """
        hidden: list[str] = []
        arrays: list[Any] = []
        for name, value in own.items():
            kind = type(value)
            if kind in _NUMBERS:
                # NaN has another hash each time.
                self._program.notes.numbers.append(
                    value if value == value else None)
            elif kind not in _SIMPLE and name not in CHAINERS:
                for leaf in nested.leaves(value)[0]:
                    array = nested.array_of(leaf)
                    if is_placeholder(array):
                        read += self._read(leaf)
                        hidden.append(name)
                    else:
                        arrays.append(array)
        return tuple(dict.fromkeys(hidden)), arrays

    def _path(self, number: int) -> tuple[int, ...]:
        return tuple([self._first_call.setdefault(id(link), number)
                      for link in self._stack])

    def _read(self, x: Any) -> tuple:
        """What an input is made of: outputs of calls, and parameters."""
        if isinstance(x, chainer.Parameter):
            name = self._names.of(x)
            if name is None:
                raise ValueError(
                    f'{user_line()}: the model uses a parameter that is not '
                    'among its own; register it in init_scope')
            return (name,)
        array = x._data[0] if isinstance(x, Variable) else x
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
        if array.program is self._program:
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
        program, key = self._program, (id(array.program), source)
        if key not in program.notes.pins:
            chunk = array.program.chunk_of(source)
            if chunk is None:
                raise ValueError(
                    f'{user_line()}: a value of an earlier batch or '
                    'micro-batch is used, which nobody has kept; keep state '
                    'in attributes of links, and call partition() with an '
                    'example that reads it in its second call')
            program.notes.pins[key] = Source(len(program.calls), 0)
            program.calls.append(RecordedCall(
                'state', outputs={0: Value(array.shape, array.dtype)},
                pinned=chunk, before=(array.program, source)))
        return program.notes.pins[key]

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

    def _persistent_in(self, inputs: list[Any], arrays: list[Any]
                       ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Links whose calls must be on one chunk, and those it reads.

        The first are those that are run as one call, and those whose
        persistent arrays are attributes of the function, which writes to
        them.
        """
        names, owners = self._names, self._owners
        whole: list[str] = []
        for link in self._stack:
            path = names.of(link)
            if path is None:
                continue
            if path in self._recorder.atomic:
                whole += (path, *self._keeping(
                    one for one in names.links
                    if one.startswith(path.rstrip('/') + '/')))
            if link._persistent:        # some make them in forward
                owners.update((id(value), path)
                              for value in _persistent(link))
        used = tuple(dict.fromkeys([
            owners[one] for array in (*arrays, *inputs)
            for one in (id(array), id(getattr(array, 'base', None)))
            if one in owners]))
        written = {owners.get(id(array)) for array in arrays} - {None}
        return (*whole, *(path for link in self._stack if (
            path := names.of(link)) in written and path)), used

    def _keeping(self, names: Iterable[str]) -> list[str]:
        """Paths of links that have persistent arrays, by parameters or links.
        """
        paths = [name if name in self._names.links
                 else name.rpartition('/')[0] or '/' for name in names]
        return [path for path in paths
                if _persistent(self._names.links[path])]

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
        link.avg_mean = link.xp.zeros_like(link.avg_mean)
        link.avg_var = link.xp.zeros_like(link.avg_var)
        link.decay, link.N = 0.0, 0
        path = self._names.of(link)
        if path is not None:
            self._owners.update({id(link.avg_mean): path,
                                 id(link.avg_var): path})
        try:
            result = original(link, *args, **kwargs)
            calls = self._program.calls
            for number in range(len(calls) - 1, -1, -1):
                if any(value is link.avg_mean for value
                       in calls[number].attributes.values()):
                    self._program.notes.normalised.append(
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
        memo, key = self._recorder.memo, key_of(node, own, inputs)
        found = memo.get(key)
        if found is None or self._timed and not found.timed:
            found = self._measure(node, own, inputs, original)
        if key is not None:
            memo.pop(key, None)
            memo[key] = found         # the last one is the latest
            if len(memo) > _MEASURED:
                del memo[next(iter(memo))]
        return found

    def _measure(self, node: Any, own: dict[str, Any], inputs: tuple,
                 original: Callable) -> Figures:
        twin, whole = again(node, own), isinstance(node, WholeCall)
        attributes_of(twin).update({
            name: with_real(value) for name, value in own.items()
            if name not in CHAINERS and type(value) not in _SIMPLE})
        inside = _Inside(self._names, self._recorder.pipeline)
        with self._names.reporter.scope({}), (
                on_copies(self._names.links) if whole else _NO_BLOCK), \
                inside.filling(getattr(node, 'run', None)), \
                intercepting(inside):
            if whole:
                self._refuse_numbers(twin, inputs, original)
            found = measured(twin, inputs, original, self._timed)
        label = ignored_label(node)
        if label is not None:
            found.ignored = (label, 1),
        if whole:
            found.ignored = inside.labels(inputs)
        found.inner = tuple(sorted(inside.seen))
        found.once, found.normalises = inside.once, inside.normalises
        return found

    def _refuse_numbers(self, node: Any, inputs: tuple, original: Callable
                        ) -> None:
        """Raises PlaceholderError if numbers that it gives are of data.

        The function is run on two different values.
        """
        links = self._names.links
        returned, kept = [], []
        for factor in (1.0, -37.0):
            twin = again(node, attributes_of(node))
            with on_copies(links), preserved():
                original(twin, made_up_inputs(inputs, factor))
                returned.append(constants(twin.result))
                kept.append({(path, name, repr(value))
                             for path, link in links.items()
                             for name, value in vars(link).items()
                             if isinstance(value, PLAIN)})
        if returned[0] != returned[1]:
            where = self._names.of(self._stack[-1]) if self._stack else '/'
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


class _Inside(Interceptor):
    """Sees what runs inside of a call that is measured.

    Attributes:
        seen: Paths of the parameters.
        once: Whether a link is called that moves on with every pass.
        normalises: Whether a batch normalisation is called.
    """

    def __init__(self, names: Names, pipeline: Any) -> None:
        self._names, self._pipeline = names, pipeline
        self.seen: set[str] = set()
        self.once = self.normalises = False
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

    def communicate(self, name: str, comm: MPI.Comm,
                    answer: Callable[[], Any] | None,
                    original: Callable[[], Any]) -> Any:
        return collectives.answered(name, comm, answer, self._pipeline)

    def leave_out(self, labels: Any, label: int) -> None:
        """Notes the array of labels, of which a mean leaves out some."""
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
    """The program of a call in training, after which links are as before.

    Calls say which values they retain for backward, for planning.  Outputs
    may lie in the memory of other values, which are retained then.
    """
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True), preserved(), \
            on_copies(recorder.names.links), recorder.placeholders():
        program = recorder.record(run, timed=timed)
    memory: dict[Source, Source | None] = {}
    for number, call in enumerate(program.calls):
        figures = call.figures
        if figures is None:
            continue
        read = [() if isinstance(x, chainer.Parameter) else tuple([
            one for one in reads(nested.array_of(x))
            if isinstance(one, Source)]) for x in call.arguments]
        for output, index in figures.views.items():
            memory[Source(number, output)] = next(
                (memory.get(source, source) for source in read[index]), None)
        retained = [
            *(source for index in figures.kept_inputs
              for source in read[index]),
            *(Source(number, index) for index in figures.kept_outputs)]
        call.retained = tuple(filter(None, dict.fromkeys(
            memory.get(source, source) for source in retained)))
    return program


def _persistent(link: chainer.Link) -> list[Any]:
    """The persistent arrays of a link."""
    return [value for name in link._persistent if isinstance(
        value := vars(link).get(name), chainer.get_array_types())]


def _kept(x: Any) -> Any:
    """An input that Python may write to afterwards: a copy of it."""
    if isinstance(x, Variable):
        return Variable(x._data[0].copy(), requires_grad=x.requires_grad)
    return x.copy() if hasattr(x, 'copy') else x


def _ahead(array: Any, wants: bool) -> chainer.Variable:
    made = _variable(array, wants)
    made.__class__ = Ahead
    return made


def _line() -> tuple[Any, int] | None:
    """The code and line of the user's that calls a function."""
    frame = next(frames_of_users(sys._getframe(2)), None)
    return None if frame is None else (frame.f_code, frame.f_lineno)

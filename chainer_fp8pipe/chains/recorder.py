"""Runs a model's forward once, on placeholders, and writes down its calls."""
# Every rank runs the user's own forward, for every micro-batch, and each of
# its calls comes here: it is written down and not made, and forward goes on
# with placeholders for the outputs.  Most calls have been written down before:
# all but the values of arrays follows from a call's form (`forms`), what it
# reads, and the links around it.  A new form is measured.
#
# So Python runs once for a micro-batch on each rank, and all ranks have drawn,
# counted and appended the same: nothing is put back, and control flow may be
# another one in each batch.
#
# A link whose own code looks at data cannot be cut.  The error of the
# placeholder says so in the middle of the run; then forward is run again with
# the innermost link around the look as one call, and links get the attributes
# that they had, of which only the first program has copies.  A look in the
# model's own forward, or first in a later batch, is the user's to mark.
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
from chainer import Variable
from chainer.functions.array.as_strided import AsStrided

from ..intercept.function_calls import (
    Interceptor,
    _variable,
    hold_calls,
    intercepting,
    suspended,
)
from ..pipeline.means import BatchStatistics
from ..pipeline.randomness import Place, preserved, seed_at
from . import collectives, nested
from .attributes import Names, copied, on_copies, set_attributes
from .calls import Source
from .deferred import place_array, set_placeholder
from .forms import Forms, persistent_in
from .measure import (
    CHAINERS,
    KnownCall,
    attributes_of,
    counted,
    function_of,
    measured,
)
from .placeholder import (
    Ahead,
    PlaceholderError,
    is_placeholder,
    looked_at,
    placeholder,
    remade,
    sources,
    user_line,
)
from .program import LOCAL, Program
from .whole_call import ArrayCall, WholeCall, call_whole, is_marked

#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
NOWHERE = Place(0, 0, 0, 0)
_NUMBERS = frozenset((int, bool, float))
#: In place of NaN, whose hash is another one on each rank, as None's may be.
_NAN = 1 << 60
#: So many calls are kept to be written down again.
_FORMS = 1 << 14


class Recorder:
    """Records a model's forward passes.

    Args:
        names: Of the model's links and parameters, which may be placeholders.
        pipeline: The ranks over which the model is to be cut; None: unknown.
    """

    def __init__(self, names: Names, pipeline: Any = None) -> None:
        self.names, self.pipeline = names, pipeline
        collectives.hold(self)
        hold_calls(map(type, names.links.values()), self)
        self.timed = False      # whether calls that are new are timed
        self._reasons: dict[str, str] = {}
        #: By configuration: figures by form, and calls by form, what they
        #: read, and links around them.
        self.forms: dict[str, dict[Any, Any]] = {}
        #: Paths of the links that are run as one call.
        self.atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if is_marked(link))

    def undivided(self) -> list[str]:
        """The links that are run as one call because they look at data."""
        return [f'link {path} is not divided: {reason.partition(". ")[0]}'
                for path, reason in self._reasons.items()]

    def record(self, run: Callable, both: Any = ((), {}),
               place: Place = NOWHERE,
               statistics: BatchStatistics | None = None) -> Program:
        """The program of what ``run`` calls, in a block of `placeholders`.

        Args:
            run: The model, or what calls it.
            both: Its arguments by place and by name, which it gets copies of.
            place: Where in the training that is.
            statistics: Gathers those of batch normalisations.

        Raises:
            PlaceholderError: The model's own forward looks at computed data.
        """
        names, shaped = self.names, len(self.names.shaped)
        statistics = statistics or BatchStatistics()
        leaves, tree = nested.leaves(both)
        while True:
            args, kwargs = nested.rebuilt(tree, [x.copy() for x in leaves])
            one = _Recording(self, Program(names, place), statistics)
            # What looks at data has done so in the example, hardly later.
            before = None if one.known else copied(names.links)
            try:
                with names.reporter.scope(one.program.reports), \
                        statistics.counting(-1), between_calls(place), \
                        intercepting(one):
                    one.program.result = run(*args, **kwargs)
                one.refuse_placeholders()
            except PlaceholderError as error:
                found = next((name for name in reversed(one.looking)
                              if name not in self.atomic | {'/'}), None)
                if found is None or before is None:
                    raise
                self.atomic |= {found}
                self.forms = {}
                self._reasons[found] = str(error)
                set_attributes(names.links, before)
                for name in names.shaped[shaped:]:
                    place_array(names.parameters[name], None)
                del names.shaped[shaped:]
            else:
                return one.program

    @contextlib.contextmanager
    def placeholders(self) -> Iterator[None]:
        """A block in which every parameter with a shape is a placeholder."""
        names, done = self.names, False
        shaped = len(names.shaped)
        before = [(name, parameter, parameter._data[0], parameter._grad)
                  for name, parameter in names.parameters.items()]
        for name, parameter, array, _ in before:
            if array is not None:
                place_array(parameter, placeholder(
                    array.shape, array.dtype, name,
                    chainer.backend.get_array_module(array)))
        try:
            yield
            done = True
        finally:
            for name, parameter, array, gradient in before:
                found = parameter._data[0]
                if array is None and found is not None:
                    names.made[name] = placeholder(found.shape, found.dtype)
                # A parameter whose shape was found keeps its placeholder; one
                # that its link has made will be made again, and after an error
                # the link may have to run again.
                if array is not None or not done or not is_placeholder(found):
                    place_array(parameter, array)
                parameter._grad = gradient
            if not done:
                del names.shaped[shaped:]


class OfBatch(chainer.Variable):
    """A result that follows from one micro-batch alone, of this place."""

    def __init__(self, array: Any, place: Place) -> None:
        super().__init__(array, requires_grad=False)
        self.place = place


class _Recording(Interceptor):
    """Writes down the calls of one forward pass."""

    def __init__(self, recorder: Recorder, program: Program,
                 statistics: BatchStatistics) -> None:
        self._recorder, self._names = recorder, recorder.names
        self.program, self._statistics = program, statistics
        self._first_call: dict[int, int] = {}   # of each link, by its id
        # The links around the first look at data, from the model inwards.
        self.looking: list[str] = []
        self._forms = Forms(program)
        self._stack = self._forms.stack
        if sum(map(len, recorder.forms.values())) > _FORMS:
            recorder.forms.clear()
        self.known = recorder.forms.setdefault(repr({
            **self._forms.config, 'train': chainer.config.train,
            'enable_backprop': chainer.config.enable_backprop}), {})
        self._arrays = {path: parameter._data[0] for path, parameter
                        in self._names.parameters.items()}
        self._hooks = dict(chainer.get_function_hooks())

    # --- the interceptor -----------------------------------------------------

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        self._stack.append(link)
        try:
            if self._names.of(link) in self._recorder.atomic:
                return call_whole(link, args, kwargs)
            return self._statistics.call_link(link, args, kwargs, original)
        except PlaceholderError:
            self.looking = self.looking or list(filter(
                None, map(self._names.of, self._stack)))
            raise
        finally:
            self._stack.pop()

    def call_whole(self, function: Callable, args: Any, kwargs: Any) -> Any:
        return call_whole(function, args, kwargs)

    def compute(self, function: Callable, args: Any, kwargs: Any) -> Any:
        """Records a function of NumPy's, or an operator, of placeholders."""
        return call_whole(function, args, kwargs, ArrayCall)

    def communicate(self, name: str, comm: Any,
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
        self.program.notes.labels.append(counted(labels, label))

    def before_backward(self, outputs: Any) -> None:
        raise PlaceholderError(
            f'{user_line()}: a gradient needs the values of calls that are '
            'not made yet; mark the function or link that computes it, from '
            'the batch or from arrays: chainer_fp8pipe.atomic(function)')

    def before_unchain(self, output: chainer.Variable) -> None:
        """Has all that an output was made of unchained where it is made."""
        array, program = nested.array_of(output), self.program
        if not is_placeholder(array) or array.program is not program:
            return
        to_do = list(sources(array))
        while to_do:
            source = to_do.pop()
            if source not in program.notes.unchained:
                program.notes.unchained.add(source)
                to_do += program.calls[source.call].inputs

    # --- after the run -------------------------------------------------------

    def refuse_placeholders(self) -> None:
        """Raises an error for values that forward must not set so."""
        for path, link in self._names.links.items():
            for name in link._persistent:
                value = vars(link).get(name)
                if is_placeholder(nested.array_of(value)):
                    self.looking = [path]
                    raise PlaceholderError(
                        f'link {path} sets its persistent {name!r} to '
                        f'{value!r}, so that the link cannot be cut')
        for path, parameter in self._names.parameters.items():
            before = self._arrays[path]
            if before is not None and before is not parameter._data[0]:
                self.looking = [path.rpartition('/')[0] or '/']
                place_array(parameter, before)
                raise PlaceholderError(
                    f'forward sets the array of parameter {path}; mark the '
                    'function that does so: chainer_fp8pipe.atomic(function)')

    # --- one call ------------------------------------------------------------

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here on each rank, and most are
        # like one of an earlier program.
        function, program = function_of(node), self.program
        if chainer.get_function_hooks() != self._hooks:
            raise PlaceholderError(
                f'{user_line()}: a function hook in forward would see no '
                'call, as none is made yet; put it around the training, or '
                'mark a function around its block: '
                'chainer_fp8pipe.atomic(function)')
        own = function.__dict__
        key = self._forms.of(function, inputs)
        call = self.known.get(key) or self._new(key, node, inputs, original)
        for name in call.numbers:
            value = own[name]
            program.notes.numbers.append(value if value == value else _NAN)
        if call.alone:
            _check_place(inputs, program.place)
            with suspended(), chainer.no_backprop_mode():
                return tuple([OfBatch(out.array, program.place)
                              for out in original(node, inputs)])
        for label, index in call.ignored:
            self.leave_out(None if index is None else inputs[index], label)
        attributes, arguments = own.copy(), inputs
        # Arrays to which Python may write afterwards.
        for name in call.copied:
            attributes[name] = _copied(attributes[name])
        if call.real:
            _check_place(inputs, program.place)
            arguments = tuple([_kept(x) if index in call.real else x
                               for index, x in enumerate(inputs)])
        program.calls.append(call)
        program.takes.append((node, attributes, arguments))
        results = []
        for output, value in call.outputs.items():
            array = remade(call.forms[output], program=program)
            if type(output) is int:
                made = _variable(array, value.wants)
                made.__class__ = Ahead
                results.append(made)
            else:
                own[output] = array         # it may be read
        if call.form is not None:
            own['result'] = call.form
        return tuple(results)

    def _new(self, key: Any, node: Any, inputs: tuple, original: Callable
             ) -> KnownCall:
        """Finds out about a call what all calls with its key share."""
        recorder, forms = self._recorder, self._forms
        read, form = forms.read, key and key[0]
        if type(node) is AsStrided and read:
            raise looked_at(nested.array_of(inputs[0]), 'as_strided')
        figures = self.known.get(form) or measured(
            node, inputs, original, self._link(), self._names,
            recorder.pipeline, recorder.timed)
        own = {name: value for name, value in attributes_of(node).items()
               if name not in CHAINERS}
        number = len(self.program.calls)
        names = tuple(dict.fromkeys([
            *(one for one in read if type(one) is str), *figures.inner]))
        arrays = [_real_in(x) for x in inputs]
        attributes = _real_in(list(own.values()))
        used = dict.fromkeys([
            path for array in itertools.chain(attributes, *arrays)
            if (path := forms.owner_of(array))])
        for path in used:
            self._statistics.check(self._names.links[path])
        whole = self._whole(node, names, {
            forms.owners.get(id(array)) for array in attributes})
        call = dataclasses.replace(
            figures, link=self._link(),
            path=tuple([self._first_call.setdefault(id(link), number)
                        for link in self._stack]),
            inputs=tuple([one for one in read if type(one) is Source]),
            parameters=names, whole=whole, reads=tuple(used),
            # What follows from the batch alone is no call of the program.
            alone=not (read or whole or used or figures.inner
                       or figures.draws),
            forms={output: remade(one, source=Source(number, output))
                   for output, one in figures.forms.items()},
            numbers=tuple([
                name for name, value in attributes_of(node).items()
                if type(value) in _NUMBERS]),
            hidden=tuple([name for name, value in own.items() if len(
                _real_in(value)) < len(nested.leaves(value)[0])]),
            copied=tuple([
                name for name, value in own.items()
                if name not in figures.writes
                and _may_change(value, forms.owners)]),
            real=tuple([index for index, x in enumerate(inputs)
                        if arrays[index] and self._names.of(x) is None]),
            config={} if vars(LOCAL) == forms.config else {
                name: value for name, value in vars(LOCAL).items()
                if name not in forms.config or forms.config[name] != value})
        # A number beside arrays may be another one in the next batch.
        if key is not None and not (
                figures.form and _has_constants(figures.form[0])):
            self.known.update({form: figures, key: call})
        return call

    def _link(self) -> str:
        return self._names.of(self._stack[-1]) or '/' if self._stack else '/'

    def _whole(self, node: Any, names: Iterable[str], written: set[str | None]
               ) -> tuple[str, ...]:
        """Links whose calls must all be on one chunk.

        They are run as one call, or the function writes to their arrays.
        """
        links = self._names.links
        stack = list(filter(None, map(self._names.of, self._stack)))
        whole = [path for path in stack if path in written]
        if isinstance(node, WholeCall):
            if stack and stack[-1] in self._recorder.atomic:
                whole += [path for path in links if f'{path}/'.startswith(
                    f'{stack[-1].rstrip("/")}/')]
            whole += [path for path in (
                name.rpartition('/')[0] or '/' for name in names)
                if persistent_in(links[path])]
        return tuple(dict.fromkeys(whole))


@contextlib.contextmanager
def between_calls(place: Place) -> Iterator[None]:
    """A block in which the place seeds what Python draws between calls."""
    state = random.getstate()
    random.seed(repr(place))
    try:
        with preserved():
            seed_at(place._replace(layer=_BETWEEN))
            yield
    finally:
        random.setstate(state)


def record_example(recorder: Recorder, run: Callable, timed: bool,
                   both: Any = ((), {})) -> Program:
    """The program of a call in training, with what each retains for backward.

    Links are as before.  Outputs may lie in the memory of other values, which
    are retained then.
    """
    recorder.timed = timed
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True), preserved(), \
            on_copies(recorder.names.links, run), recorder.placeholders():
        program = recorder.record(run, both)
    recorder.timed = False
    memory: dict[Source, Source | None] = {}
    for number, (call, taken) in enumerate(zip(
            program.calls, program.takes, strict=True)):
        read = [sources(nested.array_of(x)) for x in taken[2]] if taken else []
        for output, index in call.views.items():
            memory[Source(number, output)] = next(
                (memory.get(source, source) for source in read[index]), None)
        retained = [
            *(source for index in call.kept_inputs
              for source in read[index]),
            *(Source(number, index) for index in call.kept_outputs)]
        call.retained = tuple(filter(None, dict.fromkeys(
            memory.get(source, source) for source in retained)))
    return program


def _real_in(value: Any) -> list[Any]:
    """The arrays in a value that are no placeholders."""
    return [array for leaf in nested.leaves(value)[0] if not is_placeholder(
        array := nested.array_of(leaf))]


def _may_change(value: Any, owners: Mapping[int, str]) -> bool:
    """Whether Python may write to a list or an array in a value."""
    if isinstance(value, tuple):
        return any(_may_change(one, owners) for one in value)
    return isinstance(value, (list, dict)) or isinstance(
        value, nested.ARRAYS) and not is_placeholder(value) and (
            id(value) not in owners)


def _copied(value: Any) -> Any:
    """A copy of an attribute, with copies of the arrays in it."""
    found, tree = nested.leaves(value)
    return nested.rebuilt(tree, [
        one if is_placeholder(nested.array_of(one)) or isinstance(
            one, Variable) else one.copy() for one in found])


def _check_place(inputs: Iterable[Any], place: Place) -> None:
    """Refuses results of another micro-batch of the same update."""
    for x in inputs:
        made = x.place if type(x) is OfBatch else place
        if made != place and made.iteration == place.iteration:
            raise ValueError(
                f'{user_line()}: forward uses what it has kept of an earlier '
                'micro-batch, where one process has that of the batch before; '
                'compute it anew, or train with micro_batches=1 '
                '(--micro-batches 1)')


def _has_constants(tree: Any) -> bool:
    kind, content = tree
    if kind in ('leaf', 'constant'):
        return kind == 'constant' and content is not None
    return any(_has_constants(one[1] if kind is dict else one)
               for one in content)


def _kept(x: Any) -> Any:
    """An input that Python may write to afterwards: a copy of it."""
    if isinstance(x, Variable):
        return Variable(x._data[0].copy(), requires_grad=x.requires_grad)
    return x.copy() if hasattr(x, 'copy') else x

"""Runs a model's forward once, on placeholders, and writes down its calls."""
# Every rank runs the user's own forward, for every micro-batch, and each of
# its calls comes here: it is written down and not made, and forward goes on
# with placeholders for the outputs.  Most calls have been written down before:
# all but the values of arrays follows from a call's form (`forms`), what it
# reads, and the links around it.  A new form is measure.measured.
#
# So Python runs once for a micro-batch on each rank, and all ranks have drawn,
# counted and appended the same: nothing is put back, and control flow may be
# another one in each batch.
#
# A link whose own code looks at data cannot be cut.  The error of the
# placeholder says so in the middle of the run; then forward is run again with
# the innermost link around the look as one call, and links get copies of what
# they kept, which are made where settings are new.  A look in the model's own
# forward, or first in a later batch, is the user's to mark.
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
from chainer import Variable

from ..intercept.function_calls import (
    _variable,
    current,
    hold_calls,
    intercepting,
    suspended,
)
from ..intercept.patching import Patch
from ..pipeline.means import BatchStatistics
from ..pipeline.randomness import Place, preserved, seed_at
from . import measure, nested
from .attributes import Names, on_copies, putting_back
from .calls import Call, Source
from .collectives import PATCHES, Answering
from .deferred import place_array, set_placeholder
from .forms import Forms, persistent_in
from .layout import sources_in
from .placeholder import (
    Ahead,
    PlaceholderError,
    is_placeholder,
    placeholder,
    remade,
    user_line,
)
from .program import LOCAL, Program
from .whole_call import MARK, ArrayCall, WholeCall, call_whole

#: Seeds what Python draws between calls, in place of a call's number.
_BETWEEN = (1 << 31) - 1
NOWHERE = Place(0, 0, 0, 0)
_NUMBERS = frozenset((int, bool, float))
#: So many calls are kept to be written down again.
_FORMS = 1 << 14


class Recorder:
    """Records forward passes of a model, to be cut over a pipeline."""

    def __init__(self, names: Names, pipeline: Any = None) -> None:
        self.names, self.pipeline = names, pipeline
        for patch in (*PATCHES, _GRADIENTS):
            patch.hold(self)
        hold_calls(map(type, names.links.values()), self)
        self.timed = False      # whether calls that are new are timed
        self._reasons: dict[str, str] = {}
        #: By configuration: calls by form, and by key (`forms`).
        self.forms: dict[str, dict[Any, Call]] = {}
        #: Paths of the links that are run as one call.
        self.atomic: frozenset[str] = frozenset(
            name for name, link in names.links.items() if MARK in vars(link))

    def undivided(self) -> list[str]:
        """The links that are run as one call because they look at data."""
        return [f'link {path} is not divided: {reason.partition(". ")[0]}'
                for path, reason in self._reasons.items()]

    def record(self, run: Callable, both: Any = ((), {}),
               place: Place = NOWHERE,
               statistics: BatchStatistics | None = None) -> Program:
        """The program of what ``run`` calls, in a block of `placeholders`.

        It is called with copies of ``both``, arguments by place and by name.

        Raises:
            PlaceholderError: The model's own forward looks at computed data.
        """
        while not _Recording(self, place).known:
            put_back = putting_back(self.names.links, run)
            try:
                with self.placeholders():
                    one = _Recording(self, place, statistics)
                    return one.record(run, both)
            except PlaceholderError as error:
                found = next((name for name in reversed(one.looking)
                              if name not in self.atomic | {'/'}), None)
                if found is None:
                    raise
                put_back()
                self.atomic |= {found}
                self.forms = {}
                self._reasons[found] = str(error)
        # What looks at data has done so before, hardly later.
        return _Recording(self, place, statistics).record(run, both)

    def example(self, run: Callable, both: Any = ((), {}),
                place: Place = NOWHERE) -> Program:
        """The same, which leaves links as before."""
        with on_copies(self.names.links, run), self.placeholders():
            return self.record(run, both, place)

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


def _get_grad(original: Callable, parameter: chainer.Parameter) -> Any:
    if is_placeholder(parameter._data[0]) and isinstance(
            current(), _Recording):
        # Run as one call, a link would find none.
        raise ValueError(
            f'{user_line()}: forward reads the gradient of a parameter, '
            'which another rank may have; read it in a hook of the '
            'optimizer that is called for each parameter '
            '(call_for_each_param = True)')
    return original(parameter)


#: A look at a gradient in forward (chainer/variable.py, line 1073).
_GRADIENTS = Patch(chainer.Parameter, '_get_grad', _get_grad)


class OfBatch(chainer.Variable):
    """A result that follows from one micro-batch alone, of this place."""

    def __init__(self, array: Any, place: Place) -> None:
        super().__init__(array, requires_grad=False)
        self.place = place


class _Recording(Answering):
    """Writes down the calls of one forward pass."""

    def __init__(self, recorder: Recorder, place: Place,
                 statistics: BatchStatistics | None = None) -> None:
        self.recorder, self.pipeline = recorder, recorder.pipeline
        self.program = Program(self._names, place)
        self._statistics = statistics or BatchStatistics()
        self._first_call: dict[int, int] = {}   # of each link, by its id
        # By output that is a view, whose memory it is in; None: the batch's.
        self._memory: dict[Source, Source | None] = {}
        # The links around the first look at data, from the model inwards.
        self.looking: list[str] = []
        self._forms = Forms(self.program)
        if sum(map(len, recorder.forms.values())) > _FORMS:
            recorder.forms.clear()
        self.known: Any = recorder.forms.setdefault(repr({
            **self._forms.config, 'train': chainer.config.train,
            'enable_backprop': chainer.config.enable_backprop}), {})
        self._arrays = {path: parameter._data[0] for path, parameter
                        in self._names.parameters.items()}
        self._hooks = len(chainer.get_function_hooks())

    @property
    def _names(self) -> Names:
        return self.recorder.names

    def record(self, run: Callable, both: Any) -> Program:
        """The program of a call with copies of arguments."""
        program = self.program
        leaves, tree = nested.leaves(both)
        args, kwargs = nested.rebuilt(tree, [x.copy() for x in leaves])
        seed_between(program.place)
        with self._names.reporter.scope(program.reports), \
                self._statistics.counting(-1), intercepting(self):
            program.result = run(*args, **kwargs)
        self._refuse_placeholders()
        return program

    def _refuse_placeholders(self) -> None:
        """Raises an error for values that forward must not set so."""
        for path, link in self._names.links.items():
            for name in link._persistent:
                if is_placeholder(nested.array_of(vars(link).get(name))):
                    self.looking = [path]
                    raise PlaceholderError(
                        f'link {path} sets its persistent {name!r} to a value '
                        'of another rank, so that the link cannot be cut')
        for path, parameter in self._names.parameters.items():
            before = self._arrays[path]
            if before is not None and before is not parameter._data[0]:
                self.looking = [path.rpartition('/')[0] or '/']
                place_array(parameter, before)
                raise PlaceholderError(
                    f'forward sets the array of parameter {path}; mark the '
                    'function that does so: chainer_fp8pipe.atomic(function)')

    # --- the interceptor -----------------------------------------------------

    def call_link(self, link: chainer.Link, args: Any, kwargs: Any,
                  original: Callable) -> Any:
        stack = self._forms.stack
        stack.append(link)
        try:
            if self._names.of(link) in self.recorder.atomic:
                return call_whole(link, args, kwargs)
            return self._statistics.call_link(link, args, kwargs, original)
        except (PlaceholderError, AttributeError) as error:
            self.looking = self.looking or list(filter(
                None, map(self._names.of, stack)))
            if isinstance(getattr(error, 'obj', None), (
                    chainer.FunctionNode, chainer.Function)):
                raise PlaceholderError(
                    f'{error}, as its forward is not run yet; mark a function '
                    'around its call and what reads this: '
                    'chainer_fp8pipe.atomic(function)') from error
            raise
        finally:
            stack.pop()

    #: Records a function of NumPy's, or an operator, of placeholders.
    compute = staticmethod(functools.partial(call_whole, of=ArrayCall))
    call_whole: Any = staticmethod(call_whole)

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
        self.program.notes.labels.append(measure.counted(labels, label))

    def before_backward(self, outputs: Any) -> None:
        raise PlaceholderError(
            f'{user_line()}: a gradient needs the values of calls that are '
            'not made yet; mark the function or link that computes it, from '
            'the batch or from arrays: chainer_fp8pipe.atomic(function)')

    def before_unchain(self, output: chainer.Variable) -> None:
        """Has all that an output was made of unchained where it is made."""
        to_do: list[Any] = [output]
        for x in to_do:             # which grows
            if type(x) is Ahead and x.array.program is self.program:
                taken = self.program.takes[x.array.source.call]
                to_do += taken[2] if taken else ()
                x.unchain()

    # --- one call ------------------------------------------------------------

    def apply(self, node: Any, inputs: tuple, original: Callable) -> tuple:
        # Each call of each micro-batch comes here on each rank, and most are
        # like one of an earlier program.
        function, program = measure.function_of(node), self.program
        if len(chainer.get_function_hooks()) != self._hooks:
            raise PlaceholderError(
                f'{user_line()}: a function hook in forward would see no '
                'call, as none is made yet; put it around the training, or '
                'mark a function around its block: '
                'chainer_fp8pipe.atomic(function)')
        own = function.__dict__
        key = self._forms.of(function, inputs)
        call = self.known.get(key) or self._new(key, node, inputs, original)
        for name in call.numbers:
            program.notes.numbers.append(own[name])
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
            arguments = tuple([_copied(x) if index in call.real else x
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
             ) -> Call:
        """Finds out about a call what all calls with its key share."""
        forms = self._forms
        read, form = forms.read, key and key[0]
        alike = self.known.get(form) or measure.measured(
            node, inputs, original, self.recorder)
        every = measure.attributes_of(node)
        own = {name: value for name, value in every.items()
               if name not in measure.CHAINERS}
        number = len(self.program.calls)
        stack = list(filter(None, map(self._names.of, forms.stack)))
        names = tuple(dict.fromkeys([
            *(one for one in read if type(one) is str), *alike.inner]))
        arrays = [_real_in(x) for x in inputs]
        attributes = _real_in(list(own.values()))
        used = dict.fromkeys(filter(None, map(
            forms.owner_of, itertools.chain(attributes, *arrays))))
        for path in used:
            self._statistics.check(self._names.links[path])
        given = [sources_in(x) for x in inputs]
        in_memory = self._memory
        for output, index in alike.views.items():
            in_memory[Source(number, output)] = next(
                (in_memory.get(one, one) for one in given[index]), None)
        retained = [*(one for index in alike.kept_inputs
                      for one in given[index]),
                    *(Source(number, index) for index in alike.kept_outputs)]
        whole = self._whole(node, names, stack, {
            forms.owners.get(id(array)) for array in attributes})
        call = dataclasses.replace(
            alike, link=stack[-1] if stack else '/',
            path=tuple([self._first_call.setdefault(id(link), number)
                        for link in forms.stack]),
            inputs=tuple([one for one in read if type(one) is Source]),
            retained=tuple(filter(None, dict.fromkeys([
                in_memory.get(one, one) for one in retained]))),
            parameters=names, whole=whole, reads=tuple(used),
            # What follows from the batch alone is no call of the program.
            alone=not (read or whole or used or alike.inner or alike.draws),
            forms={output: remade(one, source=Source(number, output))
                   for output, one in alike.forms.items()},
            numbers=tuple([name for name, value in every.items()
                           if type(value) in _NUMBERS]),
            hidden=tuple([name for name, value in own.items() if any(
                map(is_placeholder, nested.arrays(value)))]),
            copied=tuple([name for name, value in own.items()
                          if _may_change(value) and name not in alike.writes
                          and id(value) not in forms.owners]),
            real=tuple([index for index, x in enumerate(inputs)
                        if arrays[index] and self._names.of(x) is None]),
            config={name: value for name, value in vars(LOCAL).items()
                    if name not in forms.config
                    or forms.config[name] != value})
        # A number beside arrays may be another one in the next batch.
        if key is not None and not (
                alike.form and _has_constants(alike.form[0])):
            self.known.update({form: alike, key: call})
        return call

    def _whole(self, node: Any, names: Iterable[str], stack: list[str],
               written: set[str | None]) -> tuple[str, ...]:
        """Links whose calls must all be on one chunk.

        They are run as one call, or the function writes to their arrays.
        """
        links = self._names.links
        whole = [path for path in stack if path in written]
        if isinstance(node, WholeCall):
            if stack and stack[-1] in self.recorder.atomic:
                whole += [path for path in links if f'{path}/'.startswith(
                    f'{stack[-1].rstrip("/")}/')]
            whole += [path for path in (
                name.rpartition('/')[0] or '/' for name in names)
                if persistent_in(links[path])]
        return tuple(dict.fromkeys(whole))


def seed_between(place: Place) -> None:
    """Has the place seed what Python draws between calls."""
    seed_at(place._replace(layer=_BETWEEN))


def record_example(recorder: Recorder, run: Callable, timed: bool,
                   both: Any = ((), {})) -> Program:
    """The program of a call in training; links are as before.

    What its calls retain for backward is known in a new recorder's only.
    """
    recorder.timed = timed
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True), preserved():
        program = recorder.example(run, both)
    recorder.timed = False
    return program


def _real_in(value: Any) -> list[Any]:
    """The arrays in a value that are no placeholders."""
    return [one for one in nested.arrays(value) if not is_placeholder(one)]


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


def _may_change(value: Any) -> bool:
    """Whether Python may write to a value, or to what is in it."""
    try:
        hash(value)
    except TypeError:
        return True
    return False


def _copied(value: Any) -> Any:
    """A copy of what a call is given, with copies of the arrays in it."""
    def one(leaf: Any) -> Any:
        if is_placeholder(nested.array_of(leaf)) or isinstance(
                leaf, chainer.Parameter):
            return leaf
        return Variable(leaf._data[0].copy(), requires_grad=(
            leaf.requires_grad)) if isinstance(leaf, Variable) else leaf.copy()
    found, tree = nested.leaves(value)
    return nested.rebuilt(tree, list(map(one, found)))

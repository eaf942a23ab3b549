"""What links keep in attributes: copied for a look, and from batch to batch.
"""
# partition() runs forward on an example, and a link's own code on made-up
# values, and nothing must be seen of it later: a counter, a list, a generator
# of random numbers, a running mean.  So links get deep copies for that time,
# all made together, as links may share what is in them, and so do numbers,
# lists and generators among the variables of their modules.  Links,
# parameters, variables, placeholders and what copy.deepcopy refuses (threads,
# files, other ranks) stay as they are.
#
# In a step, the next batch's same micro-batch goes on from what the samples of
# this one have left: an LSTM's state, which is a placeholder, and whose maker
# has kept it; or their raw arrays.  The gradient ends there, as after
# Chainer's `unchain_backward`.  A computed value without samples, such as a
# running mean, is refused.  Which is which shows an example with one sample
# more: other shapes.  So do numbers and lists of numbers: those that move as
# before, such as a count of batches, move once a batch; others, such as a
# count of samples, and generators go on from micro-batch to micro-batch.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy

from . import nested
from .calls import Value
from .placeholder import is_placeholder

Attribute = tuple[str, str]     # path of a link, name
#: Those that links have of Chainer.
CHAINERS = frozenset(('_params', '_persistent', '_children', '_device',
                      '_overridden_to_methods'))
#: Between a link's path and the name under which the link has reported.
OBSERVER = '\0/'
#: Packages whose objects have threads or other ranks behind them.
_FOREIGN = frozenset(('chainer', 'chainermn', 'chainer_fp8pipe', 'mpi4py'))
_SIMPLE = int, float, bool, str, type(None)
_CONTAINERS = list, dict, set, collections.deque
_PLAIN = *_SIMPLE, *_CONTAINERS, numpy.generic
_GENERATORS = (numpy.random.RandomState, numpy.random.Generator, random.Random)


def _others(links: Mapping[str, chainer.Link], function: Any
            ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The variables of links' modules, and of a function, and what may move.
    """
    kinds = {kind for link in links.values() for kind in type(link).__mro__}
    found = {one.__module__: one.__globals__ for one in itertools.chain(
        [function], *(vars(kind).values() for kind in kinds))
             if isinstance(one, types.FunctionType)
             and str(one.__module__).partition('.')[0] not in _FOREIGN}
    if hasattr(function, '__dict__') and not isinstance(
            function, chainer.Link):
        found['loss_func'] = vars(function)
    return [(own, {name: value for name, value in own.items()
                   if isinstance(value, _SIMPLE + _CONTAINERS + _GENERATORS)
                   and not name.startswith('__')}) for own in found.values()]


def _copies(links: Mapping[str, chainer.Link], others: Iterable[dict] = ()
            ) -> tuple[list[dict[str, Any]], list[Any]]:
    """Copies of the variables of links and others; all that was copied."""
    found = [dict(vars(link)) for link in links.values()]
    # Those behind NumPy's and Python's functions, which a pass seeds anew.
    memo: dict[int, Any] = {id(one): one for one in (
        numpy.random.mtrand._rand, vars(random)['_inst'], *links.values())}
    # What cannot be written to may be large: a file in memory, say.
    memo.update((id(leaf), leaf) for leaf in nested.leaves(found)[0]
                if isinstance(leaf, (chainer.Variable, nested.Dataless))
                or not getattr(leaf.flags, 'writeable', True))
    memo.update((id(value), copy.copy(value)) for own in others
                for value in own.values() if isinstance(value, _CONTAINERS))
    found += map(dict, others)
    for own in found:
        for name, value in own.items():
            if type(value) not in _SIMPLE and name not in CHAINERS and (
                    type(value).__module__.partition('.')[0] not in _FOREIGN):
                try:
                    own[name] = copy.deepcopy(value, memo)
                except Exception:       # of any class
                    memo[id(value)] = value
    return found, memo.get(id(memo), [])    # deepcopy keeps originals there


def _states(links: Mapping[str, chainer.Link], function: Any
            ) -> tuple[Callable, list[dict[str, Any]], list[dict[str, Any]]]:
    """What sets all that links and others keep; copies of it; and itself."""
    others = _others(links, function)
    kept = [*((vars(link), dict(vars(link))) for link in links.values()),
            *others]

    def place(states: Iterable[dict[str, Any]]) -> None:
        for link in links.values():
            vars(link).clear()
        for (own, _), values in zip(kept, states, strict=True):
            own.update(values)
    return (place, _copies(links, [values for _, values in others])[0],
            [values for _, values in kept])


@contextlib.contextmanager
def on_copies(links: Mapping[str, chainer.Link], function: Any = None
              ) -> Iterator[None]:
    """A block in which what links keep is a copy; afterwards all is as before.

    So are numbers, lists and generators that their modules and ``function``,
    which calls the model, keep.
    """
    place, copies, kept = _states(links, function)
    place(copies)
    try:
        yield
    finally:
        place(kept)


def putting_back(links: Mapping[str, chainer.Link], function: Any = None
                 ) -> Callable[[], None]:
    """What sets all that is kept to copies of what it is now."""
    place, copies, _ = _states(links, function)
    return functools.partial(place, copies)


def generators_of(links: Mapping[str, chainer.Link]) -> list[Any]:
    """The generators of random numbers in attributes of links."""
    return [one for one in _copies(links)[1] if isinstance(one, (
        numpy.random.RandomState, numpy.random.BitGenerator, random.Random))]


def attributes(links: Mapping[str, chainer.Link]) -> dict[Attribute, Any]:
    """What links keep now; of persistent values those without arrays."""
    return {(path, name): _copied(value) for path, link in links.items()
            for name, value in vars(link).items()
            if name not in CHAINERS | link._params
            and not (name in link._persistent and nested.arrays(value))}


def changed(links: Mapping[str, chainer.Link], before: Mapping[Attribute, Any]
            ) -> dict[Attribute, Any]:
    """The attributes with arrays or plain numbers that are not as before."""
    return {key: value for key, value in attributes(links).items()
            if not _is_same(before.get(key), value)
            and (isinstance(value, _PLAIN) or nested.arrays(value))}


class Names:
    """Paths of a model's links and parameters."""

    def __init__(self, model: chainer.Link) -> None:
        #: Parameters that got their shape in a program, in this order.
        self.shaped: list[str] = []
        #: Placeholders of the parameters that their links make in forward.
        self.made: dict[str, Any] = {}
        self.links: dict[str, chainer.Link] = {}
        self.parameters: dict[str, chainer.Parameter] = {}
        #: How many links have a parameter, one with two paths counted twice.
        self.times: collections.Counter[str] = collections.Counter()
        self._of: dict[int, str] = {}
        self.reporter = chainer.Reporter()
        # model.namedparams() of a partitioned model has this rank's only.
        for path, link in model.namedlinks():
            if self._of.setdefault(id(link), path) == path:
                self.links[path] = link
                self.reporter.add_observer(path + OBSERVER[:-1], link)
            for name in sorted(link._params):
                parameter = getattr(link, name)
                full = f'{path.rstrip("/")}/{name}'
                known = self._of.setdefault(id(parameter), full)
                self.times[known] += 1
                if known == full:
                    self.parameters[full] = parameter

    def of(self, thing: Any) -> str | None:
        """The path of a link or parameter; None: not of this model."""
        return self._of.get(id(thing))


def parameters_of(names: Names) -> dict[str, Value]:
    """Shapes and dtypes of a model's parameters, by path, for planning."""
    found = {}
    for name, parameter in names.parameters.items():
        array = parameter._data[0]
        if array is None:
            array = names.made.get(name)
        found[name] = Value(None, numpy.dtype(chainer.get_dtype(
            getattr(parameter.initializer, 'dtype', None)))
            ) if array is None else Value(tuple(array.shape), array.dtype)
    return found


class State:
    """What links keep, from step to step, for the same micro-batch."""

    def __init__(self, links: dict[str, chainer.Link]) -> None:
        self._links = links
        #: Attributes that go on: with something for each sample, computed of
        #: all samples ('together'), or numbers that move once a batch.
        self.kinds: dict[Attribute, str] = {}
        # By step, of each micro-batch; and what the last one has left.
        self._kept: dict[str, list[dict[Attribute, Any]]] = {}
        self._left: dict[Attribute, Any] = {}

    def begin(self, step: str, atomic: Iterable[str]) -> None:
        """Begins to record the micro-batches of a step.

        Links that are run as one call, of these paths, keep what they do.
        """
        self.kinds = {key: kind for key, kind in self.kinds.items() if not any(
            f'{key[0]}/'.startswith(f'{path}/') for path in atomic)}
        now = self._now()
        self._before = now, self._kept, self._left
        self._step = step
        self._found: list[dict[Attribute, Any]] = []
        if step == 'train':     # what somebody has set counts
            same = {key for key, value in self._left.items()
                    if _is_same(value, now.get(key))}
            self._kept = {step: [
                {key: kept[key] for key in same & kept.keys()}
                for kept in self._kept.get(step, [])]}

    def resume(self) -> None:
        """Gives links what they kept of the last batch's micro-batch."""
        kept = self._kept.get(self._step, [])[len(self._found):]
        self._set({**self._before[0], **(kept[0] if kept else {})})

    def note(self, program: Any) -> None:
        """Notes what links keep of a micro-batch.

        Raises:
            ValueError: It would go on from that of another micro-batch.
        """
        found = self._now()
        program.kept = {
            key: value for key, value in found.items() if any(
                is_placeholder(array) and array.program is program
                for array in nested.arrays(value))}
        for path, name in sorted(program.kept):
            if self._found and self.kinds[path, name] != 'samples':
                raise ValueError(
                    f'link {path} keeps {name!r} for the next batch, computed '
                    'of all samples together, which micro-batches would do '
                    'each for itself; train with micro_batches=1 '
                    '(--micro-batches 1), or keep it in a persistent array of '
                    'a link marked with chainer_fp8pipe.atomic')
        self._found.append(found)

    def end(self) -> None:
        """Ends the recording of a step; training leaves all, others numbers.
        """
        now = self._now()
        self._kept = {**self._kept, self._step: self._found}
        if self._step == 'train':
            self._left = now
        else:
            self._set(self._before[0] | {
                key: value for key, value in now.items()
                if self.kinds[key] == 'numbers'})

    def put_back(self) -> None:
        """Has links keep what they did when the step began."""
        self._set(self._before[0])

    def undo(self) -> None:
        """Takes back the recording of a step that has failed."""
        _, self._kept, self._left = self._before
        self.put_back()

    def _now(self) -> dict[Attribute, Any]:
        return {(path, name): _copied(vars(self._links[path])[name])
                for path, name in self.kinds
                if name in vars(self._links[path])}

    def _set(self, values: Mapping[Attribute, Any]) -> None:
        for path, name in self.kinds:
            own = vars(self._links[path])
            own.pop(name, None)
            if (path, name) in values:
                own[name] = _copied(values[path, name])


def _copied(value: Any) -> Any:
    """A copy of a container, and of those in it, so that none grows."""
    if not isinstance(value, _CONTAINERS):
        return value
    found: Any = copy.copy(value)
    if not isinstance(value, set):
        for key, one in (value.items() if isinstance(value, dict)
                         else enumerate(value)):
            found[key] = _copied(one)
    return found


def _is_same(before: Any, now: Any) -> bool:
    """Whether an attribute is what it was, also what it contains."""
    if not isinstance(before, _PLAIN):
        return before is now
    (arrays, form), (others, other_form) = map(nested.leaves, (before, now))
    return form == other_form and [*map(id, arrays)] == [*map(id, others)]

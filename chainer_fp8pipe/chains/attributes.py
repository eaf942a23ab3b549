"""What links keep in attributes: copied for a look, and from batch to batch.
"""
# partition() runs forward on an example, and a link's own code on made-up
# values, and nothing must be seen of it later: a counter, a list, a generator
# of random numbers, a running mean.  So links get deep copies for that time,
# all made together, as links may share what is in them.  Links, parameters,
# variables, placeholders and what copy.deepcopy refuses (threads, files, other
# ranks) stay as they are.
#
# In a step, the next batch's same micro-batch goes on from what the samples of
# this one have left: an LSTM's state, which is a placeholder, and whose maker
# has kept it; or their raw arrays.  The gradient ends there, as after
# Chainer's `unchain_backward`.  A computed value without samples, such as a
# running mean, is refused.  Python's own things (a counter, a list of numbers)
# go on from micro-batch to micro-batch, as in one process.
from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import chainer
import numpy

from . import nested
from .placeholder import is_placeholder

Attribute = tuple[str, str]     # path of a link, name
#: Those that links have of Chainer.
CHAINERS = frozenset(('_params', '_persistent', '_children', '_device',
                      '_overridden_to_methods'))
#: Packages whose objects have threads or other ranks behind them.
_FOREIGN = frozenset(('chainer', 'chainermn', 'chainer_fp8pipe', 'mpi4py'))
_SIMPLE = frozenset((int, float, bool, str, type(None)))
_CONTAINERS = list, dict, set, collections.deque


def _copies(links: Mapping[str, chainer.Link]
            ) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Copies of attributes, and everything that was copied."""
    found = {path: dict(vars(link)) for path, link in links.items()}
    values = [(own, name, value) for own in found.values()
              for name, value in own.items()
              if type(value) not in _SIMPLE and name not in CHAINERS]
    # Those behind NumPy's and Python's functions, which a pass seeds anew.
    memo: dict[int, Any] = {id(one): one for one in (
        numpy.random.mtrand._rand, vars(random)['_inst'], *links.values())}
    # What cannot be written to may be large: a file in memory, say.
    memo.update((id(leaf), leaf) for _, _, value in values
                for leaf in ([value] if isinstance(value, chainer.Variable)
                             else nested.leaves(value)[0])
                if isinstance(leaf, (chainer.Variable, nested.Dataless))
                or not getattr(leaf.flags, 'writeable', True))
    for own, name, value in values:
        if type(value) in (dict, list) and _SIMPLE.issuperset(map(type, (
                value.values() if isinstance(value, dict) else value))):
            own[name] = memo.setdefault(id(value), value.copy())
        elif type(value).__module__.partition('.')[0] not in _FOREIGN:
            try:
                own[name] = copy.deepcopy(value, memo)
            except Exception:       # of any class
                memo[id(value)] = value
    return found, memo.get(id(memo), [])    # deepcopy keeps originals there


def copied(links: Mapping[str, chainer.Link]) -> dict[str, dict[str, Any]]:
    """Copies of the attributes that links have now, by path and name."""
    return _copies(links)[0]


def set_attributes(links: Mapping[str, chainer.Link],
                   state: dict[str, dict[str, Any]]) -> None:
    """Gives links these attributes and no others."""
    for path, own in state.items():
        vars(links[path]).clear()
        vars(links[path]).update(own)


@contextlib.contextmanager
def on_copies(links: Mapping[str, chainer.Link]) -> Iterator[None]:
    """A block in which links have copies of their attributes."""
    before = {path: dict(vars(link)) for path, link in links.items()}
    set_attributes(links, copied(links))
    try:
        yield
    finally:
        set_attributes(links, before)


def generators_of(links: Mapping[str, chainer.Link]) -> list[Any]:
    """The generators of random numbers in attributes of links."""
    return [one for one in _copies(links)[1] if isinstance(one, (
        numpy.random.RandomState, numpy.random.BitGenerator, random.Random))]


class State:
    """What links keep, from step to step."""

    def __init__(self, links: dict[str, chainer.Link]) -> None:
        self._links = links
        #: Attributes that a later program reads; no others are kept.
        self.read: frozenset[Attribute] = frozenset()
        #: Those with computed values after the last step of training.
        self.left: dict[Attribute, Any] = {}
        self._changed: set[Attribute] = set()   # by this step
        # Whether an attribute had the form of a batch's array before any: an
        # array of the script's own, such as a count of each label.
        self._is_own: dict[Attribute, bool] = {}
        self._kept: dict[str, list[dict[Attribute, Any]]] = {}  # by step

    def begin(self, step: str) -> None:
        """Begins to record the micro-batches of a step."""
        self._step, self._changed = step, set()
        self._before = {path: {name: _copied(value) for name, value
                               in vars(link).items()
                               if name not in CHAINERS}
                        for path, link in self._links.items()}
        if step == 'train':
            self._kept.pop('evaluate', None)
            for (path, name), value in self.left.items():
                if not _is_same(value, vars(self._links[path]).get(name)):
                    for kept in self._kept.get('train', ()):
                        kept.pop((path, name), None)    # somebody's
        self._from, self._left = self._kept.pop(step, []), self.left
        self._kept[step] = []

    def resume(self, number: int, arrays: Sequence[Any] = ()) -> None:
        """Gives links what they kept of the last batch's micro-batch.

        ``arrays`` of this one, or lists with an item for each sample.
        """
        self._restore()
        self._number, self._arrays = number, arrays
        self._forms = set(map(_form_of, _arrays_in(arrays)))
        self._resumed = self._from[number] if number < len(
            self._from) else {}
        for (path, name), value in self._resumed.items():
            vars(self._links[path])[name] = _copied(value)

    def _of(self, program: Any) -> dict[Attribute, Any]:
        """Attributes with values of a program's samples; None: of any."""
        return {(path, name): value for path, link in self._links.items()
                for name, value in vars(link).items()
                if value is not (before := self._before[path].get(name))
                and name not in CHAINERS | link._params | link._persistent
                and self._is_of((path, name), program, value, before)}

    def _is_of(self, key: Attribute, program: Any, value: Any, before: Any
               ) -> bool:
        arrays = _arrays_in(value)
        if any(is_placeholder(array) and program in (None, array.program)
               for array in arrays):
            return True
        if self._forms.isdisjoint(map(_form_of, arrays)) or (
                _is_same(before, value)):
            return False
        return not self._is_own.setdefault(key, not self._forms.isdisjoint(
            map(_form_of, _arrays_in(before))))

    def note(self, program: Any) -> dict[Attribute, Any]:
        """Notes, and returns, what links keep of a micro-batch.

        Raises:
            ValueError: It would go on from that of another micro-batch.
        """
        found = {key: _copied(value) for key, value
                 in self._of(program).items()}
        self._changed |= found.keys()
        for path, name in sorted(self.read & found.keys()):
            if self._number and any(
                    is_placeholder(array) and not any(
                        size and size % len(self._arrays[0]) == 0
                        for size in array.shape)
                    for array in _arrays_in(found[path, name])):
                raise ValueError(
                    f'link {path} keeps {name!r} for the next batch, computed '
                    'of all samples together, which micro-batches would do '
                    'each for itself; train with micro_batches=1 '
                    '(--micro-batches 1), or keep it in a persistent array of '
                    'a link marked with chainer_fp8pipe.atomic')
        self.keep(program, found)
        self._kept[self._step].append({
            **self._resumed, **program.kept, **{
                key: value for key, value in found.items()
                if not any(map(is_placeholder, _arrays_in(value)))}})
        return found

    def keep(self, program: Any, found: dict[Attribute, Any]) -> None:
        """Has a program keep, of what was found, what a later one reads."""
        program.kept = {key: value for key, value in found.items()
                        if key in self.read}

    def end(self) -> None:
        """Ends the recording of a step; only training leaves something."""
        if self._step == 'train':
            self.left = {
                (path, name): _copied(value) for path, name in self._changed
                if (value := vars(self._links[path]).get(name)) is not None}
        else:
            self._restore()

    def undo(self) -> None:
        """Takes back the recording of a step that nobody has computed."""
        self._changed |= self._of(None).keys()
        self._restore()
        self._kept[self._step], self.left = self._from, self._left

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self.left = {}

    def _restore(self) -> None:
        for path, name in self._changed:
            own, before = vars(self._links[path]), self._before[path]
            own.pop(name, None)
            if name in before:
                own[name] = _copied(before[name])


def _arrays_in(value: Any) -> list[Any]:
    return list(map(nested.array_of, nested.leaves(value)[0]))


def _form_of(array: Any) -> Any:
    """Equal for arrays of the same samples, and not for a mean of them."""
    return None if array is None else (
        array.shape[:1], array.ndim, array.dtype)


def _copied(value: Any) -> Any:
    """A copy of a list or another container, so that it does not grow."""
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_same(before: Any, now: Any) -> bool:
    """Whether an attribute is what it was, also what it contains."""
    if not isinstance(before, _CONTAINERS) or type(before) is not type(now):
        return before is now
    both = [list(map(id, nested.leaves(one)[0])) for one in (before, now)]
    return len(before) == len(now) and both[0] == both[1]

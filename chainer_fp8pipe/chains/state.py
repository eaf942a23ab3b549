"""What links keep of computed values, from batch to batch."""
# An LSTM's state, say, is a placeholder.  The next batch's same micro-batch
# goes on from it: the rank that has made the value has kept it.  The gradient
# ends there, as after Chainer's `unchain_backward`.  Python's own things (a
# counter, a list of numbers) go on from micro-batch to micro-batch, as in one
# process.
from __future__ import annotations

import collections
import copy
from typing import Any

import chainer

from . import nested
from .attributes import CHAINERS, Attribute
from .placeholder import is_placeholder
from .program import Program

_CONTAINERS = list, dict, set, collections.deque


class State:
    """What links keep, from step to step.

    Args:
        links: By path.
    """

    def __init__(self, links: dict[str, chainer.Link]) -> None:
        self._links = links
        #: Attributes that a later program reads; no others are kept.
        self.read: frozenset[Attribute] = frozenset()
        #: Attributes that this step has given computed values.
        self.changed: set[Attribute] = set()
        #: What links had after the last step of training.
        self.left: dict[Attribute, Any] = {}
        self._kept: dict[str, list[dict[Attribute, Any]]] = {}  # by step

    def begin(self, step: str) -> None:
        """Begins to record the micro-batches of a step."""
        self._step, self.changed = step, set()
        self._before = {path: {name: _copied(value) for name, value
                               in vars(link).items()
                               if name not in CHAINERS}
                        for path, link in self._links.items()}
        if step == 'train':
            self._kept.pop('evaluate', None)
            for key, value in self.left.items():
                if not _is_same(value, self._now(key)):     # somebody's
                    for kept in self._kept.get('train', ()):
                        kept.pop(key, None)
        self._from, self._left = self._kept.pop(step, []), self.left
        self._kept[step] = []

    def resume(self, number: int) -> None:
        """Gives links what they kept of the last batch's micro-batch."""
        self._restore()
        self._resumed = self._from[number] if number < len(
            self._from) else {}
        for (path, name), value in self._resumed.items():
            vars(self._links[path])[name] = _copied(value)

    def note(self, program: Program) -> dict[Attribute, Any]:
        """Notes, and returns, what links keep of a micro-batch."""
        found: dict[Attribute, Any] = {}
        for path, link in self._links.items():
            before = self._before[path]
            for name, value in vars(link).items():
                if (name not in CHAINERS and value is not before.get(name)
                        and name not in link._params
                        and name not in link._persistent
                        and any(is_placeholder(array)
                                and array.program is program for array in map(
                                    nested.array_of,
                                    nested.leaves(value)[0]))):
                    found[path, name] = _copied(value)
        self.changed |= found.keys()
        self.keep(program, found)
        self._kept[self._step].append({**self._resumed, **program.kept})
        return found

    def keep(self, program: Program, found: dict[Attribute, Any]) -> None:
        """Has a program keep, of what was found, what a later one reads."""
        program.kept = {key: value for key, value in found.items()
                        if key in self.read}

    def end(self) -> None:
        """Ends the recording of a step; only training leaves something."""
        if self._step == 'train':
            self.left = {key: _copied(value) for key in self.changed
                         if (value := self._now(key)) is not None}
        else:
            self._restore()

    def undo(self) -> None:
        """Takes back the recording of a step that nobody has computed."""
        self.changed |= {
            (path, name) for path, link in self._links.items()
            for name, value in vars(link).items()
            if name not in (CHAINERS | link._params | link._persistent)
            and any(map(is_placeholder, map(
                nested.array_of, nested.leaves(value)[0])))}
        self._restore()
        self._kept[self._step], self.left = self._from, self._left

    def forget(self) -> None:
        """Drops what links kept, after a step that failed."""
        self._kept.clear()
        self.left = {}

    def _now(self, key: Attribute) -> Any:
        return vars(self._links[key[0]]).get(key[1])

    def _restore(self) -> None:
        for path, name in self.changed:
            own, before = vars(self._links[path]), self._before[path]
            own.pop(name, None)
            if name in before:
                own[name] = _copied(before[name])


def _copied(value: Any) -> Any:
    """A copy of a list or another container, so that it does not grow."""
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_same(before: Any, now: Any) -> bool:
    """Whether an attribute is what it was, also what it contains."""
    if not isinstance(before, _CONTAINERS) or type(before) is not type(now):
        return before is now
    both = [nested.leaves(one)[0] for one in (before, now)]
    return len(before) == len(now) and list(map(id, both[0])) == (
        list(map(id, both[1])))

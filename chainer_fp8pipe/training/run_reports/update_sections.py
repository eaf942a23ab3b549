"""Writes down what an update of any updater does, for reports."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import chainer

from ...intercept.around_calls import Around, AroundCalls
from ...report.stream import EventStream, Section
from ..extensions.update_marks import CallMark, mark_update

_NAME = 'RunReport'


class UpdateSections:
    """Sections of input, passes, exchange and update, while installed.

    A pipeline writes its passes, exchange and update itself.  Elsewhere,
    ``forward`` is the outermost call of an optimizer's model in training, and
    what a loss function computes outside of it is in no section.

    Args:
        stream: Where to write.
        updater: Whose updates they are.
        writes_itself: It is a pipeline's.
    """

    def __init__(self, stream: EventStream, updater: Any,
                 writes_itself: bool) -> None:
        self._stream = stream
        self._calls = AroundCalls()
        self._open: list[Section] = []
        self._undo: list[Callable[[], None]] = []
        self._watch_input(updater)
        if writes_itself:
            return
        self._calls.add(chainer.Variable, 'backward',
                        functools.partial(stream.section, 'backward'))
        for optimizer in updater.get_all_optimizers().values():
            self._watch_exchange(optimizer)
            self._watch_passes(getattr(optimizer, 'actual_optimizer',
                                       optimizer))

    def around(self, owner: Any, name: str, block: Around) -> None:
        """Makes calls of an object's method in a block, while installed."""
        self._calls.add(owner, name, block)

    def settle(self) -> None:
        """An update is over: ends what an error has left open."""
        while self._open:
            self._close()

    def remove(self) -> None:
        """Writes nothing any more."""
        self.settle()
        self._calls.remove()
        while self._undo:
            # A user may have removed the hook as well.
            with contextlib.suppress(KeyError):
                self._undo.pop()()

    # --- details -------------------------------------------------------------

    def _watch_input(self, updater: Any) -> None:
        iterators = getattr(updater, '_iterators', None)
        for iterator in (iterators or {}).values():
            for name in 'next', '__next__':
                self._calls.add(
                    iterator, name,
                    functools.partial(self._stream.section, 'input'))

    def _watch_exchange(self, optimizer: Any) -> None:
        communicator = getattr(optimizer, 'communicator', None)
        for name in 'bcast_data', 'multi_node_mean_grad':
            self._calls.add(
                communicator, name,
                functools.partial(self._stream.section, 'exchange'))

    def _watch_passes(self, optimizer: Any) -> None:
        target = optimizer.target
        target.add_hook(CallMark(*self._ends_of('forward')), _NAME)
        self._undo += [
            lambda: target.delete_hook(_NAME),
            mark_update(optimizer, _NAME, *self._ends_of('update'))]

    def _ends_of(self, name: str) -> tuple[Callable[[], None], ...]:
        """What begins a section, and what ends it."""
        return tuple(functools.partial(act, name)
                     for act in (self._begin, self._end))

    def _begin(self, name: str) -> None:
        section = self._stream.section(name)
        section.__enter__()
        self._open.append(section)

    def _end(self, name: str) -> None:
        # What an error has left open inside of it ends with it.
        while any(section.name == name for section in self._open):
            self._close()

    def _close(self) -> None:
        self._open.pop().__exit__(None, None, None)

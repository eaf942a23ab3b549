"""Hooks and triggers that only tell when something happens."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import chainer

from ..large_batch import UpdateHook


class EveryUpdate:
    """A trigger that fires after each update.

    Unlike ``(1, 'iteration')`` it has no state, which snapshots would have,
    so that a run can go on from the snapshot of one without the extension.
    """

    def __call__(self, trainer: Any) -> bool:
        return True


class UpdateMark(UpdateHook):
    """An optimizer's hook that tells when it is called."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, optimizer: Any) -> None:
        self._tell()


def mark_update(optimizer: Any, name: str, begin: Callable[[], None],
                end: Callable[[], None]) -> Callable[[], None]:
    """Tells when an optimizer begins and ends an update.

    Its other hooks are a part of the update.

    Args:
        optimizer: That updates the model, not ChainerMN's around it.
        name: Of the hooks.
        begin: Called before all other hooks.
        end: Called after the update, and the hooks so far.

    Returns:
        What takes the hooks off again.
    """
    marks = {'pre': begin, 'post': end}
    for timing, tell in marks.items():
        optimizer.add_hook(UpdateMark(tell), f'{name} {timing}', timing)
    optimizer._hookable._pre_update_hooks.move_to_end(
        f'{name} pre', last=False)

    def remove() -> None:
        for timing in marks:
            # A user may have removed it.
            with contextlib.suppress(KeyError):
                optimizer.remove_hook(f'{name} {timing}')
    return remove


class CallMark(chainer.LinkHook):
    """Tells when a model is called in training, and when it has returned."""

    def __init__(self, before: Callable[[], None],
                 after: Callable[[], None]) -> None:
        self._before, self._after = before, after

    def forward_preprocess(self, args: Any) -> None:
        if chainer.config.train:
            self._before()

    def forward_postprocess(self, args: Any) -> None:
        if chainer.config.train:
            self._after()

    def __deepcopy__(self, memo: Any) -> CallMark:
        # A copy of the model is not what trains.
        return CallMark(_do_nothing, _do_nothing)


def _do_nothing() -> None:
    pass

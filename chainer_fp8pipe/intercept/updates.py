"""Tells listeners of updates, of looks at models, and of trainings' ends."""
# While there are listeners, these of Chainer 7.8.1 are replaced (see `Patch`):
# `GradientMethod.update` (chainer/optimizer.py, line 857), which Chainer's
# optimizers inherit and ChainerMN's call; `Evaluator.__call__` and `evaluate`
# (chainer/training/extensions/evaluator.py, lines 148 and 185); `save_npz` and
# `save_hdf5` (chainer/serializers/npz.py, line 84; hdf5.py, line 68), under
# both names that they have; and `Trainer.run` (chainer/training/trainer.py,
# line 293).
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import chainer
from chainer.serializers import hdf5, npz
from chainer.training.extensions import Evaluator

from .patching import Patch


class Listener(Protocol):
    """Is told what happens to models."""

    def updated(self, optimizer: Any) -> None:
        """An optimizer has updated its target."""

    def common(self) -> contextlib.AbstractContextManager[None]:
        """A block in which a model is evaluated or saved."""

    def ended(self, models: Sequence[chainer.Link]) -> None:
        """A ``Trainer`` has trained these models, to its regular end."""


# In the order in which they came, the same on all ranks.
_listeners: list[weakref.ref[Listener]] = []


def listen(listener: Listener) -> weakref.finalize:
    """Tells a listener for as long as it lives.

    Returns:
        Ends that earlier, when it is called.
    """
    reference = weakref.ref(listener)
    _listeners.append(reference)
    for patch in _PATCHES:
        patch.install()

    def end() -> None:
        _listeners.remove(reference)
        for patch in _PATCHES:
            patch.remove()
    ending = weakref.finalize(listener, end)
    ending.atexit = False
    return ending


@contextlib.contextmanager
def common() -> Iterator[None]:
    """A block of all listeners' ``common``."""
    with contextlib.ExitStack() as stack:
        for listener in _alive():
            stack.enter_context(listener.common())
        yield


def _alive() -> list[Listener]:
    return [one for reference in tuple(_listeners)
            if (one := reference()) is not None]


def _telling(original: Callable) -> Callable:
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in _alive():
            listener.updated(self)
    return update


def _in_common(original: Callable) -> Callable:
    def look(*args: Any, **kwargs: Any) -> Any:
        with common():
            return original(*args, **kwargs)
    return look


def _ending(original: Callable) -> Callable:
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        models = [optimizer.target for optimizer
                  in self.updater.get_all_optimizers().values()]
        for listener in _alive():
            listener.ended(models)
    return run


_PATCHES = (Patch(chainer.GradientMethod, 'update', _telling),
            Patch(Evaluator, '__call__', _in_common),
            Patch(Evaluator, 'evaluate', _in_common),
            *(Patch(owner, f'save_{kind}', _in_common)
              for kind, home in (('npz', npz), ('hdf5', hdf5))
              for owner in (chainer.serializers, home)),
            Patch(chainer.training.Trainer, 'run', _ending))

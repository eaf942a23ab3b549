"""Has another object make what a training script makes."""
# In a block of `substituting`, these of Chainer 7.8.1 are replaced in all
# threads (see `Patch`): `StandardUpdater.__init__` and `update`
# (chainer/training/updaters/standard_updater.py, lines 80 and 230), `__init__`
# of `MultiprocessParallelUpdater` (multiprocess_parallel_updater.py, 121),
# `Trainer.run` (chainer/training/trainer.py, line 293), `Evaluator.evaluate`
# (chainer/training/extensions/evaluator.py, line 185), and the
# functions that save and load files (chainer/serializers/npz.py, lines 84 and
# 213; hdf5.py, lines 68 and 172), under both names that they have, and
# `GradientMethod.update` (chainer/optimizer.py, line 857), which Chainer's
# optimizers inherit, and `chainermn.scatter_dataset`, also under its name in
# `chainermn.datasets` (chainermn/datasets/scatter.py, line 11).  Methods are
# replaced and not classes, which a script may have imported or derived from.
# A function of files that calls another one of them, as `save_npz` calls
# itself, calls Chainer's.
#
# In a block of `creating_communicators`, `chainermn.create_communicator` is
# replaced, also under its name in `chainermn.communicators`
# (chainermn/communicators/__init__.py, line 8).
#
# Another package's patch that was there before the block is the original.  A
# patch made in the block is called first, and stays.
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainermn
import chainermn.communicators
import chainermn.datasets
from chainer.serializers import hdf5, npz
from chainer.training.extensions import Evaluator
from chainer.training.updaters import (
    MultiprocessParallelUpdater,
    StandardUpdater,
)

from .patching import Current, Patch

_own_work = Current()


def own_work() -> Any:
    """A block, or the decorator of a function, in which the package trains.

    Such as to measure a model: what it makes and updates is its own affair,
    and no substitute is asked for it.
    """
    return _own_work.set_to(True)


#: Packages whose objects and lines are not a script's own.
LIBRARIES = frozenset(('chainer', 'chainermn', 'chainer_fp8pipe'))


class Originals:
    """Makes what a script would have made: here as Chainer does.

    A substitute derives from it, and replaces some of these methods; where it
    does not, nothing is replaced in Chainer.  Each gets Chainer's own function
    and the arguments of the call.  Of two blocks of :func:`substituting`, the
    inner one's is called first, and the outer one's is its original.

    - ``make_updater``, ``update``: ``__init__`` and ``update`` of
      ``StandardUpdater``.
    - ``update_optimizer``: ``GradientMethod.update``.
    - ``run_trainer``: ``Trainer.run``.
    - ``evaluate``: ``Evaluator.evaluate``.
    - ``save``, ``load``: ``save_npz`` and ``save_hdf5``, ``load_npz`` and
      ``load_hdf5``.
    - ``scatter``: ``chainermn.scatter_dataset``.
    """

    def _original(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    make_updater = update = update_optimizer = run_trainer = _original
    evaluate = save = load = scatter = _original

    def finish(self) -> None:
        """The script has ended."""


#: What is replaced, by the substitute's method.
_METHODS = (
    (StandardUpdater, '__init__', 'make_updater'),
    (MultiprocessParallelUpdater, '__init__', 'make_updater'),
    (StandardUpdater, 'update', 'update'),
    (chainer.GradientMethod, 'update', 'update_optimizer'),
    (chainer.training.Trainer, 'run', 'run_trainer'),
    (Evaluator, 'evaluate', 'evaluate'),
    (chainermn, 'scatter_dataset', 'scatter'),
    (chainermn.datasets, 'scatter_dataset', 'scatter'))
_FILES = tuple((owner, f'{verb}_{kind}', verb) for verb in ('save', 'load')
               for kind, home in (('npz', npz), ('hdf5', hdf5))
               for owner in (chainer.serializers, home))


def _of_the_script(act: Callable, original: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _own_work.now:
            return original(*args, **kwargs)
        return act(original, *args, **kwargs)
    return call


@contextlib.contextmanager
def substituting(substitute: Originals) -> Iterator[None]:
    """A block in which a substitute makes what scripts make."""
    inside = threading.local()

    def outermost(act: Callable, original: Callable) -> Callable:
        # Or a substitute would be asked for what Chainer does for it, on
        # the ranks only that do it.
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, 'now', False):
                return original(*args, **kwargs)
            inside.now = True
            try:
                return act(original, *args, **kwargs)
            finally:
                inside.now = False
        return call

    def changes(act: str) -> bool:
        return getattr(type(substitute), act, None) is not Originals._original

    with contextlib.ExitStack() as stack:
        for places, make in (_METHODS, _of_the_script), (_FILES, outermost):
            for owner, name, act in places:
                if changes(act):
                    stack.enter_context(Patch(owner, name, functools.partial(
                        make, getattr(substitute, act))))
        yield


@contextlib.contextmanager
def creating_communicators(create: Callable[..., Any]) -> Iterator[None]:
    """A block in which scripts create communicators with this function.

    Another package's ``create_communicator`` is not called.

    Args:
        create: Takes ChainerMN's arguments.
    """
    with contextlib.ExitStack() as stack:
        for owner in chainermn, chainermn.communicators:
            stack.enter_context(
                Patch(owner, 'create_communicator', lambda original: create))
        yield

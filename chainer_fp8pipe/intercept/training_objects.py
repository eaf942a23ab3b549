"""Has another object make what a training script makes."""
# In a block of `substituting`, what `_REPLACED` lists of Chainer 7.8.1 is
# replaced in all threads (see `Patch`), where the substitute has a method for
# it.  Methods are replaced and not classes, which a script may have imported
# or derived from.  A function of files that calls another one of them, as
# `save_npz` calls itself, calls Chainer's.  Another package's patch that was
# there before is the original; one made in the block is called first, and
# stays.
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainermn
import chainermn.communicators
import chainermn.datasets
from chainer.serializers import hdf5, npz
from chainer.training.extensions import Evaluator, snapshot_writers
from chainer.training.updaters import StandardUpdater

from .patching import Current, Patch

_own_work = Current()
#: Packages whose objects and lines are not a script's own.
LIBRARIES = frozenset(('chainer', 'chainermn', 'chainer_fp8pipe'))


def own_work() -> Any:
    """A block, or the decorator of a function, in which the package trains.

    Such as to measure a model: what it makes and updates is its own affair,
    and no substitute is asked for it.
    """
    return _own_work.set_to(True)


class Originals:
    """Makes what a script would have made: here as Chainer does.

    A substitute derives from it, and replaces some of these methods.  Each
    gets Chainer's own function and the arguments of the call.  Of two blocks
    of :func:`substituting`, the inner one's is called first, and the outer
    one's is its original.
    """

    def _original(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    make_updater = update = update_optimizer = run_trainer = _original
    evaluate = save = load = serialize = write = scatter = _original
    create: Callable[..., Any] = _original

    def finish(self) -> None:
        """The script has ended."""


#: What is replaced, by the substitute's method.
_REPLACED = (
    # chainer/training/updaters/standard_updater.py, lines 80 and 230
    (StandardUpdater, '__init__', 'make_updater'),
    (StandardUpdater, 'update', 'update'),
    # chainer/optimizer.py, 857, which Chainer's optimizers inherit
    (chainer.GradientMethod, 'update', 'update_optimizer'),
    # chainer/training: trainer.py, 293, and extensions/evaluator.py, 185
    (chainer.training.Trainer, 'run', 'run_trainer'),
    (Evaluator, 'evaluate', 'evaluate'),
    (npz, 'serialize', 'serialize'),    # chainer/serializers/npz.py, 70
    # chainer/training/extensions/snapshot_writers.py, 57
    (snapshot_writers.Writer, 'save', 'write'),
    # chainermn/datasets/scatter.py, 11
    (chainermn, 'scatter_dataset', 'scatter'),
    (chainermn.datasets, 'scatter_dataset', 'scatter'),
    # chainermn/communicators/__init__.py, 8
    (chainermn, 'create_communicator', 'create'),
    (chainermn.communicators, 'create_communicator', 'create'),
    # chainer/serializers: save_npz (npz.py, line 84), load_npz (213),
    # save_hdf5 (hdf5.py, 69) and load_hdf5 (173), under both names
    *((owner, f'{verb}_{kind}', verb) for verb in ('save', 'load')
      for kind, home in (('npz', npz), ('hdf5', hdf5))
      for owner in (chainer.serializers, home)))


@contextlib.contextmanager
def substituting(substitute: Originals) -> Iterator[None]:
    """A block in which a substitute makes what scripts make."""
    def call(act: str, original: Callable, /, *args: Any, **kwargs: Any
             ) -> Any:
        if _own_work.now:
            return original(*args, **kwargs)
        with (own_work() if act in ('save', 'load')
              else contextlib.nullcontext()):
            return getattr(substitute, act)(original, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name, act in _REPLACED:
            if getattr(getattr(substitute, act), '__func__', None
                       ) is not Originals._original:
                stack.enter_context(Patch(
                    owner, name, functools.partial(call, act)))
        yield

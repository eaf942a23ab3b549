"""Has what a training script makes be made by another.

In a block of :func:`substituting`, these of Chainer 7.8.1 are replaced in all
threads (see :class:`.Patch`): ``StandardUpdater.__init__``
(chainer/training/updaters/standard_updater.py, line 80), the same of
``MultiprocessParallelUpdater`` (multiprocess_parallel_updater.py, line 121),
``Trainer.__init__``, ``extend`` and ``run`` (chainer/training/trainer.py,
lines 142, 200 and 293), ``Evaluator.__init__`` and ``evaluate``
(chainer/training/extensions/evaluator.py, lines 95 and 185), and the functions
that save and load files (chainer/serializers/npz.py, lines 84 and 213;
hdf5.py, lines 68 and 172), under both names that they have.  Methods are
replaced and not classes, so that it does not matter how a script got hold of
a class, and what it derives from one stays derived from it.

Another package's functions in these places are what the substitute is given as
the originals, if they were there before the block.  If they come in the block,
they are called first and stay, and the substitute is asked when they call what
they replaced.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import chainer
from chainer.serializers import hdf5, npz
from chainer.training.extensions import Evaluator
from chainer.training.updaters import (
    MultiprocessParallelUpdater,
    StandardUpdater,
)

from .patching import Patch


class Substitute(Protocol):
    """Makes what the script would have made, or has Chainer make it.

    Each method is given Chainer's own and the arguments of the call.
    """

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        """A ``StandardUpdater``, or one derived from it, is initialised."""

    def make_trainer(self, original: Callable, trainer: Any, *args: Any,
                     **kwargs: Any) -> None:
        """A ``Trainer`` is initialised."""

    def extend(self, original: Callable, trainer: Any, *args: Any,
               **kwargs: Any) -> None:
        """A trainer gets an extension."""

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        """A trainer begins to train."""

    def make_evaluator(self, original: Callable, evaluator: Any, *args: Any,
                       **kwargs: Any) -> None:
        """An ``Evaluator`` is initialised."""

    def evaluate(self, original: Callable, evaluator: Any) -> Any:
        """An ``Evaluator`` goes through its data."""

    def save(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        """Something is saved to a file."""

    def load(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        """Something is loaded from a file."""


@contextlib.contextmanager
def substituting(substitute: Substitute) -> Iterator[None]:
    """In a block, the substitute makes what scripts make for a training."""
    with contextlib.ExitStack() as stack:
        for owner, name, act in (
                (StandardUpdater, '__init__', substitute.make_updater),
                (MultiprocessParallelUpdater, '__init__',
                 substitute.make_updater),
                (chainer.training.Trainer, '__init__',
                 substitute.make_trainer),
                (chainer.training.Trainer, 'extend', substitute.extend),
                (chainer.training.Trainer, 'run', substitute.run_trainer),
                (Evaluator, '__init__', substitute.make_evaluator),
                (Evaluator, 'evaluate', substitute.evaluate),
                *((owner, f'{verb}_{kind}', getattr(substitute, verb))
                  for verb in ('save', 'load')
                  for kind, home in (('npz', npz), ('hdf5', hdf5))
                  for owner in (chainer.serializers, home))):
            stack.enter_context(Patch(
                owner, name, functools.partial(functools.partial, act)))
        yield

"""Saving of models of which each rank has a part."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import chainer

from ..intercept.patching import Current, Patch

_by_the_package = Current()


class NotWhole(RuntimeError):
    """A model would be saved of which this rank has a part only."""


def saving_parts() -> contextlib.AbstractContextManager[None]:
    """A block that puts together what the ranks of a pipeline save."""
    return _by_the_package.set_to(True)


def check_whole(serializer: Any, model: Any, is_whole: bool) -> None:
    """Raises NotWhole if a part of a model is about to be saved.

    What loads takes its own.
    """
    if not (is_whole or _by_the_package.now
            or isinstance(serializer, chainer.Deserializer)):
        raise NotWhole(
            f'this rank has a part of {type(model).__name__} only, and would '
            'save that; call chainer_fp8pipe.training.extensions.'
            'save_whole_model(path, model, comm) on all ranks, which writes '
            'one file for load_npz, or extend a Trainer with Snapshot(comm)')


def _serialize(original: Callable, optimizer: Any, serializer: Any) -> None:
    target = optimizer.target
    check_whole(serializer, target, getattr(getattr(
        target, 'partition', target), 'is_whole', True))
    original(optimizer, serializer)


#: An optimizer saves what it has for this rank's parameters
#: (chainer/optimizer.py, line 713).
OPTIMIZERS = Patch(chainer.Optimizer, 'serialize', _serialize)

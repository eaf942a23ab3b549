"""Refuses scripts of which each rank would train a model of its own."""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from chainermn.communicators.communicator_base import CommunicatorBase
from mpi4py import MPI

from ...intercept.training_objects import Originals
from ...mpi.grid import ProcessGrid
from .launch import Refusal, quietly


class RankAware(Originals):
    """Runs scripts that average their gradients themselves.

    By ChainerMN, by this package or by mpi4py.  A script that has made no
    communicator, and knows nothing of mpi4py, is refused when it is about to
    train.

    Args:
        comm: All ranks.
        script: The script's path.
        create: Makes the communicators.
    """

    block = staticmethod(contextlib.nullcontext)

    def __init__(self, comm: MPI.Comm, script: str,
                 create: Callable[..., Any]) -> None:
        self._size, self.create = comm.size, create
        self._is_checked, self._script = comm.size == 1, script

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        self._check()
        quietly(original, trainer, *args, **kwargs)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        self._check()
        original(*args, **kwargs)

    def _check(self) -> None:
        # Of an object its class alone: a proxy's attributes may do anything.
        if not (self._is_checked or _knows_mpi(self._script) or any(
                issubclass(type(one), (CommunicatorBase, ProcessGrid))
                for one in gc.get_objects())):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{self._size} ranks would train a model of its own on all '
                'data. Run the script as it is with --pipeline '
                f'{self._size}. Or add "comm = chainermn.create_communicator'
                '()" and "optimizer = chainermn.create_multi_node_optimizer('
                'optimizer, comm)" before optimizer.setup(model)')
        self._is_checked = True


def _knows_mpi(script: str) -> bool:
    with open(script, 'rb') as file:
        return b'mpi4py' in file.read()

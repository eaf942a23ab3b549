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

    A script that has made no communicator of ChainerMN's or this package's,
    and does not name mpi4py, is refused when it is about to train.

    Args:
        comm: All ranks.
        script: The script's path.
        create: Makes the communicators.
    """

    block = staticmethod(contextlib.nullcontext)

    def __init__(self, comm: MPI.Comm, script: str,
                 create: Callable[..., Any]) -> None:
        self._size, self._script, self.create = comm.size, script, create
        self._is_checked = comm.size == 1

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        self._check()
        quietly(original, trainer, *args, **kwargs)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        self._check()
        original(*args, **kwargs)

    def _check(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        with open(self._script, 'rb') as file:
            names_mpi = b'mpi4py' in file.read()
        # Of an object its class alone: a proxy's attributes may do anything.
        if not names_mpi and not any(
                issubclass(type(one), (CommunicatorBase, ProcessGrid))
                for one in gc.get_objects()):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{self._size} ranks would train a model of its own on all '
                'data. Run the script as it is with --pipeline '
                f'{self._size}. Or add "comm = chainermn.create_communicator'
                '()" and "optimizer = chainermn.create_multi_node_optimizer('
                'optimizer, comm)" before optimizer.setup(model)')

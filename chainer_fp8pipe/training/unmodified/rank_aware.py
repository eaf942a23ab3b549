"""Refuses a script that would train a model of its own on each rank."""
from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainermn.communicators.communicator_base import CommunicatorBase
from mpi4py import MPI

from ...intercept.training_objects import Originals
from ...mpi.grid import ProcessGrid
from .refusal import Refusal, quietly

#: Modules with these names know MPI, which says nothing about the script.
_OURS = 'chainer_fp8pipe', 'chainermn', 'mpi4py'


class RankAware(Originals):
    """Refuses the first update of a script that does not know of ranks.

    A :class:`~chainer_fp8pipe.intercept.training_objects.Substitute` for
    scripts that average their gradients themselves, by ChainerMN, by this
    package or by mpi4py.

    Args:
        comm: All ranks.
        script: The script's path.
    """

    def __init__(self, comm: MPI.Comm, script: str) -> None:
        self._size, self._script = comm.size, script
        self._is_checked = comm.size == 1

    def finish(self) -> None:
        """The script has ended."""

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        self._check()
        quietly(original, trainer, *args, **kwargs)

    def update_optimizer(self, original: Callable, optimizer: Any,
                         *args: Any, **kwargs: Any) -> None:
        self._check()
        original(optimizer, *args, **kwargs)

    def _check(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        if not _has_communicator() and not _knows_mpi(self._script):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{self._size} ranks would train a model of its own on all '
                'data; add "comm = chainermn.create_communicator()" and '
                '"optimizer = chainermn.create_multi_node_optimizer('
                'optimizer, comm)" before optimizer.setup(model), or leave '
                'the script as it is and run it with --pipeline '
                f'{self._size}')


def _has_communicator() -> bool:
    # By its class alone: a proxy's attributes may do anything.
    return any(issubclass(type(one), (CommunicatorBase, ProcessGrid))
               for one in gc.get_objects())


def _knows_mpi(script: str) -> bool:
    """Whether the script, or a module that it has imported, uses mpi4py."""
    with open(script, 'rb') as file:
        if b'mpi4py' in file.read():
            return True
    for name, module in list(sys.modules.items()):
        if (isinstance(module, ModuleType)
                and name.partition('.')[0] not in _OURS):
            for value in list(vars(module).values()):
                named = (value.__name__ if isinstance(value, ModuleType)
                         else type(value).__module__)
                if isinstance(named, str) and named.startswith('mpi4py'):
                    return True
    return False

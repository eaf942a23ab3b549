"""Refuses scripts that several ranks would train without averaging."""
from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chainer
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)
from mpi4py import MPI

from ...intercept.patching import Patch
from ...intercept.training_objects import Originals
from ...mpi.grid import ProcessGrid
from .launch import Refusal, quietly

#: Modules with these names know MPI, which says nothing about the script.
_OURS = 'chainer_fp8pipe', 'chainermn', 'mpi4py'
#: Methods of communicators by which a script may share what it trains.
_SHARE = ('allgather', 'allreduce', 'allreduce_grad', 'allreduce_obj',
          'alltoall', 'gather', 'multi_node_mean', 'multi_node_mean_grad',
          'recv', 'scatter', 'send')


class RankAware(Originals):
    """Refuses the first update that would not be averaged over the ranks.

    For scripts that average their gradients themselves, by ChainerMN, by
    this package or by mpi4py; Chainer makes all that they make.

    Args:
        comm: All ranks.
        script: The script's path.
        create: Makes the communicators.
    """

    block = staticmethod(contextlib.nullcontext)

    def __init__(self, comm: MPI.Comm, script: str,
                 create: Callable[..., Any]) -> None:
        self._size, self._script, self._create = comm.size, script, create
        self._has_begun = self._shares = comm.size == 1
        self._right: list[Any] = []     # optimizers and models

    def create(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a communicator, and notes whether it is used."""
        found = self._create(*args, **kwargs)
        for name in _SHARE:
            if hasattr(type(found), name):
                Patch(type(found), name, self._noting).hold(found)
        return found

    def _noting(self, original: Callable) -> Callable:
        def share(comm: Any, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], chainer.Link):
                self._right.append(args[0])     # its gradients' mean
            else:
                self._shares = True
            return original(comm, *args, **kwargs)
        return share

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        self._check_script()
        quietly(original, trainer, *args, **kwargs)

    def update_optimizer(self, original: Callable, optimizer: Any,
                         lossfun: Any = None, *args: Any, **kwargs: Any
                         ) -> None:
        self._check_script()

        def loss(*args: Any, **kwargs: Any) -> Any:
            # A model that is divided over ranks sends and receives in it.
            found = lossfun(*args, **kwargs)
            self._check(optimizer)
            return found
        if lossfun is None:
            self._check(optimizer)
        original(optimizer, lossfun and loss, *args, **kwargs)

    def _check_script(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if _knows_mpi(self._script) or _alive(ProcessGrid):
            self._shares = True
        elif not _alive(CommunicatorBase):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{self._size} ranks would train a model of its own on all '
                'data. Run the script as it is with --pipeline '
                f'{self._size}. Or add "comm = chainermn.create_communicator'
                '()" and "optimizer = chainermn.create_multi_node_optimizer('
                'optimizer, comm)" before optimizer.setup(model)')

    def _check(self, optimizer: Any) -> None:
        if self._shares or any(one is optimizer or one is optimizer.target
                               for one in self._right):
            return
        if not any(getattr(one, 'actual_optimizer', None) is optimizer
                   for one in _alive(_MultiNodeOptimizer,
                                     _DoubleBufferingOptimizer)):
            kind, target = type(optimizer).__name__, type(optimizer.target)
            raise Refusal(
                f'the {kind} of a {target.__name__} is updated without '
                f'averaging, so each of the {self._size} ranks would train a '
                'model of its own. Give it to chainermn.'
                'create_multi_node_optimizer(optimizer, comm) before '
                'optimizer.setup(model). Or call '
                'comm.multi_node_mean_grad(model) before optimizer.update(). '
                'Scripts that import mpi4py are not checked')
        self._right.append(optimizer)


def _alive(*kinds: type) -> list[Any]:
    """All objects of some kinds."""
    # By its class alone: a proxy's attributes may do anything.
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def _knows_mpi(script: str) -> bool:
    """Whether the script, or a module that it has imported, uses mpi4py."""
    with open(script, 'rb') as file:
        if re.search(b'mpi4py|mpi_comm', file.read()):
            return True
    return any(
        isinstance(named := value.__name__ if isinstance(value, ModuleType)
                   else type(value).__module__, str)
        and named.startswith('mpi4py')
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition('.')[0] not in _OURS
        for value in list(vars(module).values()))

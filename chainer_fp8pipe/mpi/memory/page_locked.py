"""Node memory that a GPU copies to and from by itself.

Its pages are locked: they are registered with CUDA, which else would copy to
and from pages of its own first.  So what a GPU has written neighbours read
where it lies.

Only a rank's own memory is registered, never a neighbour's as it is mapped
here: a neighbour gives pages back when it has done with them, and a GPU would
go on reading the old ones.
"""
from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from typing import Any

import numpy

from .node_memory import NodeMemory, node_memory

# cudaHostRegisterPortable: for all devices that this process uses.
_PORTABLE = 1
_REMEDY = (
    'CUDA cannot register memory that the ranks of this node share: {error}. '
    'Gradients are copied through a buffer of their own, which is slower. '
    'Raise the limit of locked memory (ulimit -l unlimited before mpiexec, '
    'in a container --ulimit memlock=-1), or pass shared_memory=False.')


class PageLockedMemory:
    """Arrays of node memory with locked pages.

    Args:
        memory: Where they are.

    Attributes:
        refused: CUDA has refused to register memory; it is not asked again.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self.refused = False

    def empty(self, runtime: Any, nbytes: int) -> numpy.ndarray | None:
        """uint8[nbytes]; unlocked, and given back, with its last view.

        Args:
            runtime: ``cupy.cuda.runtime``.
            nbytes: At least 1.

        Returns:
            None where CUDA refuses; the first time with a warning.
        """
        if self.refused:
            return None
        array = self._memory.empty(nbytes)
        address = array.ctypes.data
        try:
            runtime.hostRegister(address, nbytes, _PORTABLE)
        except runtime.CUDARuntimeError as error:
            self.refused = True
            warnings.warn(_REMEDY.format(error=error), RuntimeWarning,
                          stacklevel=2)
            return None
        # The last callback of an object is called first: before its pages are
        # given back.
        weakref.finalize(array.base, _unlock, runtime, address, os.getpid()
                         ).atexit = False
        return array


def _unlock(runtime: Any, address: int, owner: int) -> None:
    if os.getpid() != owner:        # what was forked off has no GPU
        return
    # If this fails, CUDA refuses to register these pages again.
    with contextlib.suppress(runtime.CUDARuntimeError):
        runtime.hostUnregister(address)


@functools.cache
def page_locked_memory() -> PageLockedMemory | None:
    """This process's; None: the system has no node memory."""
    memory = node_memory()
    return PageLockedMemory(memory) if memory else None

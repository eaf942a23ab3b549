"""A folder that ranks have in common: the same files, one cache a node."""
from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from chainer_fp8pipe.mpi import agreement
from chainer_fp8pipe.mpi.failure.abort import abort_on_exception

from mpi4py import MPI

from .cache import Cache
from .file_list import FileTable, find_images
from .workers.segment import Segment

_log = logging.getLogger(__name__)


class FolderRanks:
    """The ranks that share a folder's images.

    An exception that nobody catches, on any rank, ends the job from then on.

    Args:
        comm: mpi4py's communicator of theirs.

    Attributes:
        rank: This one.
        size: How many there are.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        abort_on_exception()        # or the others wait in their next step
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm

    def together(self, action: Callable[[], Any]) -> Any:
        """Does something that may fail, on all ranks or on none."""
        return agreement.raise_together(self._comm, action, ValueError)

    def same(self, what: str, **settings: object) -> None:
        """Raises on all ranks unless their settings are the same."""
        agreement.agree(self._comm, agreement.Signature({
            f'{what} {name}': repr(value)
            for name, value in settings.items()}),
            remedy='Give all ranks the same.')

    def find(self, root: str) -> FileTable:
        """The files, looked for by one rank only; the same on all."""
        def look() -> FileTable | None:
            if not os.path.isdir(root):
                raise ValueError(f'{root!r} is not a folder; images are '
                                 'expected as ROOT/CLASS/*.JPEG')
            return None if self.rank else find_images(root)
        table = self._comm.bcast(self.together(look))
        # The folder may be elsewhere on another node.
        table.root = root
        return table

    def cache(self, samples: int, budget: int) -> Cache:
        """One cache for all ranks of a node."""
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            return self._cache_of(node, samples, budget)
        finally:
            node.Free()

    def _cache_of(self, node: MPI.Comm, samples: int, budget: int) -> Cache:
        first = self.together(
            lambda: None if node.rank else Cache.create(samples, budget))
        place = node.bcast(first and first.segment.place)
        cache = first
        if node.rank:
            segment = Segment.open(place)
            cache = segment and Cache(segment, samples)
        if node.allreduce(cache is not None, MPI.LAND):
            return cache
        if not node.rank:
            _log.warning(
                'rank %d: the ranks of this node cannot open memory of each '
                'other, so that each keeps a cache of its own, of '
                'cache_bytes / %d', self.rank, node.size)
        return Cache.create(samples, budget // node.size)

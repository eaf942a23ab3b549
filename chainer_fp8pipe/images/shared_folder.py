"""Ranks that read one folder: the same files, and one cache per node."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .cache import Cache
from .file_list import FileTable, check_folder, find_images
from .workers.segment import Segment

_log = logging.getLogger(__name__)


class FolderRanks:
    """The ranks that share a folder's images.

    With a communicator, an uncaught exception on any rank ends the job from
    then on.  Without one MPI is not imported, as that would start it.

    Args:
        shard: A communicator; (index, count); None for one rank alone.

    Attributes:
        rank: This rank's number.
        size: Number of ranks.
    """

    def __init__(self, shard: Any) -> None:
        self._comm: Any = None
        if shard is None or isinstance(shard, tuple):
            self.rank, self.size = shard or (0, 1)
            if not 0 <= self.rank < self.size:
                raise ValueError(f'shard=({self.rank}, {self.size}): there '
                                 f'is no shard {self.rank} among {self.size}')
            return
        from mpi4py import MPI

        from ..mpi.failure.world import enter_world
        comm = getattr(shard, 'mpi_comm', shard)
        if not isinstance(comm, MPI.Comm):
            raise TypeError(f'shard={shard!r} is neither a communicator nor '
                            '(index, count)')
        enter_world()        # or the others wait in their next step
        self.rank, self.size, self._comm = comm.rank, comm.size, comm

    def together(self, action: Callable[[], Any]) -> Any:
        """Calls ``action``; if it fails on a rank, raises on all."""
        if self._comm is None:
            return action()
        from ..mpi import agreement
        return agreement.raise_together(self._comm, action, ValueError)

    def same(self, what: str, **settings: object) -> None:
        """Raises on all ranks if their settings differ."""
        if self._comm is None:
            return
        from ..mpi import agreement
        agreement.agree(self._comm, agreement.Signature({
            f'{what} {name}': repr(value)
            for name, value in settings.items()}),
            remedy='Give all ranks the same.')

    def find(self, root: str) -> FileTable:
        """Finds the files on rank 0, and gives them to all ranks."""
        if self._comm is None:
            return find_images(root)

        def look() -> FileTable | None:
            check_folder(root)
            return None if self.rank else find_images(root)
        table = self._comm.bcast(self.together(look))
        # The folder may be elsewhere on another node.
        table.root = root
        return table

    def cache(self, samples: int, budget: int) -> Cache:
        """One cache for all ranks of a node."""
        if self._comm is None:
            return Cache.create(samples, budget)
        from mpi4py import MPI
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            return self._cache_of(node, samples, budget)
        finally:
            node.Free()

    def _cache_of(self, node: Any, samples: int, budget: int) -> Cache:
        first = self.together(
            lambda: None if node.rank else Cache.create(samples, budget))
        place = node.bcast(first and first.segment.place)
        cache = first
        if node.rank:
            segment = Segment.open(place)
            cache = segment and Cache(segment, samples)
        if all(node.allgather(cache is not None)):
            return cache
        if not node.rank:
            _log.warning(
                'rank %d: the ranks of this node cannot open memory of each '
                'other, so that each keeps a cache of its own, of '
                'cache_bytes / %d', self.rank, node.size)
        return Cache.create(samples, budget // node.size)

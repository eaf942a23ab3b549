"""The ranks that share the images of a folder: MPI's, or one alone."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .file_list import FileTable, find_images

if TYPE_CHECKING:
    from .shared_folder import FolderRanks


class Alone:
    """:class:`~.shared_folder.FolderRanks` of one rank, without MPI.

    Args:
        rank: Number of this shard.
        size: Number of shards.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f'shard=({rank}, {size}): there is no shard '
                             f'{rank} among {size}')
        self.rank, self.size = rank, size

    def together(self, action: Callable[[], Any]) -> Any:
        """Calls ``action``."""
        return action()

    def same(self, what: str, **settings: object) -> None:
        """Does nothing: no other rank can differ."""

    def find(self, root: str) -> FileTable:
        """Finds the files."""
        return find_images(root)

    def cache(self, samples: int, budget: int) -> Cache:
        """A cache of this process."""
        return Cache.create(samples, budget)


def ranks_of(shard: Any) -> FolderRanks | Alone:
    """The ranks of a communicator, of (index, count), or of None."""
    if shard is None:
        return Alone()
    if isinstance(shard, tuple):
        return Alone(*shard)
    # Imported only now, as that starts MPI.
    from mpi4py import MPI

    from .shared_folder import FolderRanks
    comm = getattr(shard, 'mpi_comm', shard)
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f'shard={shard!r} is neither a communicator nor '
                        '(index, count)')
    return FolderRanks(comm)

"""Who shares the images of a folder: ranks of MPI, or nobody."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .file_list import FileTable, find_images

if TYPE_CHECKING:
    from .shared_folder import FolderRanks


class Alone:
    """A rank that asks nobody.

    It does alone what :class:`~.shared_folder.FolderRanks` does with all.

    Args:
        rank: This one.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f'shard=({rank}, {size}): there is no shard '
                             f'{rank} among {size}')
        self.rank, self.size = rank, size

    def together(self, action: Callable[[], Any]) -> Any:
        """Does something."""
        return action()

    def same(self, what: str, **settings: object) -> None:
        """Nobody has others."""

    def find(self, root: str) -> FileTable:
        """The files."""
        return find_images(root)

    def cache(self, samples: int, budget: int) -> Cache:
        """A cache of its own."""
        return Cache.create(samples, budget)


def ranks_of(shard: Any) -> FolderRanks | Alone:
    """What ``shard`` means: a communicator, (index, count), or None."""
    if shard is None:
        return Alone()
    if isinstance(shard, tuple):
        return Alone(*shard)
    # Not before it is wanted: the import starts MPI.
    from mpi4py import MPI

    from .shared_folder import FolderRanks
    comm = getattr(shard, 'mpi_comm', shard)
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f'shard={shard!r} is neither a communicator nor '
                        '(index, count)')
    return FolderRanks(comm)

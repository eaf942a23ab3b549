"""A folder of images as a data set of Chainer's."""
from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Callable
from typing import Any, Literal

import chainer
import numpy

from .decoding import Decoder, create_decoder
from .file_list import FileTable, check_folder, find_images
from .iterator import ImageIterator
from .memory import available_bytes, total_bytes
from .reading import Cache, CacheKind, Reader, kept_bytes
from .segment import Segment
from .transforms import Transform

_log = logging.getLogger(__name__)
_KINDS = None, 'memory', 'decoded'
_ON_ERROR = 'skip', 'raise'


class ImageFolder(chainer.dataset.DatasetMixin):
    """Images in ``root/CLASS/*.JPEG``, each with the number of its class.

    ``dataset[i]`` is ``(image, label)``, for Chainer's own iterators: CHW of
    the transform's type, and int32.  :meth:`iterator` reads in parallel and
    ahead, divides the images over ranks, and goes on in mid-epoch from a
    snapshot.

    With a communicator as ``shard``, all of its ranks make the folder and
    call :meth:`iterator`; a mistake on one rank is raised on each.  From then
    on an uncaught exception on any rank ends the job.

    Args:
        root: The folder.  ``.jpg`` and ``.png`` are found as well.
        transform: Crops and normalises, such as
            :class:`~chainer_fp8pipe.images.transforms.RandomResizedCrop`.
            Without one ``dataset[i]`` is the whole image, uint8.
        cache: ``'memory'`` keeps the files' bytes in memory,
            ``'decoded'`` the pixels of the whole images (five to ten times
            as much, for less to do), None nothing.  The ranks of a node and
            their workers share one copy; images that do not fit are read
            from their files.
        cache_bytes: Bytes of the cache of a node, taken as it fills; by
            default half of the available memory.
        shard: A communicator (this package's, ChainerMN's or mpi4py's) whose
            ranks divide the images; or (index, count); None for all.
        seed: Of the order and of the transform's random numbers; the same on
            all ranks.
        on_error: An image that cannot be decoded is left out of its batch,
            counted, and named in the log (``'skip'``), or it is an error
            (``'raise'``).  For ``dataset[i]`` it always is.  A batch of
            which nothing is left takes an image of another of the rank's.
        decoder: A :class:`~.decoding.Decoder`, or the name of one for
            :func:`~.decoding.create_decoder`.

    Attributes:
        classes: Their names; the index is the label.

    Raises:
        ValueError: The folder is missing or empty, a class has no images,
            the cache does not hold the first image or is larger than the
            memory, or an argument is none of the above or differs on a rank.
    """

    def __init__(self, root: str | os.PathLike[str],
                 transform: Transform | None = None,
                 cache: CacheKind = None, cache_bytes: int | None = None,
                 shard: Any = None, seed: int = 0,
                 on_error: Literal['skip', 'raise'] = 'skip',
                 decoder: str | Decoder = 'auto') -> None:
        self._ranks = FolderRanks(shard)
        self._on_error = on_error
        seed, cache_bytes, where = self._ranks.together(
            lambda: _checked(cache, cache_bytes, seed, on_error, root,
                             transform, decoder))
        self._ranks.same('image folder', cache=cache, cache_bytes=cache_bytes,
                         seed=seed, on_error=on_error,
                         # Memory addresses differ between ranks.
                         transform=re.sub(' at 0x[0-9a-f]+', '',
                                          repr(transform)))
        table = self._ranks.find(where)
        self.classes = table.classes
        made = self._ranks.together(lambda: create_decoder(
            decoder) if isinstance(decoder, str) else decoder)
        self._reader = Reader(table, transform, made, cache, None, seed)
        if cache is not None:
            self._reader.cache = self._make_cache(cache_bytes)
        self._draws: tuple[int, numpy.random.Generator] | None = None

    def __len__(self) -> int:
        """Images of all ranks."""
        return len(self._reader.table)

    @property
    def labels(self) -> numpy.ndarray:
        """int32, shape (images,): the class of each."""
        return self._reader.table.labels

    def path(self, index: int) -> str:
        """The file of an image."""
        return self._reader.table.path(index)

    def get_example(self, index: int) -> tuple[numpy.ndarray, numpy.int32]:
        """``dataset[index]``: drawn anew each time.

        Raises:
            ImageError: The image cannot be used.
            OSError: The file cannot be read.
        """
        index = range(len(self))[index]
        return (self._reader.draw(index, self._generator()),
                self._reader.table.labels[index])

    def iterator(self, batch: int, workers: int = 4, prefetch: int = 8,
                 repeat: bool = True, shuffle: bool = True) -> ImageIterator:
        """An iterator over this rank's share of each epoch.

        Its batches are lists of ``(image, label)`` that
        :func:`batch_arrays` takes as they are.

        Args:
            batch: Images in a batch of this rank, at most.  All batches of
                an epoch differ by one at most, so that most are full where
                an epoch has many.
            workers: Processes that read and decode; 0 does it in this one,
                when a batch is wanted.
            prefetch: Batches that workers read ahead.
            repeat: Whether to go on after the first epoch.
            shuffle: Whether the images are in a new order, and on other
                ranks, in each epoch; otherwise they are in the folder's.

        Raises:
            ValueError: There is no transform, or less than one image for
                each rank, or an argument is negative, no whole number, or
                differs on a rank.
        """
        batch, workers, prefetch = self._ranks.together(lambda: (
            _whole('batch', batch, 1), _whole('workers', workers, 0),
            _whole('prefetch', prefetch, 0)))
        self._ranks.same('iterator', batch=batch, repeat=repeat,
                         shuffle=shuffle)

        def make() -> ImageIterator:
            if self._reader.transform is None:
                raise ValueError(
                    'images of different sizes do not make a batch: give the '
                    'ImageFolder a transform, such as RandomResizedCrop(224)')
            return ImageIterator(
                self._reader, (self._ranks.rank, self._ranks.size), batch,
                workers, prefetch, repeat, shuffle, self._on_error)
        return self._ranks.together(make)

    def __getstate__(self) -> dict[str, Any]:
        if self._reader.cache is not None:
            raise TypeError(
                f'an ImageFolder with cache={self._reader.kind!r} cannot be '
                'pickled, as its memory belongs to this process and its '
                'forks: use its iterator(), whose workers share the cache, '
                'or cache=None')
        return dict(vars(self))

    def cached(self) -> tuple[int, int]:
        """Images in this node's cache, and their bytes."""
        cache = self._reader.cache
        return (0, 0) if cache is None else cache.statistics()

    def _make_cache(self, budget: int | None) -> Cache:
        """The node's cache, if it can hold a sample."""
        def checked() -> int:
            limit = available_bytes() // 2 if budget is None else budget
            needed = kept_bytes(self._reader, 0)
            if needed > limit:
                raise ValueError(
                    f'cache_bytes={limit:,} does not hold one sample: '
                    f'{self.path(0)} takes {needed:,} bytes; allow as much as '
                    'all images take, or use cache=None')
            return limit
        return self._ranks.cache(len(self), self._ranks.together(checked))

    def _generator(self) -> numpy.random.Generator:
        """The process's generator: a fork draws other numbers."""
        if self._draws is None or self._draws[0] != os.getpid():
            words = [self._reader.seed, self._ranks.rank]
            if self._draws is not None:
                words.append(os.getpid())
            self._draws = os.getpid(), numpy.random.default_rng(words)
        return self._draws[1]


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

        from ..mpi.failure.abort import enter_world
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


def _checked(cache: object, cache_bytes: int | None, seed: int,
             on_error: object, root: str | os.PathLike[str],
             transform: object, decoder: object
             ) -> tuple[int, int | None, str]:
    """Checks the arguments; returns seed, cache_bytes and root."""
    for name, value, needed in (
            ('transform', transform, ('shape', 'dtype', 'plan', 'finish')),
            ('decoder', decoder, ('size', 'decode'))):
        if value is None and name == 'transform' or (
                isinstance(value, str) and name == 'decoder'):
            continue
        missing = [one for one in needed if not hasattr(value, one)]
        if missing or isinstance(value, type):
            raise ValueError(
                f'{name}={value!r} is no {name}: it must be an object with '
                f'{", ".join(needed)}'
                + (', such as RandomResizedCrop(224)'
                   if name == 'transform' else ", or a name such as 'auto'"))
    if cache not in _KINDS:
        raise ValueError(f'cache={cache!r} is none of {_KINDS}')
    if on_error not in _ON_ERROR:
        raise ValueError(f'on_error={on_error!r} is none of {_ON_ERROR}')
    seed = _whole('seed', seed, 0)
    if seed >= 1 << 63:
        raise ValueError(f'seed={seed} is not below 2^63')
    if cache_bytes is not None:
        if cache is None:
            raise ValueError("cache_bytes is for cache='memory' or 'decoded'")
        cache_bytes = _whole('cache_bytes', cache_bytes, 0)
        if cache_bytes > total_bytes():
            raise ValueError(
                f'cache_bytes={cache_bytes:,} is more than the '
                f'{total_bytes():,} bytes of memory that there are')
    # The script may go to another folder while images are still read.
    return seed, cache_bytes, os.path.abspath(os.fspath(root))


def _whole(name: str, value: Any, least: int) -> int:
    """An argument as Python's int, whatever kind of integer it is."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(
            f'{name}={value!r} is not a whole number') from error
    if number < least:
        raise ValueError(f'{name}={number} must be {least} or more')
    return number



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

from .cache import Cache, available_bytes
from .decoding import Decoder
from .iterator import ImageIterator
from .reading import Reader, check_folder, find_images
from .transforms import Transform

_log = logging.getLogger(__name__)


class ImageFolder(chainer.dataset.DatasetMixin):
    """Images in ``root/CLASS/*.JPEG``, each with the number of its class.

    ``dataset[i]`` is ``(image, label)``, for Chainer's own iterators: CHW of
    the transform's type, and int32.  :meth:`iterator` reads in parallel and
    ahead, divides the images over ranks, and goes on in mid-epoch from a
    snapshot.

    With a communicator as ``shard``, all of its ranks make the folder and
    call :meth:`iterator`.  Each raises the error of any of them.

    Args:
        root: The folder.  ``.jpg`` and ``.png`` are found as well.
        transform: Crops and normalises, such as
            :class:`~chainer_fp8pipe.images.transforms.RandomResizedCrop`.
            Without one ``dataset[i]`` is the whole image, uint8.
        cache: ``'memory'`` keeps the files' bytes; None keeps nothing.
            The ranks of a node share one copy.  Files give the images that
            do not fit.
        cache_bytes: Bytes of the cache of a node, taken as it fills; by
            default half of the available memory.
        shard: A communicator (this package's, ChainerMN's or mpi4py's) whose
            ranks divide the images; or (index, count); None for all.
        seed: Of the order and of the transform's random numbers; the same on
            all ranks.
        on_error: ``'skip'`` leaves an image that cannot be decoded out of
            its batch, counts it, and names it in the log.  ``'raise'`` makes
            it an error, as ``dataset[i]`` always does.
        decoder: ``'auto'``, ``'turbojpeg'`` or ``'pillow'``, or a
            :class:`~.decoding.Decoder`.

    Attributes:
        classes: Their names; the index is the label.

    Raises:
        ValueError: The folder is missing or empty, or a class has no images;
            the cache is larger than the available memory; an argument is
            wrong, or differs on a rank.
    """

    def __init__(self, root: str | os.PathLike[str],
                 transform: Transform | None = None,
                 cache: Literal['memory'] | None = None,
                 cache_bytes: int | None = None, shard: Any = None,
                 seed: int = 0, on_error: Literal['skip', 'raise'] = 'skip',
                 decoder: str | Decoder = 'auto') -> None:
        self._rank, self._ranks, self._comm = _ranks_of(shard)
        self._on_error = on_error

        def check() -> tuple[int, int, str, Decoder]:
            # The script may go to another folder while images are still read.
            where = os.path.abspath(os.fspath(root))
            _check(cache, cache_bytes, on_error, transform, decoder)
            check_folder(where)
            return (_whole('seed', seed, 0), _budget(cache_bytes), where,
                    Decoder(decoder) if isinstance(decoder, str)
                    else decoder)
        whole_seed, budget, where, made = self._together(
            check, lambda found: _described(
                'image folder', cache=cache, cache_bytes=cache_bytes,
                seed=found[0], on_error=on_error,
                # Memory addresses differ between ranks.
                transform=re.sub(' at 0x[0-9a-f]+', '', repr(transform))))
        table = self._together(
            lambda: None if self._rank and self._comm else find_images(where))
        if self._comm is not None:
            # The folder may be elsewhere on another node.
            table = self._comm.bcast(table)._replace(root=where)
        self.classes, self.labels = table.classes, table.labels
        self._reader = Reader(table, transform, made, None, whole_seed)
        if cache is not None:
            self._reader.cache = self._make_cache(budget)
        self._draws: tuple[int, numpy.random.Generator] | None = None

    def __len__(self) -> int:
        """Images of all ranks."""
        return len(self.labels)

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
        # The process's generator: a fork draws other numbers.
        if self._draws is None or self._draws[0] != os.getpid():
            words = [self._reader.seed, self._rank]
            if self._draws is not None:
                words.append(os.getpid())
            self._draws = os.getpid(), numpy.random.default_rng(words)
        return (self._reader.draw(index, self._draws[1]), self.labels[index])

    def iterator(self, batch: int, workers: int = 4, prefetch: int = 8,
                 repeat: bool = True, shuffle: bool = True) -> ImageIterator:
        """An iterator over this rank's share of each epoch.

        Its batches are lists of ``(image, label)`` that
        :func:`batch_arrays` takes as they are.

        Args:
            batch: Images in a batch of this rank, at most; 2 where this is 1
                and the ranks do not divide the images.  All batches of an
                epoch differ by one at most, so that most are full where an
                epoch has many.
            workers: Threads that read and decode.
            prefetch: Batches that they read ahead; 0 reads a batch when it
                is wanted.
            repeat: Whether to go on after the first epoch.
            shuffle: Whether each epoch has a new order and new ranks for
                the images; otherwise they are in the folder's order.

        Raises:
            ValueError: There is no transform, or a rank has no image.  An
                argument is no whole number, too small, or differs on a rank.
        """
        def check() -> tuple[int, int, int]:
            if self._reader.transform is None:
                raise ValueError(
                    'images of different sizes do not make a batch: give the '
                    'ImageFolder a transform, such as RandomResizedCrop(224)')
            return (_whole('batch', batch, 1), _whole('workers', workers, 1),
                    _whole('prefetch', prefetch, 0))
        batch, workers, prefetch = self._together(
            check, lambda found: _described('iterator', batch=found[0],
                                            repeat=repeat, shuffle=shuffle))
        return self._together(lambda: ImageIterator(
            self._reader, (self._rank, self._ranks), batch, workers, prefetch,
            repeat, shuffle, self._on_error))

    def cached(self) -> tuple[int, int]:
        """Images in this node's cache, and their bytes."""
        cache = self._reader.cache
        return (0, 0) if cache is None else cache.statistics()

    def __getstate__(self) -> dict[str, Any]:
        if self._reader.cache is not None:
            raise TypeError(
                "an ImageFolder with cache='memory' cannot be pickled: only "
                'forks of this process share its memory; use its iterator(), '
                'or cache=None')
        return dict(vars(self))

    def _together(self, action: Callable[[], Any],
                  entries: Callable[[Any], dict[str, str]] | None = None
                  ) -> Any:
        """Calls ``action``; raises on all ranks if it fails on one.

        So it does if ``entries`` of what it returns differ between ranks.
        """
        if self._comm is None:
            return action()
        from ..mpi.agreement import raise_together
        return raise_together(self._comm, action, ValueError, entries,
                              'Give all ranks the same.')

    def _make_cache(self, budget: int) -> Cache:
        """One cache for all ranks of a node."""
        if self._comm is None:
            return Cache.create(len(self), budget)
        from mpi4py import MPI
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            cache = self._together(lambda: None if node.rank else Cache.create(
                len(self), budget))
            place = node.bcast(cache and cache.place)
            if node.rank:
                cache = Cache.open(place, len(self))
            if all(node.allgather(cache is not None)):
                return cache
            if not node.rank:
                _log.warning(
                    'rank %d: ranks of this node cannot open memory of each '
                    'other, so each keeps a cache of cache_bytes / %d',
                    self._rank, node.size)
            return Cache.create(len(self), budget // node.size)
        finally:
            node.Free()


def _ranks_of(shard: Any) -> tuple[int, int, Any]:
    """This rank's number, how many there are, and their communicator.

    Without a communicator MPI is not imported, as that would start it.
    """
    if shard is None or isinstance(shard, tuple):
        rank, size = shard or (0, 1)
        if not 0 <= rank < size:
            raise ValueError(f'shard=({rank}, {size}): there is no shard '
                             f'{rank} among {size}')
        return rank, size, None
    from mpi4py import MPI

    from ..mpi.world import enter_world
    comm = getattr(shard, 'mpi_comm', shard)
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f'shard={shard!r} is neither a communicator nor '
                        '(index, count)')
    enter_world()        # or the others wait in their next step
    return comm.rank, comm.size, comm


def _check(cache: object, cache_bytes: object, on_error: object,
           transform: object, decoder: object) -> None:
    """Raises ValueError about an argument that cannot be."""
    for name, value, is_named, needed, example in (
            ('transform', transform, transform is None,
             ('shape', 'dtype', 'plan', 'finish'),
             'such as RandomResizedCrop(224)'),
            ('decoder', decoder, isinstance(decoder, str), ('decode',),
             "or a name such as 'auto'")):
        if not is_named and (isinstance(value, type) or not all(
                hasattr(value, one) for one in needed)):
            raise ValueError(f'{name}={value!r} is no {name}: it must be an '
                             f'object with {", ".join(needed)}, {example}')
    for name, value, allowed in (
            ('cache', cache, (None, 'memory')),
            ('on_error', on_error, ('skip', 'raise'))):
        if value not in allowed:
            raise ValueError(f'{name}={value!r} is none of {allowed}')
    if cache is None and cache_bytes is not None:
        raise ValueError("cache_bytes is for cache='memory'")


def _budget(cache_bytes: int | None) -> int:
    available = available_bytes()
    if cache_bytes is None:
        return available // 2
    cache_bytes = _whole('cache_bytes', cache_bytes, 1)
    if cache_bytes > available:
        raise ValueError(f'cache_bytes={cache_bytes:,} is more than the '
                         f'{available:,} bytes of memory that are available')
    return cache_bytes


def _whole(name: str, value: Any, least: int) -> int:
    """An argument as Python's int, whatever kind of integer it is."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(
            f'{name}={value!r} is not a whole number') from error
    if number < least:
        raise ValueError(f'{name}={number} must be {least} or more')
    if number >= 1 << 63:
        raise ValueError(f'{name}={number} is not below 2^63')
    return number


def _described(what: str, **settings: object) -> dict[str, str]:
    return {f'{what} {name}': repr(value)
            for name, value in settings.items()}

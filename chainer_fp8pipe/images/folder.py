"""A folder of images as a data set of Chainer's: ``ROOT/CLASS/*.JPEG``."""
from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable
from typing import Any, Literal

import chainer
import numpy

from .cache import Cache, available_bytes
from .decoding import ImageError, decode, is_fast
from .iterator import ImageIterator, Plan
from .transforms import Crop

#: What names of images end with, in small or capital letters.
_SUFFIXES = ('.jpeg', '.jpg', '.png')


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
            :class:`~chainer_fp8pipe.images.transforms.RandomResizedCrop`, or
            any object with its ``shape``, ``dtype``, ``plan`` and ``finish``.
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
        decoder: ``'auto'`` takes libjpeg-turbo if it is there, ``'pillow'``
            never.

    Attributes:
        classes: Their names; the index is the label.
        labels: int32, of each image.
        transform: As given.
        seed: As given.

    Raises:
        ValueError: The folder is missing or empty, or a class has no images;
            the cache is larger than the available memory; an argument is
            wrong, or differs on a rank.
    """

    def __init__(self, root: str | os.PathLike[str],
                 transform: Any = None,
                 cache: Literal['memory'] | None = None,
                 cache_bytes: int | None = None, shard: Any = None,
                 seed: int = 0, on_error: Literal['skip', 'raise'] = 'skip',
                 decoder: str = 'auto') -> None:
        self._rank, self._ranks, self._comm = _ranks_of(shard)

        def check() -> tuple[str, int]:
            # The script may go to another folder while images are still read.
            where = os.path.abspath(os.fspath(root))
            if not os.path.isdir(where):
                raise ValueError(f'{where!r} is not a folder; images are '
                                 'expected as ROOT/CLASS/*.JPEG')
            if transform is not None and (
                    isinstance(transform, type) or not all(
                        hasattr(transform, name) for name
                        in ('shape', 'dtype', 'plan', 'finish'))):
                raise ValueError(
                    f'transform={transform!r} is no transform: it must be an '
                    'object with shape, dtype, plan and finish, such as '
                    'RandomResizedCrop(224)')
            for name, value, allowed in (
                    ('cache', cache, (None, 'memory')),
                    ('on_error', on_error, ('skip', 'raise'))):
                if value not in allowed:
                    raise ValueError(f'{name}={value!r} is none of {allowed}')
            self.seed = _whole('seed', seed, 0)
            self._fast = is_fast(decoder)
            return where, _budget(cache, cache_bytes)
        where, budget = self._together(check, {
            'cache': cache, 'cache_bytes': cache_bytes, 'seed': seed,
            'on_error': on_error,
            'transform': transform})
        files = self._together(
            lambda: None if self._rank and self._comm else find_images(where))
        if self._comm is not None:
            files = self._comm.bcast(files)
        # The folder may be elsewhere on another node.
        self._root, self.transform = where, transform
        self.classes, self.labels, self._names = files
        self._skips = on_error == 'skip'
        self._cache = self._make_cache(budget) if cache else None
        self._draws = os.getpid(), numpy.random.default_rng(
            [self.seed, self._rank])

    def __len__(self) -> int:
        """Images of all ranks."""
        return len(self.labels)

    def path(self, index: int) -> str:
        """The file of an image."""
        return os.path.join(self._root, os.fsdecode(self._names[index]))

    def get_example(self, index: int) -> tuple[numpy.ndarray, numpy.int32]:
        """``dataset[index]``: drawn anew each time.

        Raises:
            ImageError: The image cannot be used.
            OSError: The file cannot be read.
        """
        index = range(len(self))[index]
        if self._draws[0] != os.getpid():       # a fork draws other numbers
            self._draws = os.getpid(), numpy.random.default_rng(
                [self.seed, self._rank, os.getpid()])
        return self._draw(index, self._draws[1], None), self.labels[index]

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
        def make() -> ImageIterator:
            if self.transform is None:
                raise ValueError(
                    'images of different sizes do not make a batch: give the '
                    'ImageFolder a transform, such as RandomResizedCrop(224)')
            return ImageIterator(self, Plan(
                _whole('batch', batch, 1), self._rank, self._ranks,
                _whole('workers', workers, 1),
                _whole('prefetch', prefetch, 0), repeat, shuffle,
                self._skips))
        return self._together(make, {'iterator batch': batch,
                                     'repeat': repeat, 'shuffle': shuffle})

    def cached(self) -> tuple[int, int]:
        """Images in this node's cache, and their bytes."""
        return (0, 0) if self._cache is None else self._cache.statistics()

    def read(self, index: int, epoch: int, out: numpy.ndarray) -> None:
        """Writes an image, as it is in an epoch, into ``out``.

        Several threads may do so: the random numbers depend on the seed, the
        epoch and the image alone.

        Raises:
            ImageError: The image, which the error names, cannot be used.
            OSError: The file cannot be read.
            ValueError: The transform returns another shape than it has.
            TypeError: It returns values that its dtype does not hold.
        """
        result = self._draw(index, numpy.random.default_rng(
            [self.seed, epoch, index]), out)
        if result is not out:       # what it returns counts
            if numpy.shape(result) != out.shape:
                raise ValueError(
                    f'finish() returns an array of {numpy.shape(result)}, '
                    f"but the transform's shape is {out.shape}")
            numpy.copyto(out, result, 'same_kind')

    def _draw(self, index: int, rng: numpy.random.Generator,
              out: numpy.ndarray | None) -> numpy.ndarray:
        """An image, with given random numbers; CHW."""
        data = self._cache and self._cache.get(index)
        if not data:
            with open(self.path(index), 'rb') as file:
                data = file.read()
            if self._cache is not None:
                self._cache.put(index, data)
        transform = self.transform
        try:
            pixels = decode(data, lambda width, height: (
                Crop((0, 0, width, height), (height, width))
                if transform is None else transform.plan(width, height, rng)),
                self._fast)
        except ImageError as error:
            raise ImageError(self.path(index), error.reason) from error
        if transform is None:
            return numpy.ascontiguousarray(pixels.transpose(2, 0, 1))
        return transform.finish(pixels, out)

    def _together(self, action: Callable[[], Any],
                  same: dict[str, object] | None = None) -> Any:
        """Calls ``action``; raises on all ranks if it fails on one.

        So it does if what must be the same differs between ranks.
        """
        if self._comm is None:
            return action()
        from ..mpi.agreement import raise_together
        return raise_together(
            self._comm, action, ValueError, lambda _: {
                # Memory addresses differ between ranks.
                name: re.sub(' at 0x[0-9a-f]+', '', repr(value))
                for name, value in (same or {}).items()},
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
            # In containers of their own ranks cannot open others' memory.
            is_shared = all(node.allgather(cache is not None))
            return cache if is_shared else Cache.create(
                len(self), budget // node.size)
        finally:
            node.Free()


def find_images(root: str
                ) -> tuple[list[str], numpy.ndarray, numpy.ndarray]:
    """Looks for ``root/CLASS/*.JPEG`` (or ``.jpg``, ``.png``).

    Classes are numbered in the order of their names, and files are sorted,
    whatever the order of the file system.  Other files, hidden ones, and
    folders inside a class are left out.

    Returns:
        Names of classes; of each file the index of its class, int32; and the
        names of files, as bytes of one length: a million strings would take
        several times the memory.

    Raises:
        ValueError: There is no class, or one without images.
    """
    classes = _sorted(root, lambda entry: entry.is_dir())
    if not classes:
        raise ValueError(f'{root!r} has no folders in it; images are '
                         'expected as ROOT/CLASS/*.JPEG')
    found = [_sorted(os.path.join(root, name), lambda entry: (
        entry.name.lower().endswith(_SUFFIXES) and entry.is_file()))
        for name in classes]
    empty = [repr(name) for name, files in zip(classes, found, strict=True)
             if not files]
    if empty:
        raise ValueError(
            f'no images ({", ".join(_SUFFIXES)}) in {", ".join(empty[:5])}'
            + (f' and {len(empty) - 5} more' if len(empty) > 5 else '')
            + f' of {root!r}; every folder there is a class: remove the '
            'others')
    return classes, numpy.repeat(
        numpy.arange(len(classes), dtype=numpy.int32),
        [len(files) for files in found]), numpy.array([
            os.fsencode(os.path.join(folder, name))
            for folder, files in zip(classes, found, strict=True)
            for name in files])


def _sorted(folder: str, wanted: Callable[[os.DirEntry], bool]) -> list[str]:
    """Names in a folder, without hidden ones."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Such as a link that leads to itself.
            with contextlib.suppress(OSError):
                if not entry.name.startswith('.') and wanted(entry):
                    names.append(entry.name)
    return sorted(names)


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


def _budget(cache: object, cache_bytes: int | None) -> int:
    available = available_bytes()
    if cache_bytes is None:
        return available // 2
    if cache is None:
        raise ValueError("cache_bytes is for cache='memory'")
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
    if not least <= number < 1 << 63:
        raise ValueError(f'{name}={number} must be {least} or more, and below '
                         '2^63')
    return number

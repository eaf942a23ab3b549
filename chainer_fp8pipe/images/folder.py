"""A folder of images as a data set of Chainer's: ``ROOT/CLASS/*.JPEG``."""
from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import chainer
import numpy

from .cache import Cache
from .decoding import decode
from .iterator import ImageIterator

#: What names of images end with, in small or capital letters.
_SUFFIXES = ('.jpeg', '.jpg', '.png')


class ImageError(ValueError):
    """An image cannot be used; the message names the rank, file and fault."""


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
        cache: Bytes of memory in which a node keeps the bytes of files, taken
            as it fills; None keeps nothing.  The ranks of a node share one
            copy.  Files give the images that do not fit.
        shard: A communicator (this package's, ChainerMN's or mpi4py's) whose
            ranks divide the images; None for all.
        seed: Of the order and of the transform's random numbers; the same on
            all ranks.

    Attributes:
        classes: Their names; the index is the label.
        labels: int32, of each image.
        transform: As given.
        seed: As given.

    Raises:
        ValueError: The folder is missing or empty, or a class has no images;
            an argument is wrong, or differs on a rank.
    """

    def __init__(self, root: str | os.PathLike[str], transform: Any,
                 cache: int | None = None, shard: Any = None,
                 seed: int = 0) -> None:
        self._comm: Any = None
        if shard is not None:       # MPI is not started for none
            from ..mpi.grid import ranks_of
            from ..mpi.world import enter_world
            self._comm = ranks_of(shard)
            enter_world()       # or the others wait in their next step
        self.rank = self._comm.rank if self._comm else 0
        self.ranks = self._comm.size if self._comm else 1

        def check() -> Any:
            # The script may go to another folder while images are still read.
            self._root = os.path.abspath(os.fspath(root))
            if not os.path.isdir(self._root):
                raise ValueError(f'{self._root!r} is not a folder; images are '
                                 'expected as ROOT/CLASS/*.JPEG')
            if isinstance(transform, type) or not all(
                    hasattr(transform, name)
                    for name in ('shape', 'dtype', 'plan', 'finish')):
                raise ValueError(
                    f'transform={transform!r} is no transform: it must be an '
                    'object with shape, dtype, plan and finish, such as '
                    'RandomResizedCrop(224)')
            self.seed = _whole('seed', seed, 0)
            if cache is not None:
                _whole('cache', cache, 1)
            import PIL  # noqa: F401  # not with this module, as all import it
            return None if self.rank else find_images(self._root)
        found = self._together(check, {
            'cache': cache, 'seed': seed, 'transform': transform})
        # The folder may be elsewhere on another node.
        self.classes, self.labels, self._names = (
            self._comm.bcast(found) if self._comm else found)
        self.transform, self._drawn = transform, 0
        self._cache = self._make_cache(int(cache)) if cache else None

    def __len__(self) -> int:
        """Images of all ranks."""
        return len(self.labels)

    def path(self, index: int) -> str:
        """The file of an image."""
        return os.path.join(self._root, os.fsdecode(self._names[index]))

    def get_example(self, index: int) -> tuple[numpy.ndarray, numpy.int32]:
        """``dataset[index]``: drawn anew each time."""
        index = range(len(self))[index]
        self._drawn += 1
        image = numpy.empty(self.transform.shape, self.transform.dtype)
        self.read(index, (self._drawn, index, self.rank, 1), image)
        return image, self.labels[index]

    def iterator(self, batch: int, workers: int = 4, prefetch: int = 8,
                 repeat: bool = True, shuffle: bool = True) -> ImageIterator:
        """An iterator over this rank's share of each epoch.

        Its batches are lists of ``(image, label)`` that
        :func:`batch_arrays` takes as they are.

        Args:
            batch: Images in a batch of this rank, at most; 2 where this is 1
                and the ranks do not divide the images.  All batches of an
                epoch differ by one at most.
            workers: Threads that read and decode.
            prefetch: Batches that they read ahead; 0 reads a batch when it
                is wanted.
            repeat: Whether to go on after the first epoch.
            shuffle: Whether each epoch has a new order and new ranks for
                the images; otherwise they are in the folder's order.

        Raises:
            ValueError: A rank has no image.  An argument is no whole number,
                too small, or differs on a rank.
        """
        return self._together(lambda: ImageIterator(
            self, _whole('batch', batch, 1), _whole('workers', workers, 1),
            _whole('prefetch', prefetch, 0), repeat, shuffle), {
                'iterator batch': batch, 'repeat': repeat,
                'shuffle': shuffle})

    def read(self, index: int, words: Sequence[int],
             out: numpy.ndarray) -> None:
        """Writes an image into ``out``; several threads may do so.

        Args:
            index: Of the image.
            words: From these and the seed follow the random numbers.
            out: Of the transform's shape and dtype.

        Raises:
            ImageError: The image, which the error names, cannot be used.
        """
        transform, path = self.transform, self.path(index)
        rng = numpy.random.default_rng([self.seed, *words])
        try:
            data = self._cache and self._cache.get(index)
            if not data:
                with open(path, 'rb') as file:
                    data = file.read()
                if self._cache is not None:
                    self._cache.put(index, data)
            result = transform.finish(decode(
                data, lambda width, height: transform.plan(
                    width, height, rng)), out)
            if numpy.shape(result) != out.shape:
                raise ValueError(
                    f'finish() returns an array of {numpy.shape(result)}, '
                    f"but the transform's shape is {out.shape}")
            if result is not out:
                numpy.copyto(out, result, 'same_kind')
        except Exception as error:
            raise ImageError(f'rank {self.rank}: {path}: '
                             f'{type(error).__name__}: {error}') from error

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
    """Classes and images of ``root/CLASS/*.JPEG``, each sorted by name.

    Other files and hidden ones are left out.

    Returns:
        Names of classes; of each file the index of its class, int32; and the
        names of files, as bytes of one length: a million strings would take
        several times the memory.

    Raises:
        ValueError: There is no class, or one without images.
    """
    classes = sorted(one.name for one in os.scandir(root)
                     if one.name[0] != '.' and one.is_dir())
    if not classes:
        raise ValueError(f'{root!r} has no folders in it; images are '
                         'expected as ROOT/CLASS/*.JPEG')
    labels, found = [], []
    for label, name in enumerate(classes):
        files = [os.fsencode(os.path.join(name, file))
                 for file in sorted(os.listdir(os.path.join(root, name)))
                 if file[0] != '.' and file.lower().endswith(_SUFFIXES)]
        if not files:
            raise ValueError(
                f'no images ({", ".join(_SUFFIXES)}) in {name!r} of {root!r}; '
                'every folder there is a class: remove the others')
        labels += [label] * len(files)
        found += files
    return classes, numpy.array(labels, numpy.int32), numpy.array(found)


def _whole(name: str, value: Any, least: int) -> int:
    """An argument as Python's int, whatever kind of integer it is."""
    if isinstance(value, bool) or not isinstance(
            value, numbers.Integral) or not least <= int(value) < 1 << 63:
        raise ValueError(f'{name}={value!r} must be a whole number of {least} '
                         'or more, and below 2^63')
    return int(value)

"""The two folders of images, each divided over the ranks."""
import os

from chainer_fp8pipe import CenterCrop, ImageFolder, RandomResizedCrop
from chainer_fp8pipe.images.cache import available_bytes

from mpi4py import MPI

# Of the cache; ImageNet's training images are 96 % of all.
_TRAINING_SHARE = 0.9


def open_folders(options, comm, insize):
    """``ROOT/train`` and ``ROOT/val``, as :class:`ImageFolder`.

    Call it on all ranks.

    Raises:
        ValueError: A folder is missing or empty, or the two do not have the
            same classes; on all ranks.
    """
    cache = None if options.cache == 'none' else options.cache
    common = {'shard': comm, 'seed': options.seed,
              'on_error': options.on_error, 'decoder': options.decoder}
    folders = []
    for name, transform, share in (
            ('train', RandomResizedCrop(insize, normalise=None),
             _TRAINING_SHARE),
            ('val', CenterCrop(insize, normalise=None),
             1 - _TRAINING_SHARE)):
        folders.append(ImageFolder(
            os.path.join(options.root, name), transform, cache,
            cache and int(share * _cache_bytes(options, comm)), **common))
    train, val = folders
    if train.classes != val.classes:
        one = sorted({*train.classes} ^ {*val.classes})[0]
        here, there = (('train', 'val') if one in train.classes
                       else ('val', 'train'))
        raise ValueError(f'class {one} is in {options.root}/{here} but not '
                         f'in {options.root}/{there}; both need the same '
                         'classes')
    return train, val


def _cache_bytes(options, comm):
    """What a node may keep: as said, or half of the memory it has left."""
    return options.cache_bytes or comm.mpi_comm.allreduce(
        available_bytes() // 2, MPI.MIN)

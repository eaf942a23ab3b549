"""Images in folders as batches: found, sharded, cached, decoded in parallel.
"""
from .._on_demand import on_demand

_HOMES = {
    'CenterCrop': 'chainer_fp8pipe.images.transforms',
    'ImageError': 'chainer_fp8pipe.images.folder',
    'ImageFolder': 'chainer_fp8pipe.images.folder',
    'ImageIterator': 'chainer_fp8pipe.images.iterator',
    'Normalise': 'chainer_fp8pipe.images.transforms',
    'RandomResizedCrop': 'chainer_fp8pipe.images.transforms',
    'batch_arrays': 'chainer_fp8pipe.images.iterator',
}

__all__ = [*_HOMES]

__getattr__, __dir__ = on_demand(__name__, _HOMES)

"""Chainer on today's Python, with gradients that cross the network as fp8.

The import starts neither Chainer nor MPI; the public names below are loaded
when first asked for.
"""
from . import compat as compat
from ._on_demand import on_demand
from ._version import __version__
from .mpi.world import begin as _begin

_HOMES = {
    'CenterCrop': 'chainer_fp8pipe.images',
    'Divisible': 'chainer_fp8pipe.links',
    'ImageFolder': 'chainer_fp8pipe.images',
    'PipelineUpdater': 'chainer_fp8pipe.training.updater',
    'ProcessGrid': 'chainer_fp8pipe.mpi.grid',
    'RandomResizedCrop': 'chainer_fp8pipe.images',
    'ReplicaIterator': 'chainer_fp8pipe.training.iterators',
    'batch_arrays': 'chainer_fp8pipe.images',
    'RunReport': 'chainer_fp8pipe.training.run_report',
    'atomic': 'chainer_fp8pipe.chains.whole_call',
    'create_communicator': 'chainer_fp8pipe.communicators',
    'create_grouped_bn_model': 'chainer_fp8pipe.training.grouped_bn_model',
    'deferred': 'chainer_fp8pipe.chains.deferred',
    'large_batch': 'chainer_fp8pipe.training.large_batch',
    'lazy': 'chainer_fp8pipe.links',
    'partition': 'chainer_fp8pipe.chains.partition',
}

__all__ = ['__version__', *_HOMES]

_begin()        # or the others wait for a rank that fails
__getattr__, __dir__ = on_demand(__name__, _HOMES)

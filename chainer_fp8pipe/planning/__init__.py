"""What decides how a model is run: pure data and arithmetic, no MPI.

The calls of a recorded model with their costs, and the search for the cut
whose step is shortest under a memory limit.  The names below are loaded when
first asked for.
"""
from .._on_demand import on_demand

_HOMES = {
    'DoesNotFit': 'chainer_fp8pipe.planning.cuts',
    'PartitionPlan': 'chainer_fp8pipe.planning.partition_plan',
    'load_plan': 'chainer_fp8pipe.planning.partition_plan',
}

__all__ = [*_HOMES]

__getattr__, __dir__ = on_demand(__name__, _HOMES)

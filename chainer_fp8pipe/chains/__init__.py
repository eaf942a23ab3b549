"""Any ``chainer.Chain`` over ranks: each rank computes its share of the calls.

Read in the order in which a call goes: ``recorder`` runs the model's forward
once for a micro-batch, on the arrays without data of ``placeholder``, and
``measure`` knows what a call gives and costs; ``program`` has the calls, and
makes those between two cuts; ``partitioned`` is what a rank knows of the
model, ``partition`` cuts it, where ``cuts`` finds the step to be shortest
under a memory limit.  Here are also deferred initial values.  Schedules are
carried out by :mod:`chainer_fp8pipe.pipeline`.  The names below are loaded
when first asked for.
"""
from .._on_demand import on_demand

_HOMES = {
    'DoesNotFit': 'chainer_fp8pipe.chains.cuts',
    'PartitionPlan': 'chainer_fp8pipe.chains.plan',
    'load_plan': 'chainer_fp8pipe.chains.plan',
}

__all__ = [*_HOMES]

__getattr__, __dir__ = on_demand(__name__, _HOMES)

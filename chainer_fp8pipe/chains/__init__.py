"""Any ``chainer.Chain`` over ranks: each rank computes its share of the calls.

What lives here: ghosts (values of other ranks), the trace of a model, one
stage's forward pass, deferred initialisation, and :func:`partition`.  How cuts
are chosen is in :mod:`chainer_fp8pipe.planning`; what carries out a schedule
is in :mod:`chainer_fp8pipe.pipeline`.
"""

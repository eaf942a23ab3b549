"""Any ``chainer.Chain`` over ranks: each rank computes its share of the calls.

Read in the order in which a call goes: ``recorder`` runs the model's forward
once for a micro-batch, on the arrays without data of ``placeholder``, and
``measure`` knows what a call gives and costs; ``program`` has the calls, and
makes those between two cuts; ``partitioned`` is what a rank knows of the
model, ``partition`` cuts it.  Here are also deferred initial values.  Cuts are
chosen by :mod:`chainer_fp8pipe.planning`; schedules are carried out by
:mod:`chainer_fp8pipe.pipeline`.
"""

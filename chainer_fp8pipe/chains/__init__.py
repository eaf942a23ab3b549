"""Any ``chainer.Chain`` over ranks: each rank computes its share of the calls.

Placeholders are arrays without data, for values of other ranks.  A trace has
the calls of one forward pass of a model, and a rehearsal finds out, without
any computation, whether a batch makes these calls.  A chunk has the calls
between two cuts; its rank runs the model's own forward, and does these calls
only.  Here are also deferred initial values and :func:`partition`.  Cuts are
chosen by :mod:`chainer_fp8pipe.planning`; schedules are carried out by
:mod:`chainer_fp8pipe.pipeline`.
"""

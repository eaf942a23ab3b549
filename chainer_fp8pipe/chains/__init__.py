"""Any ``chainer.Chain`` over ranks: each rank computes its share of the calls.

Every rank runs the model's own forward for each micro-batch, once, and makes
none of its calls.  In the order in which a call goes through these files:

1. ``recorder`` writes the call down, with its arguments.  Forward goes on with
   arrays that have a shape and no data (``placeholder``); which shape that is,
   and what the call costs, is found out on made-up values where no call of
   the same form was seen before (``forms``, ``measure``).  Code that looks at
   data is one call, with all that it calls itself (``whole_call``).
2. All calls of a micro-batch are a ``program``.  What they read decides on
   which chunk of the model each one is (``calls``, ``layout``), and so which
   values one rank sends to the next, and which parameters it has
   (``placement``).
3. A rank makes the calls of its chunks on real values, and again where it
   recomputes.  It keeps the values that links carry to the next batch
   (``attributes``).
4. ``adapter`` is what a pipeline asks of all this in a step
   (:mod:`chainer_fp8pipe.pipeline`), ``partitioned`` what a rank knows of the
   model, and the model's class.

Before all this ``partition`` records an example, and searches the ``plan``
whose step is shortest under a memory limit (``cuts``).  ``deferred`` makes
models without values.
"""
from .cuts import DoesNotFit
from .plan import PartitionPlan

__all__ = ['DoesNotFit', 'PartitionPlan']

"""What the collection says of each of its models."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import chainer_fp8pipe  # noqa: F401, before chainer

import chainer
import numpy

Batch = tuple[numpy.ndarray, ...] | dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Case:
    """A model that was written without a thought of who else runs it.

    ``make()`` gives a chain whose ``chain(*batch)``, or ``chain(**batch)``
    where the batch is a dict, is a scalar loss.  ``batch(rng, samples)``
    gives arrays whose first axis is the samples, all of them.
    """

    name: str
    make: Callable[[], chainer.Chain]
    batch: Callable[[numpy.random.RandomState, int], Batch]
    samples: int = 8            # divisible by 4, or 2 where one takes long
    draws: bool = False         # random numbers in forward while training
    stateful: bool = False      # an update begins where the last one ended
    batch_norm: bool = False    # a sample's result depends on the others
    slow: bool = False          # more than half a second for a step
    reads: bool = False         # forward reads `.array` of what it computed
    reenters: bool = False      # backward within forward, or the reverse
    unused: tuple[str, ...] = ()    # parameters that get no gradient

    def loss(self, model, batch):
        """The model's loss of a batch, whichever of the two kinds it is."""
        return model(**batch) if isinstance(batch, dict) else model(*batch)

"""A good sample for a batch in which no image can be used."""
from __future__ import annotations

from collections.abc import Iterable

import numpy

from .reading import Reader
from .workers.batch_ring import Outcome
from .workers.loading import Loaded, Loader, Request


def first_usable(reader: Reader, epoch: int, samples: Iterable[int]
                 ) -> tuple[int, Loaded] | None:
    """Reads samples, in this process, up to one whose image can be used.

    Args:
        reader: What they are read with.
        epoch: Which their random numbers belong to.
        samples: In the order in which they are tried.

    Returns:
        The sample and a batch of it alone.  If something else than the image
        is to blame that there is none, the batch holds that failure.  None
        if no image can be used.
    """
    loader = Loader(reader, 1, 0, 1)
    try:
        for sample in samples:
            loader.request(Request(epoch, numpy.array([sample])))
            loaded = loader.take()
            if loaded.good[0] or loaded.failures[0].outcome != Outcome.IMAGE:
                return sample, loaded
    finally:
        loader.close()
    return None

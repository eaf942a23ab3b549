"""Building a stage's layers, with the other ranks listening."""
from __future__ import annotations

from typing import Any

from ...mpi.ranks import all_ranks
from ...pipeline.layers import LayerError


def build_together(part: Any, comm: Any) -> None:
    """Builds the lazy layers of this rank's part.

    A rank whose layer cannot be built would end alone, and the others would
    wait for it.

    Args:
        part: A ``Divisible``.
        comm: As given to ``stage``; ranks that cannot gather objects hear
            of nothing.

    Raises:
        LayerError: It failed on some rank; on all ranks.
    """
    problem, cause = '', None
    try:
        _ = part.pieces     # what is asked for is built
    except Exception as error:      # the ranks that wait must hear of it
        problem, cause = str(error), error
    gather = getattr(all_ranks(comm), 'allgather', None)
    if gather is None:
        if cause:
            raise cause
        return
    texts = [f'rank {rank}: {text}'
             for rank, text in enumerate(gather(problem)) if text]
    if texts:
        raise LayerError('; '.join(texts)) from cause

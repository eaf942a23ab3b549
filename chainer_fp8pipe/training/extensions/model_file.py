"""The layers of all stages in one file, for use without a pipeline."""
from __future__ import annotations

from typing import Any

import chainer
import numpy

from ...mpi.agreement import raise_together
from ...mpi.grid import ProcessGrid


def save_whole_model(path: str, model: Any, grid: ProcessGrid) -> None:
    """Writes the layers of all stages to one file; call it on all ranks.

    ``chainer.serializers.load_npz`` loads it into the whole model, ``Net()``,
    or into any part of it, ``Net().stage(comm)``.

    Args:
        path: The file, as for ``numpy.savez_compressed``.  The first
            replica's first stage writes it.
        model: This rank's stage, ``Net().stage(grid)``.
        grid: The ranks; a :class:`PipelineUpdater` has them as ``grid``.

    Raises:
        RuntimeError: It could not be written; on all ranks.
    """
    own = raise_together(grid.comm,
                         lambda: chainer.serializers.npz.serialize(model))
    stages = grid.pipeline.gather(own) if grid.replica_index == 0 else None

    def write() -> None:
        if stages:
            numpy.savez_compressed(path, **{
                key: value for stage in stages
                for key, value in stage.items()})
    raise_together(grid.comm, write)

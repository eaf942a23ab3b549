"""What an update costs beside its elements: agreement, waking up, Python."""
from __future__ import annotations

import time
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..communicators import create_communicator
from ..mpi.waiting import wait_until
from ..planning.job.codec_choice import FEW
from ..planning.job.job_profile import Figure
from .cold_caches import CacheFiller

_TENSORS = 64           # more than the other model has
_FEWEST, _MOST = 5, 101         # repeats


def measure_updates(comm: MPI.Comm, name: str, budget: float
                    ) -> tuple[Figure, Figure]:
    """Seconds of an update of few elements, and of each further tensor.

    All ranks begin together, and the last one counts.  Updates are made by a
    communicator with its default options, without float32 first, that is
    finalised afterwards.  The choice of fp8's scales, in one update of 100,
    is in no median.

    Args:
        comm: All ranks, mpi4py's; call it on all.
        name: Of the communicator.
        budget: Seconds.

    Returns:
        The seconds of a mean of one tensor of :data:`.FEW` elements, and
        what each further such tensor adds.
    """
    communicator = create_communicator(
        name, comm, **{'warmup': 0} if name == 'fp8' else {})
    try:
        models = [_model(count) for count in (1, 1 + _TENSORS)]
        filler = CacheFiller()
        found: list[list[float]] = []
        start = time.perf_counter()
        while len(found) < _FEWEST or len(found) < _MOST and comm.bcast(
                time.perf_counter() - start < budget):
            found.append([_seconds(comm, communicator, model, filler)
                          for model in models])
    finally:
        communicator.finalize()
    times = found[1:]                   # the first one fills caches
    return (Figure.of(few for few, _ in times),
            Figure.of((many - few) / _TENSORS for few, many in times))


def _seconds(comm: MPI.Comm, communicator: Any, model: chainer.Link,
             filler: CacheFiller) -> float:
    """Of the slowest rank."""
    filler.fill()
    wait_until(comm.Ibarrier().Test)
    start = time.perf_counter()
    communicator.multi_node_mean_grad(model)
    return max(comm.allgather(time.perf_counter() - start))


def _model(tensors: int) -> chainer.Link:
    link = chainer.Link()
    generator = numpy.random.default_rng(0)
    with link.init_scope():
        for number in range(tensors):
            parameter = chainer.Parameter(
                generator.standard_normal(FEW, numpy.float32))
            parameter.grad = generator.standard_normal(FEW, numpy.float32)
            setattr(link, f'x{number}', parameter)
    return link

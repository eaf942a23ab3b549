"""What an update costs beside its elements: agreement, waking up, Python."""
from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ...communicators import create_communicator
from ...communicators.options import without_warmup
from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from ...planning.job.codec_choice import FEW
from ...planning.job.job_profile import Figure
from ..cold_caches import CacheFiller

_MORE = 64              # tensors that the second model has more
_FEWEST, _MOST = 5, 101         # repeats


class UpdateCosts(NamedTuple):
    """Seconds of an update of few elements.

    Attributes:
        update: Of one tensor of :data:`.FEW` elements.
        tensor: What each further such tensor adds.
        bucket: What is added if each tensor is a bucket by itself.
    """

    update: Figure
    tensor: Figure
    bucket: Figure


def measure_updates(comm: MPI.Comm, name: str, budget: float) -> UpdateCosts:
    """Measures updates of few elements; call it on all ranks.

    All ranks begin together, and the last one counts.  Updates are made by
    communicators with their default options, without float32 first, that are
    finalised afterwards; what they need comes from memory, as after a pass.
    The choice of fp8's scales, in one update of 100, is in no median.

    Args:
        comm: All ranks, mpi4py's.
        name: Of the communicator.
        budget: Seconds; a few repeats are made whatever they take.

    Raises:
        RuntimeError: A rank has failed; on all ranks.
    """
    options = without_warmup(name)
    with contextlib.ExitStack() as stack:
        together, apart = (
            create_communicator(name, comm, **options, **size)
            for size in ({}, {'bucket_bytes': 4 * FEW}))
        for communicator in together, apart:
            stack.callback(communicator.finalize)
        filler = raise_together(comm, CacheFiller)
        one, many = _model(1), _model(1 + _MORE)
        found: list[list[float]] = []
        start = time.perf_counter()
        while len(found) < _FEWEST or len(found) < _MOST and comm.bcast(
                time.perf_counter() - start < budget):
            found.append([
                _seconds(comm, communicator, model, filler)
                for communicator, model in (
                    (together, one), (together, many), (apart, many))])
    return costs_of_few(found[1:])      # the first ones import modules


def costs_of_few(seconds: list[list[float]]) -> UpdateCosts:
    """The costs by seconds of one tensor, of all, and of all by themselves.

    None is less than nothing: an update of more tensors may be faster by
    chance.
    """
    one, many, apart = zip(*seconds, strict=True)
    update, more = statistics.median(one), statistics.median(many)
    return UpdateCosts(
        Figure.of(one),
        Figure.of(max(each - update, 0.0) / _MORE for each in many),
        Figure.of(max(each - more, 0.0) / _MORE for each in apart))


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

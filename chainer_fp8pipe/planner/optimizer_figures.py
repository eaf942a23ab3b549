"""Times an optimizer, and weighs what it keeps."""
from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import chainer
import numpy

from ..chains.profiling.laps import clock_of
from ..chains.tracing.measuring import memory_traced
from ..planning.job.job_profile import Figure
from .cold_caches import CacheFiller

_REPEATS = 5
_ELEMENTS = 1 << 22     # of parameters with which an optimizer is timed


def measure_optimizer(optimizer: Any, parameters: Any, device: Any
                      ) -> tuple[Figure, int, float]:
    """Seconds of an update of all parameters, and what it keeps.

    A copy of the optimizer updates parameters of the same shapes, as many as
    there is room for; the rest is reckoned.  They come from memory, as after
    a pass and an exchange.

    Args:
        optimizer: A ``chainer.Optimizer``, set up or not; it stays as it is.
        parameters: By path, an object with ``shape`` and ``dtype``.
        device: Chainer's.

    Returns:
        Seconds, arrays of a parameter's size that the optimizer keeps, and
        bytes of temporary arrays as a multiple of the largest parameter's.
    """
    frozen = {name for name, one in (
        optimizer.target.namedparams() if optimizer.target else ())
        if one.update_rule is not None and not one.update_rule.enabled}
    shapes = [(one.shape, one.dtype) for name, one in parameters.items()
              if one.shape is not None and name not in frozen]
    link, done = chainer.Link(), 0
    total = sum(int(numpy.prod(shape)) for shape, _ in shapes)
    with link.init_scope():
        for number, (shape, dtype) in enumerate(shapes):
            if done and done + int(numpy.prod(shape)) > _ELEMENTS:
                continue
            setattr(link, f'p{number}', chainer.Parameter(
                numpy.full(shape, .5, dtype)))
            done += int(numpy.prod(shape))
    if not done:
        return Figure(0.0), 0, 0.0
    link.to_device(device)
    clone = copy.copy(optimizer)
    clone.hyperparam = copy.copy(optimizer.hyperparam)
    clone.setup(link)
    for parameter in link.params():
        parameter.grad = parameter.array * 1e-3
    now, filler = clock_of(device), CacheFiller()
    found = []
    for _ in range(_REPEATS + 1):
        filler.fill()
        start = now()
        clone.update()
        found.append((now() - start) * total / done)
    arrays = max(sum(getattr(value, 'shape', ()) == parameter.shape
                     for value in (parameter.update_rule.state or {}
                                   ).values())
                 for parameter in link.params())
    largest = max(parameter.array.nbytes for parameter in link.params())
    with memory_traced():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        clone.update()
        _, peak = tracemalloc.get_traced_memory()
    return (Figure.of(found[1:]), arrays,
            max(peak - before - (1 << 14), 0) / largest)

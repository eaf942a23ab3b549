"""What an optimizer keeps and takes while it updates parameters."""
from __future__ import annotations

import copy
import statistics
import tracemalloc
from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from ..intercept.training_objects import own_work
from .measure import clock_of, memory_traced

#: Elements of parameters with which an optimizer is timed, and the bytes that
#: empty caches before that, as a pass does.
_ELEMENTS, _CACHES = 1 << 22, 1 << 26

@own_work()
def measure_optimizer(optimizer: Any, parameters: Mapping[str, Any],
                      device: Any) -> tuple[float, int, float]:
    """Seconds of an update of all parameters, and what it keeps.

    A copy of the optimizer updates parameters of the same shapes, as many as
    there is room for; the rest is reckoned.  They come from memory, as after
    a pass and an exchange.

    Args:
        optimizer: A ``chainer.Optimizer``, set up or not; it stays as it is.
        parameters: By path, an object with ``shape``, ``size`` and ``dtype``.
        device: Chainer's.

    Returns:
        Seconds, arrays of a parameter's size that the optimizer keeps, and
        bytes of temporary arrays as a multiple of the largest parameter's.
    """
    frozen = {name for name, one in (
        optimizer.target.namedparams() if optimizer.target else ())
        if one.update_rule is not None and not one.update_rule.enabled}
    updated = [one for name, one in parameters.items()
               if one.shape is not None and name not in frozen]
    link, done = chainer.Link(), 0
    with link.init_scope():
        for number, one in enumerate(updated):
            if not done or done + one.size <= _ELEMENTS:
                setattr(link, f'p{number}', chainer.Parameter(
                    numpy.full(one.shape, .5, one.dtype)))
                done += one.size
    if not done:
        return 0.0, 0, 0.0
    link.to_device(device)
    set_up_anew(optimizer, link)
    for parameter in link.params():
        parameter.grad = parameter.array * 1e-3

    def update() -> None:
        # Not the optimizer's, which whoever runs a script may watch.
        for parameter in link.params():
            parameter.update()
    now, caches = clock_of(device), numpy.zeros(_CACHES // 4, numpy.float32)
    found = []
    for _ in range(4):
        caches += 1
        start = now()
        update()
        found.append(now() - start)
    arrays = max(sum(getattr(value, 'shape', ()) == parameter.shape
                     for value in (parameter.update_rule.state or {}
                                   ).values())
                 for parameter in link.params())
    with memory_traced():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        update()
        temporary = tracemalloc.get_traced_memory()[1] - before - (1 << 14)
    largest = max(parameter.array.nbytes for parameter in link.params())
    return (statistics.median(found[1:]) * sum(one.size for one in updated)
            / done, arrays, max(temporary, 0) / largest)


def set_up_anew(optimizer: Any, model: Any) -> Any:
    """An optimizer like this one, set up with a model; it has no hooks."""
    clone = copy.copy(optimizer)
    clone.hyperparam = copy.copy(optimizer.hyperparam)
    return clone.setup(model)

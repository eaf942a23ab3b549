"""Whether a model's loss is scaled dynamically, asked of its optimizers."""
from __future__ import annotations

import gc

import chainer


def is_scaled_dynamically(model: chainer.Link) -> bool:
    """Whether an optimizer of a model skips updates that are not finite.

    A communicator is given a model and no optimizer, and a model does not
    know its optimizers, of which there may be several.  So they are looked up
    among all objects of Python, which takes some 0.1 seconds: it is only asked
    where a mean is not finite.  Of several optimizers all must be such.
    """
    gc.collect()        # not those that nobody has any more
    own = {id(parameter) for parameter in model.params()}
    found = [
        bool(getattr(one, '_loss_scaling_is_dynamic', False))
        for one in gc.get_objects() if issubclass(type(one), chainer.Optimizer)
        and own.intersection(map(id, _parameters(one)))]
    return bool(found) and all(found)


def _parameters(optimizer: chainer.Optimizer) -> list[chainer.Parameter]:
    target = optimizer.target
    return [] if target is None else list(target.params())

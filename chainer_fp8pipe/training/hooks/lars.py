"""Layer-wise adaptive rate scaling (LARS)."""
from __future__ import annotations

from typing import Any

from ..learning_rate import check_number
from .update_rules import WeightHook


class LARS(WeightHook):
    """Makes every weight's step proportional to the weight's own norm.

    You, Gitman, Ginsburg, *Large Batch Training of Convolutional Networks*
    (2017), equations 6 and 7 with weight decay::

        g <- coefficient * |w| / (|g| + decay |w|) * (g + decay w)

    and then as the optimizer does: with ``MomentumSGD`` v <- m v - lr g,
    w <- w + v, so that the learning rate is inside of the momentum, as in the
    paper.  Weight decay is part of it and must not be added by another hook.
    A weight of norm zero, which the equation would never let go, has its
    plain gradient.  What is no weight (:func:`.is_weight`) is not changed.

    Chainer's ``GradientLARS`` is the same for float32 weights without loss
    scaling, but for the coefficient; :doc:`large_batch` says where it is not.

    Args:
        coefficient: The paper's eta, the share of its norm by which a weight
            changes where the learning rate is 1.
        weight_decay: The paper's beta.

    Raises:
        ValueError: A value is not allowed.
    """

    name = 'LARS'

    def __init__(self, coefficient: float = 0.001,
                 weight_decay: float = 0.0) -> None:
        check_number('the coefficient of LARS', coefficient)
        check_number('weight_decay', weight_decay, zero=True)
        self.coefficient = coefficient
        self.weight_decay = weight_decay

    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        """See :meth:`.WeightHook.changed`."""
        norm = xp.linalg.norm(weight)
        whole = xp.linalg.norm(gradient) + self.weight_decay * norm
        # On a GPU nothing waits: the norms stay there.
        usable = (norm > 0) & (whole > 0)
        rate = xp.where(
            usable, self.coefficient * norm / xp.where(usable, whole, 1), 1)
        return (gradient + self.weight_decay * weight) * rate.astype(
            gradient.dtype)

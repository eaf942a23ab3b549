"""Weight decay of weights."""
from __future__ import annotations

from typing import Any

from ..learning_rate import check_number
from .update_rules import WeightHook


class WeightDecay(WeightHook):
    """Adds ``rate`` times the weight to its gradient.

    As Chainer's, but without biases and the parameters of normalisations
    (Goyal et al. 2017, section 5.1), and in float32, whatever the loss scale.
    :class:`.LARS` has its own.

    Args:
        rate: Of the decay.

    Raises:
        ValueError: It is negative or no number.
    """

    name = 'WeightDecayOfWeights'

    def __init__(self, rate: float) -> None:
        check_number('weight_decay', rate, zero=True)
        self.rate = rate

    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        """See :meth:`.WeightHook.changed`."""
        return gradient + self.rate * weight

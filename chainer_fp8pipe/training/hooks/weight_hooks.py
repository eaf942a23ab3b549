"""LARS and weight decay, of gradients that are unscaled and in float32.

Chainer calls an optimizer's own hooks while gradients still carry the factor
of loss scaling, in float16 for parameters in float16.  Norms taken then are
wrong or overflow.  The hooks of update rules come after both are undone, so
these add themselves there.
"""
from __future__ import annotations

import abc
from typing import Any

import chainer
import numpy

from ..learning_rate import check_number

#: What Chainer's links call their biases and the parameters of
#: normalisations, which may have more than one dimension.
_NO_WEIGHTS = ('b', 'gamma', 'beta')


def is_weight(parameter: chainer.Parameter) -> bool:
    """Whether large-batch recipes treat this as a weight.

    Biases, the parameters of normalisations, and whatever has less than two
    dimensions are none: they are neither decayed nor scaled (Goyal et al.
    2017, section 5.1; You et al. 2017).  The parameter must be initialised;
    its name and dimensions decide.
    """
    return parameter.ndim > 1 and parameter.name not in _NO_WEIGHTS


class WeightHook(abc.ABC):
    """Changes the gradients of weights just before they are used.

    Add it to an optimizer, ``optimizer.add_hook(hook)``; at the next update
    it adds itself to the update rules, where it stays: to take it away, remove
    it from the optimizer and from every ``parameter.update_rule``.  A rule
    that has a hook of the same name already keeps that one, so that a
    parameter can have numbers of its own:
    ``parameter.update_rule.add_hook(LARS(0.01))``.
    """

    name = 'WeightHook'
    timing = 'pre'
    call_for_each_param = False
    #: As an optimizer's hook; so an update may begin before its gradients
    #: are there.
    reads_gradients = False
    #: As an update rule's; so parameters may be updated in any order.
    one_by_one = True

    def __call__(self, owner: Any,
                 parameter: chainer.Parameter | None = None) -> None:
        if parameter is None:
            self._join(owner)
        elif parameter.array is not None and parameter.grad is not None and (
                is_weight(parameter)):
            with chainer.using_device(parameter.device):
                # A new array: the old one may be another parameter's, too.
                parameter.grad = self.changed(
                    parameter.xp, _float32(parameter.array),
                    _float32(parameter.grad)).astype(
                        parameter.dtype, copy=False)

    @abc.abstractmethod
    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        """The gradient to use, a new array.

        Args:
            xp: NumPy or CuPy.
            weight: An array, float32 or float64.
            gradient: Of the same shape; must not be changed.
        """

    def _join(self, optimizer: Any) -> None:
        for parameter in optimizer.target.params():
            rule = parameter.update_rule
            if rule is not None and (
                    self.name not in rule._hookable._pre_update_hooks):
                rule.add_hook(self, self.name)


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
        norm = xp.linalg.norm(weight)
        whole = xp.linalg.norm(gradient) + self.weight_decay * norm
        # On a GPU nothing waits: the norms stay there.
        usable = (norm > 0) & (whole > 0)
        rate = xp.where(
            usable, self.coefficient * norm / xp.where(usable, whole, 1), 1)
        return (gradient + self.weight_decay * weight) * rate.astype(
            gradient.dtype)


class WeightDecay(WeightHook):
    """Adds ``rate`` times the weight to its gradient.

    As Chainer's, but without biases and the parameters of normalisations
    (Goyal et al. 2017, section 5.1), and in float32, whatever the loss scale.
    :class:`.LARS` has its own.

    Raises:
        ValueError: ``rate`` is negative or no number.
    """

    name = 'WeightDecayOfWeights'

    def __init__(self, rate: float) -> None:
        check_number('weight_decay', rate, zero=True)
        self.rate = rate

    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        return gradient + self.rate * weight


def _float32(array: Any) -> Any:
    return (array.astype(numpy.float32) if array.dtype == numpy.float16
            else array)

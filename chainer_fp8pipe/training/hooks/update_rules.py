"""Hooks for gradients that are unscaled and in float32.

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

#: What Chainer's links call their biases and the parameters of
#: normalisations, which may have more than one dimension.
_NO_WEIGHTS = ('b', 'gamma', 'beta')


def is_weight(parameter: chainer.Parameter) -> bool:
    """Whether large-batch recipes treat this as a weight.

    Biases, the parameters of normalisations, and whatever has less than two
    dimensions are none: they are neither decayed nor scaled (Goyal et al.
    2017, section 5.1; You et al. 2017).

    Args:
        parameter: Initialised; told by its ``name`` and its dimensions.
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
        """The gradient to use.

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


def _float32(array: Any) -> Any:
    return (array.astype(numpy.float32) if array.dtype == numpy.float16
            else array)

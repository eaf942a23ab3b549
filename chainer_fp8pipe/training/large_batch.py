"""``large_batch``: the recipe for batches of thousands of samples.

Linear scaling, warm-up and decay of the learning rate, and LARS, as in Ying et
al., "Image Classification at Supercomputer Scale" (2018).
"""
# Chainer calls an optimizer's own hooks while gradients still carry the factor
# of loss scaling, in float16 for parameters in float16.  Norms taken then are
# wrong or overflow.  The hooks of update rules come after both are undone, so
# the hook adds itself there.
from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import chainer
import numpy

from ..pipeline.schedules import at_least_one

#: ``decay(epoch, warmup_epochs, epochs)``: a factor of the highest rate.
Decay = Callable[[float, float, float], float]

_DECAYS: dict[str, Decay] = {
    'polynomial': lambda epoch, warmup_epochs, epochs: min(max(
        (epochs - epoch) / (epochs - warmup_epochs), 0.0), 1.0) ** 2,
    'step': lambda epoch, warmup_epochs, epochs: 0.1 ** sum(
        epoch >= place for place in (epochs / 3, 2 * epochs / 3,
                                     8 * epochs / 9)),
    'constant': lambda epoch, warmup_epochs, epochs: 1.0}


def large_batch(optimizer: Any, batch: int, base_lr: float, base_batch: int,
                warmup_epochs: float, epochs: float, samples: int,
                lars: bool = True, decay: str | Decay = 'polynomial',
                weight_decay: float = 1e-4,
                lars_coefficient: float = 0.001) -> Any:
    """Prepares an optimizer for large batches.

    A hook sets the learning rate before each update, makes the step of each
    weight proportional to the weight's own norm (LARS), and raises on all
    ranks when gradients overflow at a loss scale of 1.  Parameters in float16
    are updated in float32 (``use_fp32_update``).

    The rate rises in a straight line from ``base_lr`` to ``base_lr * batch /
    base_batch`` (Goyal et al., *Accurate, Large Minibatch SGD*, 2017, sections
    2.1 and 2.2), and then decays.

    You, Gitman, Ginsburg, *Large Batch Training of Convolutional Networks*
    (2017), equations 6 and 7 with weight decay::

        g <- coefficient * |w| / (|g| + decay |w|) * (g + decay w)

    and then the optimizer's step.  With ``MomentumSGD`` that is
    v <- m v - lr g, w <- w + v: the learning rate is inside of the momentum,
    as in the paper.  A weight of norm zero has its plain gradient.  All is
    computed in float32, with any loss scale.

    Args:
        optimizer: One of Chainer's with a learning rate ``lr``, such as
            ``MomentumSGD``, or ChainerMN's multi-node optimizer around it.
        batch: Samples per update, over all ranks.
        base_lr: The learning rate that is right for ``base_batch``.
        base_batch: As many samples or fewer.
        warmup_epochs: How long the rate rises; 0: not at all.
        epochs: How long the training is.
        samples: In the data set, over all ranks: how far the training is
            follows from the number of updates.
        lars: Whether to use LARS; else weights decay, and nothing more.
        decay: ``'polynomial'`` (the square of the share of time that is left,
            You et al., section 5), ``'step'`` (to a tenth after 1/3, 2/3 and
            8/9 of all epochs, Goyal et al., section 5.1), ``'constant'``, or a
            function of epoch, warm-up epochs and epochs: a factor of the
            highest rate.
        weight_decay: Of weights, not of biases and normalisations
            (:func:`.is_weight`); add no other hook for it.
        lars_coefficient: The share of its norm by which a weight changes
            where the learning rate is 1.

    Returns:
        The optimizer.

    Raises:
        ValueError: A value is not allowed, the optimizer has no learning
            rate, or has been prepared already.

    .. admonition:: Example

        >>> import chainer_fp8pipe, chainer
        >>> from chainer_fp8pipe.training.large_batch import large_batch
        >>> optimizer = large_batch(
        ...     chainer.optimizers.MomentumSGD(), batch=1024, base_lr=0.1,
        ...     base_batch=256, warmup_epochs=5, epochs=90, samples=50000)
        >>> optimizer.lr
        0.1
    """
    # ChainerMN's wraps the real one, and calls its setup().
    actual = getattr(optimizer, 'actual_optimizer', optimizer)
    hyperparam: Any = getattr(actual, 'hyperparam', None)
    wrong = [f'{name}={value}' for name, value, least in (
        ('base_lr', base_lr, 5e-324), ('epochs', epochs, 5e-324),
        ('warmup_epochs', warmup_epochs, 0), ('weight_decay', weight_decay, 0),
        ('lars_coefficient', lars_coefficient, 5e-324)) if not (
            isinstance(value, numbers.Real) and least <= value < math.inf
            ) or isinstance(value, bool)]
    batch, base_batch, samples = map(at_least_one, (
        'batch', 'base_batch', 'samples'), (batch, base_batch, samples))
    for is_right, problem in (
            (hyperparam is not None and 'lr' in hyperparam.get_dict(),
             f'{type(actual).__name__} has no learning rate lr to scale with '
             'the batch; use an optimizer that has one, such as MomentumSGD, '
             'NesterovAG, CorrectedMomentumSGD or SGD'),
            (getattr(getattr(actual, 'setup', 0), 'func', 0) is not _set_up,
             'large_batch has been called on this optimizer before; make a '
             'new one'),
            (not wrong, f'{", ".join(wrong)} must be above 0 and finite; '
             'warmup_epochs and weight_decay may be 0'),
            (base_batch <= batch <= samples,
             f'batch={batch} must be from base_batch={base_batch} to the '
             f'samples={samples}: pass the samples of all ranks together, and '
             'the size of the whole data set'),
            (isinstance(lars, bool), f'lars is {lars!r}; it must be a bool')):
        if not is_right:
            raise ValueError(problem)
    hook = _Hook(lambda updates: learning_rate(
        updates * batch / samples, batch, base_lr, base_batch, warmup_epochs,
        epochs, decay), lars_coefficient if lars else None, weight_decay)
    hyperparam.lr = hook.rate(0)
    actual.use_fp32_update()
    if actual.target is not None:
        actual.add_hook(hook)
    actual.setup = functools.partial(_set_up, actual, hook)
    return optimizer


def _set_up(optimizer: Any, hook: Any, link: chainer.Link) -> Any:
    """Chainer's own ``setup``, after which the hook is added again."""
    type(optimizer).setup(optimizer, link)
    optimizer.add_hook(hook)
    return optimizer


def learning_rate(epoch: float, batch: int, base_lr: float, base_batch: int,
                  warmup_epochs: float, epochs: float,
                  decay: str | Decay = 'polynomial') -> float:
    """The rate of an update after ``epoch`` epochs, a fraction.

    See :func:`large_batch`.
    """
    if epoch < 0 or not 0 <= warmup_epochs < epochs:
        raise ValueError(f'epoch={epoch:g}, warmup_epochs={warmup_epochs:g} '
                         f'and epochs={epochs:g} must be 0 or more, and '
                         'warmup_epochs less than epochs')
    if not callable(decay) and decay not in _DECAYS:
        raise ValueError(f'decay must be one of {", ".join(_DECAYS)} or a '
                         f'function, not {decay!r}')
    # The quotient first: for batch == base_batch it is exactly base_lr.
    peak = base_lr * (batch / base_batch)
    if epoch < warmup_epochs:
        return base_lr + (peak - base_lr) * (epoch / warmup_epochs)
    factor = (decay if callable(decay) else _DECAYS[decay])(
        epoch, warmup_epochs, epochs)
    if not 0 <= factor < math.inf:
        raise ValueError(f'decay gives {factor!r} after {epoch:g} epochs; it '
                         'must give a finite number, 0 or more')
    return peak * factor


# --- the hook ----------------------------------------------------------------

#: What Chainer's links call their biases and the parameters of
#: normalisations, which may have more than one dimension.
_NO_WEIGHTS = ('b', 'gamma', 'beta')


def is_weight(parameter: chainer.Parameter) -> bool:
    """Whether large-batch recipes treat this as a weight.

    Biases, the parameters of normalisations, and whatever has less than two
    dimensions are none: they are neither decayed nor scaled (Goyal et al.
    2017, section 5.1; You et al. 2017).
    """
    return parameter.ndim > 1 and parameter.name not in _NO_WEIGHTS


@dataclasses.dataclass
class _Hook:
    """An optimizer's, and then each update rule's."""

    rate: Callable[[int], float]    # of an update, by its number
    coefficient: float | None       # None: no LARS
    weight_decay: float

    name = 'large_batch'
    timing = 'pre'
    call_for_each_param = False

    def __call__(self, owner: Any,
                 parameter: chainer.Parameter | None = None) -> None:
        if parameter is None:
            _check_finite(owner)
            owner.hyperparam.lr = self.rate(owner.t)
            for one in owner.target.params():
                rule = one.update_rule
                if rule is not None and (
                        self.name not in rule._hookable._pre_update_hooks):
                    rule.add_hook(self, self.name)
        elif parameter.array is not None and parameter.grad is not None and (
                is_weight(parameter)):
            with chainer.using_device(parameter.device):
                dtype = numpy.promote_types(parameter.dtype, numpy.float32)
                # A new array: the old one may be another parameter's, too.
                parameter.grad = changed(
                    parameter.xp, parameter.array.astype(dtype, copy=False),
                    parameter.grad.astype(dtype, copy=False),
                    self.coefficient, self.weight_decay).astype(
                        parameter.dtype, copy=False)


def changed(xp: Any, weight: Any, gradient: Any, coefficient: float | None,
            weight_decay: float) -> Any:
    """The gradient to use, a new array; arrays in float32 or float64."""
    decayed = gradient + weight_decay * weight
    if coefficient is None:
        return decayed
    norm = xp.linalg.norm(weight)
    whole = xp.linalg.norm(gradient) + weight_decay * norm
    # On a GPU nothing waits: the norms stay there.
    usable = (norm > 0) & (whole > 0)
    rate = xp.where(usable, coefficient * norm / xp.where(usable, whole, 1), 1)
    return decayed * rate.astype(gradient.dtype)


def _check_finite(optimizer: Any) -> None:
    """Raises on all ranks when gradients overflow at a loss scale of 1.

    Chainer's dynamic loss scaling skips an update whose gradients are not
    finite and halves the scale, but not below 1: it would skip for ever.
    """
    # Chainer has looked at the gradients just before.
    if not (optimizer._loss_scaling_is_dynamic
            and optimizer._loss_scaling_isnan and optimizer._loss_scale <= 1):
        return
    what = next((
        f'the gradient of {name} is' for name, one
        in optimizer.target.namedparams() if one.grad is not None
        and not one.xp.isfinite(one.grad).all()),
        'a gradient of another stage is')
    raise RuntimeError(
        f'{what} not finite at a loss scale of 1, after {optimizer.t} '
        f'updates, with a learning rate of {optimizer.hyperparam.lr}: the '
        'training has diverged. No parameter was updated. Lower the learning '
        'rate or lengthen the warm-up, and go on from a snapshot')

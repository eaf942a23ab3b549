"""Hooks of optimizers and an extension: large batches, mixed precision.

Chainer calls an optimizer's own hooks while gradients still carry the factor
of loss scaling, in float16 for parameters in float16.  Norms taken then are
wrong or overflow.  The hooks of update rules come after both are undone, so
:class:`LARS` and :class:`WeightDecay` add themselves there.
"""
from __future__ import annotations

from typing import Any

import chainer
import numpy
from chainer.training import extension

from .learning_rate import LearningRate, check_count, check_number

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


class UpdateHook:
    """What hooks of an optimizer's own have in common."""

    timing = 'pre'
    call_for_each_param = False
    #: So an update may begin before its gradients are there.
    reads_gradients = False


class WeightDecay(UpdateHook):
    """Adds ``rate`` times the weight to its gradient.

    As Chainer's, but without biases and the parameters of normalisations
    (Goyal et al. 2017, section 5.1), and in float32, whatever the loss scale.
    :class:`.LARS` has its own.

    Add it to an optimizer, ``optimizer.add_hook(hook)``; at the next update
    it adds itself to the update rules, where it stays: to take it away, remove
    it from the optimizer and from every ``parameter.update_rule``.  A rule
    that has a hook of the same name already keeps that one, so that a
    parameter can have numbers of its own:
    ``parameter.update_rule.add_hook(LARS(0.01))``.

    Raises:
        ValueError: ``rate`` is negative or no number.
    """

    name = 'WeightDecayOfWeights'
    #: As an update rule's; so parameters may be updated in any order.
    one_by_one = True

    def __init__(self, rate: float) -> None:
        check_number('weight_decay', rate, zero=True)
        self.weight_decay = rate

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

    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        """The gradient to use, a new array; arrays in float32 or float64."""
        return gradient + self.weight_decay * weight

    def _join(self, optimizer: Any) -> None:
        for parameter in optimizer.target.params():
            rule = parameter.update_rule
            if rule is not None and (
                    self.name not in rule._hookable._pre_update_hooks):
                rule.add_hook(self, self.name)


class LARS(WeightDecay):
    """Makes every weight's step proportional to the weight's own norm.

    You, Gitman, Ginsburg, *Large Batch Training of Convolutional Networks*
    (2017), equations 6 and 7 with weight decay::

        g <- coefficient * |w| / (|g| + decay |w|) * (g + decay w)

    and then as the optimizer does: with ``MomentumSGD`` v <- m v - lr g,
    w <- w + v, so that the learning rate is inside of the momentum, as in the
    paper.  Weight decay is part of it and must not be added by another hook.
    A weight of norm zero, which the equation would never let go, has its
    plain gradient.  What is no weight (:func:`.is_weight`) is not changed.
    It is added as :class:`.WeightDecay` is.

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
        super().__init__(weight_decay)
        self.coefficient = coefficient

    def changed(self, xp: Any, weight: Any, gradient: Any) -> Any:
        norm = xp.linalg.norm(weight)
        whole = xp.linalg.norm(gradient) + self.weight_decay * norm
        # On a GPU nothing waits: the norms stay there.
        usable = (norm > 0) & (whole > 0)
        rate = xp.where(
            usable, self.coefficient * norm / xp.where(usable, whole, 1), 1)
        return super().changed(xp, weight, gradient) * rate.astype(
            gradient.dtype)


def _float32(array: Any) -> Any:
    return (array.astype(numpy.float32) if array.dtype == numpy.float16
            else array)


class RateSchedule(UpdateHook):
    """Sets the optimizer's ``lr`` before each update.

    The epoch follows from the optimizer's count of updates, which is part of
    every snapshot, or is set by
    :class:`~chainer_fp8pipe.training.extensions.FollowEpochs`.

    Args:
        rate: The rates.
        samples: In the data set, over all ranks; every update is then taken
            to be of a whole batch, as those of Chainer's iterators are that
            repeat.  None: :attr:`epoch` must be set.

    Raises:
        ValueError: ``samples`` is no positive integer, or less than a batch.

    Attributes:
        epoch: Epochs so far, where ``samples`` is None.
    """

    name = 'Schedule'

    def __init__(self, rate: LearningRate, samples: int | None = None
                 ) -> None:
        if samples is not None:
            check_count('samples', samples)
            if samples < rate.batch:
                raise ValueError(
                    f'batch={rate.batch} is more than the samples='
                    f'{samples} of the data set; pass the size of the whole '
                    'data set, not of the part of one rank')
        self.rate = rate
        self.samples = samples
        self.epoch: float | None = None

    def __call__(self, optimizer: Any) -> None:
        optimizer.hyperparam.lr = self.rate.at(self._epoch(optimizer))

    def _epoch(self, optimizer: Any) -> float:
        if self.samples is not None:
            return optimizer.t * self.rate.batch / self.samples
        if self.epoch is None:
            raise RuntimeError(
                'the learning rate cannot be known: nobody has said how far '
                'the training is. Pass samples=len(dataset) to large_batch, '
                'or, under a Trainer, call trainer.extend(FollowEpochs()) on '
                'all ranks')
        return self.epoch


class FollowEpochs(extension.Extension):
    """Gives the updater's ``epoch_detail`` to the learning rate's schedule.

    Add it on all ranks, once the optimizers are set up, where the number of
    samples is not known or batches are not all of one size.  Where an
    optimizer has a communicator, rank 0's epoch counts for all: with
    different rates the ranks' weights would diverge.

    Raises:
        ValueError: No optimizer of the trainer has a schedule.
    """

    trigger = 1, 'iteration'
    priority = extension.PRIORITY_WRITER
    default_name = 'FollowEpochs'

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        optimizers = trainer.updater.get_all_optimizers().values()
        if not any(map(_schedule, optimizers)):
            raise ValueError('FollowEpochs has nothing to follow for: no '
                             'optimizer was prepared by large_batch, or has '
                             'a hook Schedule')
        self(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        for optimizer in trainer.updater.get_all_optimizers().values():
            schedule = _schedule(optimizer)
            if schedule is None:
                continue
            epoch = numpy.array([trainer.updater.epoch_detail], float)
            communicator = getattr(optimizer, 'communicator', None)
            if communicator is not None and communicator.size > 1:
                communicator.mpi_comm.Bcast(epoch)
            schedule.epoch = float(epoch[0])


def _schedule(optimizer: Any) -> RateSchedule | None:
    return next((hook for hook
                 in optimizer._hookable._pre_update_hooks.values()
                 if isinstance(hook, RateSchedule)), None)


class StopWhenDiverged(UpdateHook):
    """Raises when gradients are not finite at a loss scale of 1.

    Chainer's dynamic loss scaling skips an update whose gradients are not
    finite and halves the scale, but not below 1.  If they are not finite
    even then, the scale is not the reason, and Chainer would go on skipping
    for ever.  Without dynamic loss scaling this hook does nothing;
    communicators of this package then raise an error themselves.

    After averaging, gradients and scale are the same on all ranks, so all of
    them raise.
    """

    name = 'StopWhenDiverged'

    def __call__(self, optimizer: Any) -> None:
        # Chainer has looked at the gradients just before.
        if not (optimizer._loss_scaling_is_dynamic
                and optimizer._loss_scaling_isnan
                and optimizer._loss_scale <= 1):
            return
        names = [name for name, parameter in optimizer.target.namedparams()
                 if not _is_finite(parameter)]
        what = (f'the gradient of {names[0]} is' if names
                else 'a gradient of another stage is')
        rate = getattr(optimizer.hyperparam, 'lr', None)
        raise RuntimeError(
            f'{what} not finite at a loss scale of 1, after {optimizer.t} '
            f'updates, with a learning rate of {rate}: the training has '
            'diverged. No parameter was updated. Lower the learning rate or '
            'lengthen the warm-up, and go on from a snapshot')


def _is_finite(parameter: chainer.Parameter) -> bool:
    return parameter.grad is None or bool(
        parameter.xp.isfinite(parameter.grad).all())

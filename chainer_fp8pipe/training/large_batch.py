"""``large_batch``: the recipe for batches of thousands of samples.

Linear scaling, warm-up and decay of the learning rate, and LARS, as in Ying et
al., "Image Classification at Supercomputer Scale" (2018).
"""
from __future__ import annotations

import functools
from typing import Any

import chainer

from .hooks import LARS, RateSchedule, StopWhenDiverged, WeightDecay
from .learning_rate import Decay, LearningRate


def large_batch(optimizer: Any, batch: int, base_lr: float, base_batch: int,
                warmup_epochs: float, epochs: float, lars: bool = True,
                decay: str | Decay = 'polynomial', weight_decay: float = 1e-4,
                samples: int | None = None,
                lars_coefficient: float | None = None) -> Any:
    """Prepares an optimizer for large batches.

    The optimizer gets plain hooks at its ``setup``, or at once if that was
    called: ``Schedule``, ``LARS`` or ``WeightDecay``, and
    ``StopWhenDiverged``, all of :mod:`chainer_fp8pipe.training.hooks`.
    Parameters in float16 are updated in float32 (``use_fp32_update``).

    Args:
        optimizer: One of Chainer's with a learning rate ``lr``, such as
            ``MomentumSGD``, or ChainerMN's multi-node optimizer around it.
        batch: Samples per update, over all ranks.
        base_lr: The learning rate that is right for ``base_batch``.
        base_batch: As many samples or fewer.
        warmup_epochs: How long the rate rises, as :class:`.LearningRate`
            says.
        epochs: How long the training is.
        lars: Layer-wise adaptive rate scaling of weights (:class:`.LARS`).
        decay: As for :class:`.LearningRate`.
        weight_decay: Of weights, not of biases and normalisations.
        samples: In the data set, over all ranks: how far the training is
            then follows from the number of updates.  None: extend the
            trainer with :class:`.FollowEpochs` on all ranks.
        lars_coefficient: See :class:`.LARS`, whose default it has.

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
    hyperparam = getattr(actual, 'hyperparam', None)
    if hyperparam is None or 'lr' not in hyperparam.get_dict():
        raise ValueError(
            f'{type(actual).__name__} has no learning rate lr that could be '
            'scaled with the batch; use MomentumSGD, NesterovAG, '
            'CorrectedMomentumSGD, SGD or another optimizer that has one')
    if getattr(vars(actual).get('setup'), 'func', None) is _set_up:
        raise ValueError('large_batch has been called on this optimizer '
                         'before; make a new one')
    rate = LearningRate(base_lr, batch, base_batch, warmup_epochs, epochs,
                        decay)
    if lars_coefficient is not None and not lars:
        raise ValueError(f'lars_coefficient={lars_coefficient} is of LARS, '
                         'and lars=False; pass one of them only')
    weights = (LARS(weight_decay=weight_decay, **(
        {} if lars_coefficient is None else {'coefficient': lars_coefficient}))
        if lars else WeightDecay(weight_decay))
    hooks = [RateSchedule(rate, samples), weights, StopWhenDiverged()]
    hyperparam.lr = rate.at(0.0)
    actual.use_fp32_update()
    if actual.target is not None:
        _add(actual, hooks)
    actual.setup = functools.partial(_set_up, actual, hooks)
    return optimizer


def _set_up(optimizer: Any, hooks: list[Any], link: chainer.Link) -> Any:
    """Chainer's own ``setup``, after which the hooks are added again."""
    type(optimizer).setup(optimizer, link)
    _add(optimizer, hooks)
    return optimizer


def _add(optimizer: Any, hooks: list[Any]) -> None:
    for hook in hooks:
        optimizer.add_hook(hook)

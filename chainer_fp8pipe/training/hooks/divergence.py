"""An end to trainings that dynamic loss scaling cannot save."""
from __future__ import annotations

from typing import Any

import chainer


class StopWhenDiverged:
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
    timing = 'pre'
    call_for_each_param = False
    #: So an update may begin before its gradients are there.
    reads_gradients = False

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

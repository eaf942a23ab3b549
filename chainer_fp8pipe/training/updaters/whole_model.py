"""Decisions of an optimizer that concern the whole model, not one stage.

Every rank has an optimizer for the parameters of its stage.  Two of Chainer's
decisions look at all parameters: the norm of the gradient for clipping, and
whether an update is skipped because a gradient is not finite (dynamic loss
scaling).  The hooks here make them over all stages of a pipeline.
"""
from __future__ import annotations

from typing import Any

import chainer
import numpy
from chainer.optimizer_hooks import GradientClipping
from mpi4py import MPI

_NAME = 'whole model'


def decide_together(optimizer: Any, comm: MPI.Comm) -> None:
    """Makes an optimizer decide with those of the other stages.

    Call it before every update, as hooks may have been added since the last.
    ``comm`` has the ranks of one pipeline.
    """
    hooks = optimizer._hookable._pre_update_hooks
    if _NAME not in hooks:
        optimizer.add_hook(_SkipTogether(), _NAME)
        hooks.move_to_end(_NAME, last=False)
    for name, hook in hooks.items():
        if type(hook) is GradientClipping:
            hook = hooks[name] = _ClipTogether(hook)
        if isinstance(hook, (_SkipTogether, _ClipTogether)):
            hook.comm = comm        # an optimizer may get other ranks


def decisions(optimizer: Any) -> dict[str, str]:
    """What all stages' optimizers must decide alike, to be compared."""
    clipping = [name for name, hook
                in optimizer._hookable._pre_update_hooks.items()
                if isinstance(hook, GradientClipping)]
    return {'the gradient clipping': ', '.join(clipping) or 'none',
            'dynamic loss scaling': str(optimizer._loss_scaling_is_dynamic)}


class _SkipTogether:
    """All stages skip an update if one stage's gradient is not finite."""

    name = _NAME
    timing = 'pre'
    call_for_each_param = False
    comm: MPI.Comm

    def __call__(self, optimizer: Any) -> None:
        # Chainer has looked at this stage's gradients just before.
        if optimizer._loss_scaling_is_dynamic:
            skip = self.comm.allreduce(optimizer._loss_scaling_isnan,
                                       MPI.LOR)
            optimizer._loss_scaling_isnan = skip
            optimizer._loss_scaling_isnan_ever |= skip


class _ClipTogether(GradientClipping):
    """Chainer's clipping with the norm over all stages."""

    comm: MPI.Comm

    def __init__(self, hook: GradientClipping) -> None:
        self._hook = hook       # whose threshold may be changed later

    @property
    def threshold(self) -> float:
        return self._hook.threshold

    def __call__(self, optimizer: Any) -> None:
        parameters = list(optimizer.target.params(False))
        part = getattr(optimizer.target, 'partition', None)
        # What several stages have counts once.
        square = sum(_square_norm(parameter.grad) for parameter in (
            part.counted() if part else parameters))
        norm = float(numpy.sqrt(self.comm.allreduce(square)))
        # As in Chainer, a norm that is not finite spoils all gradients.
        rate = self.threshold / norm if norm else numpy.inf
        if not rate >= 1:
            for parameter in parameters:
                with chainer.using_device(parameter.device):
                    parameter.grad = (parameter.grad * rate).astype(
                        parameter.dtype, copy=False)


def _square_norm(gradient: Any) -> float:
    flat = chainer.backends.cuda.to_cpu(gradient).reshape(-1)
    # Summed in float64, which numpy.vdot would not do.
    return float(numpy.einsum('i,i', flat, flat, dtype=numpy.float64,
                              casting='safe'))

"""What optimizers of several ranks must do alike.

Every rank has an optimizer for the parameters of its stage.  Two of Chainer's
decisions look at all parameters: the norm of the gradient for clipping, and
whether an update is skipped because a gradient is not finite (dynamic loss
scaling).  The hooks here make them over all stages of a pipeline.  And a
parameter that several ranks have, as replicas of a stage or because stages
share it, must get the same noise on all of them.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.optimizer_hooks import GradientClipping, GradientNoise

from ..pipeline.randomness import Place, at, preserved

#: Sums a number over the stages of a pipeline, on all ranks.
Add = Callable[[float], float]

_NAME = 'whole model'


def draw_alike(optimizer: Any, seed: int) -> None:
    """Has ``GradientNoise`` draw the same wherever a parameter is.

    Call it before every update, as hooks may have been added since the last.
    """
    def take_over(hookable: Any) -> None:
        for hooks in (hookable._pre_update_hooks,
                      hookable._post_update_hooks):
            for name, hook in hooks.items():
                if isinstance(hook, GradientNoise) and not isinstance(
                        hook, _NoiseAlike):
                    hooks[name] = _NoiseAlike(hook, optimizer.target, seed)
    take_over(optimizer._hookable)
    for parameter in optimizer.target.params():
        if parameter.update_rule is not None:
            take_over(parameter.update_rule._hookable)


def decide_together(optimizer: Any, add: Add) -> None:
    """Makes an optimizer decide with those of the other stages.

    Call it before every update, as hooks may have been added since the last.
    ``add`` sums a number over the stages of one pipeline.
    """
    hooks = optimizer._hookable._pre_update_hooks
    if _NAME not in hooks:
        optimizer.add_hook(_SkipTogether(), _NAME)
        hooks.move_to_end(_NAME, last=False)
    for name, hook in hooks.items():
        if type(hook) is GradientClipping:
            hook = hooks[name] = _ClipTogether(hook)
        if isinstance(hook, (_SkipTogether, _ClipTogether)):
            hook.add = add          # an optimizer may get other ranks


def decisions(optimizer: Any, stages: int) -> dict[str, str]:
    """What all stages' optimizers must decide alike, to be compared.

    Raises:
        ValueError: A hook would look at one of several stages only.
    """
    clipping = [name for name, hook
                in optimizer._hookable._pre_update_hooks.items()
                if isinstance(hook, GradientClipping)]
    for name in clipping:
        hook = optimizer._hookable._pre_update_hooks[name]
        if stages > 1 and type(hook) not in (GradientClipping, _ClipTogether):
            raise ValueError(
                f'the hook {name!r}, a {type(hook).__name__}, would see the '
                "gradients of one stage only; use chainer's GradientClipping "
                'itself, which looks at all stages')
    return {'the gradient clipping': ', '.join(clipping) or 'none',
            'dynamic loss scaling': str(optimizer._loss_scaling_is_dynamic)}


class _NoiseAlike(GradientNoise):
    """Chainer's noise, which depends on the parameter's name and updates."""

    def __init__(self, hook: GradientNoise, model: chainer.Link, seed: int
                 ) -> None:
        self._hook, self._seed = hook, seed
        self._names = {id(parameter): name
                       for name, parameter in model.namedparams()}

    @property
    def eta(self) -> float:
        return self._hook.eta

    def __call__(self, rule: Any, parameter: chainer.Parameter) -> None:
        # A parameter that came later is told by the link's name for it.
        name = self._names.get(id(parameter)) or str(parameter.name)
        place = Place(self._seed, rule.t, zlib.crc32(name.encode()), 0)
        with preserved(), at(place, parameter.xp):
            self._hook(rule, parameter)


class _SkipTogether:
    """All stages skip an update if one stage's gradient is not finite."""

    name = _NAME
    timing = 'pre'
    call_for_each_param = False
    add: Add

    def __call__(self, optimizer: Any) -> None:
        # Chainer has looked at this stage's gradients just before.
        if optimizer._loss_scaling_is_dynamic:
            skip = self.add(float(optimizer._loss_scaling_isnan)) > 0
            optimizer._loss_scaling_isnan = skip
            optimizer._loss_scaling_isnan_ever |= skip


class _ClipTogether(GradientClipping):
    """Chainer's clipping with the norm over all stages."""

    add: Add

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
        norm = float(numpy.sqrt(self.add(square)))
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

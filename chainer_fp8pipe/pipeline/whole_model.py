"""What the optimizers of several ranks must do alike."""
# Two of Chainer's decisions look at all parameters: the norm of the gradient
# for clipping, and whether an update is skipped because a gradient is not
# finite (dynamic loss scaling).  The hooks here make them over all stages.
# Of a parameter that several stages use, all get the sum of its gradients.
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer.optimizer_hooks import GradientClipping, GradientNoise

from .stage import Channels

#: Sums a number over the stages of a pipeline, on all ranks.
Add = Callable[[float], float]

_NAME = 'whole model'


def decide_together(optimizer: Any, add: Add) -> None:
    """Makes an optimizer decide with those of the other stages.

    Call it before every update, as hooks may have been added since the last.
    """
    hooks = optimizer._hookable._pre_update_hooks
    if _NAME not in hooks:
        optimizer.add_hook(_SkipTogether(), _NAME)
        hooks.move_to_end(_NAME, last=False)
    for name, hook in hooks.items():
        # Chainer has a second class of it, chainer.optimizer's.
        if type(hook).__call__ is GradientClipping.__call__:
            hook = hooks[name] = _ClipTogether(hook)
        if isinstance(hook, (_SkipTogether, _ClipTogether)):
            hook.add = add          # an optimizer may get other ranks


def decisions(optimizer: Any, stages: int, replicas: int = 1
              ) -> dict[str, str]:
    """The settings that the optimizers of all stages must share.

    Raises ValueError for a hook that would look at one of several stages only,
    or draw other numbers on each rank.
    """
    rules = [one.update_rule for one in optimizer.target.params()]
    for owner in (optimizer, *rules) if stages * replicas > 1 else ():
        for name, hook in _hooks(owner):
            if isinstance(hook, GradientNoise):
                raise ValueError(
                    f'the hook {name!r}, a GradientNoise, would draw other '
                    'noise on each rank for a parameter that several of them '
                    'have; leave it out, or train with one process')
    for name, hook in _hooks(optimizer) if stages > 1 else ():
        if not getattr(hook, 'call_for_each_param', False) and (
                getattr(hook, '__module__', '').partition('.')[0]
                not in ('chainer', 'chainer_fp8pipe')):
            raise ValueError(
                f'the hook {name!r}, a {type(hook).__name__}, would see the '
                'parameters and gradients of one stage only; use chainer\'s '
                'GradientClipping, which looks at all stages, or a hook of '
                'each parameter (call_for_each_param = True)')
    return {'the gradient clipping': ', '.join(
        name for name, hook in _hooks(optimizer)
        if isinstance(hook, GradientClipping)) or 'none',
        'dynamic loss scaling': str(optimizer._loss_scaling_is_dynamic)}


def _hooks(owner: Any) -> Iterator[tuple[str, Any]]:
    """Names and hooks of an optimizer or update rule."""
    hookable = getattr(owner, '_hookable', None)
    if hookable is not None:
        yield from itertools.chain(hookable._pre_update_hooks.items(),
                                   hookable._post_update_hooks.items())


class _SkipTogether:
    """All stages skip an update if one stage's gradient is not finite."""

    timing, call_for_each_param = 'pre', False
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
        norm = float(numpy.sqrt(self.add(sum(
            _square_norm(parameter.grad) for parameter in (
                part.counted() if part else parameters)))))
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


class TiedGradients:
    """Sums the gradients of a parameter over the stages that have it.

    The first of its stages, its home, gets the sum, which is averaged there
    over replicas, and gives the mean back: so the copies stay the same, bit
    for bit.  ``ties`` has the stages of each tied parameter, by its ``id``;
    parameters of ``model`` are in the same order on all ranks.
    """

    def __init__(self, stage: int, ties: Mapping[int, tuple[int, ...]],
                 model: chainer.Link, channels: Channels) -> None:
        self._channels = channels
        # Those that are at home here, with the others' stages; and those
        # that are elsewhere, with that stage.
        tied = {id(one): (one, *ties[id(one)])
                for _, one in (model.namedparams() if ties else ())
                if id(one) in ties}.values()
        self._tied = [(one, home == stage, others if home == stage else [home])
                      for one, home, *others in tied]

    def add_up(self) -> None:
        """Sums at home; the others have nothing to average."""
        self._send(to_home=True)
        for parameter, is_home, _ in self._tied:
            if not is_home:
                parameter.cleargrad()

    def hand_back(self) -> None:
        """Gives the gradients at home to the other stages."""
        self._send(to_home=False)

    def _send(self, to_home: bool) -> None:
        for parameter, is_home, stages in self._tied:
            for stage in stages:
                if is_home != to_home:
                    self._channels.sender(stage).send((parameter.grad,))
                    continue
                gradient, = self._channels.receiver(stage).receive()
                if parameter.grad is None or not to_home:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad += gradient
        self._channels.flush()      # an update may write to what was sent

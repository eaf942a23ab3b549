"""The learning rate of a large batch, as a function of the epoch."""
from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

#: ``decay(epoch, warmup_epochs, epochs)``: a factor of the highest rate.
Decay = Callable[[float, float, float], float]


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """``(1 - share)^power``, with the share of the time after the warm-up.

    You, Gitman, Ginsburg, *Large Batch Training of Convolutional Networks*
    (2017), section 5, with a power of 2.
    """

    power: float = 2.0

    def __post_init__(self) -> None:
        check_number('power', self.power)

    def __call__(self, epoch: float, warmup_epochs: float, epochs: float
                 ) -> float:
        left = (epochs - epoch) / (epochs - warmup_epochs)
        return min(max(left, 0.0), 1.0) ** self.power


@dataclasses.dataclass(frozen=True)
class Steps:
    """One step down at each of a few epochs.

    Goyal et al., *Accurate, Large Minibatch SGD* (2017), section 5.1: to a
    tenth at 30, 60 and 80 of 90 epochs.

    Args:
        milestones: Epochs, counted from the start of the training.
        factor: Of the rate, at each.
    """

    milestones: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_number('factor', self.factor)
        for milestone in self.milestones:
            check_number('a milestone', milestone)

    def __call__(self, epoch: float, warmup_epochs: float, epochs: float
                 ) -> float:
        return self.factor ** sum(epoch >= milestone
                                  for milestone in self.milestones)


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Linear scaling, gradual warm-up and decay.

    The rate rises in a straight line from ``base_lr`` to ``base_lr * batch /
    base_batch`` (Goyal et al. 2017, sections 2.1 and 2.2), and then decays.
    After ``epochs`` it stays constant.

    Args:
        base_lr: The rate that is right for ``base_batch``.
        batch: Samples per update, over all ranks.
        base_batch: As many or fewer.
        warmup_epochs: How long the rate rises; 0: not at all.
        epochs: How long the training is.
        decay: ``'polynomial'`` (:class:`Polynomial`, power 2), ``'step'``
            (:class:`Steps`, to a tenth after 1/3, 2/3 and 8/9 of all epochs),
            ``'constant'``, or a function like these.

    Raises:
        ValueError: A value is not allowed; the message says what is.
    """

    base_lr: float
    batch: int
    base_batch: int
    warmup_epochs: float
    epochs: float
    decay: str | Decay = 'polynomial'

    def __post_init__(self) -> None:
        check_number('base_lr', self.base_lr)
        check_count('batch', self.batch)
        check_count('base_batch', self.base_batch)
        check_number('epochs', self.epochs)
        check_number('warmup_epochs', self.warmup_epochs, zero=True)
        if self.batch < self.base_batch:
            raise ValueError(
                f'batch={self.batch} is less than base_batch='
                f'{self.base_batch}: this recipe is for larger batches; pass '
                'the samples of all ranks together as batch')
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f'warmup_epochs={self.warmup_epochs:g} must be less than '
                f'epochs={self.epochs:g}, or nothing is left for the decay')
        if not callable(self.decay) and self.decay not in _DECAYS:
            raise ValueError(f'decay must be one of {", ".join(_DECAYS)} or '
                             f'a function, not {self.decay!r}')

    @property
    def peak(self) -> float:
        """The highest rate, that at the end of the warm-up."""
        # The quotient first: for batch == base_batch it is exactly base_lr.
        return self.base_lr * (self.batch / self.base_batch)

    def at(self, epoch: float) -> float:
        """The rate of an update after ``epoch`` epochs, a fraction."""
        if epoch < self.warmup_epochs:
            risen = epoch / self.warmup_epochs
            return self.base_lr + (self.peak - self.base_lr) * risen
        decay = (self.decay if callable(self.decay)
                 else _DECAYS[self.decay](self.epochs))
        return self.peak * decay(epoch, self.warmup_epochs, self.epochs)


_DECAYS: dict[str, Callable[[float], Decay]] = {
    'polynomial': lambda epochs: Polynomial(),
    'step': lambda epochs: Steps((epochs / 3, 2 * epochs / 3,
                                  8 * epochs / 9)),
    'constant': lambda epochs: lambda *_: 1.0,
}


def check_number(name: str, value: Any, zero: bool = False) -> None:
    """Raises ValueError unless this is a finite positive number, or zero."""
    is_number = (isinstance(value, numbers.Real)
                 and not isinstance(value, bool))
    number = float(value) if is_number else math.nan
    if not (math.isfinite(number) and (number > 0 or zero and number == 0)):
        raise ValueError(f'{name} must be a finite number '
                         f'{"not below" if zero else "above"} 0, not '
                         f'{value!r}')


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless this is a positive integer."""
    if (not isinstance(value, numbers.Integral) or isinstance(value, bool)
            or value < 1):
        raise ValueError(f'{name} must be a positive integer, not {value!r}')

"""Hooks of Chainer's optimizers: large batches, mixed precision."""
from .divergence import StopWhenDiverged
from .rate_schedule import RateSchedule
from .weight_hooks import LARS, WeightDecay, is_weight

__all__ = ['LARS', 'RateSchedule', 'StopWhenDiverged', 'WeightDecay',
           'is_weight']

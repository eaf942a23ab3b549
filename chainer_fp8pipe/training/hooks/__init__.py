"""Hooks of Chainer's optimizers: large batches, mixed precision."""
from .divergence import StopWhenDiverged
from .lars import LARS
from .rate_schedule import RateSchedule
from .update_rules import is_weight
from .weight_decay import WeightDecay

__all__ = ['LARS', 'RateSchedule', 'StopWhenDiverged', 'WeightDecay',
           'is_weight']

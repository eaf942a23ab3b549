"""Algorithms that bring the mean of all ranks' wires to every rank."""
from .base import Algorithm
from .mpi_op import MpiOp
from .plan import Plan
from .planned import Planned
from .statistics import Statistics
from .two_level import TwoLevel

__all__ = ['Algorithm', 'MpiOp', 'Plan', 'Planned', 'Statistics', 'TwoLevel']

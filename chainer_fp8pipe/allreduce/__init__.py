"""Algorithms that bring the mean of all ranks' wires to every rank."""
from ..report.statistics import Statistics
from .mpi_op import MpiOp
from .piecewise import Algorithm
from .plan import Plan
from .planned import Planned
from .two_level import TwoLevel

__all__ = ['Algorithm', 'MpiOp', 'Plan', 'Planned', 'Statistics', 'TwoLevel']

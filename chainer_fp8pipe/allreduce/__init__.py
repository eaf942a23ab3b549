"""Algorithms that bring the mean of all ranks' wires to every rank."""
from .agreement import Signature, agree, raise_together
from .base import Algorithm
from .direct import Direct
from .mpi_op import MpiOp
from .statistics import Statistics
from .two_level import TwoLevel

__all__ = ['Algorithm', 'Direct', 'MpiOp', 'Signature', 'Statistics',
           'TwoLevel', 'agree', 'raise_together']

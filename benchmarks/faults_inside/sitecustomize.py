"""Lets the campaign of faults reach into a rank.

Python imports it at its start where this folder is on ``PYTHONPATH``.  On
SIGUSR1 a rank raises an exception; on SIGUSR2 it calls one collective more
than the others do; on SIGXCPU it takes memory until there is none.
"""
import os
import signal


class InjectedFault(Exception):
    """Raised in the middle of whatever a rank does."""


def _raise(number, frame):
    raise InjectedFault('a rank that raises')


def _call_one_collective_more(number, frame):
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()


def _take_memory(number, frame):
    taken = []
    while True:
        taken.append(bytearray(1 << 24))


# Hydra's and Slurm's ranks, and Open MPI's.
if {'PMI_RANK', 'OMPI_COMM_WORLD_RANK'} & set(os.environ):
    signal.signal(signal.SIGUSR1, _raise)
    signal.signal(signal.SIGUSR2, _call_one_collective_more)
    signal.signal(signal.SIGXCPU, _take_memory)

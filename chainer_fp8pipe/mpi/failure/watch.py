"""Begins to watch ranks: whether they die, and whether they stand still."""
from __future__ import annotations

import os
import sys

from mpi4py import MPI

from ..agreement import raise_together
from .abort import end_all_ranks
from .stall_settings import settings_of_environment
from .stall_watch import watch_stalls
from .witness import own_name, register, say_that_all_end


def watch(comm: MPI.Comm, role: str = '') -> None:
    """Watches these ranks from now on; call it on all of them.

    A rank that dies without a word is named by the witness of its node, and
    one that the others wait for in vain by :mod:`.stall_watch`.

    Args:
        comm: The ranks.
        role: This rank's part in the job for messages, such as ``'stage 0'``;
            '' keeps that of an earlier call, at first ``'worker'``.

    Raises:
        ValueError: An environment variable has a value that is not allowed;
            on all ranks.
    """
    if comm.size == 1:
        return
    settings = raise_together(comm, settings_of_environment, ValueError)
    questions = register(comm, role)
    watch_stalls(comm, f'{own_name()}, process {os.getpid()} on host '
                 f'{os.uname().nodename},', questions, settings, _end)


def _end(text: str, code: int) -> None:
    """Ends all ranks, from the thread that watches."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        end_all_ranks(text, code)
        return
    say_that_all_end()
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)      # on which launchers end the others

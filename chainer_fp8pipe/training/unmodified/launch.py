"""Runs a script on all ranks, with another maker of what it trains with."""
from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4py import MPI

from ...intercept.training_objects import creating_communicators, substituting
from ...mpi.failure.abort import end_all_ranks
from ...mpi.failure.world import enter_world
from ...report.going_on import say_done
from .refusal import Refusal, refuse_all


def launch(script: str, arguments: Sequence[str], command: str,
           create: Callable[..., Any], job: Any = None) -> None:
    """Runs a script as Python would, on all ranks.

    A failure or an exit code on one rank ends all ranks.

    Args:
        script: Path of the file.
        arguments: The script's own.
        command: Which of the package's commands this is, for messages.
        create: In place of ``chainermn.create_communicator``.
        job: A :class:`.Substitute`, whose ``finish()`` is called when the
            script has ended; None: Chainer makes everything.

    Raises:
        SystemExit: The script or the job has raised it.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    enter_world()
    ranks = MPI.COMM_WORLD.Dup()    # nobody else's
    try:
        with creating_communicators(create), (
                contextlib.nullcontext() if job is None
                else substituting(job)):
            runpy.run_path(script, run_name='__main__')
            if job is not None:
                job.finish()
        say_done()
    except Refusal as refusal:
        refuse_all(ranks, refusal, command)
    except SystemExit as exit:
        if exit.code not in (None, 0) and MPI.COMM_WORLD.size > 1:
            # The other ranks may be waiting for this one.
            if isinstance(exit.code, int):
                end_all_ranks('', exit.code)
            end_all_ranks(f'{exit.code}\n', 1)
        if exit.code in (None, 0):
            say_done()
        raise


@contextlib.contextmanager
def only_rank_0_prints(*redirect: Callable) -> Iterator[None]:
    """A block in which other ranks' streams lead nowhere.

    Args:
        redirect: ``contextlib.redirect_stdout``, ``redirect_stderr``.
    """
    with contextlib.ExitStack() as stack:
        if MPI.COMM_WORLD.rank:
            nowhere = stack.enter_context(open(os.devnull, 'w'))
            for stream in redirect:
                stack.enter_context(stream(nowhere))
        yield

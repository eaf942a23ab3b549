"""Runs a script on all ranks, with another maker of what it trains with."""
from __future__ import annotations

import contextlib
import os
import pathlib
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from mpi4py import MPI

from ...intercept.patching import Patch
from ...intercept.training_objects import creating_communicators, substituting
from ...mpi.failure.abort import end_all_ranks, shown
from ...mpi.failure.world import enter_world
from ...planning.script_file import check_script
from ...report.launch_protocol import say_done
from .refusal import Refusal, refuse_all

#: Seconds in which rank 0 makes a directory.
_PATIENCE = 5.0


def check_on_all_ranks(script: str) -> None:
    """Checks a script on all ranks, which may be on hosts with other files.

    Raises:
        ValueError: As :func:`.check_script`, on all ranks.
    """
    problem = ''
    try:
        check_script(script)
    except ValueError as error:
        problem = str(error)
    if problem := next(filter(None, MPI.COMM_WORLD.allgather(problem)), ''):
        raise ValueError(problem)


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
    if MPI.COMM_WORLD.size == 1:
        sys.excepthook = _print_shown
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


def _print_shown(kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
    sys.stderr.write(shown(error))


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


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A block for a script that knows of no ranks, on all of them.

    Rank 0 alone prints, and is the first to make a directory; the others
    find it, or make it themselves on a host where it is not.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_rank_0_prints(contextlib.redirect_stdout))
        if MPI.COMM_WORLD.rank:
            stack.enter_context(Patch(os, 'mkdir', _after_rank_0))
            if sys.version_info < (3, 11):
                stack.enter_context(Patch(
                    vars(pathlib)['_normal_accessor'], 'mkdir',
                    _after_rank_0))
        yield


def _after_rank_0(original: Callable) -> Callable:
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        caller = sys._getframe(2).f_globals.get('__name__')
        if dir_fd is not None or caller == 'tempfile':  # with names by chance
            original(path, mode, dir_fd=dir_fd)
            return
        end = time.monotonic() + _PATIENCE
        while not os.path.isdir(path) and time.monotonic() < end:
            time.sleep(0.01)
        try:
            original(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
    return mkdir

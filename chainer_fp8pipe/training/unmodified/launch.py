"""Runs a script on all ranks, or refuses it in one line on all of them."""
# Each rank runs the script by old_names.run_path, in blocks where its objects
# are made by somebody else (intercept.training_objects): by a job, which knows
# in what way the script trains, and by what adds snapshots and reports.
#
# What cannot be done is a Refusal: a line, once, and exit code 2 on all ranks.
# Most come up on all ranks at the same place, as all run the same script.  An
# error of the user's own code stays what it is.
from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from mpi4py import MPI

from ...command_line import check_script
from ...compat.old_names import run_path
from ...intercept.training_objects import (
    creating_communicators,
    substituting,
)
from ...mpi.tracebacks import of_the_user, shown
from ...mpi.world import end_all_ranks, enter_world
from ...report.launch_protocol import DONE, tell

#: Seconds in which the other ranks find the same fault, if they do.
_PATIENCE = 10.0
#: Exit code of a command with wrong arguments.
_CODE = 2


class Refusal(SystemExit):
    """The script does something that the command cannot do with it.

    Not an ``Exception``, which a script might catch and go on.
    """


def refuse_all(comm: MPI.Comm, refusal: Refusal, command: str) -> NoReturn:
    """Prints why, once, and ends all ranks with the exit code 2.

    ``comm`` is used for nothing else.
    """
    text = f'chainer_fp8pipe {command}: {refusal.code}\n'
    request = comm.Ibarrier()
    end = time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() > end:
            end_all_ranks(text, _CODE)
        time.sleep(0.01)
    if comm.rank == 0:
        print(text, end='', file=sys.stderr, flush=True)
    # What has started the ranks may end all when the first one fails; it has
    # passed the line on by then.
    comm.Barrier()
    raise SystemExit(_CODE)


def refuse_together(comm: MPI.Comm, action: Callable[[], Any],
                    kind: Callable[[str], BaseException] = Refusal) -> Any:
    """Does ``action``; an error on any rank is a refusal on all.

    The first rank's message counts.  An error of the user's own code is
    raised as it is, where it came up.

    Args:
        comm: The ranks.
        action: Must not communicate.
        kind: Raised in place of a Refusal.
    """
    result, problem = None, ''
    reason: BaseException | None = None
    try:
        result = action()
    except (Exception, Refusal) as error:   # who waits must hear of it
        reason = error
        problem = f'{type(error).__name__}: ' * (
            not isinstance(error, (ValueError, Refusal))) + str(error)
    if problems := list(filter(None, comm.allgather(problem))):
        if reason is not None and of_the_user(reason):
            raise reason
        raise kind(problems[0]) from reason
    return result


@contextlib.contextmanager
def refusing() -> Any:
    """An error inside, which is the same on all ranks, is a refusal.

    One of the user's own code stays what it is, with its traceback.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, MPI.Exception):    # another start may do better
            raise
        if own := of_the_user(error):
            raise own from None
        raise Refusal(' '.join(str(error).split())) from error


def quietly(run: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a Trainer, which would print an exception on each rank."""
    if not args:
        kwargs.setdefault('show_loop_exception_msg', False)
    run(trainer, *args, **kwargs)


def add_script(parser: argparse.ArgumentParser,
               jobs_of: Callable[[argparse.Namespace], list[Any]],
               run: Callable[[argparse.Namespace, list[Any]], None]) -> None:
    """Adds a script and its arguments to a command, which runs the script.

    Args:
        parser: Of the command.
        jobs_of: Checks the command's options, on all ranks, and gives the
            jobs for :func:`launch`; raises ValueError about wrong options.
        run: Launches the script with them.
    """
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                        help="the script's own arguments")

    def checked(options: argparse.Namespace) -> Callable[[], None]:
        try:
            refuse_together(MPI.COMM_WORLD, lambda: check_script(
                options.script), ValueError)
            jobs = jobs_of(options)
        except ValueError as error:
            parser.error(str(error))
        return lambda: run(options, jobs)
    parser.set_defaults(call=checked, parser=parser)


def launch(script: str, arguments: Sequence[str], command: str, *jobs: Any
           ) -> None:
    """Runs a script as Python would, on all ranks.

    A failure or an exit code on one rank ends all ranks.

    Args:
        script: Path of the file.
        arguments: The script's own.
        command: Which of the package's commands this is, for messages.
        jobs: Each an :class:`.Originals`, which the next one has for
            Chainer.  The last one's ``create`` is in place of
            ``chainermn.create_communicator``, and all is done in the block
            that its ``block()`` gives.

    Raises:
        SystemExit: The script or the job has raised it.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if MPI.COMM_WORLD.size == 1:
        sys.excepthook = lambda _, error, trace: print(
            shown(error), end='', file=sys.stderr)
    enter_world()
    ranks = MPI.COMM_WORLD.Dup()    # nobody else's
    try:
        with jobs[-1].block(), creating_communicators(
                jobs[-1].create), contextlib.ExitStack() as stack:
            for job in jobs:
                stack.enter_context(substituting(job))
            run_path(script)
            for job in reversed(jobs):
                job.finish()
        tell(DONE)
    except Refusal as refusal:
        refuse_all(ranks, refusal, command)
    except SystemExit as exit:
        if exit.code in (None, 0):
            tell(DONE)
        elif MPI.COMM_WORLD.size > 1:
            # The other ranks may be waiting for this one.
            if isinstance(exit.code, int):
                end_all_ranks('', exit.code)
            end_all_ranks(f'{exit.code}\n', 1)
        raise


@contextlib.contextmanager
def only_rank_0_prints(*redirect: Callable) -> Iterator[None]:
    """A block in which other ranks' streams lead nowhere.

    ``redirect`` are ``contextlib.redirect_stdout`` and ``redirect_stderr``.
    """
    with contextlib.ExitStack() as stack, open(os.devnull, 'w') as nowhere:
        for stream in redirect if MPI.COMM_WORLD.rank else ():
            stack.enter_context(stream(nowhere))
        yield

"""Ends all ranks with one line on why a script cannot be trained so."""
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from ...mpi.failure.abort import end_all_ranks, of_the_user

#: Seconds in which the other ranks find the same fault, if they do.
_PATIENCE = 10.0
#: Exit code of a command with wrong arguments.
_CODE = 2


class Refusal(SystemExit):
    """The script does something that the command cannot do with it.

    Not an ``Exception``, which a script might catch and go on.
    """


def refuse_all(comm: MPI.Comm, refusal: Refusal, command: str) -> NoReturn:
    """Prints why, once, and ends this rank with the exit code 2.

    Call it on the ranks that refuse.  If some do not, these are ended, too.
    ``comm`` has all ranks, and is used for nothing else; ``command`` is
    named before the reason.
    """
    text = f'chainer_fp8pipe {command}: {refusal.code}\n'
    request = comm.Ibarrier()
    end = time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() > end:
            end_all_ranks(text, _CODE)
        time.sleep(0.01)
    if comm.rank == 0:
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    # So that a launcher that ends all ranks when the first one fails has
    # passed the line on.
    comm.Barrier()
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
    raise SystemExit(_CODE)


def refuse_together(comm: MPI.Comm, action: Callable[[], Any]) -> Any:
    """Does ``action``; an error on any rank is a refusal on all.

    The first rank's message counts.  An error of the user's own code is
    raised as it is, where it came up.  Returns what ``action`` returned,
    which must not communicate.
    """
    result, problem, reason = None, '', None
    try:
        result = action()
    except Exception as error:      # the ranks that wait must hear of it
        reason = error
        kind = '' if isinstance(error, ValueError) else (
            f'{type(error).__name__}: ')
        problem = f'{kind}{error}'
    if problems := list(filter(None, comm.allgather(problem))):
        if reason is not None and of_the_user(reason):
            raise reason
        raise Refusal(problems[0]) from reason
    return result


@contextlib.contextmanager
def refusing() -> Any:
    """An error inside, which is the same on all ranks, is a refusal.

    One of the user's own code stays what it is, with its traceback.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if own := of_the_user(error):
            raise own from None
        raise Refusal(' '.join(str(error).split())) from error


def quietly(run: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a Trainer, which would print an exception before it raises it.

    So would every rank; where nobody catches it, it is printed at the end.
    """
    if not args:
        kwargs.setdefault('show_loop_exception_msg', False)
    run(trainer, *args, **kwargs)

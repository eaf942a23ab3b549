"""An exception that nobody catches ends the job on all ranks."""
from __future__ import annotations

import sys
import traceback
from types import TracebackType

from mpi4py import MPI


def abort_on_exception() -> None:
    """Makes an uncaught exception on one rank end all ranks.

    Without it the other ranks wait for this one forever: Python would call
    MPI_Finalize on its way out, which waits for everybody.  Does nothing if
    there is one rank only, or if it was called before.
    """
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = _abort


def _abort(kind: type[BaseException], error: BaseException,
           trace: TracebackType | None) -> None:
    rank = MPI.COMM_WORLD.rank
    text = ''.join(traceback.format_exception(kind, error, trace))
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.flush()
    sys.stderr.write(f'\nrank {rank} of {MPI.COMM_WORLD.size} failed, '
                     f'ending all:\n{text}')
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

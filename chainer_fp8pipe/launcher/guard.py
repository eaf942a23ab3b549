"""A process that ends the job if the launcher is killed."""
from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from . import leftovers


class Guard:
    """Starts the guard; :mod:`.leftovers` says what it does.

    Args:
        mark: Of the job.
    """

    def __init__(self, mark: str) -> None:
        theirs, self._line = os.pipe()
        try:
            # A session of its own: an interrupt of the terminal is not its.
            self._process = subprocess.Popen(
                [sys.executable, '-I', '-S', leftovers.__file__,
                 str(theirs), mark], pass_fds=[theirs], cwd='/',
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True)
        finally:
            os.close(theirs)

    def dismiss(self) -> None:
        """Ends the guard, as the job has ended."""
        with contextlib.suppress(OSError):
            os.write(self._line, leftovers.GOODBYE)
        os.close(self._line)
        self._process.wait()

"""What the launcher prints, on its standard error."""
from __future__ import annotations

import contextlib
import sys
import time


def say(text: str) -> None:
    """Prints a line about the job, with the time."""
    show(f'chainer_fp8pipe launch: {time.strftime("%H:%M:%S")} {text}\n')


def show(text: str) -> None:
    """Prints text as it is; a terminal that is gone does not matter."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()

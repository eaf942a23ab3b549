"""How rank 0 tells a launcher that the training goes on.

The launcher knows nothing of ranks but their output and their end.
"""
from __future__ import annotations

import os
import sys

#: The environment variable that ranks have if a launcher has started them.
LAUNCHED = 'CHAINER_FP8PIPE_LAUNCH'
#: Begins the line about the first update after a start.
GOES_ON = 'chainer_fp8pipe run: goes on: update '


def is_launched() -> bool:
    """Whether ``python -m chainer_fp8pipe launch`` has started this rank."""
    return LAUNCHED in os.environ


def say_that_it_goes_on(update: int) -> None:
    """Tells the launcher that an update is done, the first since the start.
    """
    sys.stderr.write(f'{GOES_ON}{update} is done\n')
    sys.stderr.flush()

"""Has ChainerMN's ``create_communicator`` call another function.

In a block of :func:`creating`, ``chainermn.create_communicator`` and the
function of the same name in ``chainermn.communicators`` (Chainer 7.8.1,
chainermn/communicators/__init__.py, line 8) are replaced in all threads (see
:class:`.Patch`).  Another package's function is not called: the last one put
there counts.  One that was there before is back after the block, and one that
was put there in the block stays.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chainermn
import chainermn.communicators

from .patching import Patch


@contextlib.contextmanager
def creating(create: Callable[..., Any]) -> Iterator[None]:
    """Has scripts create communicators with this function in a block.

    Args:
        create: Takes ChainerMN's arguments.
    """
    with contextlib.ExitStack() as stack:
        for owner in chainermn, chainermn.communicators:
            stack.enter_context(
                Patch(owner, 'create_communicator', lambda original: create))
        yield

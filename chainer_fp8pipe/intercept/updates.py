"""Has optimizers ask before they update.

While there is a function to ask, ``chainer.GradientMethod.update`` (Chainer
7.8.1, chainer/optimizer.py, line 857) is replaced (see :class:`.Patch`), which
Chainer's optimizers inherit and ChainerMN's call.  Another package's
``update`` that was there before is called where no function takes the update
over; one that comes later is called first, and stays.  Threads may add and
remove functions at any time, also while other threads update.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer

from .patching import Patch

#: Is given an optimizer whose ``update`` is called without a loss function,
#: and returns whether the update is done, or will be.
TakesOver = Callable[[Any], bool]

_asked: list[TakesOver] = []


def ask_first(takes_over: TakesOver) -> None:
    """Has every optimizer ask this function before an update.

    The first function to take the update over is the last one asked.  A
    function added several times is asked once, until removed as often.
    """
    _asked.append(takes_over)
    _PATCH.install()


def ask_no_more(takes_over: TakesOver) -> None:
    """Ends one :func:`ask_first`.

    Raises:
        ValueError: There was none.
    """
    _asked.remove(takes_over)
    _PATCH.remove()


def _asking(original: Any) -> Any:
    def update(self: Any, lossfun: Any = None, *args: Any,
               **kwargs: Any) -> None:
        if lossfun is None and any(
                takes_over(self) for takes_over in dict.fromkeys(_asked)):
            return
        original(self, lossfun, *args, **kwargs)
    return update


_PATCH = Patch(chainer.GradientMethod, 'update', _asking)

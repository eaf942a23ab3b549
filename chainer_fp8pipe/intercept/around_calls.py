"""Does something around calls of some objects' methods.

Methods are replaced in the object's class (see :class:`.Patch`), where they
pass calls of other objects on; an attribute of the object itself would go
along into its copies.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from .patching import Patch

#: Makes the ``with`` block that a call is made in.
Around = Callable[[], contextlib.AbstractContextManager]


class AroundCalls:
    """The calls that somebody wants to be around."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def add(self, wanted: Any, name: str, around: Around) -> bool:
        """Makes each call of a method in a ``with`` block.

        Args:
            wanted: The object, or a class for all of its instances.
            name: Of the method.
            around: Makes the block.

        Returns:
            Whether that is possible; classes in C cannot be changed.
        """
        owner = wanted if isinstance(wanted, type) else type(wanted)
        if not callable(getattr(owner, name, None)):
            return False
        patch = Patch(owner, name, functools.partial(
            _around, None if owner is wanted else wanted, around))
        try:
            patch.install()
        except TypeError:
            return False
        self._patches.append(patch)
        return True

    def remove(self) -> None:
        """Ends all that :meth:`add` has begun."""
        while self._patches:
            self._patches.pop().remove()


def _around(wanted: Any, around: Around, original: Callable) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted is not None and self is not wanted:
            return original(self, *args, **kwargs)
        with around():
            return original(self, *args, **kwargs)
    return call

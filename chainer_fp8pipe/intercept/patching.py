"""Replaces attributes of modules and classes while there are users."""
from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_ABSENT: Any = object()


class _Standing(NamedTuple):
    """A replacement in its place.

    Attributes:
        before: The owner's own attribute; ``_ABSENT``: it was inherited.
        original: The owner's attribute, inherited or not.
        made: What ``make`` returned.
        replacement: What the attribute was set to.
        target: Holds the function that the replacement calls.
    """

    before: Any
    original: Any
    made: Any
    replacement: Any
    target: list[Any]


class Current(threading.local):
    """An object for each thread, which replacements ask in this thread."""

    now: Any = None

    @contextlib.contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """A block with another object."""
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


class Patch:
    """Replaces an attribute of a module or class while there are users.

    The first :meth:`install` sets the attribute to the replacement, and the
    last :meth:`remove` restores the original.  Both are thread-safe, also
    while other threads call the replacement: a call that has begun ends as
    it began.

    Other packages may patch the same attribute.  A patch that was there
    before is the original here: it is called and restored.  A patch that
    comes later stays: the attribute is restored only if it is still the
    replacement; otherwise the replacement, which the other patch may call,
    passes calls on to the original from then on.  (A package that meanwhile
    restores what was there before this patch takes this patch off.)

    Setting an attribute of a class empties Python's cache of what the class
    and its subclasses have.  Python 3.13 fills that cache a thousand times
    and no more: later, each access to their attributes takes some 50 ns
    longer.  So a patch of a class with many instances should be held.

    Args:
        owner: The module or class.
        name: Of the attribute.
        make: Is given the original and returns the replacement: a function,
            or an object that behaves as the original without users.
    """

    def __init__(self, owner: Any, name: str,
                 make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._users = 0
        self._standing: _Standing | None = None
        # Below patches of others that were there when the last user left.
        self._left: list[_Standing] = []
        # The garbage collector may remove a user in the middle of this.
        self._lock = threading.RLock()

    def install(self) -> None:
        """Counts a user; the first one puts the replacement there."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._put_on()

    def remove(self) -> None:
        """Counts a user less; the last one puts the original back.

        Without any user, nothing is done.
        """
        with self._lock:
            self._users = max(self._users - 1, 0)
            if not self._users:
                self._take_off()

    def hold(self, owner: Any) -> None:
        """Installs the patch for as long as an object lives."""
        self.install()
        weakref.finalize(owner, self.remove)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def _put_on(self) -> None:
        before = vars(self._owner).get(self._name, _ABSENT)
        for standing in self._left:
            if before is standing.replacement:      # theirs is gone
                self._left.remove(standing)
                self._standing = standing
                standing.target[0] = standing.made
                return
        original = getattr(self._owner, self._name)
        made = replacement = self._make(original)
        target = [made]
        if callable(made):
            replacement = _calling(target, original)
        self._standing = _Standing(before, original, made, replacement,
                                   target)
        setattr(self._owner, self._name, replacement)

    def _take_off(self) -> None:
        standing, self._standing = self._standing, None
        if standing is None:
            return
        if vars(self._owner).get(self._name) is not standing.replacement:
            self._left.append(standing)
        elif standing.before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, standing.before)
        standing.target[0] = standing.original


def _calling(target: list[Any], original: Any) -> Any:
    """A function, which is a method in a class, that calls the target."""
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return target[0](*args, **kwargs)
    return replacement

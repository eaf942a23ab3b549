"""Replaces attributes of modules and classes while there are users."""
from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT: Any = object()
#: By id, replacements that ended beneath a later one, and what was before.
_ended: dict[int, tuple[Any, Any]] = {}


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

    Thread-safe, also while other threads call the replacement: a call that has
    begun ends as it began.  A patch of another package that was there before
    is the original here: it is called and restored.  One that comes later
    stays, and is called first: the replacement then only passes calls on.

    Setting an attribute of a class empties Python's cache of what the class
    has.  Python 3.13 fills that cache a thousand times and no more: later,
    each access takes some 50 ns longer.  So a patch of a class with many
    instances should be held.

    Args:
        owner: The module or class.
        name: Of the attribute.
        act: Is called in place of a function, with the original and the
            call's arguments.  Of what is no function it is given the original
            and returns the replacement, which behaves as that without users.
    """

    def __init__(self, owner: Any, name: str, act: Callable[..., Any]
                 ) -> None:
        self._owner, self._name, self._act = owner, name, act
        self._users = 0
        # The garbage collector may remove a user in the middle of this.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Counts a user; the first one puts the replacement there."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._before = vars(self._owner).get(self._name, _ABSENT)
            original = getattr(self._owner, self._name)
            made = functools.partial(self._act, original)
            target = self._target = [made, original]
            self._replacement = functools.wraps(original)(
                lambda *args, **kwargs: target[0](*args, **kwargs)
                ) if callable(original) else made()
            setattr(self._owner, self._name, self._replacement)

    def __exit__(self, *_: Any) -> None:
        """Counts a user less; the last one puts the original back."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            before = self._before
            while id(before) in _ended:
                _, before = _ended.pop(id(before))
            if vars(self._owner).get(self._name) is not self._replacement:
                # A later one may call it.
                _ended[id(self._replacement)] = self._replacement, before
            elif before is _ABSENT:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, before)
            self._target.pop(0)     # a call that comes later is passed on

    def hold(self, owner: Any) -> weakref.finalize:
        """Has a user until an object is collected, or the result called."""
        self.__enter__()
        end = weakref.finalize(owner, self.__exit__)
        end.atexit = False
        return end


class AroundCalls(contextlib.ExitStack):
    """Makes calls of some objects' methods in ``with`` blocks, until closed.

    Methods are replaced in the object's class, where they pass calls of other
    objects on; an attribute of the object itself would go into its copies.
    """

    def add(self, wanted: Any, name: str,
            around: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Makes each call of a method in a block, which ``around`` makes.

        ``wanted`` is the object, or a class for all of its instances.  Classes
        in C are left, as they cannot be changed.
        """
        owner = wanted if isinstance(wanted, type) else type(wanted)

        def call(original: Callable, self: Any, /, *args: Any, **kwargs: Any
                 ) -> Any:
            with (around() if owner is wanted or self is wanted
                  else contextlib.nullcontext()):
                return original(self, *args, **kwargs)
        with contextlib.suppress(AttributeError, TypeError):
            self.enter_context(Patch(owner, name, call))

"""Has another object give parameters their values.

While there is a block of :func:`creating` in any thread, two methods of
Chainer 7.8.1 are replaced (see :class:`.Patch`): ``Parameter.__init__``
(chainer/variable.py, line 1775) and ``Parameter.initialize`` (line 1906).
They act in the thread of the block only.  Another package's methods in the
same places are called wherever Chainer's would be: for every parameter that is
made, and for those that the block's object does not initialize.
"""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import chainer

from .patching import Patch


class Creation:
    """Is asked where parameters are made and get their shape.

    By default, Chainer goes on as usual.
    """

    #: Whether :meth:`created` is called, and parameters have no values then.
    creates = False

    def created(self, parameter: chainer.Parameter, shape: Any) -> None:
        """A parameter was made, without values.

        Args:
            parameter: The new one.
            shape: What its shape shall be; None: not known yet.
        """

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """A parameter is given its shape.

        Returns:
            Whether that has been done; if not, Chainer draws values.
        """
        return False


class _Thread(threading.local):
    """The object that this thread asks about new parameters."""

    creation: Creation | None = None


_thread = _Thread()


@contextlib.contextmanager
def creating(creation: Creation) -> Iterator[None]:
    """Has an object asked about this thread's parameters in a block."""
    before, _thread.creation = _thread.creation, creation
    try:
        with _INIT, _INITIALIZE:
            yield
    finally:
        _thread.creation = before


def hold(owner: Any) -> None:
    """Keeps both methods replaced as long as an object lives."""
    for patch in (_INIT, _INITIALIZE):
        patch.install()
        weakref.finalize(owner, patch.remove)


def _init(original: Any) -> Any:
    def init(self: Any, initializer: Any = None, shape: Any = None,
             name: Any = None, *, layout: Any = None) -> None:
        creation = _thread.creation
        if (creation is None or not creation.creates
                or isinstance(initializer, chainer.get_array_types())):
            original(self, initializer, shape, name, layout=layout)
            return
        original(self, initializer, None, name, layout=layout)
        creation.created(self, shape)
    return init


def _initialize(original: Any) -> Any:
    def initialize(self: Any, shape: Any) -> None:
        creation = _thread.creation
        if creation is None or not creation.initialize(self, shape):
            original(self, shape)
    return initialize


_INIT = Patch(chainer.Parameter, '__init__', _init)
_INITIALIZE = Patch(chainer.Parameter, 'initialize', _initialize)

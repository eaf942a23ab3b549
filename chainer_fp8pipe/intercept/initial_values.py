"""Has another object give parameters their values.

While any thread is in a block of :func:`creating`, two methods of Chainer
7.8.1 are replaced (see :class:`.Patch`): ``Parameter.__init__``
(chainer/variable.py, line 1775) and ``Parameter.initialize`` (line 1906).  The
replacements act in the thread of the block only.  Another package's patches of
these methods are called wherever Chainer's would be: for every parameter that
is made, and for those that the block's object does not initialize.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer

from .patching import Current, Patch


class Creation:
    """Is told when parameters are made and get their shape.

    This one has Chainer draw the values, as usual.
    """

    #: Whether parameters are made without values, and :meth:`created` called.
    creates = False

    def created(self, parameter: chainer.Parameter, shape: Any) -> None:
        """A parameter was made; its shape is None if it is not known yet."""

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        """A parameter gets its shape; False: Chainer is to draw values."""
        return False


_creation = Current()


@contextlib.contextmanager
def creating(creation: Creation) -> Iterator[None]:
    """Has an object told of this thread's new parameters in a block."""
    with _creation.set_to(creation), _INIT, _INITIALIZE:
        yield


def hold(owner: Any) -> None:
    """Keeps both methods replaced as long as an object lives."""
    _INIT.hold(owner)
    _INITIALIZE.hold(owner)


def _init(original: Any) -> Any:
    def init(self: Any, initializer: Any = None, shape: Any = None,
             name: Any = None, *, layout: Any = None) -> None:
        creation: Creation | None = _creation.now
        if (creation is None or not creation.creates
                or isinstance(initializer, chainer.get_array_types())):
            original(self, initializer, shape, name, layout=layout)
            return
        original(self, initializer, None, name, layout=layout)
        creation.created(self, shape)
    return init


def _initialize(original: Any) -> Any:
    def initialize(self: Any, shape: Any) -> None:
        creation: Creation | None = _creation.now
        if creation is None or not creation.initialize(self, shape):
            original(self, shape)
    return initialize


_INIT = Patch(chainer.Parameter, '__init__', _init)
_INITIALIZE = Patch(chainer.Parameter, 'initialize', _initialize)

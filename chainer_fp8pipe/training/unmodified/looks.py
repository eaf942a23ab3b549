"""Lets a script's own code look at a model of which each rank has a part."""
# The first look at a parameter of another rank fetches the whole model, which
# takes all ranks.  So a rank that looks waits in a meeting.  The others come
# to it where their code has ended or is about to communicate, and hear there
# that somebody waits, or that another rank's script does something else, which
# is refused.  Where nobody looks, that is an all-gather of some 300 bytes.
#
# After an error the other ranks may be anywhere, and in another thread they
# may be in the middle of an update: a look is an error then.
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import chainer
from mpi4py import MPI

from ...chains.deferred import fetching, notice_looks
from ...chains.placeholder import PlaceholderError, user_line
from ...intercept.patching import Patch
from ...mpi.agreement import Meeting
from .launch import Refusal


def _refuse(why: str) -> NoReturn:
    raise PlaceholderError(f'{user_line()}: {why}')


class Looks:
    """Says when code may look at the model, and when ``comm`` communicates."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._meeting, self._is_open = Meeting(comm.Dup()), True
        self._partition: Any = None     # until there is one
        self._thread = threading.get_ident()
        #: Whether the training has failed, and looks are errors.
        self.have_failed = False

    def begin(self, model: Any) -> None:
        """From now on the script's code may look at a model that is cut."""
        held = self._partition = model.partition
        elsewhere = {id(parameter) for name, parameter
                     in held.names.parameters.items()
                     if name not in held.placement.own}

        def gradient(original: property) -> property:
            def read(parameter: chainer.Parameter) -> Any:
                if fetching.now is not None and id(parameter) in elsewhere:
                    _refuse('the gradient is on another rank; look at it in a '
                            'hook of the optimizer that is called for each '
                            'parameter (call_for_each_param = True)')
                return original.__get__(parameter)
            return property(read, original.fset)

        def in_this_thread(original: Callable) -> Callable:
            def namedparams(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread:
                    _refuse('a thread of the script sees a part of the model '
                            'only; look at it in the main thread')
                return original(*args, **kwargs)
            return namedparams
        notice_looks(held)
        Patch(chainer.Parameter, 'grad', gradient).hold(held)
        Patch(type(model), 'namedparams', in_this_thread).hold(held)
        self._set(self._is_open)

    @contextlib.contextmanager
    def block(self, what: str, is_open: bool = False) -> Iterator[None]:
        """A block of code that may look, if it is open, or communicates.

        Enter and leave it on all ranks; ``what`` says what it does.
        """
        before = self._is_open
        if before:
            self._meet(what)
        self._set(is_open)
        try:
            yield
            if is_open:
                self._meet(f'the end of {what}')
        finally:        # after an error the others may be somewhere else
            self._give_back()
            self._set(before)

    def look(self) -> None:
        """Has the whole model here until the block ends."""
        if self._partition.is_whole:
            return
        if self.have_failed:
            _refuse('after an error each rank has a part of the model only')
        self._meet(None)
        self._set(self._is_open)

    def _set(self, is_open: bool) -> None:
        self._is_open = is_open
        fetching.now = self.look if is_open and self._partition else None

    def _meet(self, what: str | None) -> None:
        """Meets the others until nobody looks; who does so meets them once.

        ``what`` is done next, or None: this rank looks.
        """
        fetching.now = None
        while not self.have_failed:
            said = self._meeting.say(what)
            if None in said:
                self._partition.placement.fetch()
                if what is None:
                    return
            elif len({*said}) == 1:
                break
            else:
                self.have_failed = True     # in what ends the script, too
                raise Refusal(
                    'the script does not do the same on all ranks: '
                    + ', '.join(f'{one} on rank {rank}' for rank, one in
                                enumerate(said) if one not in said[:rank])
                    + '; let no file, clock or random number without a seed '
                    'decide that (as in os.makedirs(path, exist_ok=True))')
        self._give_back()

    def _give_back(self) -> None:
        if self._partition:
            self._partition.placement.give_back()


class Looking:
    """A script's own extension or trigger, which may look at the model."""

    def __init__(self, own: Any, looks: Looks) -> None:
        self._own = self.__wrapped__ = own
        self._looks = looks

    def __call__(self, *args: Any) -> Any:
        return self._call(self._own, *args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        return (functools.partial(self._call, value)
                if value and name in ('initialize', 'finalize') else value)

    def on_error(self, *args: Any) -> None:
        """Has looks refused, and calls the extension's."""
        self._looks.have_failed = True
        if getattr(self._own, 'on_error', None):
            self._call(self._own.on_error, *args)

    def _call(self, method: Callable, *args: Any) -> Any:
        with self._looks.block(getattr(
                self._own, '__name__', type(self._own).__name__), True):
            return method(*args)

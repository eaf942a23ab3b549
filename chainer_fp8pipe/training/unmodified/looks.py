"""Lets a script's own code look at a model of which each rank has a part."""
# Extensions that sample, translate or measure call the model, or a part of it,
# on every rank, as every rank runs the script.  The first look at a parameter
# of another rank fetches the whole model, which takes all ranks of the
# pipeline.  A rank that looks waits in a meeting.  The others come to it, too,
# where their code has ended or is about to communicate, and hear there that
# somebody waits: so such code costs one sum of a number where nobody looks.
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
import numpy
from mpi4py import MPI

from ...chains.deferred import fetching, notice_looks
from ...chains.partitioned import Partition
from ...chains.placeholder import PlaceholderError, user_line
from ...intercept.patching import Patch
from ...mpi.waiting import wait_until


def _refuse(why: str) -> NoReturn:
    raise PlaceholderError(f'{user_line()}: {why}')


class WholeModel:
    """The whole model, for code between steps.

    Args:
        model: That :func:`partition` has cut.
    """

    def __init__(self, model: Any) -> None:
        self._partition: Partition = model.partition
        self._is_here = False
        #: Whether the training has failed, and looks are errors.
        self.has_failed = False
        self._elsewhere = {
            id(parameter) for name, parameter
            in self._partition.names.parameters.items()
            if name not in self._partition.placement.own}
        self._thread = threading.get_ident()
        notice_looks(self._partition)
        Patch(chainer.Parameter, 'grad', self._of_others).hold(
            self._partition)
        Patch(type(model), 'namedparams', self._in_this_thread).hold(
            self._partition)

    def _of_others(self, original: property) -> property:
        def read(parameter: chainer.Parameter) -> Any:
            if fetching.now is not None and id(parameter) in self._elsewhere:
                _refuse('the gradient is on another rank; look at it in a '
                        'hook of the optimizer that is called for each '
                        'parameter (call_for_each_param = True)')
            return original.__get__(parameter)
        return property(read, original.fset)

    def _in_this_thread(self, original: Callable) -> Callable:
        def namedparams(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                _refuse('a thread of the script sees a part of the model '
                        'only; look at it in the main thread')
            return original(*args, **kwargs)
        return namedparams

    @contextlib.contextmanager
    def seen(self, looks: bool = True) -> Iterator[None]:
        """A block of code that may look, or else communicates.

        Enter and leave it on all ranks.
        """
        before = fetching.now
        if before is not None:
            self._settle()
        if looks:
            self.open()
        try:
            yield
            if looks:
                self._settle()
        except BaseException:       # the others may be somewhere else
            self._leave()
            raise
        finally:
            fetching.now = before

    def open(self) -> None:
        """What follows may look, but in blocks that communicate."""
        fetching.now = functools.partial(
            _refuse, 'after an error each rank has a part of the model only'
            ) if self.has_failed else self.fetch

    def fetch(self) -> None:
        """Has the whole model here until the block ends."""
        fetching.now = None
        self._meet(True)
        fetching.now = self.fetch

    def _settle(self) -> None:
        fetching.now = None
        if not self.has_failed:
            self._meet(False)
        self._leave()

    def _meet(self, looks: bool) -> None:
        if self._is_here:
            return
        anybody = numpy.array([looks], 'i')
        wait_until(self._partition.grid.pipeline.Iallreduce(
            MPI.IN_PLACE, anybody, MPI.MAX).Test)
        if anybody[0]:
            self._partition.placement.fetch()
            self._is_here = True

    def _leave(self) -> None:
        if self._is_here:
            self._partition.placement.give_back()
            self._is_here = False


class Looking:
    """A script's own extension or trigger, which may look at the model.

    Args:
        own: The extension or trigger.
        whole: The model.
    """

    def __init__(self, own: Any, whole: WholeModel) -> None:
        self._own = self.__wrapped__ = own
        self._whole = whole

    def __call__(self, *args: Any) -> Any:
        with self._whole.seen():
            return self._own(*args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        return (functools.partial(self._call, value)
                if value and name in ('initialize', 'finalize') else value)

    def on_error(self, *args: Any) -> None:
        """Has looks refused, and calls the extension's."""
        self._whole.has_failed = True
        if getattr(self._own, 'on_error', None):
            self._call(self._own.on_error, *args)

    def _call(self, method: Callable, *args: Any) -> Any:
        with self._whole.seen():
            return method(*args)

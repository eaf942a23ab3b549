"""Lets a script's own code look at a model of which each rank has a part."""
# Extensions that sample, translate or measure call the model, or a part of it,
# on every rank, as every rank runs the script.  The first look at a parameter
# of another rank fetches the whole model, which takes all ranks of the
# pipeline.  A rank that looks waits for the others in a meeting.  A rank that
# looks at nothing of others' comes to it, too, where its code has ended or is
# about to communicate (`closed`), and hears there that somebody waits.  So
# each stretch of such code costs one sum of a number where nobody looks, and
# no rank has to look when another one does.
#
# After an error the other ranks may be anywhere: a look is an error then.
from __future__ import annotations

import contextlib
import functools
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


class WholeModel:
    """The whole model, for code between steps.

    Args:
        partition: What this rank knows of the model.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition, self._is_here = partition, False
        self._comm: MPI.Comm = partition.grid.pipeline
        self._elsewhere = {id(parameter) for name, parameter
                           in partition.names.parameters.items()
                           if name not in partition.own}
        notice_looks(partition)
        Patch(chainer.Parameter, 'grad', self._noticing).hold(partition)

    def _noticing(self, original: property) -> property:
        """A gradient that refuses looks where it is on another rank."""
        def read(parameter: chainer.Parameter) -> Any:
            if fetching.now is not None and id(parameter) in self._elsewhere:
                raise PlaceholderError(
                    f'{user_line()}: the gradient is on another rank; look at '
                    'it in a hook of the optimizer that is called for each '
                    'parameter (call_for_each_param = True)')
            return original.__get__(parameter)
        return property(read, original.fset)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A block of code that may look, and does not communicate.

        Enter and leave it on all ranks.
        """
        was_open = fetching.now is not None
        self.open()
        try:
            yield
        except BaseException:       # the others may be somewhere else
            fetching.now = None
            self._leave()
            raise
        self._settle()
        if was_open:
            self.open()

    def open(self) -> None:
        """What follows may look, but in blocks of :meth:`closed`."""
        fetching.now = self._fetch

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """A block in which all ranks communicate."""
        was_open = fetching.now is not None
        if was_open:
            self._settle()
        try:
            yield
        finally:
            if was_open:
                self.open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A block with the whole model on each rank."""
        self._partition.fetch()
        try:
            yield
        finally:
            self._partition.give_back()

    def _fetch(self) -> None:
        fetching.now = None
        self._meet(True)
        fetching.now = self._fetch

    def _settle(self) -> None:
        fetching.now = None
        self._meet(False)
        self._leave()

    def _meet(self, looks: bool) -> None:
        if self._is_here:
            return
        anybody = numpy.array([looks], 'i')
        wait_until(self._comm.Iallreduce(MPI.IN_PLACE, anybody, MPI.MAX).Test)
        if anybody[0]:
            self._partition.fetch()
            self._is_here = True

    def _leave(self) -> None:
        if self._is_here:
            self._partition.give_back()
            self._is_here = False


class Looking:
    """A script's own extension or trigger, which may look at the model.

    Args:
        own: The extension or trigger.
        whole: The model.
    """

    def __init__(self, own: Any, whole: WholeModel) -> None:
        self._own, self._whole, self._has_failed = own, whole, False

    def __call__(self, *args: Any) -> Any:
        with self._whole.opened():
            return self._own(*args)

    def on_error(self, *args: Any) -> None:
        """Looks are errors from now on."""
        self._has_failed = True
        if getattr(self._own, 'on_error', None):
            with fetching.set_to(_refuse):
                self._own.on_error(*args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        return (functools.partial(self._call, value)
                if value and name in ('initialize', 'finalize') else value)

    def _call(self, method: Callable, *args: Any) -> Any:
        with (fetching.set_to(_refuse) if self._has_failed
              else self._whole.opened()):
            return method(*args)


def _refuse() -> NoReturn:
    raise PlaceholderError(
        f'{user_line()}: after an error each rank has a part of the model '
        'only')

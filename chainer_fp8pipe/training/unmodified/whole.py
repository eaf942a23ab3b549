"""Lets a script's own code look at a model of which each rank has a part."""
# Extensions that sample, translate or measure call the model, or a part of it,
# on every rank, as every rank runs the script.  The first look at a parameter
# of another rank fetches the whole model, which takes all ranks of the
# pipeline.  A rank that looks waits for the others in a meeting.  A rank that
# looks at nothing of others' comes to it, too, where its code has ended or is
# about to communicate (`closed`), and hears there that somebody waits.  So
# each stretch of such code costs one sum of a number where nobody looks, and
# no rank has to look when another one does.
from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
from chainer.training.extensions import Evaluator
from mpi4py import MPI

from ...chains.deferred import fetching, notice_looks
from ...chains.partitioned import Partition
from ...mpi.waiting import wait_until

#: Packages whose extensions are known to look at no parameter.
_KNOWN = 'chainer', 'chainermn', 'chainer_fp8pipe'


class WholeModel:
    """The whole model, for code between steps.

    Args:
        partition: What this rank knows of the model.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition, self._is_here = partition, False
        self._comm: MPI.Comm = partition.grid.pipeline
        notice_looks(partition)

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


def evaluates_itself(kind: type) -> bool:
    """Whether a kind of Evaluator does not ask Chainer's ``evaluate()``."""
    function = next(vars(one)['evaluate'] for one in kind.__mro__
                    if 'evaluate' in vars(one))
    return (function is not vars(Evaluator)['evaluate']
            and 'evaluate' not in function.__code__.co_names)


def looking(extension: Any, job: Any) -> Any:
    """A script's own extension, whose calls may look at the model.

    Args:
        extension: Stays the same object, if it is no function.
        job: The :class:`.PipelineJob`.
    """
    if isinstance(extension, (types.FunctionType, types.MethodType,
                              functools.partial)):
        found = _looking(extension, job)
        if begin := getattr(extension, 'initialize', None):
            found.initialize = _looking(begin, job)
        return found
    kind: Any = type(extension)
    if kind.__module__.partition('.')[0] in _KNOWN:
        return extension
    methods = {name: _looking(getattr(kind, name), job)
               for name in ('__call__', 'initialize') if hasattr(kind, name)}
    if isinstance(extension, Evaluator) and evaluates_itself(kind):
        methods['evaluate'] = lambda self: job.as_rank_0(kind.evaluate(self))
    with contextlib.suppress(TypeError):    # a class of C code
        extension.__class__ = type(kind.__name__, (kind,), {
            '__module__': kind.__module__, '__doc__': kind.__doc__,
            **methods})
    return extension


def _looking(function: Callable, job: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with job.whole.opened():
            return function(*args, **kwargs)
    return call

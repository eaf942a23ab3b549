"""What scripts print, write and read, and their triggers, on several ranks.

Every rank runs the script.  Rank 0 alone prints, writes and changes folders.
The file of a model or optimizer of which each rank has a part has all
parameters.
"""
from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import chainer
from chainer.serializers import npz
from chainer.training import extensions
from chainer.training.extensions import _snapshot, snapshot_writers
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...intercept.patching import Patch
from ...intercept.training_objects import LIBRARIES, own_work
from ...mpi.agreement import of_first_rank, raise_together
from ...mpi.waiting import wait_until
from ..snapshots.snapshot import go_on
from ..triggers import Followed, counts
from .launch import Refusal, only_rank_0_prints
from .looks import Looking

#: Seconds in which rank 0 makes a folder that another rank comes to make.
_PATIENCE = 5.0
#: Functions of ``os`` that only the first of several ranks can call.
_ONCE = 'mkdir', 'remove', 'rename', 'replace', 'rmdir', 'unlink'
#: Modules by which scripts call them, and those that are no script's.
_THROUGH = 'os', 'pathlib', 'posixpath', 'shutil'
_NO_SCRIPTS = LIBRARIES | {'tempfile'}
_NEED_THE_WHOLE_MODEL = (
    extensions.DumpGraph, extensions.VariableStatisticsPlot,
    extensions.ParameterStatistics)
_PRINT_OR_DRAW = (
    extensions.PlotReport, extensions.PrintReport, extensions.ProgressBar)


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A block for a script that knows of no ranks, on all of them."""
    owners: list[Any] = [os] * (MPI.COMM_WORLD.rank > 0)
    if owners and sys.version_info < (3, 11):
        owners += [vars(pathlib)['_normal_accessor']]
    with only_rank_0_prints(
            contextlib.redirect_stdout), contextlib.ExitStack() as stack:
        for owner in owners:
            for name in _ONCE:
                if hasattr(owner, name):
                    stack.enter_context(Patch(
                        owner, name, functools.partial(_by_rank_0, name)))
        yield


def _by_rank_0(name: str, original: Callable) -> Callable:
    """A function of ``os`` on another rank, which leaves it to rank 0."""
    def call(*args: Any, **kwargs: Any) -> None:
        if (threading.current_thread() is not threading.main_thread()
                or _caller() in _NO_SCRIPTS):
            original(*args, **kwargs)
        elif name in ('mkdir', 'rename', 'replace'):
            path = args[0] if args else next(iter(kwargs.values()))
            makes, end = name == 'mkdir', time.monotonic() + _PATIENCE
            wait_until(lambda: os.path.lexists(path) == makes
                       or time.monotonic() > end)
            if makes and not os.path.isdir(path):   # on another host
                with contextlib.suppress(FileExistsError):
                    original(*args, **kwargs)
    return call


def _caller() -> str:
    """The package that calls a function of ``os``."""
    frame: Any = sys._getframe(3)     # behind the patch
    while frame is not None and (found := frame.f_globals.get(
            '__name__', '').partition('.')[0]) in _THROUGH:
        frame = frame.f_back
    return found if frame is not None else ''


# --- extensions and triggers -------------------------------------------------

def adapt(trainer: Any, job: Any) -> None:
    """Adapts a Trainer's extensions and triggers to several ranks.

    Triggers follow rank 0's, as clocks differ.  ``job`` is a
    :class:`.PipelineJob`.
    """
    def looking(own: Any) -> Any:
        # Those of the libraries are known to look at no parameter.
        home = type(own).__module__.partition('.')[0]
        return own if home in LIBRARIES else Looking(own, job.looks)

    def followed(trigger: Any) -> Any:
        return trigger if counts(trigger) else Followed(
            looking(trigger), job.comm)
    trainer.stop_trigger = followed(trainer.stop_trigger)
    for entry in trainer._extensions.values():
        entry.trigger = followed(entry.trigger)
        own, is_first = entry.extension, job.comm.rank == 0
        if isinstance(own, _NEED_THE_WHOLE_MODEL):
            job.warn(f'{type(own).__name__} needs the whole model and batch '
                     'on one rank; it is left out')
            entry.extension = _LeftOut(own)
        elif isinstance(own, _PRINT_OR_DRAW) and not is_first:
            entry.extension = _LeftOut(own)
        elif isinstance(own, extensions.LogReport) and not is_first:
            own._log_name = None        # others read what it collects
        elif isinstance(own, _snapshot._Snapshot):
            _adapt_snapshot(own, is_first)
        entry.extension = looking(entry.extension)


def _adapt_snapshot(own: Any, is_first: bool) -> None:
    if own._snapshot_on_error:
        raise Refusal('snapshot_on_error=True needs ranks that may be '
                      'anywhere after an error; leave it out')
    if not is_first:
        own.writer = lambda *args: None
        return
    if isinstance(own.writer, snapshot_writers.ProcessQueueWriter):
        raise Refusal('snapshots are written by a process with a queue; pass '
                      'a ThreadWriter or a ThreadQueueWriter')
    writer = getattr(own.writer, '_task', own.writer)
    if function := getattr(writer, '_savefun', None):
        # No other rank calls it.
        writer._savefun = own_work()(function)


class _LeftOut(chainer.training.Extension):
    """Does nothing in an extension's place: snapshots have its state."""

    def __init__(self, own: Any) -> None:
        self.serialize = own.serialize

    def __call__(self, trainer: Any) -> None:
        pass


# --- models ------------------------------------------------------------------

def serialize(job: Any, original: Callable, obj: Any) -> dict[str, Any]:
    """Replaces ``npz.serialize``: all arrays of an object, on rank 0."""
    if job.updater is None:
        return original(obj)
    with saving_parts(), job.model.partition.own_alone():
        arrays = raise_together(job.comm, lambda: original(obj))
    # The first stage's counts where several have the same.
    return {key: value for stage in reversed(
        job.grid.pipeline.gather(arrays) or []) for key, value
        in stage.items()}


def save(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``save_npz`` and ``save_hdf5`` of the script."""
    if job.updater is not None and not isinstance(obj, dict):
        if original.__name__ != 'save_npz':
            raise Refusal('what is trained over ranks can be saved by '
                          'save_npz only')
        obj = serialize(job, npz.serialize.__wrapped__, obj)
    of_first_rank(job.comm, lambda: original(file, obj, *args, **kwargs))


def load(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``load_npz`` and ``load_hdf5``: loads on all ranks, or on none.

    A rank's own error stays as it is, as a script may expect it.
    """
    with (contextlib.nullcontext() if job.updater is None
          else job.model.partition.own_alone()):
        try:
            raise_together(job.comm, lambda: original(
                file, obj, *args, **kwargs), ValueError)
        except ValueError as error:
            raise (error.__cause__ or error) from None
    if isinstance(obj, chainer.training.Trainer):
        go_on(obj.updater)

"""What scripts print, write and read, and their triggers, on several ranks.

Every rank runs the script.  Rank 0 alone prints, writes and changes folders;
what comes of that there is what comes of it on the others.  The file of a
model or optimizer of which each rank has a part has all parameters.
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
from chainer.training.extensions import _snapshot
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...intercept.patching import Patch
from ...intercept.training_objects import LIBRARIES
from ...mpi.agreement import raise_together
from ...mpi.finalizing import keep_forever
from ...mpi.waiting import wait_until
from ..snapshots.snapshot import go_on
from ..triggers import Followed, counts
from .launch import Refusal, only_rank_0_prints
from .looks import Looking

#: Seconds in which rank 0 comes to a call of another rank's, if it does.
_PATIENCE = 5.0
#: Functions of ``os`` that only the first of several ranks can call, and how
#: many paths each gets.
_ONCE = {'mkdir': 1, 'remove': 1, 'rename': 2, 'replace': 2, 'rmdir': 1,
         'unlink': 1}
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_rank_0_prints(contextlib.redirect_stdout))
        comm = MPI.COMM_WORLD.Dup()
        owners: list[Any] = [os]
        if sys.version_info < (3, 11):
            owners += [vars(pathlib)['_normal_accessor']]
        for owner in owners:
            for name in _ONCE:
                if hasattr(owner, name):
                    stack.enter_context(Patch(
                        owner, name, functools.partial(_once, comm, name)))
        yield


def _once(comm: MPI.Comm, name: str, original: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> None:
        if (threading.current_thread() is not threading.main_thread()
                or kwargs.get('dir_fd') is not None
                or _caller() in _NO_SCRIPTS):
            original(*args, **kwargs)
            return
        by_first_rank(comm, (name, args[:_ONCE[name]]),
                      lambda: original(*args, **kwargs), _PATIENCE)
        if name == 'mkdir' and args and not os.path.isdir(args[0]):
            # On another host.
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


def by_first_rank(comm: MPI.Comm, what: Any, action: Callable[[], object],
                  patience: float = float('inf')) -> None:
    """Has rank 0 do something, and its outcome on the others.

    Args:
        comm: All ranks; all of its messages are of this function.
        what: Is done; equal on all ranks.
        action: Is called on rank 0.
        patience: Seconds after which a rank does it itself, as rank 0 has not
            come there.
    """
    if comm.rank == 0:
        problem: Exception | None = None
        try:
            action()
        except Exception as error:
            if isinstance(error, OSError):
                problem = error
                raise
            problem = RuntimeError(
                f'rank 0: {type(error).__name__}: {error}')
            raise problem from error        # the same on all ranks
        finally:
            for rank in range(1, comm.size):
                keep_forever(comm.isend((what, problem), rank))
        return
    end, said = time.monotonic() + patience, None
    while said is None or said[0] != what:
        wait_until(lambda: comm.Iprobe() or time.monotonic() > end)
        if not comm.Iprobe():
            action()
            return
        said = comm.recv()
    if said[1] is not None:
        raise said[1]


# --- extensions and triggers -------------------------------------------------

def adapt(trainer: Any, job: Any) -> None:
    """Adapts a Trainer's extensions and triggers to several ranks.

    All triggers follow rank 0's, as clocks differ between ranks.

    Args:
        trainer: Is about to run, on all ranks.
        job: The :class:`.PipelineJob`.
    """
    def looking(own: Any) -> Any:
        # Those of the libraries are known to look at no parameter.
        home = type(own).__module__.partition('.')[0]
        return own if home in LIBRARIES else Looking(own, job.whole)

    def followed(trigger: Any) -> Any:
        return trigger if counts(trigger) else Followed(
            looking(trigger), job.comm)
    trainer.stop_trigger = followed(trainer.stop_trigger)
    for entry in trainer._extensions.values():
        entry.trigger = followed(entry.trigger)
        entry.extension = _adapted(looking(entry.extension), job)


def _adapted(extension: Any, job: Any) -> Any:
    if isinstance(extension, _NEED_THE_WHOLE_MODEL):
        job.warn(f'{type(extension).__name__} needs the whole model and '
                 'batch on one rank; it is left out')
        return _LeftOut(extension)
    if job.comm.rank and isinstance(extension, _PRINT_OR_DRAW):
        return _LeftOut(extension)
    if job.comm.rank and isinstance(extension, extensions.LogReport):
        extension._log_name = None      # others read what it collects
    if isinstance(extension, _snapshot._Snapshot):
        if extension._snapshot_on_error:
            raise Refusal('snapshot_on_error=True needs ranks that may be '
                          'anywhere after an error; leave it out')
        if job.comm.rank:
            extension.writer = lambda *args: None
        elif own := getattr(extension.writer, '_savefun', None):
            # Not the one that all ranks are to call.
            extension.writer._savefun = getattr(own, '__wrapped__', own)
    return extension


class _LeftOut(chainer.training.Extension):
    """Does nothing in an extension's place: snapshots have its state."""

    def __init__(self, own: Any) -> None:
        self.serialize = own.serialize

    def __call__(self, trainer: Any) -> None:
        pass


# --- models ------------------------------------------------------------------

def serialize(job: Any, original: Callable, obj: Any) -> dict[str, Any]:
    """Replaces ``npz.serialize``: all arrays of an object, on rank 0."""
    place = _place(job, obj)
    if place is None:
        return original(obj)
    with saving_parts():
        arrays = raise_together(job.comm, lambda: original(
            job.model if place else obj))
    # The first stage's counts where several have the same.
    return {key[len(place):]: value
            for stage in reversed(job.grid.pipeline.gather(arrays) or [])
            for key, value in stage.items() if key.startswith(place)}


def save(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``save_npz`` and ``save_hdf5`` of the script."""
    if _place(job, obj) is not None:
        if original.__name__ != 'save_npz':
            raise Refusal('a model that is divided over ranks can be saved '
                          'by save_npz only')
        obj = serialize(job, npz.serialize.__wrapped__, obj)
    by_first_rank(job.messages, 'save', lambda: original(
        file, obj, *args, **kwargs))


def load(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``load_npz`` and ``load_hdf5`` of the script."""
    if _place(job, obj):
        raise Refusal(
            'the updater has divided the model over ranks, so a part of it '
            'cannot be loaded now; load it before, or load the whole model')
    load_everywhere(job.comm, original, file, obj, *args, **kwargs)
    if isinstance(obj, chainer.training.Trainer):
        go_on(obj.updater)


def load_everywhere(comm: MPI.Comm, original: Callable, file: Any, obj: Any,
                    *args: Any, **kwargs: Any) -> None:
    """Loads a file on each rank, or raises on all: one may not have it.

    A rank's own error stays as it is, as a script may expect it.
    """
    problem: Exception | None = None
    try:
        original(file, obj, *args, **kwargs)
    except Exception as error:
        problem = error
    everyone = comm.allgather(
        problem and f'{type(problem).__name__}: {problem}')
    for rank, text in enumerate(everyone):
        if text:
            raise problem or ValueError(
                f'{file} was not loaded on rank {rank}: {text}')


def _place(job: Any, obj: Any) -> str | None:
    """Prefix of a divided object's keys in its model; None: it is whole.

    It is empty for the model itself, its optimizer, updater and Trainer.
    """
    if job.updater is None:
        return None
    optimizer = job.updater.get_optimizer('main')
    if isinstance(obj, chainer.training.Trainer) or any(
            obj is one for one in (
                job.model, job.updater, optimizer, getattr(
                    optimizer, 'actual_optimizer', optimizer))):
        return ''
    return next((path.strip('/') + '/' for path, link
                 in job.model.namedlinks(skipself=True) if link is obj), None)

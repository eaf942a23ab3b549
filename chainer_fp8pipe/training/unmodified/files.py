"""What scripts write and read, and their triggers, where ranks share a job.

Every rank runs the script.  Rank 0 alone prints and writes; the file of a
model or optimizer of which each rank has a part has all parameters.
"""
from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import chainer
from chainer.serializers import npz
from chainer.training import extensions
from chainer.training.extensions import _snapshot
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi.agreement import raise_together
from ..snapshots.snapshot import Followed, counts, go_on
from .launch import Refusal
from .whole import looking

_NEED_THE_WHOLE_MODEL = (
    extensions.DumpGraph, extensions.VariableStatisticsPlot,
    extensions.ParameterStatistics)


def adapted(extension: Any, job: Any) -> Any:
    """The extension that replaces a script's own; None to leave it out.

    ``job`` is the :class:`.PipelineJob`.
    """
    if isinstance(extension, _NEED_THE_WHOLE_MODEL):
        job.warn(f'{type(extension).__name__} needs the whole model and '
                 'batch on one rank; it is left out')
        return _LeftOut(extension)
    if isinstance(extension, _snapshot._Snapshot):
        return _whole(extension, job)
    found = _silent(extension) if job.comm.rank else extension
    return looking(found, job) if found else found


class _LeftOut(chainer.training.Extension):
    """Does nothing in an extension's place: snapshots have its state."""

    def __init__(self, own: Any) -> None:
        self._own, self.name = own, own.name or own.default_name
        self.trigger, self.priority = own.trigger, own.priority

    def __call__(self, trainer: Any) -> None:
        pass

    def serialize(self, serializer: Any) -> None:
        self._own.serialize(serializer)


def _silent(extension: Any) -> Any:
    """Keeps an extension from writing and printing.

    A ``LogReport`` goes on collecting, as other extensions read it.
    """
    if isinstance(extension, extensions.PlotReport):
        return None
    if isinstance(extension, extensions.LogReport):
        extension._log_name = None
    if isinstance(extension, extensions.PrintReport):
        extension._out = _Nowhere()
        _silent(extension._log_report)
    if isinstance(extension, extensions.ProgressBar):
        extension._out = extension._pbar._out = _Nowhere()
    return extension


class _Nowhere:
    """A stream that discards its text."""

    def write(self, text: str) -> None:
        pass


def _whole(extension: Any, job: Any) -> Any:
    """A script's snapshot, of all ranks, under the name the script gives.

    The file of the trainer, a model or an optimizer is the one that a serial
    run would write.
    """
    savefun = getattr(extension.writer, '_savefun', npz.save_npz)
    if extension._target is None and not _is_save_npz(savefun):
        raise Refusal(
            'a snapshot of the trainer is written by another function than '
            'save_npz; leave savefun out of extensions.snapshot()')
    if extension._snapshot_on_error:
        job.warn('snapshot_on_error=True is of no use where other ranks take '
                 'part: no snapshot is taken after an error')
        extension._snapshot_on_error = False
    if hasattr(extension.writer, '_savefun'):
        # Of the script it may be the one that all ranks are to call.
        extension.writer._savefun = getattr(savefun, '__wrapped__', savefun)
    extension.__class__, extension.comm = _WholeSnapshot, job.comm
    extension.job = job
    return extension


def _is_save_npz(function: Any) -> bool:
    return getattr(function, '__wrapped__', function) is getattr(
        npz.save_npz, '__wrapped__', npz.save_npz)


class _WholeSnapshot(_snapshot._Snapshot):
    """Chainer's snapshot, of all ranks."""

    default_name = '_Snapshot'
    job: Any
    comm: MPI.Comm
    autoload: bool

    def initialize(self, trainer: Any) -> None:
        """Loads the newest snapshot if ``autoload`` is set, as in Chainer."""
        if self.autoload:
            name = self.comm.bcast(raise_together(
                self.comm, lambda: None if self.comm.rank else
                _snapshot._find_latest_snapshot(self.filename, trainer.out)))
            if name is not None:
                load(self.job, npz.load_npz, os.path.join(trainer.out, name),
                     trainer if self._target is None else self._target)
            self.autoload = False
        if self.comm.rank == 0:
            super().initialize(trainer)

    def __call__(self, trainer: Any) -> None:
        if self.comm.bcast(raise_together(
                self.comm, lambda: bool(self.condition()))):
            name = raise_together(self.comm, lambda: (
                self.filename(trainer) if callable(self.filename)
                else self.filename.format(trainer)))
            write_arrays(
                self.job, trainer if self._target is None else self._target,
                lambda arrays: self.writer(name, trainer.out, arrays))


def follow_rank_0(trainer: Any, comm: MPI.Comm) -> None:
    """Makes all triggers follow rank 0's, as clocks differ between ranks.

    Call it on all ranks, before the training runs.
    """
    trainer.stop_trigger = _followed(trainer.stop_trigger, comm)
    # Extensions that only write a picture are on rank 0 alone.
    everywhere = set.intersection(
        *map(set, comm.allgather(list(trainer._extensions))))
    for name, entry in trainer._extensions.items():
        if name in everywhere:
            entry.trigger = _followed(entry.trigger, comm)


def _followed(trigger: Any, comm: MPI.Comm) -> Any:
    return trigger if counts(trigger) else Followed(trigger, comm)


# --- files -------------------------------------------------------------------

def save(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``save_npz`` and ``save_hdf5`` of the script; on all ranks.

    Rank 0 writes; the file of a model or optimizer has all parameters.
    """
    is_npz = original.__name__ == 'save_npz'
    if isinstance(obj, dict) and not _is_path(file):
        # Maybe what has been gathered, on rank 0, in a writer's thread.
        original(file, obj, *args, **kwargs)
    elif is_npz and not isinstance(obj, dict):
        write_arrays(job, obj, lambda arrays: original(
            file, arrays, *args, **kwargs))
    elif _place(job, obj) is not None:
        raise Refusal('a model that is divided over ranks can be saved '
                      'by save_npz only')
    else:       # the others may be about to read it
        raise_together(job.comm, lambda: job.comm.rank or original(
            file, obj, *args, **kwargs))


def load(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``load_npz`` and ``load_hdf5`` of the script; on all ranks."""
    is_npz = original.__name__ == 'load_npz' and _is_path(file)
    if _place(job, obj):
        raise Refusal(
            'the updater has divided the model over ranks, so a part of it '
            'cannot be loaded now; load it before, or load the whole model')
    with (job.undrawn.loading(file, obj)
          if is_npz and isinstance(obj, chainer.Link)
          else contextlib.nullcontext()):
        is_trainer = isinstance(obj, chainer.training.Trainer)
        load_everywhere(
            job.comm, functools.partial(_load_trainer, original)
            if is_npz and is_trainer else original, file, obj, *args, **kwargs)
        if is_trainer:
            go_on(obj.updater)


def _load_trainer(original: Callable, file: Any, trainer: Any,
                  path: str = '', strict: bool = True,
                  ignore_names: Any = None) -> None:
    """Loads what one process has saved, too.

    It does not say how far the data are in the updater's way, which is known
    from the iterator (go_on).
    """
    ignored = ignore_names if isinstance(ignore_names, (list, tuple)) else (
        [] if ignore_names is None else [ignore_names])
    original(file, trainer, path, strict, [
        *ignored, lambda key: key.startswith(f'{path}updater/progress_')])


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
    if problem is not None:
        raise problem
    for rank, text in enumerate(everyone):
        if text:
            raise ValueError(f'{file} was not loaded on rank {rank}: {text}')


def write_arrays(job: Any, obj: Any,
                 write: Callable[[dict[str, Any]], object]) -> None:
    """Has rank 0 write an object's arrays, of all stages; on all ranks."""
    place = _place(job, obj)
    # Before the file is opened, of which values may be read.
    with saving_parts():
        arrays = raise_together(job.comm, lambda: (
            {} if place is None and job.comm.rank
            else npz.serialize(job.model if place else obj)))
    if place is not None:
        stages = job.grid.pipeline.gather(arrays) or []
        # The first stage's counts where several have the same.
        arrays = {key[len(place):]: value for stage in reversed(stages)
                  for key, value in stage.items() if key.startswith(place)}
    raise_together(job.comm, lambda: job.comm.rank or write(arrays))


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


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))

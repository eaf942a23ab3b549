"""What scripts write and read, and their triggers, where ranks share a job.

Every rank runs the script.  Rank 0 alone prints and writes; the file of a
model or optimizer of which each rank has a part has all parameters.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import chainer
from chainer.serializers import npz
from chainer.training import extensions
from chainer.training.extensions import _snapshot
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...intercept.training_objects import LIBRARIES
from ...mpi.agreement import raise_together
from ..snapshots.snapshot import go_on
from ..triggers import Followed, counts
from .launch import Refusal
from .looks import Looking

_NEED_THE_WHOLE_MODEL = (
    extensions.DumpGraph, extensions.VariableStatisticsPlot,
    extensions.ParameterStatistics)
_PRINT_OR_DRAW = (
    extensions.PlotReport, extensions.PrintReport, extensions.ProgressBar)


def adapt(trainer: Any, job: Any) -> None:
    """Adapts a Trainer's extensions and triggers to several ranks.

    All triggers follow rank 0's, as clocks differ between ranks.

    Args:
        trainer: Is about to run, on all ranks.
        job: The :class:`.PipelineJob`.
    """
    def followed(trigger: Any) -> Any:
        return trigger if counts(trigger) else Followed(
            _looking(trigger, job), job.comm)
    trainer.stop_trigger = followed(trainer.stop_trigger)
    for entry in trainer._extensions.values():
        entry.trigger = followed(entry.trigger)
        entry.extension = _adapted(entry.extension, job)


def _adapted(extension: Any, job: Any) -> Any:
    if isinstance(extension, _NEED_THE_WHOLE_MODEL):
        job.warn(f'{type(extension).__name__} needs the whole model and '
                 'batch on one rank; it is left out')
        return _LeftOut(extension)
    if isinstance(extension, _snapshot._Snapshot):
        return _whole(extension, job)
    if job.comm.rank and isinstance(extension, _PRINT_OR_DRAW):
        return _LeftOut(extension)
    if job.comm.rank and isinstance(extension, extensions.LogReport):
        extension._log_name = None      # others read what it collects
    return _looking(extension, job)


def _looking(own: Any, job: Any) -> Any:
    # Those of the libraries are known to look at no parameter.
    return own if type(own).__module__.partition('.')[0] in LIBRARIES else (
        Looking(own, job.whole))


class _LeftOut(chainer.training.Extension):
    """Does nothing in an extension's place: snapshots have its state."""

    def __init__(self, own: Any) -> None:
        self.serialize = own.serialize

    def __call__(self, trainer: Any) -> None:
        pass


def _whole(extension: Any, job: Any) -> Any:
    """A script's snapshot, of all ranks, under the name the script gives.

    The file of the trainer, a model or an optimizer is the one that a serial
    run would write.
    """
    savefun = getattr(extension.writer, '_savefun', npz.save_npz)
    # Of the script it may be the one that all ranks are to call.
    savefun = getattr(savefun, '__wrapped__', savefun)
    if extension._target is None and savefun is not getattr(
            npz.save_npz, '__wrapped__', npz.save_npz):
        raise Refusal(
            'a snapshot of the trainer is written by another function than '
            'save_npz; leave savefun out of extensions.snapshot()')
    if extension._snapshot_on_error:
        job.warn('snapshot_on_error=True is of no use where other ranks take '
                 'part: no snapshot is taken after an error')
        extension._snapshot_on_error = False
    if hasattr(extension.writer, '_savefun'):
        extension.writer._savefun = savefun
    extension.__class__, extension.job = _WholeSnapshot, job
    return extension


class _WholeSnapshot(_snapshot._Snapshot):
    """Chainer's snapshot, of all ranks."""

    default_name = '_Snapshot'
    job: Any

    def _make_snapshot(self, trainer: Any) -> None:
        name = (self.filename(trainer) if callable(self.filename)
                else self.filename.format(trainer))
        _write_arrays(
            self.job, trainer if self._target is None else self._target,
            lambda arrays: self.writer(name, trainer.out, arrays))


# --- files -------------------------------------------------------------------

def save(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``save_npz`` and ``save_hdf5`` of the script; on all ranks.

    Rank 0 writes; the file of a model or optimizer has all parameters.
    """
    if isinstance(obj, dict) and not _is_path(file):
        # Maybe what has been gathered, on rank 0, in a writer's thread.
        original(file, obj, *args, **kwargs)
    elif original.__name__ == 'save_npz' and not isinstance(obj, dict):
        _write_arrays(job, obj, lambda arrays: original(
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
    if problem is not None:
        raise problem
    for rank, text in enumerate(everyone):
        if text:
            raise ValueError(f'{file} was not loaded on rank {rank}: {text}')


def _write_arrays(job: Any, obj: Any,
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

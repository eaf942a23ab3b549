"""What scripts write and read, and their triggers, where ranks share a job.

Every rank runs the script.  Rank 0 alone prints and writes; the file of a
model or optimizer of which each rank has a part has all parameters.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer.serializers import npz
from chainer.training import extensions
from chainer.training.extensions import _snapshot
from chainer.training.triggers import IntervalTrigger, ManualScheduleTrigger
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi.agreement import raise_together
from ...mpi.waiting import wait_until
from ..extensions.update_marks import EveryUpdate
from ..snapshots.snapshot import Snapshot, resume
from ..snapshots.snapshot import save as save_job
from .launch import Refusal, refusing
from .whole import looking

_NEED_THE_WHOLE_MODEL = (
    extensions.DumpGraph, extensions.VariableStatisticsPlot,
    extensions.ParameterStatistics)
#: These depend on the number of updates alone.
_COUNTING = IntervalTrigger, ManualScheduleTrigger, EveryUpdate


def adapted(extension: Any, job: Any) -> Any:
    """The extension that replaces a script's own; None to leave it out.

    ``job`` is the :class:`.PipelineJob`.
    """
    if isinstance(extension, _NEED_THE_WHOLE_MODEL):
        job.warn(f'{type(extension).__name__} needs the whole model and '
                 'batch on one rank; it is left out')
        return None
    if isinstance(extension, _snapshot._Snapshot):
        return _whole(extension, job)
    found = _silent(extension) if job.comm.rank else extension
    return looking(found, job) if job.divides and found else found


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

    One of the trainer is a file as the package's ``Snapshot`` writes it; one
    of a model or an optimizer is the file that a serial run would write.
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
    if extension._target is None:
        return ScriptSnapshot(extension, job.comm)
    if hasattr(extension.writer, '_savefun'):
        # Of the script it may be the one that all ranks are to call.
        extension.writer._savefun = getattr(savefun, '__wrapped__', savefun)
    extension.__class__, extension.comm = _ModelSnapshot, job.comm
    extension.job = job
    return extension


def _is_save_npz(function: Any) -> bool:
    return getattr(function, '__wrapped__', function) is getattr(
        npz.save_npz, '__wrapped__', npz.save_npz)


class ScriptSnapshot(Snapshot):
    """What Chainer's snapshot of a trainer is where ranks share a job."""

    default_name = '_Snapshot'

    def __init__(self, own: Any, comm: MPI.Comm) -> None:
        super().__init__(comm, own.n_retains if own.n_retains > 0 else None)
        self._own = own
        self.trigger, self.priority = own.trigger, own.priority
        self.autoload = own.autoload

    def initialize(self, trainer: Any) -> None:
        """Loads the newest snapshot if ``autoload`` is set, as in Chainer."""
        self.start(trainer)
        if self.autoload:
            _autoload(self._own, trainer, self._comm, trainer.out)

    def __call__(self, trainer: Any) -> None:
        if _is_due(self._own, self._comm):
            super().__call__(trainer)

    def path(self, trainer: Any) -> str:
        return os.path.join(self.directory(trainer), raise_together(
            self._comm, lambda: _name(self._own, trainer)))

    def older(self, path: str) -> list[str]:
        found: list[Any] = []
        if isinstance(self._own.filename, str):
            with contextlib.suppress(OSError):      # the directory is gone
                found = _snapshot._find_snapshot_files(
                    self._own.filename, os.path.dirname(path))
        return [os.path.join(os.path.dirname(path), name)
                for _, name in found]


class _ModelSnapshot(_snapshot._Snapshot):
    """Chainer's snapshot of a model or an optimizer, of all ranks."""

    default_name = '_Snapshot'
    job: Any
    comm: MPI.Comm
    autoload: bool

    def initialize(self, trainer: Any) -> None:
        """Loads the newest snapshot if ``autoload`` is set, as in Chainer."""
        if self.autoload:
            _autoload(self, self._target, self.comm, trainer.out)
            self.autoload = False
        if self.comm.rank == 0:
            super().initialize(trainer)

    def __call__(self, trainer: Any) -> None:
        if _is_due(self, self.comm):
            name = raise_together(self.comm, lambda: _name(self, trainer))
            write_arrays(self.job, self._target, lambda arrays: self.writer(
                name, trainer.out, arrays))


def _is_due(own: _snapshot._Snapshot, comm: MPI.Comm) -> bool:
    return comm.bcast(raise_together(comm, lambda: bool(own.condition())))


def _name(own: _snapshot._Snapshot, trainer: Any) -> str:
    return (own.filename(trainer) if callable(own.filename)
            else own.filename.format(trainer))


def _autoload(own: _snapshot._Snapshot, target: Any, comm: MPI.Comm,
              directory: str) -> None:
    """Loads the newest of a script's snapshots, if there is one."""
    name = comm.bcast(raise_together(comm, lambda: None if comm.rank else
                                     _snapshot._find_latest_snapshot(
                                         own.filename, directory)))
    if name is not None:
        npz.load_npz(os.path.join(directory, name), target)


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
    return (trigger if type(trigger) in (*_COUNTING, Followed)
            else Followed(trigger, comm))


class Followed:
    """A script's trigger that fires where rank 0's does.

    All ranks of ``comm`` must ask each time.
    """

    def __init__(self, trigger: Any, comm: MPI.Comm) -> None:
        self._trigger, self._comm = trigger, comm

    def __call__(self, trainer: Any) -> bool:
        fires = numpy.array([bool(self._trigger(trainer))])
        # MPI's own wait would keep the core from other ranks.
        wait_until(self._comm.Ibcast(fires).Test)
        return bool(fires[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)


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
    elif isinstance(obj, chainer.training.Trainer):
        if not is_npz or not _is_path(file):
            raise Refusal('a trainer of a pipeline can be saved by '
                          "save_npz('NAME', trainer) only")
        save_job(obj, job.comm, os.fspath(file))
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
    if isinstance(obj, chainer.training.Trainer):
        if not is_npz:
            raise Refusal('a trainer of a pipeline can go on by '
                          "load_npz('NAME', trainer) only")
        with refusing():
            resume(obj, job.comm, os.fspath(file))
        return
    if _place(job, obj):
        raise Refusal(
            'the updater has divided the model over ranks, so a part of it '
            'cannot be loaded now; load it before, or load the whole model')
    with (job.undrawn.loading(file, obj)
          if job.divides and is_npz and isinstance(obj, chainer.Link)
          else contextlib.nullcontext()):
        load_everywhere(job.comm, original, file, obj, *args, **kwargs)


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

    It is empty for the model itself and for its optimizer.
    """
    if job.updater is None or not job.divides:
        return None
    optimizer = job.updater.get_optimizer('main')
    if any(obj is one for one in (job.model, optimizer, getattr(
            optimizer, 'actual_optimizer', optimizer))):
        return ''
    return next((path.strip('/') + '/' for path, link
                 in job.model.namedlinks(skipself=True) if link is obj), None)


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))

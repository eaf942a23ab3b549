"""Files of models, optimizers and trainers of which each rank has a part."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import chainer
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ..extensions.snapshot import resume
from ..extensions.snapshot import save as save_job
from .refusal import Refusal, refusing


def save(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``save_npz`` of the script; on all ranks.

    Rank 0 writes; the file of a model or optimizer has all parameters.
    """
    if isinstance(obj, dict) and not _is_path(file):
        # Maybe what has been gathered, on rank 0, in a writer's thread.
        original(file, obj, *args, **kwargs)
    elif isinstance(obj, chainer.training.Trainer):
        if original.__name__ != 'save_npz' or not _is_path(file):
            raise Refusal('a trainer of a pipeline can be saved by '
                          "save_npz('NAME', trainer) only")
        save_job(obj, job.comm, os.fspath(file))
    elif _is_divided(job, obj):
        if original.__name__ != 'save_npz':
            raise Refusal('a model that is divided over ranks can be saved '
                          'by save_npz only')
        on_rank_0(job, lambda arrays: original(file, arrays, *args,
                                               **kwargs), obj)
    else:       # the others may be about to read it
        def write() -> None:
            arrays = obj
            if original.__name__ == 'save_npz' and not isinstance(obj, dict):
                # Before the file is opened, of which values may be read.
                arrays = chainer.serializers.npz.serialize(obj)
            original(file, arrays, *args, **kwargs)
        raise_together(job.comm, lambda: write() if job.comm.rank == 0
                       else None)


def load(job: Any, original: Callable, file: Any, obj: Any, *args: Any,
         **kwargs: Any) -> None:
    """Replaces ``load_npz`` of the script; on all ranks."""
    if isinstance(obj, chainer.training.Trainer):
        if original.__name__ != 'load_npz' or not _is_path(file):
            raise Refusal('a trainer of a pipeline can go on by '
                          "load_npz('NAME', trainer) only")
        with refusing():
            resume(obj, job.comm, os.fspath(file))
    elif _prefix(job, obj):
        raise Refusal(
            'a part of the model is loaded after the updater was made, when '
            'it is divided over ranks; load it before, or load the whole '
            'model')
    elif (isinstance(obj, chainer.Link) and _is_path(file)
          and original.__name__ == 'load_npz'):
        with job.undrawn.loading(file, obj):
            load_everywhere(job.comm, original, file, obj, *args, **kwargs)
    else:
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


def on_rank_0(job: Any, write: Callable[[dict[str, Any]], None],
              obj: Any) -> None:
    """Has rank 0 write an object's arrays, of all stages; on all ranks."""
    prefix = _prefix(job, obj)
    arrays = raise_together(job.comm, lambda: chainer.serializers.npz.
                            serialize(job.model if prefix else obj))
    if _is_divided(job, obj):
        stages = job.grid.pipeline.gather(arrays) or []
        # The first stage's counts where several have the same.
        arrays = {key[len(prefix):]: value for stage in reversed(stages)
                  for key, value in stage.items() if key.startswith(prefix)}
    raise_together(job.comm, lambda: write(arrays)
                   if job.comm.rank == 0 else None)


def _is_divided(job: Any, obj: Any) -> bool:
    if job.updater is None:
        return False
    optimizer = job.updater.get_optimizer('main')
    return (obj is job.model or obj is optimizer
            or obj is getattr(optimizer, 'actual_optimizer', None)
            or bool(_prefix(job, obj)))


def _prefix(job: Any, obj: Any) -> str:
    """Prefix of a link's keys in its model; '' for the model and others."""
    if job.updater is None or not isinstance(obj, chainer.Link):
        return ''
    return next((path.strip('/') + '/' for path, link
                 in job.model.namedlinks(skipself=True) if link is obj), '')


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))

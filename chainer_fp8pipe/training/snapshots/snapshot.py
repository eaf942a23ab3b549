"""Snapshots of a whole job, and continuation from them."""
from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import os
import shutil
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import chainer
import numpy
from chainer import training
from chainer.training import extension, triggers
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi.agreement import agree, in_common, raise_together
from ...mpi.grid import grid_of, ranks_in
from ...mpi.waiting import Wait, wait_until, waiting, world_ranks
from ...pipeline.schedules import at_least_one
from ...report.record import written_whole
from . import file, state
from .file import DamagedSnapshot, State, find_snapshots, iteration_of

#: Seconds for which a training that has failed waits for its own file.
_PATIENCE = 60.0
#: After which one that waits for others to have a Snapshot, too, gives up.
_LATE = 600.0

_resumed = weakref.WeakSet[training.Trainer]()


class Followed:
    """A trigger that fires where rank 0's does; all ranks must ask.

    Clocks differ between ranks, and so may what an extension reports.
    ``before`` is called before each question.
    """

    finished = False    # or Chainer would not initialize what it is of

    def __init__(self, own: Any, comm: MPI.Comm,
                 before: Callable[[], None] = lambda: None) -> None:
        self.own = self.__wrapped__ = own
        self._comm, self._before = comm, before

    def __call__(self, trainer: training.Trainer) -> bool:
        self._before()
        fires = numpy.array([bool(self.own(trainer))])
        if not counts(self.own):
            # MPI's own wait would keep the core from other ranks.
            wait_until(self._comm.Ibcast(fires).Test)
        return bool(fires[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def counts(trigger: Any) -> bool:
    """Whether a trigger depends on the number of updates alone."""
    return type(trigger) in (
        triggers.IntervalTrigger, triggers.ManualScheduleTrigger, Followed)


class Snapshot(extension.Extension):
    """Writes a snapshot of the whole job.  Add it on all ranks.

    It is written where rank 0's trigger fires, every epoch unless ``extend``
    gets another, and at the end of the training.  Each rank writes a copy of
    its state to a file, ``snapshot_iter_N.ranks/rank0of4.npz``, beside later
    updates.  Continue with :func:`resume`.

    ``chainer.serializers.load_npz(FILE, model, 'updater/model:main/')`` loads
    a model: the whole one of replicas, a stage of a pipeline.

    A warning of rank 0 says what could not be written, and names each
    attribute of a hook, an extension or an iterator that the training changes
    and that cannot be saved.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's; None: ``MPI.COMM_WORLD``.
        retain: How many of the newest snapshots to keep; None: all.
        directory: Of the snapshots; None: the trainer's ``out``.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: ``retain`` is no whole number of at least 1.
        FileExistsError: At the start, if a new run finds snapshots.
        RuntimeError: On all ranks, if a value cannot be saved, the last
            snapshot was not written, or a rank has no ``Snapshot``.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None,
                 directory: str | None = None) -> None:
        if retain is not None:
            retain = at_least_one('retain', retain)
        self._comm, self._ranks = comm, ranks_in(comm)
        self._retain, self._directory = retain, directory
        # The folder that is being written, and what is not in it.
        self._writing: tuple[futures.Future, str, list[str]] | None = None
        self._copies: State = {}
        self._trainer: training.Trainer | None = None

    def initialize(self, trainer: training.Trainer) -> None:
        """Begins to take part; sends nothing that another rank waits for."""
        self._trainer = trainer
        # Training may be a part of an except block.
        self._handled = sys.exc_info()[1]
        self._common = self._ranks, (
            'the extension Snapshot, which every rank needs or none,')
        self._saved = begin = trainer.updater.iteration
        # Before all ranks have met nothing of this run is written.
        for folder in find_snapshots(self._directory or trainer.out):
            if begin == 0 and trainer not in _resumed:
                raise FileExistsError(
                    f'{folder} is of another run; resume from it, move it '
                    "away, or choose another directory (the trainer's out)")
            if iteration_of(folder) > begin:
                with contextlib.suppress(OSError):  # another rank was first
                    os.rename(folder, f'{folder}.given_up.{uuid.uuid4().hex}')
        in_common.append(self._common)
        meet = functools.cache(self._meet)
        for entry in trainer._extensions.values():
            if entry.extension is self:
                entry.trigger = Followed(
                    inspect.unwrap(entry.trigger), self._ranks, meet)
        state.note_beginning(trainer)

    def _meet(self) -> None:
        """Waits until all ranks ask for the first time whether to save."""
        ranks, end = self._ranks, time.monotonic() + _LATE
        text = 'Snapshot on all ranks (extend every trainer with it)'

        def is_late() -> bool:
            # ChainerMN's communicators never tell others that one has it.
            if time.monotonic() > end:
                raise RuntimeError(f'rank {ranks.rank} has waited for '
                                   f'{_LATE:.0f} seconds for {text}')
            return False
        # The first update has brought all of them here.
        with waiting(lambda: [Wait(text, world_ranks(ranks))]):
            agree(ranks, {}, wait=lambda done: wait_until(
                lambda: done() or is_late()))

    def __call__(self, trainer: training.Trainer) -> None:
        self._begin(trainer)
        if self._trainer is None:       # outside of a Trainer's loop
            self._complete(is_last=True)

    def finalize(self) -> None:
        """Takes the last snapshot, and waits for it.

        At an end by an error, which the other ranks may not have met, it only
        waits for this rank's file.
        """
        trainer, self._trainer = self._trainer, None
        if trainer is None:     # its trigger had finished: it has not begun
            return
        in_common.remove(self._common)
        if sys.exc_info()[1] is self._handled:
            if trainer.updater.iteration > self._saved:
                self._begin(trainer, is_last=True)
            self._complete(is_last=True)
        elif self._writing is not None:
            futures.wait(self._writing[:1], _PATIENCE)
        self._copies, self._writing = {}, None

    def _begin(self, trainer: training.Trainer, is_last: bool = False) -> None:
        """Begins this rank's file of its state, when the last is written."""
        self._complete()
        ranks, last = self._ranks, self._copies

        def copied() -> list[str]:
            found, left_out = state.collect(trainer, self._comm)
            self._copies = {}
            for key, value in found.items():
                if is_last and key.startswith(state.NOT_LAST):
                    continue
                # The system takes several times as long to give new memory.
                old = last.get(key, file.NONE)
                self._copies[key] = copy = old if (old.shape, old.dtype) == (
                    value.shape, value.dtype) else numpy.empty_like(value)
                copy[...] = value
            return left_out
        left_out = raise_together(ranks, copied)
        self._saved = trainer.updater.iteration
        folder = os.path.join(self._directory or trainer.out,
                              f'snapshot_iter_{self._saved}.ranks')
        self._writing = futures.ThreadPoolExecutor(1, 'snapshot').submit(
            file.write, folder, self._copies, ranks.rank, ranks.size,
            ranks.bcast(uuid.uuid4().hex)), folder, left_out

    def _complete(self, is_last: bool = False) -> None:
        """Waits for the files of all ranks, and removes older snapshots.

        RuntimeError, on all ranks: the last one was not written.
        """
        if self._writing is None:
            return
        (writing, folder, left_out), self._writing = self._writing, None
        wait_until(writing.done)
        ranks, texts = self._ranks, []
        try:
            raise_together(ranks, writing.result)
        except RuntimeError as error:
            texts.append(f'{folder} could not be written ({error}); older '
                         'snapshots are still there')
            if is_last:
                raise RuntimeError(*texts) from error
        else:
            for old in find_snapshots(os.path.dirname(folder) or '.')[
                    :-self._retain] if self._retain else ():
                shutil.rmtree(old, ignore_errors=True)
        _warn(ranks, [*texts, *(
            f'the training changes {text}, which is in no snapshot: a run '
            'that goes on has it as the script makes it; keep numbers, texts, '
            'arrays, and lists or dictionaries of them'
            for text in sorted(set().union(*ranks.allgather(left_out))))],
            RuntimeError)


# --- reading -----------------------------------------------------------------

def resume(trainer: training.Trainer, comm: Any, path: str, *,
           damaged: str = 'error') -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With as many ranks, the same layers on each, and the same kind of
    communicator, the run goes on exactly, and each rank reads its own file.
    Otherwise it goes on with a warning, and every rank must see all files.
    Values that differed between ranks are then the first rank's, an iterator
    over a share of the data goes on at the same share of its epoch, and
    residuals, codec state and the random numbers of new ranks start afresh.

    The snapshot's values of optimizers count: set another learning rate after
    this call.  Extensions are initialised with the script's.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: A snapshot, or a directory: its newest whole one counts.
        damaged: ``'aside'`` leaves the trainer as it is, with a warning, where
            none is whole.  A file that cannot be read is always an error.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: On all ranks.  There is no whole snapshot, or it does not
            fit: the trainer is as it was.  Or a rank cannot restore its part.
    """
    ranks = ranks_in(comm)
    if damaged not in ('error', 'aside'):
        raise ValueError(
            f"damaged must be 'error' or 'aside', not {damaged!r}")
    _resumed.add(trainer)
    state.note_beginning(trainer)
    current = raise_together(
        ranks, lambda: state.collect(trainer, comm)[0], error=ValueError)
    texts = []      # of warnings
    for folder in (found := _seen(ranks, path)):
        try:
            saved, exact, parts = _read(ranks, folder, current)
            break
        except ValueError as error:
            # What was raised on other ranks is only in the text.
            if DamagedSnapshot.__name__ not in str(error):
                raise
            texts.append(f'{folder} is not whole and is passed over: {error}')
    else:
        agree(ranks, {}, '' if found and damaged == 'aside' else (
            f'no snapshot in {path} can be gone on from; ' + '; '.join(texts)
            if found else f'there is no snapshot in {path}'))
        _warn(ranks, [*texts, 'the training begins anew'])
        return trainer.updater.iteration
    if not exact:
        state.fit(saved, current)
        texts.append(
            f'{folder} is of a run with another layout ({len(parts)} ranks, '
            f'or another communicator): residuals, codec state and the random '
            'numbers of new ranks start afresh, iterators over another share '
            'of the data at the same share of their epoch')
    taken = set().union(*ranks.allgather([*saved]))
    agree(ranks, {}, state.incompatible(saved, current, trainer) or next((
        f'the snapshot has {key}, the model has not'
        for part in parts for key in part.is_none
        if key.startswith(state.MODEL) and key not in taken), ''))
    _warn(ranks, texts)
    raise_together(ranks, lambda: state.restore(saved, trainer, comm),
                   error=ValueError)
    for entry in trainer._extensions.values():
        if isinstance(entry.extension, Snapshot):   # it takes the last one
            entry.trigger = Followed(inspect.unwrap(entry.trigger), ranks)
    go_on(trainer.updater)
    return trainer.updater.iteration


def _warn(ranks: MPI.Comm, texts: list[str],
          error: type[Exception] = ValueError) -> None:
    """Warns on rank 0; raises on all where a warning is an error."""
    def warn() -> None:
        for text in texts if ranks.rank == 0 else ():
            warnings.warn(text, stacklevel=6)
    raise_together(ranks, warn, error=error)


def go_on(updater: Any) -> None:
    """Tells an updater, which has been restored, and its optimizers."""
    for optimizer in updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    if hasattr(updater, 'resumed'):
        updater.resumed()


def _seen(ranks: MPI.Comm, path: str) -> list[str]:
    """The snapshots in a directory that any rank sees, the newest first."""
    own = [os.path.relpath(folder, path) for folder in (
        [path] if file.files_in(path) else find_snapshots(path))]
    return [os.path.normpath(os.path.join(path, name)) for name in sorted(
        set().union(*ranks.allgather(own)), key=iteration_of, reverse=True)]


def _read(ranks: MPI.Comm, folder: str, current: State
          ) -> tuple[State, bool, list[file.Manifest]]:
    """What this rank needs, whether exactly, and the manifests it is from.

    ValueError, on all ranks: it is not whole, and the message has the name of
    DamagedSnapshot; or not all ranks can read what they need.
    """
    parts = raise_together(ranks, lambda: [
        file.manifest_of(os.path.join(folder, name))
        for name in file.files_in(folder)], error=ValueError)
    found = set().union(*ranks.allgather(
        {(part.identity, part.ranks, part.rank) for part in parts}))
    number = max(found)[1]
    if len(found) != number or len({identity for identity, *_ in found}) > 1:
        raise DamagedSnapshot(
            'DamagedSnapshot: not the files of all ranks of one snapshot')
    own = [part.is_none for part in parts
           if (part.rank, part.ranks) == (ranks.rank, ranks.size)]
    exact = ranks.allreduce(bool(own) and state.layout(own[0]) == (
        state.layout(current)), MPI.LAND)
    agree(ranks, {}, '' if exact or len(parts) == number else (
        f'{folder} is of another layout, and this host sees {len(parts)} of '
        f'its {number} files; give it a disk that all hosts see, or the '
        'ranks, hosts, layers and communicator that it had'))
    keys = ({ranks.rank: [*own[0]]} if exact
            else state.wanted(parts, ranks.rank, current))
    return raise_together(ranks, lambda: {
        key: value for part in parts for key, value
        in file.read(part, keys.get(part.rank, ())).items()},
        error=ValueError), exact, parts


# --- a model alone -----------------------------------------------------------

def save_whole_model(path: str, model: Any, grid: Any) -> None:
    """Writes the layers of all stages to one file; call it on all ranks.

    ``chainer.serializers.load_npz`` loads it into the whole model, ``Net()``,
    or into any part of it, ``Net().stage(comm)``.

    Args:
        path: The file, which the first rank writes and replaces when the new
            one is whole; ``.npz`` is added if it does not end so.
        model: This rank's stage, ``Net().stage(grid)``.
        grid: The ranks, as :class:`PipelineUpdater` takes them.

    Raises:
        RuntimeError: It could not be written; on all ranks.
    """
    grid = grid_of(grid)
    with saving_parts():
        own = raise_together(
            grid.comm, lambda: chainer.serializers.npz.serialize(model))
    stages = grid.pipeline.gather(own) if grid.replica_index == 0 else None

    def save_all() -> None:
        if stages:
            name = os.fspath(path).removesuffix('.npz') + '.npz'
            with written_whole(name, 'wb') as whole:
                numpy.savez_compressed(whole, **collections.ChainMap(*stages))
    raise_together(grid.comm, save_all)

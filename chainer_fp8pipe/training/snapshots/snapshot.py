"""Snapshots of a whole job, and continuation from them.

Chainer's ``snapshot`` writes the state of one rank.  A run continues exactly
only if every rank gets back its own iterator, random numbers and residuals, so
here each writes a file.  Parameters have the names of the whole model; so a
run can also go on with another number of stages or replicas.
"""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import numpy
from chainer import training
from chainer.training import extension
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi import all_ranks
from ...mpi.agreement import agree, raise_together
from ...mpi.grid import grid_of
from ...mpi.waiting import wait_until
from ...report.record import written_whole
from ..checks import check_count
from ..triggers import Followed
from .file import (
    DamagedSnapshot,
    Manifest,
    State,
    files_in,
    find_snapshots,
    folder_of,
    iteration_of,
    manifest_of,
    read,
    write,
)
from .state import (
    MODEL,
    arrays_of,
    beginnings,
    collect,
    describe,
    fitted,
    incompatible,
    layout,
    names_of_communicators,
    note_beginning,
    restore,
    wanted,
)

#: Seconds for which a training that has failed waits for its own file.
_PATIENCE = 60.0
#: So many failed snapshots in a row end a training.
_FAILURES = 3
#: Seconds after which ranks that are not there do not take part.
IN_VAIN = 120.0


class Snapshot(extension.Extension):
    """Writes a snapshot of the whole job.  Add it on all ranks.

    It is written every epoch unless ``extend`` gets a trigger, where rank 0's
    trigger fires, and at the end of the training.  Each rank writes a file,
    ``snapshot_iter_N.ranks/rank0of4.npz``, beside later updates: an update
    waits for a copy of the rank's state, whose memory is kept.  A snapshot
    counts when all of its files are on the disk.  The next one, and the end of
    the training, wait for the last one.  Continue with :func:`resume`.

    ``chainer.serializers.load_npz(FILE, model, 'updater/model:main/')`` loads
    a model: the whole one of replicas, a stage of a pipeline.

    If it cannot be written (disk full, no permission), training goes on with a
    warning of rank 0, until three in a row have failed.  An attribute of a
    hook, an extension or an iterator that the training changes, and that
    cannot be saved, is named in a warning.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's.  Residuals are found in it and in the
            communicators of multi-node optimizers.
        retain: How many of the newest snapshots to keep; None: all.  Older
            ones are removed before the next one is begun.
        directory: Of the snapshots, made when it is needed; None: the
            trainer's ``out``.  Hosts may have one of the same name each; they
            must share it for a run that goes on with other ranks.

    Raises:
        ValueError: ``retain`` is no positive integer.
        RuntimeError: After the first update, on the ranks that have the
            extension: others have it not, or a new run finds snapshots, which
            would be mixed with its own.  Later, on all ranks: a value cannot
            be saved, or three snapshots in a row were not written.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None,
                 directory: str | None = None) -> None:
        if retain is not None:
            check_count('retain', retain)
        self._comm, self._retain, self._directory = comm, retain, directory
        self._failed = 0            # in a row
        self._named: set[str] = set()   # attributes in warnings
        self._writing: _Writing | None = None
        self._copies: State = {}
        self._trainer: training.Trainer | None = None

    def directory(self, trainer: training.Trainer) -> str:
        """Where the snapshots of a trainer are."""
        return trainer.out if self._directory is None else self._directory

    def initialize(self, trainer: training.Trainer) -> None:
        """Begins to take part; sends nothing that another rank waits for."""
        ranks, self._trainer = all_ranks(self._comm), trainer
        self._saved = begin = trainer.updater.iteration
        # Of the stop trigger, before it was asked: a run that goes on asks
        # it again.
        self._stop: State = {}
        # Training may be a part of an except block.
        self._handled = sys.exc_info()[1]
        is_first = [True]
        is_new = begin == 0 and trainer not in beginnings

        def look() -> None:
            if is_new and (found := find_snapshots(self.directory(trainer))):
                raise FileExistsError(
                    f'{found[-1]} is of another run; resume from it, move it '
                    "away, or choose another directory (the trainer's out)")

        def after_update() -> None:
            if is_first:        # the first update has brought all ranks here
                is_first.clear()
                agree(ranks, {}, wait=_in_time)
                raise_together(ranks, look)
                for folder in _folders(ranks, self.directory(trainer)):
                    if iteration_of(folder) > begin:
                        _set_aside(folder, bool(_files(ranks, folder)[0]))
            if hasattr(trainer.stop_trigger, 'serialize'):
                self._stop = arrays_of(trainer.stop_trigger, 'stop_trigger/')
        for entry in trainer._extensions.values():
            if entry.extension is self and type(entry.trigger) is not Followed:
                entry.trigger = Followed(entry.trigger, ranks, after_update)
        note_beginning(trainer)

    def __call__(self, trainer: training.Trainer) -> None:
        self._complete()
        self._begin(trainer, {})
        if self._trainer is None:       # outside of a Trainer's loop
            self._complete(1)

    def finalize(self) -> None:
        """Takes the last snapshot, and waits for it.

        At an end by an error, which the other ranks may not have met, it only
        waits for this rank's file.
        """
        trainer, self._trainer = self._trainer, None
        if trainer is None or sys.exc_info()[1] is not self._handled:
            if self._writing is not None:
                self._writing.join(_PATIENCE)
                self._writing = None
        else:
            self._complete()
            if trainer.updater.iteration > self._saved:
                self._begin(trainer, self._stop)
            self._complete()
        self._copies = {}

    def _begin(self, trainer: training.Trainer, stop: State) -> None:
        """Begins this rank's file of its state, as it is now.

        ``stop`` is that of the stop trigger, if it is to be another.  Values
        are copied into those of the last time, where they fit, as the system
        takes several times as long to give new memory.
        """
        ranks = all_ranks(self._comm)

        def copied() -> list[str]:
            state, left_out = collect(trainer, self._comm)
            last, self._copies = self._copies, {}
            for key, value in (state | stop).items():
                old = last.get(key)
                if old is None or (old.shape, old.dtype) != (
                        value.shape, value.dtype):
                    old = numpy.empty(value.shape, value.dtype)
                old[...] = value
                self._copies[key] = old
            return left_out
        left_out = raise_together(ranks, copied)
        self._saved = trainer.updater.iteration
        self._writing = _Writing(
            folder_of(self.directory(trainer), self._saved), self._copies,
            left_out, rank=ranks.rank, ranks=ranks.size,
            identity=ranks.bcast(uuid.uuid4().hex),
            communicator=names_of_communicators(trainer, self._comm))

    def _complete(self, most: int = _FAILURES) -> None:
        """Waits for the files of all ranks, and removes older snapshots.

        Raises RuntimeError on all ranks if so many in a row were not written,
        or a warning is an error.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        wait_until(lambda: not writing.is_alive())
        ranks = all_ranks(self._comm)
        told = ranks.allgather((writing.problem, writing.left_out))
        problem = '; '.join(f'rank {rank}: {text}'
                            for rank, (text, _) in enumerate(told) if text)
        left_out = {text for _, texts in told for text in texts}
        self._failed = self._failed + 1 if problem else 0
        if self._failed >= most:
            raise RuntimeError(
                f'{writing.folder} could not be written ({problem}), the '
                f'{self._failed}. in a row. Make room, or choose another '
                "directory (the trainer's out), and resume")
        if not problem:
            self._make_room(writing.folder)
        _warn(ranks, [f'{writing.folder} could not be written ({problem}); '
                      'training goes on, and older snapshots are still there'
                      ] * bool(problem) + [
            f'the training changes {text}, which is in no snapshot: a run '
            'that goes on has it as the script makes it; keep numbers, texts, '
            'arrays, and lists or dictionaries of them'
            for text in sorted(left_out - self._named)])
        self._named |= left_out

    def _make_room(self, folder: str) -> None:
        """Of all ranks that see one of these the first one does it."""
        found = find_snapshots(os.path.dirname(folder) or '.')
        for one in found[:-self._retain] if self._retain else ():
            shutil.rmtree(one, ignore_errors=True)


class _Writing(threading.Thread):
    """Writes this rank's file beside the training."""

    def __init__(self, folder: str, state: State, left_out: list[str],
                 **about: Any) -> None:
        super().__init__(name='writer of a snapshot', daemon=True)
        self.folder, self.left_out, self.problem = folder, left_out, ''
        self._state, self._about = state, about
        self.start()

    def run(self) -> None:
        try:
            write(self.folder, self._state, **self._about)
        except Exception as error:      # all ranks are told
            self.problem = f'{type(error).__name__}: {error}'


# --- reading -----------------------------------------------------------------

def resume(trainer: training.Trainer, comm: Any, path: str, *,
           damaged: str = 'error') -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With the same number of ranks, the same layers on each, and the same kind
    of communicator, the run goes on exactly, and each rank reads its own file.
    Otherwise it goes on with a warning, and every rank must see the files of
    all.  Values that differed between ranks are then the first rank's.  An
    iterator over a share of the data set goes on at the same share of its
    epoch, in its own order.  Residuals, codec state and the random numbers of
    new ranks start afresh.

    The snapshot's values of optimizers count, not the script's: a learning
    rate that is to be another one is set after this call.  Extensions are
    initialised with the script's, as with Chainer's snapshots.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: The snapshot, or a directory with several: the newest whole one
            counts.
        damaged: For a directory with snapshots of which none is whole:
            ``'error'``, or ``'aside'``, which leaves the trainer as it is,
            with a warning.  A file that cannot be read is an error in both
            cases.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: On all ranks.  There is no whole snapshot, or it is of
            another model or optimizer, or lacks something: the trainer is as
            it was.  Or a rank cannot restore its part: make the trainer anew.
    """
    ranks = all_ranks(comm)
    if damaged not in ('error', 'aside'):
        raise ValueError(f'damaged must be error or aside, not {damaged!r}')
    note_beginning(trainer)
    current = raise_together(ranks, lambda: collect(trainer, comm)[0],
                             error=ValueError)
    texts = []      # of warnings
    for folder in (found := _folders(ranks, path)):
        try:
            saved, exact, parts = _read(ranks, folder, current, trainer, comm)
            break
        except DamagedSnapshot as error:
            texts.append(f'{folder} is not whole and is passed over: {error}')
    else:
        agree(ranks, {}, '' if found and damaged == 'aside' else (
            f'no snapshot in {path} can be gone on from; ' + '; '.join(texts)
            if found else f'there is no snapshot in {path}'))
        _warn(ranks, [*texts, 'the training begins anew'])
        return trainer.updater.iteration
    if not exact:
        saved, changed = fitted(saved, current, parts, ranks.rank)
        texts.append(
            f'{folder} is of a run with another layout ({len(parts)} ranks, '
            f'communicator {parts[0].communicator}). Model, optimizer and '
            f'iterator go on{changed}; residuals, codec state and the random '
            'numbers of new ranks start afresh')
    taken = set().union(*ranks.allgather(
        [key for key in saved if key.startswith(MODEL)]))
    agree(ranks, {}, incompatible(saved, current, trainer) or next((
        f'the snapshot has {describe(key)}, the model has not'
        for part in parts for key in part.digests
        if key.startswith(MODEL) and key not in taken), ''))
    _warn(ranks, texts)
    raise_together(ranks, lambda: restore(saved, trainer, comm),
                   error=ValueError)
    go_on(trainer.updater)
    return trainer.updater.iteration


def _warn(ranks: MPI.Comm, texts: list[str]) -> None:
    """Warns on rank 0; raises on all where a warning is an error."""
    def warn() -> None:
        for text in texts if ranks.rank == 0 else ():
            warnings.warn(text, stacklevel=6)
    raise_together(ranks, warn, error=ValueError)


def go_on(updater: Any) -> None:
    """Tells an updater, which has been restored, and its optimizers."""
    for optimizer in updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    if hasattr(updater, 'resumed'):
        updater.resumed()


def _set_aside(folder: str, is_whole: bool) -> None:
    """Renames a snapshot of a run that was given up, or removes a half one.

    All ranks do so, and the first one's counts.
    """
    if not is_whole:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(folder, f'{folder}.given_up.{uuid.uuid4().hex[:8]}')


def _in_time(done: Callable[[], bool]) -> None:
    """Waits for ranks that may not take part."""
    end = time.monotonic() + IN_VAIN
    wait_until(lambda: done() or time.monotonic() > end)
    if not done():
        raise RuntimeError('Snapshot is on this rank but not on all; extend '
                           'the trainer with it on all ranks')


def _folders(ranks: MPI.Comm, path: str) -> list[str]:
    """The snapshots that any rank sees, the newest first; on all ranks."""
    names = ranks.allgather(
        None if iteration_of(path) >= 0 or files_in(path)
        else [os.path.basename(one) for one in find_snapshots(path)])
    if None in names:       # a snapshot itself
        return [path]
    return [os.path.join(path, name) for name in sorted(
        set().union(*names), key=iteration_of, reverse=True)]


def _files(ranks: MPI.Comm, folder: str) -> tuple[int, str]:
    """Of how many ranks a snapshot is, and which files no rank sees."""
    names = set().union(*ranks.allgather(
        [os.path.basename(path) for path in files_in(folder)]))
    lacks = 'there is no file in it'
    for number in sorted({int(re.findall(r'\d+', f'{name} 0 0')[1])
                          for name in names}):
        missing = [str(rank) for rank in range(number)
                   if f'rank{rank}of{number}.npz' not in names]
        if number and not missing:
            return number, ''
        lacks = (f'the file of rank {", ".join(missing)} of {number} is not '
                 'there')
    return 0, lacks


def _read(ranks: MPI.Comm, folder: str, current: State,
          trainer: training.Trainer, comm: Any
          ) -> tuple[State, bool, list[Manifest]]:
    """What this rank needs, whether exactly, and the manifests it is from.

    Raises:
        DamagedSnapshot: It is not whole; on all ranks.
        ValueError: It is of another layout, and not all ranks see it; or a
            file cannot be read.
    """
    number, lacks = _files(ranks, folder)
    if lacks:
        raise DamagedSnapshot(lacks)
    paths = [os.path.join(folder, f'rank{rank}of{number}.npz')
             for rank in range(number)]

    def manifests(some: Iterable[str]) -> list[Manifest]:
        return _together(ranks, lambda: [manifest_of(path) for path in some])
    parts = manifests(filter(os.path.exists, paths[ranks.rank:][:1]
                             if number == ranks.size else ()))
    exact = ranks.allreduce(
        len(parts) == 1
        and parts[0].communicator == names_of_communicators(trainer, comm)
        and layout(parts[0].digests) == layout(current), MPI.LAND)
    if not exact:
        seen = sum(map(os.path.exists, paths))
        agree(ranks, {}, '' if seen == number else (
            f'{folder} is of another layout, and this host sees {seen} of its '
            f'{number} files; give it a disk that all hosts see, or the '
            'ranks, hosts, layers and communicator that it had'))
        parts = manifests(paths)
    if len(set().union(*ranks.allgather(
            {part.identity for part in parts}))) > 1:
        raise DamagedSnapshot('its files are of several snapshots')
    keys = ({part.rank: [*part.digests] for part in parts} if exact
            else wanted(parts, ranks.rank, current, trainer))
    return _together(ranks, lambda: {
        key: value for part in parts for key, value
        in read(part, keys.get(part.rank, ())).items()}), exact, parts


def _together(ranks: MPI.Comm, action: Callable[[], Any]) -> Any:
    """As ``raise_together``; what is damaged is a DamagedSnapshot on all."""
    def tried() -> tuple[Any, str]:
        try:
            return action(), ''
        except DamagedSnapshot as error:
            return None, f'rank {ranks.rank}: {error}'
    result, problem = raise_together(ranks, tried, error=ValueError)
    if problems := [text for text in ranks.allgather(problem) if text]:
        raise DamagedSnapshot('; '.join(problems))
    return result


# --- a model alone -----------------------------------------------------------

def save_whole_model(path: str, model: Any, grid: Any) -> None:
    """Writes the layers of all stages to one file; call it on all ranks.

    ``chainer.serializers.load_npz`` loads it into the whole model, ``Net()``,
    or into any part of it, ``Net().stage(comm)``.

    Args:
        path: The file, as for ``numpy.savez_compressed``.  The first
            replica's first stage writes it; an older file is replaced when
            the new one is whole.
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
            name = os.fspath(path)
            with written_whole(name if name.endswith('.npz')
                               else f'{name}.npz', 'wb') as file:
                numpy.savez_compressed(file, **{
                    key: value for stage in stages
                    for key, value in stage.items()})
    raise_together(grid.comm, save_all)

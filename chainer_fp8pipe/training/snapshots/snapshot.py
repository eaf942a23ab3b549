"""Snapshots of a whole job, and continuation from them."""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import uuid
import warnings
import weakref
from collections import defaultdict
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
from ...mpi.world import stderr
from ...pipeline.schedules import at_least_one
from ...report.record import written_whole
from . import file, state
from .file import DamagedSnapshot, State, find_snapshots, iteration_of

#: Seconds for which a training that has failed waits for its own file.
_PATIENCE = 60.0
#: After which a rank says that it waits for others to have a Snapshot, too.
_LATE = 60.0

_resumed = weakref.WeakSet[training.Trainer]()      # also without a snapshot


class Followed:
    """A trigger that fires where rank 0's does; all ranks must ask.

    Clocks differ between ranks, and so may what an extension reports.
    ``before`` is called before each question.
    """

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

    It is written every epoch unless ``extend`` gets a trigger, where rank 0's
    trigger fires, and at the end of the training.  Each rank writes a file,
    ``snapshot_iter_N.ranks/rank0of4.npz``, beside later updates, of a copy of
    its state, whose memory is kept.  A snapshot counts when all of its files
    are on the disk.  The next one, and the end of the training, wait for the
    last one.  Continue with :func:`resume`.

    ``chainer.serializers.load_npz(FILE, model, 'updater/model:main/')`` loads
    a model: the whole one of replicas, a stage of a pipeline.

    If it cannot be written, training goes on with a warning of rank 0, which
    also names each attribute of a hook, an extension or an iterator that the
    training changes and that cannot be saved.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's; None: ``MPI.COMM_WORLD``.
        retain: How many of the newest snapshots to keep; None: all.
        directory: Of the snapshots; None: the trainer's ``out``.  Hosts may
            have one of the same name each; they must share it for a run that
            goes on with other ranks.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: ``retain`` is no whole number of at least 1.
        RuntimeError: On all ranks: after the first update, if a new run finds
            snapshots, which would be mixed with its own; later, if a value
            cannot be saved, or the last snapshot was not written.
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
        self._named = set[str]()        # in warnings
        # The folder that is being written, and what is not in it.
        self._writing: tuple[futures.Future, str, list[str]] | None = None
        self._copies: State = {}
        self._trainer: training.Trainer | None = None

    def initialize(self, trainer: training.Trainer) -> None:
        """Begins to take part; sends nothing that another rank waits for."""
        ranks, self._trainer = self._ranks, trainer
        self._common = ranks, ('the extension Snapshot, which every rank needs'
                               ' or none,')
        in_common.append(self._common)
        self._saved = begin = trainer.updater.iteration
        # Training may be a part of an except block.
        self._handled = sys.exc_info()[1]
        is_first = [True]
        is_new = begin == 0 and trainer not in _resumed

        def look(folder: str) -> None:
            if is_new:
                raise FileExistsError(
                    f'{folder} is of another run; resume from it, move it '
                    "away, or choose another directory (the trainer's out)")
            if iteration_of(folder) > begin:    # the first rank's move counts
                with contextlib.suppress(OSError):
                    os.rename(folder, f'{folder}.given_up.{uuid.uuid4().hex}')

        def before() -> None:
            if is_first:        # the first update has brought all ranks here
                is_first.clear()
                _meet(ranks)
                found = _seen(ranks, self._directory or trainer.out)
                raise_together(ranks, lambda: [*map(look, found)])
        for entry in trainer._extensions.values():
            if entry.extension is self and type(entry.trigger) is not Followed:
                entry.trigger = Followed(entry.trigger, ranks, before)
        state.note_beginning(trainer)

    def __call__(self, trainer: training.Trainer) -> None:
        self._complete()
        self._begin(trainer)
        if self._trainer is None:       # outside of a Trainer's loop
            self._complete(is_last=True)

    def finalize(self) -> None:
        """Takes the last snapshot, and waits for it.

        At an end by an error, which the other ranks may not have met, it only
        waits for this rank's file.
        """
        trainer, self._trainer = self._trainer, None
        in_common.remove(self._common)
        if trainer is not None and sys.exc_info()[1] is self._handled:
            if trainer.updater.iteration > self._saved:
                self._complete()
                self._begin(trainer, is_last=True)
            self._complete(is_last=True)
        elif self._writing is not None:
            futures.wait(self._writing[:1], _PATIENCE)
        self._copies, self._writing = {}, None

    def _begin(self, trainer: training.Trainer, is_last: bool = False) -> None:
        """Begins this rank's file of its state, as it is now."""
        ranks, last = self._ranks, self._copies

        def copied() -> list[str]:
            found, left_out = state.collect(trainer, self._comm)
            self._copies = {}
            for key, value in found.items():
                if is_last and key.startswith(state.NOT_LAST):
                    continue
                # The system takes several times as long to give new memory.
                old = last.get(key)
                if old is None or (old.shape, old.dtype) != (
                        value.shape, value.dtype):
                    old = numpy.empty(value.shape, value.dtype)
                old[...] = value
                self._copies[key] = old
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

        Raises RuntimeError on all ranks if the last one was not written, or a
        warning is an error.
        """
        if self._writing is None:
            return
        (writing, folder, left_out), self._writing = self._writing, None
        wait_until(writing.done)
        error, ranks = writing.exception(), self._ranks
        told = ranks.allgather((
            error and f'{type(error).__name__}: {error}', left_out))
        problem = '; '.join(f'rank {rank}: {text}'
                            for rank, (text, _) in enumerate(told) if text)
        if problem:
            problem = (f'{folder} could not be written ({problem}); older '
                       'snapshots are still there')
            if is_last:
                raise RuntimeError(problem)
        elif self._retain:
            for one in find_snapshots(
                    os.path.dirname(folder) or '.')[:-self._retain]:
                shutil.rmtree(one, ignore_errors=True)
        new = {text for _, texts in told for text in texts} - self._named
        self._named |= new
        _warn(ranks, [*filter(None, [problem]), *(
            f'the training changes {text}, which is in no snapshot: a run '
            'that goes on has it as the script makes it; keep numbers, texts, '
            'arrays, and lists or dictionaries of them'
            for text in sorted(new))], RuntimeError)


def _meet(ranks: MPI.Comm) -> None:
    """Waits until all ranks ask for the first time whether to save."""
    text = 'Snapshot on all ranks (extend every trainer with it)'
    # ChainerMN's communicators never tell other ranks that one has it.
    late = threading.Timer(_LATE, lambda: print(
        f'chainer_fp8pipe: rank {ranks.rank} has waited for {_LATE:.0f} '
        f'seconds for {text}', file=stderr(), flush=True))
    late.daemon = True
    late.start()
    try:
        with waiting(lambda: [Wait(text, world_ranks(ranks))]):
            agree(ranks, {})
    finally:
        late.cancel()


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
        path: The snapshot, or a directory with several: the newest whole one
            counts.
        damaged: ``'aside'`` leaves the trainer as it is, with a warning, where
            none is whole.  A file that cannot be read is always an error.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: On all ranks.  There is no whole snapshot, or it is of
            another model or optimizer, or lacks something: the trainer is as
            it was.  Or a rank cannot restore its part: make the trainer anew.
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
    for folder, number in (found := _seen(ranks, path)).items():
        try:
            saved, exact, parts = _read(
                ranks, folder, number, current, trainer)
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
            f'or another communicator). Model, optimizer and iterators go on, '
            'those over another share of the data at the same share of their '
            'epoch; residuals, codec state and the random numbers of new '
            'ranks start afresh')
    taken = set().union(*ranks.allgather([*filter(state.is_models, saved)]))
    agree(ranks, {}, state.incompatible(saved, current, trainer) or next((
        f'the snapshot has {state.describe(key)}, the model has not'
        for part in parts for key in part.digests
        if state.is_models(key) and key not in taken), ''))
    _warn(ranks, texts)
    raise_together(ranks, lambda: state.restore(saved, trainer, comm),
                   error=ValueError)
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


def _seen(ranks: MPI.Comm, path: str) -> dict[str, int]:
    """The snapshots that any rank sees in a directory, the newest first.

    By their folders: of how many ranks it is; 0: not all files are there.
    """
    own = [os.path.relpath(name, path) for folder in (
        [path] if file.files_in(path) else find_snapshots(path))
        for name in file.files_in(folder)]
    files: dict[str, set[str]] = defaultdict(set)
    for name in {name for names in ranks.allgather(own) for name in names}:
        files[os.path.dirname(name)].add(os.path.basename(name))
    return {os.path.join(path, folder) if folder else path: next((
        ranks for ranks in {int(re.split(r'of|\.', one)[1]) for one in its}
        if its.issuperset(file.names_of(ranks))), 0)
        for folder, its in sorted(
            files.items(), key=lambda item: -iteration_of(item[0]))}


def _read(ranks: MPI.Comm, folder: str, number: int, current: State,
          trainer: training.Trainer
          ) -> tuple[State, bool, list[file.Manifest]]:
    """What this rank needs, whether exactly, and the manifests it is from.

    Raises:
        ValueError: On all ranks: it is not whole, and the message has the name
            of DamagedSnapshot; or it is of another layout, and not all ranks
            see it; or a file cannot be read.
    """
    if not number:
        raise DamagedSnapshot('DamagedSnapshot: files of ranks are not there')
    paths = [os.path.join(folder, name) for name in file.names_of(number)]

    def manifests(some: list[str]) -> list[file.Manifest]:
        return raise_together(ranks, lambda: [
            file.manifest_of(path) for path in some if os.path.exists(path)],
            error=ValueError)
    parts = manifests(paths[ranks.rank:][:number == ranks.size])
    exact = ranks.allreduce(
        bool(parts) and parts[0].digests[state.LAYOUT] == file.digest_of(
            current[state.LAYOUT]), MPI.LAND)
    if not exact:
        parts = manifests(paths)
        agree(ranks, {}, '' if len(parts) == number else (
            f'{folder} is of another layout, and this host sees {len(parts)} '
            f'of its {number} files; give it a disk that all hosts see, or '
            'the ranks, hosts, layers and communicator that it had'))
    if len({name for names in ranks.allgather(
            {part.identity for part in parts}) for name in names}) > 1:
        raise DamagedSnapshot('DamagedSnapshot: files of several snapshots')
    keys = ({ranks.rank: [*parts[0].digests]} if exact
            else state.wanted(parts, ranks.rank, current, trainer))
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
        path: The file, as for ``numpy.savez_compressed``, of the first rank;
            an older file is replaced when the new one is whole.
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
                               else f'{name}.npz', 'wb') as whole:
                numpy.savez_compressed(whole, **{
                    key: value for stage in stages
                    for key, value in stage.items()})
    raise_together(grid.comm, save_all)

"""Snapshots of a whole job, and continuation from them.

Chainer's ``snapshot`` writes the state of one rank.  A run continues exactly
only if every rank gets back its own iterator, random numbers and residuals, so
here each writes a file.  Parameters have the names of the whole model; so a
run can also go on with another number of stages or replicas.
"""
from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import numpy
from chainer import training
from chainer.training import extension
from chainer.training.triggers import IntervalTrigger, ManualScheduleTrigger
from mpi4py import MPI

from ...chains.saving import saving_parts
from ...mpi import all_ranks
from ...mpi.agreement import Attendance, agree, raise_together
from ...mpi.grid import grid_of
from ...mpi.waiting import wait_until
from ...report.record import written_whole
from ..extensions.update_marks import EveryUpdate
from .file import (
    DamagedSnapshot,
    Manifest,
    State,
    file_of,
    find_snapshots,
    folder_of,
    identities,
    iteration_of,
    manifest_of,
    new_identity,
    read,
    remove_others,
    remove_unfinished,
    rename,
    write,
)
from .state import (
    MODEL,
    collect,
    describe,
    fitted,
    incompatible,
    layout,
    lost_rules,
    names_of_communicators,
    note_beginning,
    restore,
    stop_state,
    value_of,
    wanted,
)

_DAMAGED = 'error', 'aside'
#: Seconds for which a training that has failed waits for its own file.
_PATIENCE = 60.0
#: Trainers that have gone on from a snapshot.
_resumed: weakref.WeakSet[Any] = weakref.WeakSet()


class Snapshot(extension.Extension):
    """Writes a snapshot of the whole job.  Add it on all ranks.

    Each rank writes a file, ``snapshot_iter_N.ranks/rank0of4.npz``, beside
    later updates: an update waits for a copy of the rank's state, whose memory
    is kept.  A file gets its name when it is complete and on the disk, and a
    snapshot counts when all of its files are there: no crash leaves half a
    snapshot.  The next snapshot, and the end of the training, wait for the
    last one.  Continue with :func:`resume`.

    ``chainer.serializers.load_npz(FILE, model, 'updater/model:main/')`` loads
    a model: the whole one of replicas, a stage of a pipeline.

    If it cannot be written (disk full, no permission), training goes on with a
    warning of rank 0.  An attribute of a hook, an extension or an iterator
    that the training changes, and that cannot be saved, is named in a warning.

    A snapshot is written every epoch unless ``extend`` gets a trigger, where
    rank 0's trigger fires, and at the end of the training.

    Args:
        comm: The ranks: a ChainerMN communicator, a ``ProcessGrid``, or a
            communicator of mpi4py's.  Residuals are found in it and in the
            communicators of multi-node optimizers.
        retain: How many of the newest snapshots to keep; None: all.  Older
            ones are removed before the next one is begun.
        failures: So many failed snapshots in a row are an error on all ranks,
            at the next snapshot or the end of the training; None: never.
        directory: Of the snapshots, made when it is needed; None: the
            trainer's ``out``.  Hosts may have one of the same name each; they
            must share it for a run that goes on with other ranks.

    Raises:
        ValueError: ``retain`` or ``failures`` is less than 1.
        RuntimeError: After the first update, on the ranks that have the
            extension: others have it not, or a new run finds snapshots, which
            would be mixed with its own.  Later, on all ranks: a value cannot
            be saved, or ``failures`` snapshots in a row were not written.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None,
                 failures: int | None = 3, directory: str | None = None
                 ) -> None:
        for name, number in (('retain', retain), ('failures', failures)):
            if number is not None and number < 1:
                raise ValueError(f'{name} must be at least 1, not {number!r}')
        self._comm, self._retain, self._failures = comm, retain, failures
        self._directory = directory
        self._failed = 0            # in a row
        self._named: set[str] = set()   # attributes in warnings
        self._writing: _Writing | None = None
        self._copies: State = {}
        self._training: _Training | None = None

    def directory(self, trainer: training.Trainer) -> str:
        """Where the snapshots of a trainer are."""
        return trainer.out if self._directory is None else self._directory

    def initialize(self, trainer: training.Trainer) -> None:
        """Begins to take part; sends nothing that another rank waits for."""
        note_beginning(trainer)
        self._training = _Training(trainer, self)

    def __call__(self, trainer: training.Trainer) -> None:
        if self._training is not None:
            self._training.begin()
        self._complete()
        self._begin(trainer)
        if self._training is None:      # outside of a Trainer's loop
            self._complete()

    def finalize(self) -> None:
        """Takes the last snapshot, and waits for it.

        At an end by an error, which the other ranks may not have met, it only
        waits for this rank's file.
        """
        run, self._training = self._training, None
        if run is not None and run.end():
            self._complete()
            if run.trainer.updater.iteration > run.saved:
                self._begin(run.trainer, run.stop)
            self._complete()
        elif self._writing is not None:
            self._writing.join(_PATIENCE)
            self._writing = None
        self._copies = {}

    def _begin(self, trainer: training.Trainer, stop: State | None = None
               ) -> None:
        self._writing = _begin(
            trainer, self._comm, folder_of(self.directory(
                trainer), trainer.updater.iteration), self._copies, stop)
        if self._training is not None:
            self._training.saved = trainer.updater.iteration

    def _complete(self) -> None:
        """Waits for the files of all ranks, and removes older snapshots.

        Raises RuntimeError on all ranks if too many in a row were not
        written, or a warning is an error.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        wait_until(lambda: not writing.is_alive())
        ranks = all_ranks(self._comm)
        problem, left_out = _told(ranks, writing)
        self._failed = self._failed + 1 if problem else 0
        if self._failed and self._failed == self._failures:
            raise RuntimeError(
                f'{self._failed} snapshots in a row could not be written, the '
                f'last with {problem}. Make room, or choose another directory '
                "(the trainer's out), and resume; Snapshot(comm, "
                'failures=None) never ends a run')
        older = [one for one in find_snapshots(
            os.path.dirname(writing.folder) or '.')
            if iteration_of(one) <= iteration_of(writing.folder)]
        if self._retain and not problem:
            for one in older[:-self._retain]:
                shutil.rmtree(one, ignore_errors=True)

        def warn() -> None:
            if ranks.rank:
                return
            if problem:
                whole = [one for one in older if one != writing.folder]
                warnings.warn(
                    f'{writing.folder} could not be written ({problem}); '
                    'training goes on, and ' + (
                        f'{whole[-1]} is still there' if whole else
                        'there is no older snapshot'), stacklevel=5)
            for text in sorted(left_out - self._named):
                warnings.warn(
                    f'the training changes {text}, which is in no snapshot: '
                    'a run that goes on has it as the script makes it; keep '
                    'numbers, texts, arrays, or containers of them',
                    stacklevel=5)
            self._named |= left_out
        raise_together(ranks, warn)


class _Training:
    """A trainer's loop with a :class:`Snapshot` in it, until :meth:`end`."""

    def __init__(self, trainer: training.Trainer, snapshot: Snapshot) -> None:
        self.trainer, self._snapshot = trainer, snapshot
        #: The iterations of its beginning and of its last snapshot.
        self.first = self.saved = trainer.updater.iteration
        self._ranks = all_ranks(snapshot._comm)
        self._attendance: Attendance | None = Attendance(
            self._ranks, 'Snapshot') if self._ranks.size > 1 else None
        self._has_begun = False
        #: The stop trigger's state when it had not been asked.
        self.stop: State = {}
        # Training may be a part of an except block.
        self._handled = sys.exc_info()[1]
        self._own = [(entry, entry.trigger)
                     for entry in trainer._extensions.values()
                     if entry.extension is snapshot]
        for entry, trigger in self._own:
            entry.trigger = Followed(trigger, self._ranks, self._asked)

    def _asked(self) -> None:
        """After each update."""
        self.begin()
        # Before it has ended the training, as it is to end it again.
        self.stop = stop_state(self.trainer)

    def begin(self) -> None:
        """After the first update, when all ranks know who is there."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._attendance is not None:
            self._attendance.settle()
        directory = self._snapshot.directory(self.trainer)
        found = _candidates(self._ranks, directory)

        def make_room() -> None:
            if found and self.first == 0 and self.trainer not in _resumed:
                raise FileExistsError(
                    f'{found[0].folder} is of another run; resume from it, '
                    "move it away, or choose another directory (the trainer's "
                    'out)')
            remove_unfinished(directory)
            for later in found:
                if iteration_of(later.folder) > self.first:
                    later.give_up()
        raise_together(self._ranks, make_room)

    def end(self) -> bool:
        """Whether it has ended well."""
        for entry, trigger in self._own:
            entry.trigger = trigger
        return self._has_begun and sys.exc_info()[1] is self._handled


class Followed:
    """A trigger that fires where rank 0's does; all ranks must ask.

    Clocks differ between ranks, and so may what an extension reports.

    Args:
        own: This rank's trigger.
        comm: The ranks.
        before: Called before each question.
    """

    def __init__(self, own: Any, comm: MPI.Comm,
                 before: Callable[[], None] = lambda: None) -> None:
        self.own, self._comm, self._before = own, comm, before

    def __call__(self, trainer: Any) -> bool:
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
    return type(trigger) in (IntervalTrigger, ManualScheduleTrigger,
                             EveryUpdate, Followed)


# --- writing -----------------------------------------------------------------

class _Writing(threading.Thread):
    """Writes this rank's file beside the training."""

    def __init__(self, folder: str, state: State, left_out: list[str],
                 **about: Any) -> None:
        super().__init__(name='writer of a snapshot', daemon=True)
        self.folder, self.left_out, self.problem = folder, left_out, ''
        self.identity: str = about['identity']
        self._state, self._about = state, about
        try:
            self.start()
        except RuntimeError:        # no more threads
            self.run()

    def run(self) -> None:
        try:
            write(self.folder, self._state, **self._about)
        except Exception as error:      # all ranks are told
            self.problem = f'{type(error).__name__}: {error}'


def _begin(trainer: training.Trainer, comm: Any, folder: str, copies: State,
           stop: State | None = None) -> _Writing:
    """Begins the files of the state of all ranks, as it is now.

    ``stop`` is that of the stop trigger, if it is to be another.

    Values are copied into those of the last time, where they fit, as the
    system takes several times as long to give new memory.
    """
    ranks = all_ranks(comm)

    def copied() -> tuple[list[str], str]:
        state, left_out = collect(trainer, comm)
        state |= stop or {}
        for key in copies.keys() - state.keys():
            del copies[key]
        for key, value in state.items():
            old = copies.get(key)
            if old is not None and (old.shape, old.dtype) == (
                    value.shape, value.dtype):
                old[...] = value
            else:
                copies[key] = numpy.array(value, order='C')
        return left_out, names_of_communicators(trainer, comm)
    left_out, communicator = raise_together(ranks, copied)
    return _Writing(folder, dict(copies), left_out, rank=ranks.rank,
                    ranks=ranks.size, communicator=communicator,
                    identity=ranks.bcast(new_identity()))


def _told(ranks: MPI.Comm, writing: _Writing) -> tuple[str, set[str]]:
    """What was not written on all ranks, and what they have left out."""
    told = ranks.allgather((writing.problem, writing.left_out))
    problem = '; '.join(f'rank {rank}: {text}'
                        for rank, (text, _) in enumerate(told) if text)
    if not problem:
        remove_others(writing.folder, ranks.size, writing.identity)
    return problem, {text for _, texts in told for text in texts}


def save(trainer: training.Trainer, comm: Any, folder: str) -> None:
    """Writes the state of all ranks to a folder; call it on all ranks.

    Raises:
        RuntimeError: A rank could not write, or a value cannot be saved; on
            all ranks.
    """
    writing = _begin(trainer, comm, folder, {})
    wait_until(lambda: not writing.is_alive())
    problem, _ = _told(all_ranks(comm), writing)
    if problem:
        raise RuntimeError(problem)


# --- reading -----------------------------------------------------------------

def resume(trainer: training.Trainer, comm: Any, path: str, *,
           damaged: str = 'error') -> int:
    """Continues from a snapshot; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    With the same number of ranks, the same layers on each, and the same kind
    of communicator, the run goes on exactly, and each rank reads its own file.
    Otherwise model, optimizer, iteration, iterator and extensions go on, and
    every rank must see the files of all, on a disk that hosts share.  Values
    that differed between ranks (statistics of batch normalisation on replicas)
    are the first rank's.  An iterator over a share of the data set goes on at
    the same share of its epoch, in its own order.  Residuals, codec state and
    the random numbers of new ranks start afresh, with a warning of rank 0.

    The snapshot's values of optimizers count, not the script's: a learning
    rate that is to be another one is set after this call.  Extensions are
    initialised with the script's, as with Chainer's snapshots.

    Values are compared with their digests before anything is changed.
    Nothing in a file is run.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks, as for :class:`Snapshot`.
        path: The snapshot, or a directory with several: the newest whole one
            counts.
        damaged: For a directory without a whole snapshot: ``'error'``, or
            ``'aside'``, which renames all to ``NAME.damaged`` with a warning,
            and leaves the trainer as it is.  A file that cannot be read is an
            error in both cases.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: On all ranks.  There is no whole snapshot, or it is of
            another model or optimizer, or lacks something: the trainer is as
            it was.  Or a rank cannot restore its part: make the trainer anew.
    """
    ranks = all_ranks(comm)
    if damaged not in _DAMAGED:
        raise ValueError(f'damaged must be one of {", ".join(_DAMAGED)}, not '
                         f'{damaged!r}')
    note_beginning(trainer)
    current = raise_together(ranks, lambda: collect(trainer, comm)[0],
                             error=ValueError)
    chosen, passed = _newest_whole(
        ranks, path, damaged, current, names_of_communicators(trainer, comm),
        trainer)
    if chosen is None:
        return trainer.updater.iteration
    folder, saved, exact, parts = chosen
    changed = ''
    if not exact:
        saved, changed = fitted(saved, current, parts, ranks.rank)
    taken = set().union(*ranks.allgather(
        [key for key in saved if key.startswith(MODEL)]))
    agree(ranks, {}, incompatible(saved, current, trainer, exact) or next((
        f'the snapshot has {describe(key)}, the model has not'
        for part in parts for key in part.digests
        if key.startswith(MODEL) and value_of(key) not in taken), ''))
    lost = set(ranks.allgather(lost_rules(saved, current))) - {''}

    def warn() -> None:     # a warning may be an error
        if ranks.rank:
            return
        for text in passed:
            warnings.warn(text, stacklevel=6)
        if not exact:
            warnings.warn(
                f'{folder} is of a run with another layout '
                f'({len(parts)} ranks, communicator {parts[0].communicator}). '
                f'Model, optimizer and iterator go on{changed}; residuals and '
                'codec state start afresh' + (
                    '' if ranks.size <= len(parts) else
                    ', and the random numbers of new ranks'), stacklevel=6)
        for text in sorted(lost):
            warnings.warn(text, stacklevel=6)
    raise_together(ranks, warn, error=ValueError)
    raise_together(ranks, lambda: restore(saved, trainer, comm),
                   error=ValueError)
    _resumed.add(trainer)
    go_on(trainer.updater)
    return trainer.updater.iteration


def go_on(updater: Any) -> None:
    """Tells an updater, which has been restored, and its optimizers."""
    for optimizer in updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    if hasattr(updater, 'resumed'):
        updater.resumed()


def _newest_whole(ranks: MPI.Comm, path: str, damaged: str, *given: Any
                  ) -> tuple[Any, list[str]]:
    """What :meth:`_Candidate.read` returns, and what to say of the others.

    None where all are damaged, and have been set aside.
    """
    passed: list[str] = []
    is_unreadable = False
    found = _candidates(ranks, path)
    for one in found:
        try:
            return (one.folder, *one.read(*given)), passed
        except _PassedOver as error:
            is_unreadable |= error.is_unreadable
            passed.append(f'{one.folder} is not whole and is passed over: '
                          f'{error}')
    text = (f'no snapshot in {path} can be gone on from; ' + '; '.join(passed)
            if passed else f'there is no snapshot in {path}')
    if damaged == 'error' or is_unreadable or not passed:
        agree(ranks, {}, text)

    def set_aside() -> None:
        for one in found:
            rename(one.folder, '.damaged')
        if ranks.rank == 0:
            warnings.warn(f'{text}; their names end in .damaged now, and the '
                          'training begins anew', stacklevel=6)
    raise_together(ranks, set_aside, error=ValueError)
    return None, passed


class _PassedOver(Exception):
    """All ranks pass a snapshot over."""

    def __init__(self, text: str, is_unreadable: bool = False) -> None:
        super().__init__(text)
        self.is_unreadable = is_unreadable


class _Candidate:
    """A snapshot of which some rank sees a file; the same on all ranks.

    Args:
        comm: All ranks.
        folder: Where it is.
        seen: By rank, the files that it sees: (rank, ranks, identity).
    """

    def __init__(self, comm: MPI.Comm, folder: str,
                 seen: list[list[tuple[int, int, str]]]) -> None:
        self._comm, self.folder, self._seen = comm, folder, seen

    def read(self, current: State, communicator: str,
             trainer: training.Trainer
             ) -> tuple[State, bool, list[Manifest]]:
        """What this rank needs, whether exactly, and the manifests.

        Those of all files, or only this rank's own.

        Raises:
            _PassedOver: It is not whole; on all ranks.
            ValueError: It is of another layout, and not all ranks see it.
        """
        comm = self._comm
        ranks, identity = self._whole()
        sees = {rank for rank, *rest in self._seen[comm.rank]
                if rest == [ranks, identity]}

        def manifest(rank: int) -> Manifest:
            return manifest_of(file_of(self.folder, rank, ranks))
        own = self._together(lambda: manifest(comm.rank) if (
            comm.rank in sees) else None)
        if comm.allreduce(
                ranks == comm.size and own is not None
                and own.communicator == communicator
                and layout(own.digests) == layout(current), MPI.LAND):
            return (self._together(lambda: read(own, own.digests)), True,
                    [own])
        agree(comm, {}, '' if len(sees) == ranks else (
            f'{self.folder} is of another layout, and this host sees '
            f'{len(sees)} of its {ranks} files; give it a disk that all hosts '
            'see, or the ranks, hosts, layers and communicator that it had'))
        parts = self._together(lambda: [manifest(rank)
                                        for rank in range(ranks)])
        return self._together(lambda: {
            key: value for rank, keys in wanted(
                parts, comm.rank, current, trainer).items()
            for key, value in read(parts[rank], keys).items()}), False, parts

    def give_up(self) -> None:
        """A run goes on from an older one; call it on all ranks."""
        try:
            self._whole()
        except _PassedOver:     # it ended while this one was written
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            rename(self.folder, '.given_up')

    def _whole(self) -> tuple[int, str]:
        """Number of ranks and identity, if each file is seen by some rank."""
        files = {one for seen in self._seen for one in seen}
        lacks = []
        for ranks, identity in sorted({one[1:] for one in files}):
            missing = sorted(set(range(ranks)) - {
                one[0] for one in files if one[1:] == (ranks, identity)})
            if not missing:
                return ranks, identity
            lacks.append(f'rank{"s"[:len(missing) - 1]} '
                         f'{", ".join(map(str, missing))} of {ranks}')
        raise _PassedOver('the file of ' + ', '.join(lacks) + ' is not there'
                          if lacks else 'there is no file in it')

    def _together(self, action: Callable[[], Any]) -> Any:
        result, problem, is_unreadable = None, '', False
        try:
            result = action()
        except Exception as error:
            problem = f'{error}'
            is_unreadable = not isinstance(error, DamagedSnapshot)
        told = self._comm.allgather((problem, is_unreadable))
        for rank, (text, _) in enumerate(told):
            if text:
                raise _PassedOver(f'rank {rank}: {text}',
                                  any(flag for _, flag in told))
        return result


def _candidates(ranks: MPI.Comm, path: str) -> list[_Candidate]:
    """The snapshots that any rank sees, the newest first."""
    folders = [path] if iteration_of(path) >= 0 or os.path.exists(
        path) and identities(path) else find_snapshots(path)
    told = ranks.allgather({
        os.path.basename(os.path.normpath(one)): identities(one)
        for one in folders})
    names = sorted({name for seen in told for name in seen},
                   key=lambda name: (iteration_of(name), name), reverse=True)
    alone = ranks.bcast(folders == [path])
    return [_Candidate(ranks, path if alone else os.path.join(path, name),
                       [seen.get(name, []) for seen in told])
            for name in names]


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

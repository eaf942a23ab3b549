"""Snapshots of a whole job in one file, and exact continuation from them.

Chainer's ``snapshot`` writes what one rank knows.  A run continues exactly
only if every rank gets back its own iterator, random numbers and residuals,
so this one gathers all ranks.  What is equal on all ranks (parameters,
optimizer) is written once.

Layout of the file, an ordinary ``.npz``: ``all/KEY`` as rank 0 has it,
``rank3/KEY`` where rank 3 differs, ``rank3/`` with the keys that rank 3 has
not, ``meta/KEY`` about the job.  A key is what Chainer's serializer or
:mod:`.job_state` calls a value.
"""
from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pickle
import re
import zipfile
from typing import Any

import chainer
import numpy
from chainer.training import extension

from ...allreduce import Signature, agree, raise_together
from .job_state import State, below, collect, incompatible, restore

_FILENAME = 'snapshot_iter_{}.npz'
_LACKS = ''


class Snapshot(extension.Extension):
    """Writes ``snapshot_iter_N.npz`` for the whole job.  Add it on all ranks.

    Rank 0 writes, to a temporary file that is renamed when it is complete,
    so that no crash leaves half a snapshot or takes an older one.  Continue
    with :func:`resume`.

    Its trigger is every epoch unless ``extend`` is told otherwise.

    Args:
        comm: The ranks' communicator.
        retain: How many of the newest snapshots to keep; None: all.

    Raises:
        ValueError: ``retain`` is less than 1.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None) -> None:
        if retain is not None and retain < 1:
            raise ValueError(f'retain must be at least 1, not {retain!r}')
        self._comm = comm
        self._retain = retain

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Refuses to mix a new run's snapshots with those of an old one.

        Raises:
            RuntimeError: The run starts at iteration 0 and there are
                snapshots in its directory; on all ranks.
        """
        def look() -> None:
            if self._comm.rank == 0 and trainer.updater.iteration == 0:
                found = find_snapshots(trainer.out)
                if found:
                    raise FileExistsError(
                        f'{found[-1]} is of another run; resume from it, move '
                        "it away, or choose another directory (the trainer's "
                        'out)')
        raise_together(self._comm.mpi_comm, look)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        name = _FILENAME.format(trainer.updater.iteration)
        save(trainer, self._comm, os.path.join(trainer.out, name))
        if self._retain and self._comm.rank == 0:
            for path in find_snapshots(trainer.out)[:-self._retain]:
                os.remove(path)


def save(trainer: chainer.training.Trainer, comm: Any, path: str) -> None:
    """Writes the state of all ranks to ``path``; call it on all ranks.

    Raises:
        RuntimeError: Rank 0 could not write, on all ranks.  What was at
            ``path`` before is still there.
    """
    state = collect(trainer, comm)
    if comm.rank:
        known = comm.mpi_comm.bcast(None)
        own = {key: value for key, value in state.items()
               if known.get(key) != _digest(value)}
        own[_LACKS] = numpy.array(sorted(set(known) - set(state)), str)
        comm.mpi_comm.send(own, 0)
        raise_together(comm.mpi_comm, lambda: None)
        return
    comm.mpi_comm.bcast({key: _digest(value)
                         for key, value in state.items()})
    ranks = _Ranks(comm)
    problem: list[Exception] = []
    try:
        _write(path, _meta(comm), state, ranks)
    except OSError as error:
        problem.append(error)
    ranks.drain()           # or the others would wait in send for ever

    def outcome() -> None:
        if problem:
            raise problem[0]
    raise_together(comm.mpi_comm, outcome)


def resume(trainer: chainer.training.Trainer, comm: Any, path: str) -> int:
    """Continues from a snapshot exactly; call it on all ranks.

    Call it after all extensions were added, before ``trainer.run()``.

    Args:
        trainer: Built as for the run that was interrupted.
        comm: The ranks' communicator, as many and of the same kind.
        path: The snapshot, or a directory, of which the newest is taken.
            Only rank 0 reads it.

    Returns:
        The iteration at which training goes on.

    Raises:
        ValueError: There is no snapshot, it is damaged, or it is of another
            model, communicator or number of ranks.  On all ranks, and
            before anything is changed: trainer and file are as they were.
    """
    saved = _receive(comm, path)
    agree(comm.mpi_comm, Signature({}),
          incompatible(saved, collect(trainer, comm)))
    restore(saved, trainer, comm)
    for optimizer in trainer.updater.get_all_optimizers().values():
        if hasattr(optimizer, 'target_params'):
            # ChainerMN's optimizer spends its first update on a broadcast
            # unless it has seen these parameters; all ranks have them.
            optimizer.is_changed(optimizer.target)
    return trainer.updater.iteration


def find_snapshots(directory: str) -> list[str]:
    """The snapshots in a directory, oldest iteration first."""
    pattern = re.escape(_FILENAME).replace(r'\{\}', r'(\d+)')
    found = []
    for path in glob.glob(os.path.join(glob.escape(directory), '*')):
        match = re.fullmatch(pattern, os.path.basename(path))
        if match:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


# --- writing ------------------------------------------------------------

class _Ranks:
    """The other ranks' states, received one at a time to save memory."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm.mpi_comm
        self._next = 1

    def __iter__(self) -> _Ranks:
        return self

    def __next__(self) -> tuple[int, State]:
        if self._next == self._comm.size:
            raise StopIteration
        rank = self._next
        self._next += 1
        return rank, self._comm.recv(source=rank)

    def drain(self) -> None:
        for _ in self:
            pass


def _write(path: str, meta: State, state: State, others: _Ranks) -> None:
    directory = os.path.dirname(path) or '.'
    os.makedirs(directory, exist_ok=True)
    # A name of its own, so that a killed run leaves no more than one.
    temporary = os.path.join(directory, 'snapshot.partial')
    try:
        with open(temporary, 'wb') as file:
            with zipfile.ZipFile(file, 'w') as archive:
                _add(archive, 'all/', state)
                for rank, own in others:
                    _add(archive, f'rank{rank}/', own)
                _add(archive, 'meta/', meta)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _add(archive: zipfile.ZipFile, prefix: str, state: State) -> None:
    for key, value in state.items():
        with archive.open(f'{prefix}{key}.npy', 'w',
                          force_zip64=True) as member:
            numpy.lib.format.write_array(member, value, allow_pickle=True)


def _digest(value: numpy.ndarray) -> bytes:
    digest = hashlib.blake2b(f'{value.dtype} {value.shape}'.encode())
    if value.dtype == object:
        digest.update(pickle.dumps(value.tolist()))
    else:
        flat = numpy.ascontiguousarray(value).reshape(-1)
        digest.update(flat.view(numpy.uint8).data)
    return digest.digest()


def _meta(comm: Any) -> State:
    return {'ranks': numpy.asarray(comm.size),
            'communicator': numpy.asarray(
                getattr(comm, 'name', type(comm).__name__))}


# --- reading ------------------------------------------------------------

def _receive(comm: Any, path: str) -> State:
    """This rank's state, from what rank 0 finds in the file."""
    content = raise_together(
        comm.mpi_comm, lambda: _read(path, _meta(comm)) if comm.rank == 0
        else None, error=ValueError)
    shared = comm.bcast_obj(content[0] if comm.rank == 0 else None)
    own = comm.mpi_comm.scatter(content[1] if comm.rank == 0 else None)
    lacks = set(own.pop(_LACKS, numpy.array([], str)).tolist())
    return {**{key: value for key, value in shared.items()
               if key not in lacks}, **own}


def _read(path: str, meta: State) -> tuple[State, list[State]]:
    if os.path.isdir(path):
        found = find_snapshots(path)
        if not found:
            raise FileNotFoundError(f'there is no snapshot in {path}')
        path = found[-1]
    try:
        with numpy.load(path, allow_pickle=True) as archive:
            content = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f'{path} is damaged or no snapshot ({error}); resume from an '
            'older one') from error
    saved = below('meta/', content)
    if saved.keys() != meta.keys():
        raise ValueError(f'{path} was not written by the Snapshot extension '
                         'of chainer_fp8pipe')
    for key, now in meta.items():
        if saved[key] != now:
            raise ValueError(
                f'{path} is of a run with {key} = {saved[key]}, this one has '
                f'{key} = {now}; start it with the same')
    ranks = range(int(meta['ranks']))
    return (below('all/', content),
            [below(f'rank{rank}/', content) for rank in ranks])

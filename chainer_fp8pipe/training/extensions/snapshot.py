"""Snapshots of a whole job in one file, and exact continuation from them.

Chainer's ``snapshot`` writes what one rank knows.  A run continues exactly
only if every rank gets back its own iterator, random numbers and residuals,
so this one gathers all ranks.  What is equal on all ranks (parameters,
optimizer) is written once.

Layout of the file, an ordinary ``.npz``: ``all/KEY`` as rank 0 has it,
``rank3/KEY`` where rank 3 differs, ``meta/KEY`` about the job.  A key is what Chainer's
serializer calls a value of the trainer, below ``trainer/``, or this
package's own below ``communicator/`` and ``random/``.
"""
from __future__ import annotations

import glob
import hashlib
import os
import random
import re
import tempfile
import zipfile
from typing import Any

import chainer
import numpy
from chainer.training import extension

from ...allreduce import Signature, agree, raise_together

State = dict[str, numpy.ndarray]
_FILENAME = 'snapshot_iter_{}.npz'
_MODEL = 'trainer/updater/model:'


class Snapshot(extension.Extension):
    """Writes ``snapshot_iter_N.npz`` for the whole job.  Add it on all ranks.

    Rank 0 writes, to a temporary file that is renamed when it is complete,
    so that no crash leaves half a snapshot or takes an older one.  Continue
    with :func:`resume`.

    Args:
        comm: The ranks' communicator.
        retain: How many of the newest snapshots to keep; None: all.
    """

    trigger = 1, 'epoch'
    priority = -100         # after the extensions whose state is saved
    default_name = 'Snapshot'

    def __init__(self, comm: Any, retain: int | None = None) -> None:
        if retain is not None and retain < 1:
            raise ValueError(f'retain must be at least 1, not {retain!r}')
        self._comm = comm
        self._retain = retain

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
    state = _state(trainer, comm)
    if comm.rank:
        known = comm.mpi_comm.bcast(None)
        comm.mpi_comm.send({key: value for key, value in state.items()
                            if known.get(key) != _digest(value)}, 0)
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
    shared, own = _receive(comm, path)
    saved = {**shared, **own}
    agree(comm.mpi_comm, Signature({}),
          _incompatible(saved, _state(trainer, comm)))
    deserializer = chainer.serializers.NpzDeserializer(saved)
    trainer.serialize(deserializer['trainer'])
    if hasattr(comm, 'load_state'):
        comm.load_state(_below('communicator/', saved))
    _set_random_state(_below('random/', saved))
    for optimizer in trainer.updater.get_all_optimizers().values():
        if hasattr(optimizer, 'is_changed'):
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


# --- writing ------------------------------------------------------------------

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
    handle, temporary = tempfile.mkstemp('.partial', dir=directory)
    try:
        with os.fdopen(handle, 'wb') as file:
            with zipfile.ZipFile(file, 'w') as archive:
                _add(archive, 'all/', state)
                for rank, own in others:
                    _add(archive, f'rank{rank}/', own)
                _add(archive, 'meta/', meta)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.remove(temporary)
        raise


def _add(archive: zipfile.ZipFile, prefix: str, state: State) -> None:
    for key, value in state.items():
        with archive.open(f'{prefix}{key}.npy', 'w',
                          force_zip64=True) as member:
            numpy.lib.format.write_array(member, value, allow_pickle=True)


def _digest(value: numpy.ndarray) -> bytes:
    if value.dtype == object:
        data = repr(value.tolist()).encode()
    else:
        data = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    described = f'{value.dtype} {value.shape}'.encode()
    return hashlib.blake2b(data, digest_size=16).digest() + described


def _meta(comm: Any) -> State:
    return {'ranks': numpy.asarray(comm.size),
            'communicator': numpy.asarray(
                getattr(comm, 'name', type(comm).__name__))}


def _state(trainer: chainer.training.Trainer, comm: Any) -> State:
    serializer = chainer.serializers.DictionarySerializer()
    try:
        trainer.serialize(serializer['trainer'])
    except RuntimeError:
        # The last thing it writes is the time since its start; one that has
        # not started raises there.
        if trainer._start_at is not None:
            raise
        serializer('trainer/_snapshot_elapsed_time', 0.0)
    state = {key: numpy.asarray(value)
             for key, value in serializer.target.items()}
    if hasattr(comm, 'state'):
        for key, value in comm.state().items():
            state[f'communicator/{key}'] = value
    for key, value in _random_state().items():
        state[f'random/{key}'] = value
    return state


# --- reading ------------------------------------------------------------------

def _receive(comm: Any, path: str) -> tuple[State, State]:
    """What rank 0 finds in the file: all ranks' part and this rank's."""
    content = raise_together(
        comm.mpi_comm, lambda: _read(path, _meta(comm)) if comm.rank == 0
        else None, error=ValueError)
    shared = comm.bcast_obj(content[0] if comm.rank == 0 else None)
    own = comm.mpi_comm.scatter(content[1] if comm.rank == 0 else None)
    return shared, own


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
    saved = _below('meta/', content)
    if saved.keys() != meta.keys():
        raise ValueError(f'{path} was not written by the Snapshot extension '
                         'of chainer_fp8pipe')
    for key, now in meta.items():
        if saved[key] != now:
            raise ValueError(
                f'{path} is of a run with {key} = {saved[key]}, this one has '
                f'{key} = {now}; start it with the same')
    ranks = range(int(meta['ranks']))
    return (_below('all/', content),
            [_below(f'rank{rank}/', content) for rank in ranks])


def _incompatible(saved: State, current: State) -> str:
    """Why ``saved`` does not fit; '' if it does."""
    for key in current:
        if key.startswith('trainer/') and key not in saved:
            return f'{_name(key)} is not in the snapshot'
    for key, value in saved.items():
        if key.startswith(_MODEL):
            if key not in current:
                return f'the snapshot has {_name(key)}, the model has not'
            now = current[key]
            if (now.dtype != object and value.dtype != object
                    and (now.shape, now.dtype) != (value.shape, value.dtype)):
                return (f'{_name(key)} is {value.dtype} {value.shape} in the '
                        f'snapshot but {now.dtype} {now.shape} in the model')
    return ''


def _name(key: str) -> str:
    if key.startswith(_MODEL):
        return 'parameter /' + key[len(_MODEL):].partition('/')[2]
    return key


def _below(prefix: str, state: State) -> State:
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


# --- random numbers -------------------------------------------------------------

def _random_state() -> State:
    """Of NumPy's and Python's global generators, which Chainer draws from."""
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    version, words, gauss = random.getstate()
    return {'numpy_keys': numpy.asarray(keys),
            'numpy_rest': numpy.array([position, has_gauss, cached]),
            'python_words': numpy.array(words, numpy.uint32),
            'python_gauss': numpy.array(
                [numpy.nan if gauss is None else gauss])}


def _set_random_state(state: State) -> None:
    position, has_gauss, cached = state['numpy_rest'].tolist()
    numpy.random.set_state(('MT19937', state['numpy_keys'], int(position),
                            int(has_gauss), cached))
    gauss = state['python_gauss'].item()
    random.setstate((3, tuple(state['python_words'].tolist()),
                     None if numpy.isnan(gauss) else gauss))

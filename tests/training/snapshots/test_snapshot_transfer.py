import contextlib

from chainer_fp8pipe.training.snapshots import snapshot_file
from chainer_fp8pipe.training.snapshots.snapshot_file import opened
from chainer_fp8pipe.training.snapshots.snapshot_transfer import read, write

import numpy
import pytest

from tests.ranks import on_ranks


class Counting:
    """A communicator that remembers what its rank was sent."""

    def __init__(self, comm):
        self._comm = comm
        self.received = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def recv(self, *arguments, **options):
        self.received.append(self._comm.recv(*arguments, **options))
        return self.received[-1]

    def bcast(self, value, root=0):
        value = self._comm.bcast(value, root)
        if self._comm.rank != root:
            self.received.append(value)
        return value

    def bytes_received(self):
        """Of arrays: alone, or after the names of their members."""
        arrays = [value[1] if isinstance(value, tuple) else value
                  for value in self.received]
        return sum(array.nbytes for array in arrays)


def state_of(rank):
    """Stages of two ranks each: 0 and 2, 1 and 3."""
    stage = rank % 2
    return {'shared': numpy.arange(5), 'own': numpy.full(7, rank),
            f'layer{stage}': numpy.full(100, stage)}


def wishes(comm, path, names):
    with opened(path) as content:
        index = content.index
    return index, numpy.array([key in names for key in index.keys], bool)


def load(comm, path, names, exact):
    index, wanted = wishes(comm, path, names)
    with opened(path) if comm.rank == 0 else (
            contextlib.nullcontext()) as content:
        return read(comm, content, index, wanted, lambda key: exact)


@pytest.mark.parametrize('exact', [True, False])
@on_ranks(1, 4)
def test_every_rank_gets_what_it_wants_and_nothing_else(
        comm, exact, tmp_path):
    path, state = str(tmp_path / 'x.npz'), state_of(comm.rank)
    write(comm, path, state, 'none')
    counting = Counting(comm)
    found = load(counting, path, set(state), exact)
    assert found.keys() == state.keys()
    for key, value in found.items():
        # If not exact, what differs is the first rank's.
        assert value.tolist() == (
            [0] * 7 if key == 'own' and not exact else state[key].tolist())
    if comm.rank:
        wanted = sum(value.nbytes for value in state.values())
        # and a list of one byte per key
        assert counting.bytes_received() == wanted + comm.bcast(None)
    else:
        comm.bcast(len(wishes(comm, path, {})[1]))


@contextlib.contextmanager
def full_after(members):
    """A disk that has room for so many members of a file."""
    written, original = [], snapshot_file._write_member

    def fail(*arguments):
        written.append(1)
        if len(written) > members:
            raise OSError('disk full')
        return original(*arguments)
    snapshot_file._write_member = fail
    try:
        yield
    finally:
        snapshot_file._write_member = original


@pytest.mark.parametrize('call', [0, 2, 4])
@on_ranks(4)
def test_a_disk_that_is_full_is_an_error_on_all_ranks(comm, call, tmp_path):
    path = tmp_path / 'x.npz'
    write(comm, str(path), state_of(comm.rank), 'none')
    before = path.read_bytes()
    with full_after(call), pytest.raises(
            RuntimeError, match='rank 0: OSError: disk full'):
        write(comm, str(path), {'new': numpy.zeros(3),
                                **state_of(comm.rank)}, 'none')
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    # No message is left over to be taken for another one.
    write(comm, str(path), state_of(comm.rank), 'none')
    found = load(comm, str(path), set(state_of(comm.rank)), True)
    for key, value in state_of(comm.rank).items():
        assert found[key].tolist() == value.tolist()


@on_ranks(4)
def test_a_value_that_cannot_be_saved_is_an_error_on_all_ranks(
        comm, tmp_path):
    state = state_of(comm.rank)
    if comm.rank == 2:
        state['function'] = numpy.array(lambda: None)
    with pytest.raises(RuntimeError, match='rank 2: .*function cannot be '
                       'saved: .*class function'):
        write(comm, str(tmp_path / 'x.npz'), state, 'none')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('keys', [['shared'], ['layer1'],
                                  ['shared', 'layer1']])
@on_ranks(4)
def test_a_damaged_value_is_an_error_on_all_ranks(comm, keys, tmp_path):
    path = tmp_path / 'x.npz'
    write(comm, str(path), state_of(comm.rank), 'none')
    if comm.rank == 0:
        content = bytearray(path.read_bytes())
        for key in keys:
            content[content.index(f'all/{key}.npy'.encode()) + 200] ^= 1
        path.write_bytes(content)
    comm.Barrier()
    with pytest.raises(ValueError, match='rank 0: .*x.npz is damaged .*'
                       f'{keys[0]}'):
        load(comm, str(path), state_of(comm.rank), True)
    assert load(comm, str(path), {'own'}, True)['own'].tolist() == [
        comm.rank] * 7

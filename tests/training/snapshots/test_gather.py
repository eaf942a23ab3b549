import threading

from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.training.snapshots import file, gather
from chainer_fp8pipe.training.snapshots.file import _JSON as JSON, Content, prepared
from chainer_fp8pipe.training.snapshots.gather import SnapshotWriting

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


def test_a_copy_does_not_change_with_its_array():
    array = numpy.arange(6.0).reshape(2, 3).T
    values = prepared({'a': array, 'b': numpy.array(None)}, {})
    array[:] = 0
    assert values['a'].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert values['a'].flags.c_contiguous
    assert values['b'].dtype == JSON
    assert values['b'].tobytes() == b'null'


def test_a_value_that_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match='trainer/x cannot be saved: .*class '
                       'set; serialize arrays, numbers, texts'):
        prepared({'trainer/x': numpy.array({1})})


@on_ranks(1, 3)
def test_values_arrive_piece_by_piece(comm, tmp_path):
    """Rank 0 holds no more than two windows of those of others."""
    state = {'large': numpy.arange(1000) + comm.rank,
             'none': numpy.zeros((0, comm.rank)),
             'shared': numpy.arange(10),
             **{f'small{number}': numpy.full(number, comm.rank, 'i1')
                for number in range(9)}}
    original, gather.WINDOW = gather.WINDOW, 512
    try:
        writing = SnapshotWriting(comm, str(tmp_path / 'x.npz'),
                                  prepared(state), 'none')
        waiting = []

        def step():
            if writing._writer:
                waiting.append(writing._writer.waiting)
            return writing.step()
        wait_until(step)
        writing.free()
    finally:
        gather.WINDOW = original
    assert writing.problem == ''
    # Before that are rank 0's own, which are there anyway.
    own = sum(value.nbytes for value in state.values())
    assert comm.rank or max(waiting) <= own + 2 * 8000
    comm.Barrier()
    with Content(str(tmp_path / 'x.npz')) as content:
        content.check()
        for key, value in state.items():
            found = content.read(content.index.name(key, comm.rank))
            assert found.dtype == value.dtype
            assert found.tolist() == value.tolist()


class Stuck:
    """A disk at which a file waits, with all values, for :meth:`go_on`."""

    def __init__(self, comm, path):
        self._write, may_go = file.write, threading.Event()
        self.go_on, has_all = may_go.set, threading.Event()

        def write(path, members, *given):
            members = list(members)
            has_all.set()
            may_go.wait(60)
            self._write(path, members, *given)
        file.write = write
        self.writing = SnapshotWriting(
            comm, path, prepared({'a': numpy.full(1000, comm.rank)}), 'none')
        while not comm.bcast(has_all.is_set()):
            self.writing.step()

    def __enter__(self):
        return self.writing

    def __exit__(self, *_):
        self.go_on()
        file.write = self._write


@on_ranks(2)
def test_a_rank_that_ends_alone_does_not_wait_for_the_others_disk(
        comm, tmp_path):
    with Stuck(comm, str(tmp_path / 'x.npz')) as writing:
        if comm.rank == 1:
            assert not writing.step_at_an_error(lambda: 0.0)
            assert writing.step_at_an_error(lambda: 1.0)    # second
        comm.Barrier()


@on_ranks(3)
def test_ranks_that_all_end_complete_the_file_however_long_it_takes(
        comm, tmp_path):
    disk, now = Stuck(comm, str(tmp_path / 'x.npz')), 0
    with disk as writing:
        # So long until all have heard that all end.
        while not comm.allreduce(writing._all_end is not None
                                 and writing._all_end.Test(), MPI.LAND):
            assert not writing.step_at_an_error(lambda: now)
        now = 1e9
        assert not writing.step_at_an_error(lambda: now)
        comm.Barrier()
        disk.go_on()
        wait_until(lambda: writing.step_at_an_error(lambda: now))
    assert writing.problem == ''
    writing.free()
    with Content(str(tmp_path / 'x.npz')) as content:
        content.check()


def test_a_file_that_is_given_up_ends_in_the_middle_of_a_value(tmp_path):
    """Of 30 pieces; the disk holds the tenth."""
    pieces, may_go = [], threading.Event()
    original = file.write

    def write(path, members, communicator, ranks, owners, check):
        def check_piece():
            pieces.append(check)
            if len(pieces) == 10:
                may_go.wait(60)
            check()
        original(path, members, communicator, ranks, owners, check_piece)
    file.write = write
    try:
        writer = gather._FileWriter(
            str(tmp_path / 'x.npz'), 'none', 1, {'a': [0]}, lambda: None)
        value = numpy.zeros(30 << 17)
        writer.put(file.Member(
            'all/a', value, file.entry_of(value)))
        while len(pieces) < 10:
            pass
        assert [path.name for path in tmp_path.iterdir()] == [
            'snapshot.partial']
        writer.give_up()        # which does not wait for the disk
        may_go.set()
        writer.thread.join(60)
    finally:
        file.write = original
        may_go.set()
    assert len(pieces) == 10
    assert list(tmp_path.iterdir()) == []


# --- reading -----------------------------------------------------------------

def state_of(rank):
    """Stages of two ranks each: 0 and 2, 1 and 3."""
    stage = rank % 2
    return {'shared': numpy.arange(5), 'own': numpy.full(7, rank),
            f'layer{stage}': numpy.full(100, stage)}


def write(comm, path, state):
    writing = SnapshotWriting(comm, path, prepared(state), 'none')
    wait_until(writing.step)
    writing.free()
    assert not writing.problem
    comm.Barrier()


def load(comm, path, names, exact):
    with Content(path) as content:
        index = content.index
        wanted = numpy.array([key in names for key in index.keys], bool)
        return gather.read(comm, None if comm.rank else content, index,
                           wanted, lambda key: exact)


@pytest.mark.parametrize('exact', [True, False])
@on_ranks(1, 4)
def test_every_rank_gets_what_it_wants_and_nothing_else(
        comm, exact, tmp_path):
    path, state = str(tmp_path / 'x.npz'), state_of(comm.rank)
    write(comm, path, state)
    found = load(comm, path, set(state), exact)
    assert found.keys() == state.keys()
    for key, value in found.items():
        # If not exact, what differs is the first rank's.
        assert value.tolist() == (
            [0] * 7 if key == 'own' and not exact else state[key].tolist())


@pytest.mark.parametrize('keys', [['shared'], ['layer1'],
                                  ['shared', 'layer1']])
@on_ranks(4)
def test_a_damaged_value_is_an_error_on_all_ranks(comm, keys, tmp_path):
    path = tmp_path / 'x.npz'
    write(comm, str(path), state_of(comm.rank))
    if comm.rank == 0:
        content = bytearray(path.read_bytes())
        for key in keys:
            content[content.index(f'all/{key}.npy'.encode()) + 200] ^= 1
        path.write_bytes(content)
    comm.Barrier()
    with pytest.raises(ValueError, match='rank 0: .*x.npz is damaged'):
        load(comm, str(path), state_of(comm.rank), True)
    # No message is left over to be taken for another one.
    assert load(comm, str(path), {'own'}, True)['own'].tolist() == [
        comm.rank] * 7

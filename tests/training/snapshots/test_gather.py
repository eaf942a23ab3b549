"""Values of all ranks on their way to the file, and back."""
import threading

from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.training.snapshots import file, gather
from chainer_fp8pipe.training.snapshots.file import JSON, Content, prepared
from chainer_fp8pipe.training.snapshots.gather import (
    Entry,
    SnapshotWriting,
    plan,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    with pytest.raises(TypeError, match='trainer/x cannot be saved: .*class '
                       'set; serialize arrays, numbers, texts'):
        prepared({'trainer/x': numpy.array({1})})


@given(st.lists(st.dictionaries(
    st.sampled_from('abcde'), st.sampled_from('012').map(
        lambda text: Entry(text, 4))), min_size=1, max_size=5))
def test_every_rank_can_be_put_together_from_what_is_written(tables):
    owners, sent = plan(tables)
    written = {}
    for rank, names in enumerate(sent):
        for key, name in names.items():
            assert name not in written
            written[name] = tables[rank][key]
    for rank, table in enumerate(tables):
        assert table == {
            key: written.get(f'rank{rank}/{key}', written[f'all/{key}'])
            for key, ranks in owners.items() if rank in ranks}
    # What the first rank has is not written again.
    assert all(entry != written[f'all/{name.partition("/")[2]}']
               for name, entry in written.items() if name[:3] != 'all')


@on_ranks(3)
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
            first = next(members)
            has_all.set()
            may_go.wait(60)
            self._write(path, (one for part in ([first], members)
                               for one in part), *given)
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


@pytest.mark.parametrize('alone', [0, 1])
@on_ranks(2)
def test_a_rank_that_ends_alone_does_not_wait_for_the_others_disk(
        comm, alone, tmp_path):
    """And no half file is left."""
    with Stuck(comm, str(tmp_path / 'x.npz')) as writing:
        if comm.rank == alone:
            assert not writing.step_at_an_error(lambda: 0.0)
            assert writing.step_at_an_error(lambda: 1.0)    # second
        comm.Barrier()
    if comm.rank == 0:
        writing._give_up()
        writing._writer.join(60)
        assert not list(tmp_path.iterdir())


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


# --- reading -----------------------------------------------------------------

def state_of(rank):
    """Stages of two ranks each: 0 and 2, 1 and 3."""
    stage = rank % 2
    return {'shared': numpy.arange(5), 'own': numpy.full(7, rank),
            f'layer{stage}': numpy.full(100, stage)}


def load(comm, path, names, exact):
    with Content(path) as content:
        index = content.index
        wishes = numpy.array([
            (gather.OWN if exact else gather.FIRST) * (key in names)
            for key in index.owners])
        return gather.read(comm, None if comm.rank else content, index,
                           wishes)


@on_ranks(4)
def test_every_rank_reads_what_it_wants_or_all_raise(comm, tmp_path):
    path, state = tmp_path / 'x.npz', state_of(comm.rank)
    writing = SnapshotWriting(comm, str(path), prepared(state), 'none')
    wait_until(writing.step)
    writing.free()
    comm.Barrier()
    for exact in True, False:
        found = load(comm, str(path), set(state), exact)
        assert found.keys() == state.keys()
        for key, value in found.items():
            # If not exact, what differs is the first rank's.
            assert value.tolist() == (
                [0] * 7 if key == 'own' and not exact
                else state[key].tolist())
    for damaged in ('shared', 'layer0'):
        content = path.read_bytes()
        place = content.index(f'all/{damaged}.npy'.encode()) + 200
        comm.Barrier()
        if comm.rank == 0:
            path.write_bytes(content[:place] + b'?' + content[place + 1:])
        comm.Barrier()
        with pytest.raises(ValueError, match='.*x.npz is damaged'):
            load(comm, str(path), state, True)
        # No message is left over to be taken for another one.
        assert load(comm, str(path), {'own'}, True)['own'].tolist() == [
            comm.rank] * 7
        comm.Barrier()

"""Snapshots that are written while training goes on, or cannot be."""
import contextlib
import os
import shutil
import threading
import warnings

from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.snapshots import file as snapshot_file
from chainer_fp8pipe.training.snapshots import gather
from chainer_fp8pipe.training.snapshots.snapshot import save

import chainer
import numpy
import pytest

from tests.ranks import on_ranks

from ..trainers import make_trainer, names, weights


class Held:
    """A disk on which a file gets no further until it is let go."""

    def __init__(self):
        self._write, self._may_go = snapshot_file.write, threading.Event()

    def __enter__(self):
        def write(path, *given):
            self._may_go.wait(60)
            self._write(path, *given)
        snapshot_file.write = write
        return self

    def let_go(self):
        self._may_go.set()

    def __exit__(self, *_):
        self.let_go()
        snapshot_file.write = self._write


@contextlib.contextmanager
def no_room(when):
    """A disk that is full at those calls, which are counted from 0."""
    calls, original = [], snapshot_file.write

    def write(path, *given):
        calls.append(path)
        if when(len(calls) - 1):
            raise OSError(28, 'No space left on device')
        original(path, *given)
    snapshot_file.write = write
    try:
        yield
    finally:
        snapshot_file.write = original


@contextlib.contextmanager
def silent():
    """No warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def make(comm, out, last, every=3, **options):
    trainer, communicator = make_trainer(comm, out)
    trainer.stop_trigger = chainer.training.get_trigger((last, 'iteration'))
    snapshot = Snapshot(communicator, **options)
    trainer.extend(snapshot, trigger=(every, 'iteration'))
    return trainer, communicator


def at(trainer, iteration, action):
    """Does something after an update, after the extensions."""
    trainer.extend(lambda trainer: action(), name=f'at {iteration}',
                   trigger=lambda trainer: (
                       trainer.updater.iteration == iteration), priority=-200)


@on_ranks(1, 3)
def test_training_goes_on_while_the_file_is_written(comm, tmp_path):
    """And the file has the values of the update at which it was begun."""
    save_at_3, communicator = make(comm, tmp_path / 'waiting', 4, every=9)
    at(save_at_3, 3, lambda: save(
        save_at_3, communicator, str(tmp_path / 'expected.npz')))
    save_at_3.run()
    trainer, _ = make(comm, tmp_path / 'beside', 5)
    seen = []
    with Held() as disk:
        at(trainer, 4, lambda: seen.append(names(tmp_path / 'beside')))
        at(trainer, 5, disk.let_go)
        trainer.run()
    assert seen == [[]]
    if comm.rank == 0:
        found, expected = (dict(numpy.load(path)) for path in (
            tmp_path / 'beside/snapshot_iter_3.npz',
            tmp_path / 'expected.npz'))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if 'elapsed' not in key and not key.startswith('meta/'):
                assert (numpy.asarray(found[key]).tobytes()
                        == numpy.asarray(value).tobytes()), key


@on_ranks(2)
def test_the_next_snapshot_waits_for_the_last(comm, tmp_path):
    trainer, _ = make(comm, tmp_path, 6)
    seen = []
    with Held() as disk:
        at(trainer, 5, disk.let_go)
        at(trainer, 6, lambda: seen.append(names(tmp_path)))
        trainer.run()
    comm.Barrier()
    assert seen == [['snapshot_iter_3.npz']]
    assert names(tmp_path) == ['snapshot_iter_3.npz', 'snapshot_iter_6.npz']


@on_ranks(2)
def test_snapshots_of_later_iterations_are_not_taken_for_newer_ones(
        comm, tmp_path):
    if comm.rank == 0:
        (tmp_path / 'snapshot_iter_99.npz').write_bytes(b'damaged')
    comm.Barrier()
    trainer, communicator = make_trainer(comm, tmp_path)
    Snapshot(communicator, retain=1)(trainer)
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_0.npz', 'snapshot_iter_99.npz']


@on_ranks(3)
def test_an_error_on_all_ranks_leaves_a_whole_snapshot(comm, tmp_path):
    trainer, communicator = make(comm, tmp_path, 9, every=4)

    def fail():
        raise KeyError('all ranks')
    at(trainer, 5, fail)
    with pytest.raises(KeyError):
        trainer.run()
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_4.npz']
    trainer, communicator = make(comm, tmp_path, 9)
    assert resume(trainer, communicator, str(tmp_path)) == 4


@on_ranks(2)
def test_an_error_on_rank_0_alone_does_not_wait_for_the_disk(comm, tmp_path):
    """And the older snapshot is all that there is afterwards."""
    trainer, _ = make(comm, tmp_path, 9 if comm.rank == 0 else 6)
    snapshot = trainer._extensions['Snapshot'].extension
    at(trainer, 3, snapshot._complete)
    disk = Held()
    at(trainer, 5, disk.__enter__)
    original = gather._PATIENCE
    gather._PATIENCE = 0.1
    try:
        if comm.rank == 0:
            at(trainer, 6, lambda: {}['rank 0 alone'])
            with pytest.raises(KeyError):
                trainer.run()
            disk.let_go()
            for thread in threading.enumerate():
                if thread.name == 'writer of a snapshot':
                    thread.join()
            assert [path.name for path in tmp_path.iterdir()] == [
                'snapshot_iter_3.npz']
            comm.Barrier()
        else:
            at(trainer, 6, comm.Barrier)    # in the middle of an update
            snapshot.finalize = list
            trainer.run()
    finally:
        gather._PATIENCE = original
        disk.__exit__()
    trainer, communicator = make(comm, tmp_path, 9)
    assert resume(trainer, communicator, str(tmp_path)) == 3


@on_ranks(2)
def test_what_a_killed_run_was_writing_is_removed_at_the_next_start(
        comm, tmp_path):
    if comm.rank == 0:
        for name in ('snapshot.partial', 'snapshot.partial.1', 'else.partial'):
            (tmp_path / name).write_bytes(b'half a snapshot')
    comm.Barrier()
    trainer, _ = make(comm, tmp_path, 2, every=9)
    trainer.run()
    comm.Barrier()
    assert [path.name for path in tmp_path.iterdir()] == ['else.partial']


# --- where it cannot be written ----------------------------------------------

@on_ranks(2)
def test_a_full_disk_is_a_warning_and_the_run_goes_on(comm, tmp_path):
    trainer, _ = make(comm, tmp_path, 12, retain=1)
    with no_room(lambda call: call in (1, 2)), warnings.catch_warnings(
            record=True) as caught:
        warnings.simplefilter('always')
        trainer.run()
    comm.Barrier()
    texts = [str(warning.message) for warning in caught
             if 'could not be written' in str(warning.message)]
    assert len(texts) == (2 if comm.rank == 0 else 0)
    for text, iteration in zip(texts, (6, 9), strict=False):
        assert f'snapshot_iter_{iteration}.npz could not be written (rank ' \
            '0: OSError: [Errno 28] No space left on device); training goes ' \
            'on, and ' in text
        assert 'snapshot_iter_3.npz is still there' in text
    assert names(tmp_path) == ['snapshot_iter_12.npz']


@on_ranks(2)
def test_a_folder_that_has_vanished_is_made_again(comm, tmp_path):
    trainer, _ = make(comm, tmp_path / 'out', 6)

    def vanish():
        trainer.get_extension('Snapshot')._complete()
        comm.Barrier()
        if comm.rank == 0:
            assert names(tmp_path / 'out') == ['snapshot_iter_3.npz']
            shutil.rmtree(tmp_path / 'out')
    at(trainer, 4, vanish)
    trainer.run()
    comm.Barrier()
    assert names(tmp_path / 'out') == ['snapshot_iter_6.npz']


@on_ranks(2)
def test_too_many_failures_in_a_row_are_an_error_on_all_ranks(
        comm, tmp_path):
    trainer, _ = make(comm, tmp_path, 30, every=2, failures=2)
    # The one between them was written.
    with no_room(lambda call: call != 1), silent(), pytest.raises(
            RuntimeError, match='2 snapshots in a row could not be written, '
            r'the last with rank 0: OSError: .*No space left.*Make room'):
        trainer.run()
    assert trainer.updater.iteration == 10
    assert names(tmp_path) == ['snapshot_iter_4.npz']


# --- what is not whole -------------------------------------------------------

def damage(path, how):
    data = path.read_bytes()
    place = data.index(b'model:main/predictor/l2/W') + 250
    path.write_bytes({
        'empty': b'', 'cut off': data[:-2000],
        'flipped': data[:place] + bytes([data[place] ^ 1]) + data[place + 1:],
    }[how])


def made_anew(comm, folder, damaged):
    """A trainer beside damaged snapshots of 6 updates, by their numbers."""
    trainer, _ = make(comm, folder, 6)
    trainer.run()
    comm.Barrier()
    if comm.rank == 0:
        for number, how in damaged.items():
            path = folder / f'snapshot_iter_{number}.npz'
            if how == 'a directory':
                path.unlink()
                path.mkdir()
            else:
                damage(path, how)
    comm.Barrier()
    return make(comm, folder, 6)


@pytest.mark.parametrize('how', ['empty', 'cut off', 'flipped'])
@on_ranks(2)
def test_the_newest_whole_snapshot_is_taken(comm, how, tmp_path):
    """The run ends with the bits of one that was never interrupted."""
    whole, _ = make(comm, tmp_path / 'whole', 12)
    whole.run()
    first, _ = make(comm, tmp_path / 'part', 10)
    first.run()
    comm.Barrier()
    if comm.rank == 0:
        damage(tmp_path / 'part/snapshot_iter_9.npz', how)
        os.remove(tmp_path / 'part/snapshot_iter_3.npz')
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path / 'part', 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert resume(trainer, communicator, str(tmp_path / 'part')) == 6
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (comm.rank == 0)
    assert all('snapshot_iter_9.npz is not whole and is passed over: '
               in text for text in texts)
    trainer.run()
    assert weights(trainer) == weights(whole)


@on_ranks(2)
def test_where_no_snapshot_is_whole_all_are_named_or_set_aside(
        comm, tmp_path):
    trainer, communicator = made_anew(
        comm, tmp_path, {3: 'flipped', 6: 'cut off'})
    before = weights(trainer)
    with pytest.raises(ValueError, match=r'no snapshot in .* can be gone on '
                       'from; .*iter_6.npz is not whole .*; .*iter_3.npz is '
                       'not whole'):
        resume(trainer, communicator, str(tmp_path))
    assert weights(trainer) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert resume(trainer, communicator, str(tmp_path),
                      damaged='aside') == 0
    assert weights(trainer) == before
    assert len(caught) == (comm.rank == 0)
    comm.Barrier()
    assert {name for name in os.listdir(tmp_path) if 'iter' in name} == {
        'snapshot_iter_3.npz.damaged', 'snapshot_iter_6.npz.damaged'}


@on_ranks(2)
def test_what_cannot_be_read_is_not_set_aside(comm, tmp_path):
    trainer, communicator = made_anew(
        comm, tmp_path, {3: 'a directory', 6: 'cut off'})
    with pytest.raises(ValueError, match='can be gone on from'):
        resume(trainer, communicator, str(tmp_path), damaged='aside')
    comm.Barrier()
    assert (tmp_path / 'snapshot_iter_6.npz').exists()


@on_ranks(2)
def test_a_value_that_changes_on_its_way_is_an_error_on_all(comm, tmp_path):
    """Rank 0 reads the right bits, and others reach rank 1."""
    trainer, _ = make(comm, tmp_path, 3)
    trainer.run()
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6)
    ranks = communicator.mpi_comm
    before = weights(trainer)

    class Bad:
        def __getattr__(self, name):
            return getattr(ranks, name)

        def recv(self, *args, **kwargs):
            value = ranks.recv(*args, **kwargs)
            if value.dtype == 'f' and value.size:
                value.reshape(-1)[0] += 1
            return value
    communicator.mpi_comm = Bad()
    with pytest.raises(ValueError, match=r'rank 1: .*came with other bits'):
        resume(trainer, communicator, str(tmp_path))
    assert weights(trainer) == before

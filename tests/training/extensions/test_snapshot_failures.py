"""Where a snapshot is not written, or not whole: nothing older is lost."""
import contextlib
import os
import threading
import warnings
from unittest import mock

from chainer_fp8pipe.mpi.waiting import current_waits
from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.snapshots import snapshot

import numpy
import pytest
from chainer import training

from tests.ranks import on_ranks

from ..trainers import Job, make_trainer, names, weights


class Own(training.Extension):
    """An extension with a state, which may fail to save or load it."""

    name, trigger = 'own', (1, 'iteration')

    def __init__(self):
        self.calls = 0

    def __call__(self, trainer):
        self.calls += 1

    def serialize(self, serializer):
        self.calls = serializer('calls', self.calls)


def make(comm, out, last, every=3, **options):
    trainer, communicator = make_trainer(comm, out)
    trainer.stop_trigger = training.get_trigger((last, 'iteration'))
    trainer.extend(Own())
    trainer.extend(Snapshot(communicator, **options),
                   trigger=(every, 'iteration'))
    return trainer, communicator


def at(trainer, iteration, action):
    """Does something after an update, after the extensions."""
    trainer.extend(lambda trainer: action(), name=f'at {iteration}',
                   trigger=training.triggers.ManualScheduleTrigger(
                       iteration, 'iteration'), priority=-200)


def complete(trainer):
    trainer.get_extension('Snapshot')._complete()


def fails(*_, **__):
    raise OSError(28, 'No space left on device')


@contextlib.contextmanager
def recorded():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield caught


# --- one rank fails ----------------------------------------------------------

#: The rank on which alone something fails, and what.
SAVING = {
    'an extension': (2, Own, 'serialize', lambda self, serializer: {}['x']),
    'an object': (
        0, Own, 'serialize', lambda self, serializer: serializer('x', print)),
    'replace': (0, os, 'replace', fails),
}


@pytest.mark.parametrize('what', SAVING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_saving_is_one_of_all(comm, what, tmp_path):
    rank, place, name, failure = SAVING[what]
    trainer, communicator = make(comm, tmp_path, 6)
    with contextlib.ExitStack() as stack:
        def begin():
            complete(trainer)
            comm.Barrier()
            if comm.rank == rank:
                stack.enter_context(mock.patch.object(place, name, failure))
        at(trainer, 4, begin)
        with pytest.raises(RuntimeError, match=f'rank {rank}: '):
            trainer.run()
    comm.Barrier()
    assert not list(tmp_path.glob('*partial*'))
    trainer, communicator = make(comm, tmp_path, 6)
    with recorded() as caught:
        assert resume(trainer, communicator, str(tmp_path)) == 3
    assert all('not the files of all ranks' in str(one.message)
               for one in caught)


READING = {
    'an extension does not load': (
        2, Own, 'serialize', lambda self, serializer: {}['x']),
    'a warning is an error': (0, warnings, 'warn', fails),
}


@pytest.mark.parametrize('what', READING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_reading_is_one_of_all(comm, what, tmp_path):
    rank, place, name, failure = READING[what]
    make(comm, tmp_path, 3)[0].run()
    comm.Barrier()
    if comm.rank == 0:      # there is something to warn of
        (tmp_path / 'snapshot_iter_9.ranks').mkdir()
        (tmp_path / 'snapshot_iter_9.ranks/rank0of3.npz').touch()
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6)
    with (mock.patch.object(place, name, failure) if comm.rank == rank
          else contextlib.nullcontext()), recorded(), pytest.raises(
              ValueError, match=r'rank|file') as caught:
        resume(trainer, communicator, str(tmp_path))
    assert len(set(comm.allgather(str(caught.value)))) == 1
    trainer, communicator = make(comm, tmp_path, 6)
    with recorded():
        assert resume(trainer, communicator, str(tmp_path)) == 3
    assert trainer.get_extension('own').calls == 3


@on_ranks(2)
def test_a_snapshot_on_one_rank_only_is_an_error_on_all(comm, tmp_path):
    """Whose remedy does not speak of the model."""
    def pipeline(updates):
        job = Job(comm)
        return job.trainer(tmp_path, updates), job.grid
    for trainer, ranks in make_trainer(comm, tmp_path, 1), pipeline(2):
        if comm.rank == 0:
            trainer.extend(Snapshot(ranks))
        with pytest.raises(ValueError, match='Snapshot, which every rank '
                           r'needs or none, is there on rank 0 but missing on '
                           r'rank 1\.$'):
            trainer.run()
    trainer, communicator = make_trainer(comm, tmp_path, 1)
    trainer.run()       # is not held to what has ended


@on_ranks(2)
def test_one_that_only_chainermn_hears_of_is_an_error_in_the_end(
        comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 1, name='naive')
    if comm.rank == 0:
        trainer.extend(Snapshot(communicator))

        def alone(*_, wait):
            assert 'Snapshot on all ranks' in current_waits()[0].text
            wait(lambda: False)
        with mock.patch.multiple(
                snapshot, agree=alone, _LATE=0.1), pytest.raises(
                    RuntimeError, match='rank 0 has waited for 0 seconds for '
                    'Snapshot on all ranks'):
            trainer.run()
    else:
        trainer.updater.update()        # only this one is in common


# --- the disk ----------------------------------------------------------------

@on_ranks(1, 3)
def test_training_goes_on_while_the_file_is_written(comm, tmp_path):
    """And the file has the values of the update at which it was begun."""
    seen, may_go, replace = [], threading.Event(), os.replace

    def held(*given):
        may_go.wait()
        replace(*given)
    trainer, _ = make(comm, tmp_path, 6)
    kept = []
    at(trainer, 3, lambda: kept.append(weights(trainer)))
    at(trainer, 4, lambda: seen.extend(tmp_path.glob('*.ranks/*.npz')))

    def let_go():
        comm.Barrier()
        may_go.set()
    at(trainer, 5, let_go)
    with mock.patch.object(os, 'replace', held):
        trainer.run()
    assert not seen
    with numpy.load(tmp_path / 'snapshot_iter_3.ranks' /
                    f'rank{comm.rank}of{comm.size}.npz') as archive:
        for key, value in kept[0].items():
            assert archive[f'updater/model:main/{key}'].tobytes() == value
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_3.ranks',
                               'snapshot_iter_6.ranks']


@on_ranks(2)
def test_a_full_disk_is_a_warning_and_the_run_goes_on(comm, tmp_path):
    trainer, _ = make(comm, tmp_path, 12, retain=1)
    full = mock.patch.object(os, 'fsync', fails)

    def begin():
        complete(trainer)
        full.start()
    at(trainer, 4, begin)

    def end():
        complete(trainer)
        full.stop()
    at(trainer, 10, end)
    with recorded() as caught:
        trainer.run()
    comm.Barrier()
    texts = [str(one.message) for one in caught
             if 'could not be written' in str(one.message)]
    assert len(texts) == (2 if comm.rank == 0 else 0)
    for text, iteration in zip(texts, (6, 9), strict=False):
        assert f'snapshot_iter_{iteration}.ranks could not be written (all ' \
            'ranks: OSError: [Errno 28] No space left on device); older ' \
            'snapshots are still there' in text
    assert names(tmp_path) == ['snapshot_iter_12.ranks']


@on_ranks(2)
def test_an_error_leaves_what_is_whole_and_goes_on_from_there(comm, tmp_path):
    """Also where only one rank meets it, while the other has trained on."""
    trainer, _ = make(comm, tmp_path, 9, every=4)
    at(trainer, 5, lambda: {}['all ranks'])
    with pytest.raises(KeyError):
        trainer.run()
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_4.ranks']
    comm.Barrier()
    if comm.rank == 0:
        # Written by rank 0 when rank 1 had died.
        os.makedirs(tmp_path / 'snapshot_iter_8.ranks')
        (tmp_path / 'snapshot_iter_8.ranks/rank0of2.npz').write_bytes(
            (tmp_path / 'snapshot_iter_4.ranks/rank0of2.npz').read_bytes())
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6, every=9)
    with recorded() as caught:
        assert resume(trainer, communicator, str(tmp_path)) == 4
    assert [str(one.message) for one in caught] == [
        f'{tmp_path}/snapshot_iter_8.ranks is not whole and is passed over: '
        'DamagedSnapshot: not the files of all ranks of one snapshot'] * (
            comm.rank == 0)
    trainer.run()
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_4.ranks',
                               'snapshot_iter_6.ranks']


# --- what is not whole -------------------------------------------------------

def damage(folder, rank, how):
    path = folder / f'rank{rank}of2.npz'
    data = path.read_bytes()
    place = data.index(b'model:main/predictor/l2/W') + 250
    path.write_bytes({
        'empty': b'', 'cut off': data[:-2000],
        'flipped': data[:place] + bytes([data[place] ^ 1]) + data[place + 1:],
        'another': data.replace(b'"identity": "', b'"identity": "f'),
    }[how])


@pytest.mark.parametrize(('rank', 'how'), [
    (0, 'empty'), (1, 'cut off'), (1, 'flipped'), (0, 'another')])
@on_ranks(2)
def test_the_newest_whole_snapshot_is_taken(comm, rank, how, tmp_path):
    """The run ends with the bits of one that was never interrupted."""
    whole, _ = make(comm, tmp_path / 'whole', 12)
    whole.run()
    first, _ = make(comm, tmp_path / 'part', 9)
    first.run()
    comm.Barrier()
    if comm.rank == 0:
        damage(tmp_path / 'part/snapshot_iter_9.ranks', rank, how)
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path / 'part', 12)
    with recorded() as caught:
        assert resume(trainer, communicator, str(tmp_path / 'part')) == 6
    assert ['snapshot_iter_9.ranks is not whole and is passed over: '
            in str(one.message) for one in caught] == [True] * (
                comm.rank == 0)
    trainer.run()
    assert weights(trainer) == weights(whole)


@on_ranks(2)
def test_where_no_snapshot_is_whole_all_are_named_or_set_aside(
        comm, tmp_path):
    make(comm, tmp_path, 6)[0].run()
    comm.Barrier()
    if comm.rank == 0:
        damage(tmp_path / 'snapshot_iter_3.ranks', 1, 'flipped')
        damage(tmp_path / 'snapshot_iter_6.ranks', 0, 'cut off')
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r'no snapshot in .* can be gone on '
                       'from; .*iter_6.ranks is not whole .*; .*iter_3.ranks '
                       'is not whole'):
        resume(trainer, communicator, str(tmp_path))
    with recorded() as caught:
        assert resume(trainer, communicator, str(tmp_path),
                      damaged='aside') == 0
    assert weights(trainer) == before
    assert bool(caught) == (comm.rank == 0)
    comm.Barrier()
    trainer.run()
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_3.ranks',
                               'snapshot_iter_6.ranks']
    assert resume(trainer, communicator, str(tmp_path)) == 6


@on_ranks(2)
def test_what_cannot_be_read_is_not_set_aside(comm, tmp_path):
    make(comm, tmp_path, 3)[0].run()
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6)

    def denied(path, *_, **__):
        raise PermissionError(13, 'Permission denied', path)
    with (contextlib.nullcontext() if comm.rank else mock.patch(
            'numpy.load', denied)), pytest.raises(
                ValueError, match='Permission denied'):
        resume(trainer, communicator, str(tmp_path), damaged='aside')
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_3.ranks']


# --- hosts without a common disk ---------------------------------------------

@on_ranks(2)
def test_ranks_go_on_from_their_own_files_on_disks_of_their_own(
        comm, tmp_path):
    """And say what other ranks would need."""
    own = tmp_path / f'host{comm.rank}'
    whole, _ = make(comm, tmp_path / 'whole', 9)
    whole.run()
    make(comm, own, 6, retain=1)[0].run()
    assert [path.name for path in (own / 'snapshot_iter_6.ranks').iterdir()
            ] == [f'rank{comm.rank}of2.npz']
    trainer, communicator = make(comm, own, 9)
    assert resume(trainer, communicator, str(own)) == 6
    trainer.run()
    assert weights(trainer) == weights(whole)
    trainer, communicator = make_trainer(comm, own, name='float32')
    trainer.extend(Own())
    with pytest.raises(ValueError, match='is of another layout, and this host '
                       'sees 1 of its 2 files; give it a disk that all hosts'):
        resume(trainer, communicator, str(own))


# --- a run that was given up -------------------------------------------------

@on_ranks(2)
def test_a_run_that_was_given_up_is_not_gone_on_from(comm, tmp_path):
    make(comm, tmp_path, 9)[0].run()
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 5)
    assert resume(trainer, communicator,
                  str(tmp_path / 'snapshot_iter_3.ranks')) == 3
    seen = []       # by an extension after Snapshot: a kill may come then
    trainer.extend(lambda trainer: seen.append(names(tmp_path)), name='seen',
                   trigger=(1, 'iteration'), priority=-200)
    trainer.run()
    assert seen[0] == ['snapshot_iter_3.ranks']
    comm.Barrier()
    assert names(tmp_path) == ['snapshot_iter_3.ranks',
                               'snapshot_iter_5.ranks']
    trainer, communicator = make(comm, tmp_path, 9)
    assert resume(trainer, communicator, str(tmp_path)) == 5

import contextlib
import hashlib
import os
import pathlib

from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.snapshots.snapshot import find_snapshots

import chainer
import numpy
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks

from .helpers import make_trainer, updates_of, weights


def train(comm, out, epochs, name='fp8', resumed=False, **options):
    trainer, communicator = make_trainer(comm, out, epochs, name, **options)
    trainer.extend(Snapshot(communicator), trigger=(7, 'iteration'))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(3, 'iteration')))
    if resumed:
        resume(trainer, communicator, str(out))
    trainer.run()
    return trainer


@pytest.mark.parametrize('name', ['fp8', 'fp8_paper', 'float32', 'naive'])
@on_ranks(1, 3)
def test_an_interrupted_run_ends_with_the_same_bits(comm, name, tmp_path):
    """Snapshot in mid-epoch, in the fp8 phase; residuals per rank."""
    whole = train(comm, tmp_path / 'whole', 6, name)
    train(comm, tmp_path / 'part', 4, name)
    second = train(comm, tmp_path / 'part', 6, name, resumed=True)
    assert second.updater.iteration == whole.updater.iteration == 30
    assert weights(second) == weights(whole)
    assert len(set(comm.allgather(weights(second)['predictor/l1/W']))) == 1
    if comm.rank == 0:
        logs = [(tmp_path / run / 'log').read_text().count('"iteration"')
                for run in ('whole', 'part')]
        assert logs[0] == logs[1]


def run_twice(comm, folder, prepare, stop, last, **options):
    """A whole run, and one stopped at an iteration and resumed."""
    results = []
    for name, iterations in (('whole', [last]), ('part', [stop, last])):
        for part in iterations:
            trainer, communicator = make_trainer(
                comm, folder / name, optimizer=prepare(None), **options)
            prepare(trainer)
            trainer.stop_trigger = chainer.training.get_trigger(
                (part, 'iteration'))
            trainer.extend(Snapshot(communicator),
                           trigger=(stop, 'iteration'))
            if part == last and name == 'part':
                resume(trainer, communicator, str(folder / name))
            trainer.run()
        results.append(weights(trainer))
    assert results[0] == results[1]


@pytest.mark.parametrize('stop', [1, 2])
@on_ranks(2)
def test_a_snapshot_of_the_first_iterations_can_be_resumed(
        comm, tmp_path, stop):
    """ChainerMN's first update leaves the optimizer without state."""
    run_twice(comm, tmp_path,
              lambda trainer: chainer.optimizers.Adam(0.01), stop, 6)


@on_ranks(2)
def test_a_learning_rate_of_one_parameter_goes_on(comm, tmp_path):
    def prepare(trainer):
        if trainer is None:
            return chainer.optimizers.MomentumSGD(0.1)
        if trainer.updater.iteration == 0:
            model = trainer.updater.get_optimizer('main').target
            model.predictor.l1.W.update_rule.hyperparam.lr = 0.5
            trainer.extend(shrink, trigger=(1, 'iteration'))
        return None

    def shrink(trainer):
        model = trainer.updater.get_optimizer('main').target
        model.predictor.l1.W.update_rule.hyperparam.lr *= 0.9
    run_twice(comm, tmp_path, prepare, 5, 12)


@on_ranks(2)
def test_float32_copies_of_float16_parameters_go_on(comm, tmp_path):
    def prepare(trainer):
        optimizer = chainer.optimizers.MomentumSGD(0.1)
        optimizer.use_fp32_update()
        return optimizer if trainer is None else None
    with chainer.using_config('dtype', chainer.mixed16):
        run_twice(comm, tmp_path, prepare, 5, 12, dtype='f2')


@on_ranks(2)
def test_a_snapshot_of_another_optimizer_is_an_error(comm, tmp_path):
    train(comm, tmp_path, 2)
    rejected(comm, tmp_path / 'snapshot_iter_7.npz',
             "optimizer 'main' is MomentumSGD, in the snapshot it is Adam",
             optimizer=chainer.optimizers.MomentumSGD(0.1))


@on_ranks(2)
def test_a_new_run_does_not_mix_its_snapshots_with_an_old_ones(
        comm, tmp_path):
    train(comm, tmp_path, 2)
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(Snapshot(communicator, retain=1))
    with pytest.raises(RuntimeError, match='snapshot_iter_7.npz is of '
                       'another run; resume from it'):
        trainer.run()
    assert [os.path.basename(path) for path in find_snapshots(str(tmp_path))
            ] == ['snapshot_iter_7.npz']


@on_ranks(3)
def test_values_equal_on_all_ranks_are_written_once(comm, tmp_path):
    trainer = train(comm, tmp_path, 2)
    del trainer
    comm.Barrier()
    with numpy.load(find_snapshots(str(tmp_path))[-1],
                    allow_pickle=True) as archive:
        keys = archive.files
    assert 'all/trainer/updater/model:main/predictor/l1/W' in keys
    for rank in (1, 2):
        own = {key for key in keys if key.startswith(f'rank{rank}/')}
        assert (f'rank{rank}/communicator/main/codec|residual|0|48|gradient|'
                '/predictor/l1/W') in own
        assert f'rank{rank}/random/numpy_keys' in own
        assert not any('l1/W' in key and 'updater' in key for key in own)
        # The running statistics of batch normalisation differ by rank.
        assert any(key.endswith('bn/avg_mean') for key in own)


@on_ranks(2)
def test_only_the_newest_snapshots_are_retained(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(Snapshot(communicator, retain=2),
                   trigger=(3, 'iteration'))
    trainer.run()
    comm.Barrier()
    assert [os.path.basename(path) for path in find_snapshots(str(tmp_path))
            ] == ['snapshot_iter_15.npz', 'snapshot_iter_18.npz']


def test_snapshots_are_found_in_the_order_of_iterations(tmp_path):
    for name in ('snapshot_iter_9.npz', 'snapshot_iter_10.npz',
                 'snapshot_iter_x.npz', 'other.npz',
                 'snapshot_iter_11.npz.partial'):
        (tmp_path / name).touch()
    assert [pathlib.Path(path).name
            for path in find_snapshots(str(tmp_path))] == [
        'snapshot_iter_9.npz', 'snapshot_iter_10.npz']


# --- bad input -------------------------------------------------------------

def rejected(comm, path, match, **options):
    """Every rank raises; trainer and file stay as they were."""
    digest = comm.bcast(_digests(path))
    trainer, communicator = make_trainer(comm, path.parent, **options)
    before = weights(trainer)
    with pytest.raises(ValueError, match=match) as raised:
        resume(trainer, communicator, str(path))
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert weights(trainer) == before
    assert trainer.updater.iteration == 0
    assert comm.bcast(_digests(path)) == digest


def _digests(path):
    files = sorted(path.parent.glob('snapshot*')) if (
        path.parent.exists()) else []
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@on_ranks(2)
def test_a_truncated_snapshot_is_an_error_on_all_ranks(comm, tmp_path):
    train(comm, tmp_path, 2)
    path = tmp_path / 'snapshot_iter_7.npz'
    if comm.rank == 0:
        path.write_bytes(path.read_bytes()[:-2000])
    comm.Barrier()
    rejected(comm, path, r'rank 0: .*snapshot_iter_7.npz is damaged')


@on_ranks(2)
def test_a_damaged_byte_is_an_error_on_all_ranks(comm, tmp_path):
    train(comm, tmp_path, 2)
    path = tmp_path / 'snapshot_iter_7.npz'
    if comm.rank == 0:
        data = bytearray(path.read_bytes())
        place = data.index(b'all/trainer/updater/model:main/predictor/l2/W')
        data[place + 250] ^= 1
        path.write_bytes(data)
    comm.Barrier()
    rejected(comm, path, 'damaged')


@on_ranks(2)
def test_a_snapshot_of_another_model_names_the_parameter(comm, tmp_path):
    train(comm, tmp_path, 2)
    rejected(comm, tmp_path / 'snapshot_iter_7.npz',
             r'all ranks: parameter /predictor/\S+ is float32 \(.*8.*\) '
             r'in the snapshot but float32 \(.*9.*\) in the model', width=9)


@on_ranks(2)
def test_another_communicator_goes_on_without_residuals(comm, tmp_path):
    train(comm, tmp_path, 2)
    trainer, communicator = make_trainer(comm, tmp_path, name='float32')
    with pytest.warns(UserWarning, match=r'\(2 ranks, communicator fp8\).*'
                      'residuals and codec state') if comm.rank == 0 else (
            contextlib.nullcontext()):
        resume(trainer, communicator, str(tmp_path))
    # Batch normalisation's statistics are those of the first rank.
    with numpy.load(tmp_path / 'snapshot_iter_7.npz') as archive:
        for key, value in weights(trainer).items():
            assert value == archive[
                f'all/trainer/updater/model:main/{key}'].tobytes()
    assert updates_of(communicator, trainer.updater.get_optimizer(
        'main').target) == 0


@on_ranks(2)
def test_no_snapshot_is_an_error_that_names_the_place(comm, tmp_path):
    rejected(comm, tmp_path / 'nothing.npz', 'nothing.npz')
    trainer, communicator = make_trainer(comm, tmp_path)
    with pytest.raises(ValueError, match='there is no snapshot in'):
        resume(trainer, communicator, str(tmp_path))


@on_ranks(2)
def test_another_kind_of_file_is_an_error(comm, tmp_path):
    path = tmp_path / 'snapshot_iter_1.npz'
    if comm.rank == 0:
        numpy.savez(path, x=1)
    comm.Barrier()
    rejected(comm, path, 'not written by the Snapshot extension')


@on_ranks(2)
def test_a_directory_that_cannot_be_written_is_an_error_on_all(
        comm, tmp_path):
    if comm.rank == 0:
        (tmp_path / 'file').write_text('in the way')
    comm.Barrier()
    trainer, communicator = make_trainer(comm, tmp_path / 'file')
    with pytest.raises(RuntimeError, match='1 snapshots in a row could not '
                       'be written, the last with rank 0: '):
        Snapshot(communicator, failures=1)(trainer)

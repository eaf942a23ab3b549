"""What a resumed run goes on with, and what is refused: tables."""
import contextlib

from chainer_fp8pipe.training.extensions import MovingAverage, Snapshot, resume
from chainer_fp8pipe.training.snapshots.snapshot import find_snapshots

import chainer
import numpy
import pytest
from chainer.training import extensions
from mpi4py import MPI

from tests.ranks import on_ranks

from ..trainers import make_trainer, names, updates_of, weights


def momentum(**scaling):
    """An optimizer of which Chainer would forget much."""
    optimizer = chainer.optimizers.MomentumSGD(0.1)
    optimizer.use_fp32_update()
    if scaling:
        optimizer.loss_scaling(**scaling)
    return optimizer


def own_rate(trainer):
    """One parameter has a learning rate of its own, which shrinks."""
    rule = trainer.updater.get_optimizer(
        'main').target.predictor.l1.W.update_rule
    if trainer.updater.iteration == 0:
        rule.hyperparam.alpha = 0.5

    def shrink(_):
        rule.hyperparam.alpha *= 0.9
    trainer.extend(shrink, trigger=(1, 'iteration'))


def average(trainer):
    """The model is its own average from then on."""
    found = MovingAverage(trainer.updater.get_optimizer('main').target, 0.8)
    trainer.extend(found)

    def take(_):
        with found.weights():
            now = weights(trainer)
        trainer.seen = now
    trainer.extend(take, trigger=(1, 'iteration'))


#: By name: the update of the snapshot, the communicator, its options, and
#: what is done to the trainer.
STATES = {
    'fp8': (7, 'fp8', {}, None),
    'fp8 of the paper': (7, 'fp8_paper', {}, None),
    'int4': (7, 'int4', {}, None),
    'float32': (7, 'float32', {}, None),
    "ChainerMN's": (7, 'naive', {}, None),
    'before the first update': (1, 'fp8', {}, None),
    'after one update': (2, 'fp8', {}, None),
    'a rate of one parameter': (5, 'fp8', {}, own_rate),
    'float32 copies': (5, 'fp8', {'optimizer': momentum, 'dtype': 'f2'},
                       None),
    'a loss scale': (5, 'fp8', {
        'optimizer': lambda: momentum(interval=2, scale=8), 'dtype': 'f2'},
        None),
    'averages': (5, 'fp8', {}, average),
}


@pytest.mark.parametrize('what', STATES)
@on_ranks(2)
def test_an_interrupted_run_ends_with_the_same_bits(comm, what, tmp_path):
    """In mid-epoch; residuals and random numbers of each rank."""
    stop, name, options, prepare = STATES[what]
    results = []
    for folder, parts in (('whole', [12]), ('part', [stop, 12])):
        for last in parts:
            given = {key: value() if callable(value) else value
                     for key, value in options.items()}
            with chainer.using_config('dtype', chainer.mixed16 if (
                    'dtype' in options) else numpy.float32):
                trainer, communicator = make_trainer(
                    comm, tmp_path / folder, name=name, **given)
                trainer.stop_trigger = chainer.training.get_trigger(
                    (last, 'iteration'))
                if prepare:
                    prepare(trainer)
                trainer.extend(Snapshot(communicator),
                               trigger=(stop, 'iteration'))
                if comm.rank == 0:
                    trainer.extend(extensions.LogReport(
                        trigger=(3, 'iteration')))
                if last > stop and folder == 'part':
                    assert resume(trainer, communicator,
                                  str(tmp_path / folder)) == stop
                trainer.run()
        results.append((weights(trainer), getattr(trainer, 'seen', None)))
    assert results[0] == results[1]
    assert len(set(comm.allgather(results[0][0]['predictor/l1/W']))) == 1
    if comm.rank == 0:
        logs = [(tmp_path / run / 'log').read_text().count('"iteration"')
                for run in ('whole', 'part')]
        assert logs[0] == logs[1]


def train(comm, out):
    trainer, communicator = make_trainer(comm, out, 2)
    trainer.extend(Snapshot(communicator), trigger=(7, 'iteration'))
    trainer.run()
    comm.Barrier()


@on_ranks(3)
def test_values_equal_on_all_ranks_are_written_once(comm, tmp_path):
    train(comm, tmp_path)
    with numpy.load(find_snapshots(str(tmp_path))[-1]) as archive:
        keys = archive.files
    assert 'all/trainer/updater/model:main/predictor/l1/W' in keys
    for rank in (1, 2):
        own = {key for key in keys if key.startswith(f'rank{rank}/')}
        assert any('residual' in key for key in own)
        assert f'rank{rank}/random/numpy_keys' in own
        assert not any('l1/W' in key and 'updater' in key for key in own)
        # The running statistics of batch normalisation differ by rank.
        assert any(key.endswith('bn/avg_mean') for key in own)


@on_ranks(2)
def test_a_new_run_does_not_mix_its_snapshots_with_an_old_ones(
        comm, tmp_path):
    train(comm, tmp_path)
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(Snapshot(communicator, retain=1))
    with pytest.raises(RuntimeError, match='snapshot_iter_7.npz is of '
                       'another run; resume from it'):
        trainer.run()
    assert names(tmp_path) == ['snapshot_iter_7.npz']


@on_ranks(2)
def test_another_communicator_goes_on_without_residuals(comm, tmp_path):
    train(comm, tmp_path)
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


#: By name: the file that is resumed, options of the trainer, the message.
REFUSED = {
    'another optimizer': ('snapshot_iter_7.npz', {
        'optimizer': momentum}, "optimizer 'main' is MomentumSGD, in the "
        'snapshot it is Adam'),
    'another model': ('snapshot_iter_7.npz', {'width': 9}, r'all ranks: '
                      r'parameter /predictor/\S+ is float32 \(.*8.*\) in the '
                      r'snapshot but float32 \(.*9.*\) in the model'),
    'another extension': ('snapshot_iter_7.npz', {'extension': True},
                          'extensions/LogReport/.* is not in the snapshot'),
    'no file': ('nothing.npz', {}, 'nothing.npz'),
    'no folder': ('empty', {}, 'there is no snapshot in'),
    'a file that is cut off': ('cut.npz', {}, r'rank 0: .*cut.npz is damaged'),
    'another kind of file': ('other.npz', {},
                             'not written by the Snapshot extension'),
}


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(comm, tmp_path):
    """And trainer and files are as they were."""
    train(comm, tmp_path)
    if comm.rank == 0:
        (tmp_path / 'empty').mkdir()
        numpy.savez(tmp_path / 'other.npz', x=1)
        (tmp_path / 'cut.npz').write_bytes(
            (tmp_path / 'snapshot_iter_7.npz').read_bytes()[:-2000])
    comm.Barrier()
    before = (tmp_path / 'snapshot_iter_7.npz').read_bytes()
    for what, (name, options, match) in REFUSED.items():
        trainer, communicator = make_trainer(comm, tmp_path, **{
            key: value() if callable(value) else value
            for key, value in options.items() if key != 'extension'})
        if 'extension' in options:
            trainer.extend(extensions.LogReport())
        own = weights(trainer)
        with pytest.raises(ValueError, match=match) as raised:
            resume(trainer, communicator, str(tmp_path / name))
        assert len(set(comm.allgather(str(raised.value)))) == 1, what
        assert weights(trainer) == own, what
        assert trainer.updater.iteration == 0
    assert (tmp_path / 'snapshot_iter_7.npz').read_bytes() == before


def test_arguments():
    for options in {'failures': 0}, {'retain': 0}:
        with pytest.raises(ValueError, match='must be at least 1'):
            Snapshot(None, **options)
    with pytest.raises(ValueError, match="error, aside, not 'ignore'"):
        resume(None, MPI.COMM_SELF, '.', damaged='ignore')

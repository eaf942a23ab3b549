"""What a resumed run goes on with, and what is refused: tables."""
import contextlib
import os
import threading
import warnings
import zipfile

from chainer_fp8pipe.training.extensions import (
    MovingAverage,
    Snapshot,
    find_snapshots,
    resume,
)

import chainer
import numpy
import pytest
from chainer import training
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


class Jittered(chainer.iterators.SerialIterator):
    """An iterator of one's own, with numbers of its own."""

    factor, seen = 1.0, numpy.ones(8, 'f')

    def next(self):
        self.factor *= 0.9
        self.seen = self.seen * numpy.float32(0.8)
        return [(x * numpy.float32(self.factor) * self.seen[0], t)
                for x, t in super().next()]


class Noise:
    """An extension without serialize(), which changes the weights."""

    trigger = 1, 'iteration'
    calls = 0

    def __init__(self):
        self.last = numpy.zeros(3, 'f')

    def __call__(self, trainer):
        self.calls += 1
        bias = trainer.updater.get_optimizer('main').target.predictor.l2.b
        self.last += bias.array
        bias.array = bias.array + self.last / self.calls / 100


def owned(trainer):
    """Objects of the script's own, which know nothing of snapshots."""
    trainer.updater._iterators['main'] = Jittered(
        trainer.updater.get_iterator('main').dataset, 8)
    trainer.extend(Noise(), name='noise')


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
    'own classes': (5, 'fp8', {}, owned),
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
def test_each_rank_has_a_file_of_which_load_npz_reads_the_model(
        comm, tmp_path):
    """And the whole trainer."""
    train(comm, tmp_path)
    folder = find_snapshots(str(tmp_path))[0]
    assert sorted(os.listdir(folder)) == [
        f'rank{rank}of3.npz' for rank in range(3)]
    path = f'{folder}/rank{comm.rank}of3.npz'
    trainer, _ = make_trainer(comm, tmp_path / 'again', width=8)
    model = trainer.updater.get_optimizer('main').target
    chainer.serializers.load_npz(path, model, 'updater/model:main/')
    before = weights(trainer)
    chainer.serializers.load_npz(path, trainer)
    assert trainer.updater.iteration == 7
    assert weights(trainer) == before
    with numpy.load(path, allow_pickle=False) as archive:
        assert any('residual' in key for key in archive.files)
        assert all(archive[key].dtype != object for key in archive.files
                   if key != 'job/manifest.json')


@on_ranks(2)
def test_the_last_snapshot_is_that_of_the_end(comm, tmp_path):
    train(comm, tmp_path)
    assert names(tmp_path) == ['snapshot_iter_7.ranks',
                               'snapshot_iter_10.ranks']
    trainer, communicator = make_trainer(comm, tmp_path, 2)
    trainer.extend(Snapshot(communicator))
    assert resume(trainer, communicator, str(tmp_path)) == 10
    trainer.run()       # has nothing to do
    assert len(names(tmp_path)) == 2


#: Where ranks disagree, rank 0's trigger counts.
TRIGGERS = {
    'by the clock': lambda comm: training.triggers.TimeTrigger(0.01),
    'by chance': lambda comm: lambda trainer: numpy.random.rand() < 0.2,
    'on one rank': lambda comm: lambda trainer: (
        comm.rank == 0 and trainer.updater.iteration % 3 == 0)}


@pytest.mark.parametrize('what', TRIGGERS)
@on_ranks(2)
def test_any_trigger_fires_on_all_ranks_alike(comm, what, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4)
    trainer.extend(Snapshot(communicator), trigger=TRIGGERS[what](comm))
    trainer.run()
    comm.Barrier()
    found = names(tmp_path)
    assert what != 'on one rank' or len(found) == 7
    assert found[-1] == 'snapshot_iter_20.ranks'
    assert all(len(os.listdir(tmp_path / name)) == 2 for name in found)


@on_ranks(2)
def test_a_new_run_does_not_mix_its_snapshots_with_an_old_ones(
        comm, tmp_path):
    train(comm, tmp_path)
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(Snapshot(communicator, retain=1))
    with pytest.raises(RuntimeError, match='snapshot_iter_10.ranks is of '
                       'another run; resume from it'):
        trainer.run()
    assert names(tmp_path) == ['snapshot_iter_7.ranks',
                               'snapshot_iter_10.ranks']


@on_ranks(2)
def test_another_communicator_goes_on_without_residuals(comm, tmp_path):
    train(comm, tmp_path)
    trainer, communicator = make_trainer(comm, tmp_path, name='float32')
    with pytest.warns(UserWarning, match=r'\(2 ranks, communicator fp8\).*'
                      'residuals, codec state') if comm.rank == 0 else (
            contextlib.nullcontext()):
        resume(trainer, communicator, str(tmp_path))
    # Batch normalisation's statistics are those of the first rank.
    with numpy.load(tmp_path / 'snapshot_iter_10.ranks/rank0of2.npz'
                    ) as archive:
        for key, value in weights(trainer).items():
            assert value == archive[f'updater/model:main/{key}'].tobytes()
    assert updates_of(communicator, trainer.updater.get_optimizer(
        'main').target) == 0


#: By name: the file that is resumed, options of the trainer, the message.
REFUSED = {
    'another optimizer': ('snapshot_iter_7.ranks', {
        'optimizer': momentum}, 'main has MomentumSGD, in the snapshot '
        'Adam'),
    'another model': ('snapshot_iter_7.ranks', {'width': 9}, r'all ranks: '
                      r'parameter /predictor/\S+ is float32 \(.*8.*\) in the '
                      r'snapshot but float32 \(.*9.*\) here'),
    'another extension': ('snapshot_iter_7.ranks', {'extension': True},
                          'LogReport/.* is not in the snapshot'),
    'no file': ('nothing', {}, 'there is no snapshot in .*nothing'),
    'no folder': ('empty', {}, 'there is no snapshot in'),
    'another kind of file': ('other.npz', {}, 'there is no snapshot in'),
    'another version': ('snapshot_iter_1.ranks', {}, 'it has format 1, and '
                        'this version of chainer_fp8pipe reads format 7'),
}


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(comm, tmp_path):
    """And the trainer is as it was."""
    train(comm, tmp_path)
    (tmp_path / 'empty').mkdir(exist_ok=True)
    if comm.rank == 0:
        numpy.savez(tmp_path / 'other.npz', x=1)
        os.mkdir(tmp_path / 'snapshot_iter_1.ranks')
        for rank in range(2):
            with zipfile.ZipFile(
                    tmp_path / f'snapshot_iter_1.ranks/rank{rank}of2.npz',
                    'w') as archive:
                archive.writestr('job/manifest.json', '{"format": 1}')
    comm.Barrier()
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


class Threaded:
    """An extension with what no snapshot has."""

    trigger = 1, 'iteration'

    def __init__(self):
        self.lock, self.model, self.kept = threading.Lock(), None, {}
        self.random = numpy.random.RandomState(1)

    def __call__(self, trainer):
        self.random.rand()
        self.model = trainer.updater.get_optimizer('main').target.copy()
        self.kept[trainer.updater.iteration] = 'x'


@on_ranks(2)
def test_what_is_in_no_snapshot_is_named_once(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 2)
    if comm.rank:       # of a rank that does not warn
        trainer.extend(Threaded(), name='threaded')
    trainer.extend(Snapshot(communicator), trigger=(3, 'iteration'))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer.run()
    assert [str(one.message) for one in caught] == [
        f'the training changes {what}, which is in no snapshot: a run that '
        'goes on has it as the script makes it; keep numbers, texts, arrays, '
        'and arrays by name in a dictionary'
        for what in ('kept of extension threaded, a dict',
                     'model of extension threaded, a Classifier',
                     'random of extension threaded, a RandomState')
        if comm.rank == 0]


def test_arguments():
    for options in {'failures': 0}, {'retain': 0}:
        with pytest.raises(ValueError, match='must be at least 1'):
            Snapshot(None, **options)
    with pytest.raises(ValueError, match="error or aside, not 'ignore'"):
        resume(None, MPI.COMM_SELF, '.', damaged='ignore')

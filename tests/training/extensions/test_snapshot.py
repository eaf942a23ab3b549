"""What a resumed run goes on with, and what is refused: tables."""
import copy
import functools
import math
import os
import threading
import warnings

from chainer_fp8pipe.training.extensions import (
    Snapshot,
    find_snapshots,
    resume,
)
from chainer_fp8pipe.training.snapshots import file

import chainer
import chainer.links as L
import numpy
import pytest
from chainer import training
from chainer.optimizers.rmsprop import RMSpropRule
from chainer.training import extensions
from mpi4py import MPI

from tests.ranks import on_ranks

from ..trainers import Net, make_trainer, names, save, weights


def momentum(**scaling):
    """An optimizer of which Chainer would forget much."""
    optimizer = chainer.optimizers.MomentumSGD(0.1)
    optimizer.use_fp32_update()
    if scaling:
        optimizer.loss_scaling(**scaling)
    return optimizer


class Jittered(chainer.iterators.SerialIterator):
    """An iterator of one's own, with numbers of its own."""

    factor, seen = 1.0, numpy.ones(8, 'f')

    def next(self):
        self.factor *= 0.9
        self.seen = self.seen * numpy.float32(0.8)
        return [(x * numpy.float32(self.factor) * self.seen[0], t)
                for x, t in super().next()]


class Shaken:
    """A transformation of data with random numbers of its own."""

    def __init__(self):
        self.random = numpy.random.RandomState(4)

    def __call__(self, example):
        return example[0] + numpy.float32(self.random.rand()), example[1]


class Noise:
    """An extension without serialize(), which changes the weights."""

    trigger = 1, 'iteration'
    calls = 0

    def __init__(self, log):
        self.last, self.log = numpy.zeros(3, 'f'), log
        self.random = numpy.random.RandomState(1)

    def __call__(self, trainer):
        self.calls += 1
        self.log.append(self.calls)
        link = trainer.updater.get_optimizer('main').target.predictor.l2
        link.calls += 1
        self.last += link.b.array
        link.b.array = link.b.array + self.last / self.calls / 100 + (
            numpy.float32(self.random.rand() / link.calls))


def owned(trainer):
    """Objects of the script's own, which know nothing of snapshots."""
    trainer.updater._iterators['main'] = Jittered(
        chainer.datasets.TransformDataset(
            trainer.updater.get_iterator('main').dataset, Shaken()), 8,
        order_sampler=chainer.iterators.ShuffleOrderSampler(
            numpy.random.RandomState(3)))
    trainer.updater.get_optimizer('main').target.predictor.l2.calls = 0
    trainer.seen = []       # stays the extension's, too
    trainer.extend(Noise(trainer.seen), name='noise')


class Recurrent(Net):
    """Has a state, which no persistent value is, as L.LSTM."""

    h = None

    def reset_state(self):
        self.h = None

    def forward(self, x):
        y = super().forward(x)
        y = y if self.h is None else y + self.h / 2
        self.h = chainer.Variable(y.array)
        return y


def recurrent(trainer):
    trainer.updater.get_optimizer(
        'main').target.predictor.__class__ = Recurrent


class Remembering:
    """A hook with a state: numbers, texts and arrays."""

    name, call_for_each_param, timing = 'remembering', False, 'pre'

    def __init__(self):
        self.calls, self.last = 0, None
        self.kept = {}
        self.large = numpy.zeros(200_000)
        self.worst = math.nan       # unlike all numbers, itself, too
        self.seen = [(0, {'text': 'x'})]
        self.function = print       # of the script

    def __call__(self, optimizer):
        self.calls += 1
        self.last = numpy.float32(self.calls / 3)
        for name, one in optimizer.target.namedparams():
            if one.grad is not None:
                one.grad = (one.grad + self.kept.get(name, one.grad)) / 2
                self.kept[name] = one.grad.copy()
        self.large += self.last
        self.worst = min(self.worst, float(abs(
            optimizer.target.predictor.l2.W.grad).max()))
        self.seen = [*self.seen, (self.calls, {'worst': self.worst})]


def thaw(trainer):
    model = trainer.updater.get_optimizer('main').target.predictor
    model.l1.enable_update()
    model.l2.W.update_rule.hyperparam.lr = 0.125
    model.l2.b.update_rule.mine = 'x'


def hooked(trainer):
    """Hooks, and rules that are frozen for some updates."""
    optimizer = trainer.updater.get_optimizer('main')
    hook, model = Remembering(), optimizer.target.predictor
    optimizer.add_hook(hook)
    model.l1.disable_update()
    model.l2.b.update_rule.add_hook(
        lambda rule, parameter: None, name='of a rule')
    optimizer.loss_scaling(interval=2)
    trainer.extend(thaw, trigger=(
        training.triggers.ManualScheduleTrigger(3, 'iteration')))

    def note(trainer):
        trainer.seen = repr((vars(hook), optimizer._loss_scale, getattr(
            model.l2.b.update_rule, 'mine', '')))
    trainer.extend(note, trigger=(1, 'iteration'))


def nudge(trainer):
    trainer.updater.get_optimizer('main').target.predictor.l2.b.array *= 1.5


def triggered(trainer):
    """Triggers with a state; whether they fire is seen in the weights."""
    for name, trigger in (
            ('best', training.triggers.MinValueTrigger(
                'main/loss', (1, 'iteration'))),
            ('worst', training.triggers.MaxValueTrigger(
                'main/loss', (2, 'iteration'))),
            ('once', training.triggers.OnceTrigger()),
            ('listed', training.triggers.ManualScheduleTrigger(
                [2, 9], 'iteration'))):
        trainer.extend(nudge, name=name, trigger=trigger)


class Halved(training.Extension):
    """A schedule of one's own, without a state."""

    trigger = 4, 'iteration'

    def __call__(self, trainer):
        trainer.updater.get_optimizer('main').lr *= 0.5


#: Extensions that shift the rate, and every how many updates.
SHIFTS = {
    'exponential': (lambda: extensions.ExponentialShift('lr', 0.5), 4),
    'linear': (lambda: extensions.LinearShift(
        'lr', (0.1, 0.01), (3, 10)), 1),
    'multistep every 4': (lambda: extensions.MultistepShift(
        'lr', 0.1, [1, 2], 0.1), 4),
    'warm-up from the optimizer': (lambda: extensions.WarmupShift(
        'lr', None, 8, 0.1), 1),
    'of one\'s own': (Halved, 4)}


def shifted(trainer, make, every):
    del trainer._extensions['decay']
    trainer.extend(make(), name='shift', trigger=(every, 'iteration'))

    def note(trainer):
        trainer.seen = [*getattr(trainer, 'seen', []), trainer.updater.
                        get_optimizer('main').lr][-7:]
    trainer.extend(note, trigger=(1, 'iteration'))


def early(trainer):
    """An early stop at update 9, by what is checked every third one."""
    def watched(trainer):
        chainer.report({'watched': chainer.Variable(numpy.asarray(
            -trainer.updater.iteration))})
    trainer.extend(watched, name='watched', trigger=(1, 'iteration'))
    trainer.stop_trigger = training.triggers.EarlyStoppingTrigger(
        (3, 'iteration'), 'watched', patience=2, mode='max',
        max_trigger=trainer.stop_trigger.get_training_length())


#: By name: the update of the snapshot, the communicator, its options, and
#: what is done to the trainer.
STATES = {
    'fp8': (7, 'fp8', {}, None),
    'int4': (7, 'int4', {}, None),
    'float32': (7, 'float32', {}, None),
    "ChainerMN's": (7, 'naive', {}, None),
    'before the first update': (1, 'fp8', {}, None),
    'a loss scale': (5, 'fp8', {
        'optimizer': lambda: momentum(interval=2, scale=8), 'dtype': 'f2'},
        None),
    'own classes': (5, 'fp8', {}, owned),
    'hooks': (5, 'float32', {'optimizer': lambda: (
        chainer.optimizers.MomentumSGD(0.05))}, hooked),
    'a link with a state': (5, 'float32', {}, recurrent),
    'triggers': (5, 'float32', {}, triggered),
    'early stopping': (5, 'float32', {}, early),
    'early stopping at a check': (6, 'float32', {}, early),
    **{f'{name} shift': (5, 'float32', {'optimizer': lambda: (
        chainer.optimizers.MomentumSGD(0.05))}, functools.partial(
            shifted, make=make, every=every))
       for name, (make, every) in SHIFTS.items()},
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


@on_ranks(1)
def test_the_snapshots_rate_counts_or_what_is_set_after_the_resume(
        comm, tmp_path):
    def trainer_of(rate, last):
        trainer, communicator = make_trainer(
            comm, tmp_path, name='float32',
            optimizer=chainer.optimizers.MomentumSGD(rate))
        del trainer._extensions['decay']
        trainer.stop_trigger = training.get_trigger((last, 'iteration'))
        return trainer, communicator
    trainer, communicator = trainer_of(0.05, 2)
    trainer.run()
    save(trainer, communicator, tmp_path)
    for own, expected in ((None, 0.05), (0.25, 0.25)):
        trainer, communicator = trainer_of(0.001, 3)
        resume(trainer, communicator, str(tmp_path))
        optimizer = trainer.updater.get_optimizer('main')
        if own:
            optimizer.lr = own
        trainer.run()
        assert optimizer.lr == expected


# --- persistent values that have changed -------------------------------------

ARRAY = numpy.arange(3, dtype='f')


def keeping(value, out):
    """A trainer of a link that keeps a value."""
    model = chainer.Chain()
    model.add_persistent('kept', value)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator([1], 1),
        chainer.optimizers.SGD().setup(model))
    return model, training.Trainer(updater, (1, 'iteration'), str(out))


@pytest.mark.parametrize(('before', 'after'), [
    (numpy.float32(0.1), 0.0), (7, 0.0), ('', 'x'), ([0, 1, 1], [0]),
    (None, ARRAY), (ARRAY, None), (ARRAY.astype('f2'), ARRAY)])
def test_a_persistent_value_that_has_changed_is_loaded_as_by_chainer(
        before, after, tmp_path):
    model, trainer = keeping(copy.copy(before), tmp_path)
    save(trainer, MPI.COMM_SELF, tmp_path)
    chainer.serializers.save_npz(tmp_path / 'chainer.npz', model)
    found, trainer = keeping(copy.copy(after), tmp_path)
    resume(trainer, MPI.COMM_SELF, str(tmp_path / 'snapshot_iter_0.ranks'))
    expected, _ = keeping(copy.copy(after), tmp_path)
    chainer.serializers.load_npz(tmp_path / 'chainer.npz', expected)
    other, _ = keeping(copy.copy(after), tmp_path)
    chainer.serializers.load_npz(
        tmp_path / 'snapshot_iter_0.ranks/rank0of1.npz', other,
        'updater/model:main/')
    for model in (found, other):
        assert type(model.kept) is type(expected.kept)
        assert repr(model.kept) == repr(expected.kept)


# --- files, triggers, refusals -----------------------------------------------

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
        assert all(archive[key].dtype != object for key in archive.files)


@on_ranks(2)
def test_the_last_snapshot_is_that_of_the_end(comm, tmp_path):
    """Also of a training inside an except block."""
    try:
        raise KeyError
    except KeyError:
        train(comm, tmp_path)
    assert names(tmp_path) == ['snapshot_iter_7.ranks',
                               'snapshot_iter_10.ranks']
    trainer, communicator = make_trainer(comm, tmp_path, 2)
    trainer.extend(Snapshot(communicator))
    assert resume(trainer, communicator, str(tmp_path)) == 10
    trainer.run()       # has nothing to do
    assert len(names(tmp_path)) == 2
    trainer, communicator = make_trainer(comm, tmp_path, 3)
    trainer.extend(Snapshot(communicator), trigger=(
        training.triggers.ManualScheduleTrigger(7, 'iteration')))
    resume(trainer, communicator, str(tmp_path))
    trainer.run()
    comm.Barrier()
    assert names(tmp_path)[-1] == 'snapshot_iter_15.ranks'


@on_ranks(2)
def test_a_run_that_has_stopped_early_does_not_go_on_unless_it_is_told(
        comm, tmp_path):
    for start, patience, end in (None, 2, 9), (9, 2, 9), (9, 3, 12):
        trainer, communicator = make_trainer(comm, tmp_path)
        early(trainer)
        trainer.stop_trigger.patience = patience
        trainer.extend(Snapshot(communicator), trigger=(50, 'iteration'))
        if start:
            assert resume(trainer, communicator, str(tmp_path)) == start
        trainer.run()
        comm.Barrier()
        assert trainer.updater.iteration == end


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
    with pytest.raises(FileExistsError, match='snapshot_iter_7.ranks is of '
                       'another run; resume from it'):
        trainer.run()
    assert names(tmp_path) == ['snapshot_iter_7.ranks',
                               'snapshot_iter_10.ranks']


@on_ranks(2)
def test_snapshots_may_be_written_at_other_times_after_a_resume(
        comm, tmp_path):
    """Time that has gone by before makes none; files of the script stay."""
    (tmp_path / 'rank0.npz').write_bytes(b'a script writes this')
    trainer, communicator = make_trainer(comm, tmp_path, 2)
    trainer._snapshot_elapsed_time = 1e5        # seconds
    trainer.extend(Snapshot(communicator))
    trainer.run()
    trainer, communicator = make_trainer(comm, tmp_path, 3)
    trainer.extend(Snapshot(communicator), trigger=(
        training.triggers.TimeTrigger(3600)))
    assert resume(trainer, communicator, str(tmp_path)) == 10
    trigger = trainer._extensions['Snapshot'].trigger
    assert trigger._next_time > 1e5
    trainer.run()
    assert (tmp_path / 'rank0.npz').exists()


#: By name: the file that is resumed, options of the trainer, the message.
REFUSED = {
    'another rule': ('snapshot_iter_7.ranks', {'rule': RMSpropRule},
                     'main/predictor/l1/W/class RMSpropRule is not in the '
                     'snapshot; build model and trainer as they were'),
    'another optimizer': ('snapshot_iter_7.ranks', {
        'optimizer': momentum}, 'main/class MomentumSGD is not in the '
        'snapshot'),
    'another model': ('snapshot_iter_7.ranks', {'width': 9}, r'all ranks: '
                      r'\S+main/predictor/\S+ is float32 \(.*8.*\) in the '
                      r'snapshot but float32 \(.*9.*\) here'),
    'another extension': ('snapshot_iter_7.ranks', {'extension': True},
                          'LogReport/.* is not in the snapshot'),
    'no file': ('nothing', {}, 'there is no snapshot in .*nothing'),
    'an earlier version': ('snapshot_iter_1.ranks', {}, 'has format 11, and '
                           'this version of chainer_fp8pipe reads format 13'),
}


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(comm, tmp_path):
    """And the trainer is as it was."""
    train(comm, tmp_path)
    if comm.rank == 0:
        os.mkdir(tmp_path / 'snapshot_iter_1.ranks')
        for rank in range(2):
            numpy.savez(tmp_path / f'snapshot_iter_1.ranks/rank{rank}of2.npz',
                        **{'job/manifest': file.as_json({'format': 11})})
    comm.Barrier()
    for what, (name, options, match) in REFUSED.items():
        trainer, communicator = make_trainer(comm, tmp_path, **{
            key: value() if callable(value) else value
            for key, value in options.items()
            if key not in ('extension', 'rule')})
        if 'extension' in options:
            trainer.extend(extensions.LogReport())
        if 'rule' in options:
            trainer.updater.get_optimizer(
                'main').target.predictor.l1.W.update_rule = options['rule'](
                    lr=0.1, alpha=0.9)
        own = weights(trainer)
        with pytest.raises(ValueError, match=match) as raised:
            resume(trainer, communicator, str(tmp_path / name))
        assert len(set(comm.allgather(str(raised.value)))) == 1, what
        assert weights(trainer) == own, what
        assert trainer.updater.iteration == 0


class Meter:
    total = 0


class Threaded:
    """An extension with what no snapshot has."""

    trigger = 1, 'iteration'

    def __init__(self):
        self.lock, self.model, self.kept = [], None, {}
        self.average, self.meter = L.Linear(1, 1), Meter()

    def __call__(self, trainer):
        self.meter.total += 1
        self.average.b.array += 1       # no optimizer has it
        self.model = trainer.updater.get_optimizer('main').target.copy()
        self.kept[trainer.updater.iteration] = 'x'      # is kept
        self.lock.append(threading.Lock())


@on_ranks(2)
def test_what_is_in_no_snapshot_is_named(comm, tmp_path):
    """And nothing else, as what Chainer saves of an updater of one's own."""
    trainer, communicator = make_trainer(comm, tmp_path, 2)
    trainer.updater.__class__ = type('Own', (training.StandardUpdater,), {})
    trainer.updater.models = {
        'main': (trainer.updater.get_optimizer('main').target,)}
    if comm.rank:       # of a rank that does not warn
        trainer.extend(Threaded(), name='threaded')
    trainer.extend(Snapshot(communicator), trigger=(3, 'iteration'))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer.run()
    assert [*dict.fromkeys(str(one.message) for one in caught)] == [
        f'the training changes {what}, which is in no snapshot: a run that '
        'goes on has it as the script makes it; keep numbers, texts, arrays, '
        'and lists or dictionaries of them'
        for what in ('average of extension threaded, a Linear',
                     'lock of extension threaded, a list',
                     'meter of extension threaded, a Meter',
                     'model of extension threaded, a Classifier')
        if comm.rank == 0]


def test_arguments():
    with pytest.raises(ValueError, match='retain is .*at least 1'):
        Snapshot(None, retain=0)
    for comm in 'fp8', MPI.COMM_NULL:
        with pytest.raises(TypeError, match='comm must be a communicator'):
            Snapshot(comm)

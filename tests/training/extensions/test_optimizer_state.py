"""What Chainer does not save of optimizers goes on, and disturbs nothing."""
import math
import warnings

from chainer_fp8pipe.training.extensions import Snapshot, resume

import chainer
import chainer.links as L
import numpy
import pytest
from chainer import training
from chainer.optimizers.rmsprop import RMSpropRule
from chainer.training import extensions
from mpi4py import MPI

from ..trainers import save

ALONE = MPI.COMM_SELF
STOP, LAST = 5, 12


def recorded(rates):
    """A hook that writes the rate of every update down."""
    def hook(optimizer):
        rates.append(float(optimizer.lr))
    hook.call_for_each_param, hook.timing = False, 'pre'
    return hook


def make(out, last, rate=0.05, optimizer=None, add=lambda trainer: None):
    numpy.random.seed(5)
    model = L.Classifier(chainer.Sequential(L.Linear(6, 8), L.Linear(8, 3)))
    optimizer = (optimizer or chainer.optimizers.MomentumSGD(rate)).setup(
        model)
    random = numpy.random.RandomState(0)
    data = chainer.datasets.TupleDataset(
        random.randn(40, 6).astype('f'), random.randint(0, 3, 40).astype('i'))
    trainer = training.Trainer(training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 8), optimizer),
        (last, 'iteration'), out=str(out))
    add(trainer)
    return trainer


def model_of(trainer):
    return trainer.updater.get_optimizer('main').target


def weights(trainer):
    return [one.array.tobytes() for one in model_of(trainer).params()]


# --- rates that extensions shift ---------------------------------------------

class Halved(training.Extension):
    """A schedule of one's own, without a state."""

    trigger = 4, 'iteration'

    def __call__(self, trainer):
        trainer.updater.get_optimizer('main').lr *= 0.5


SHIFTS = {
    'exponential': (lambda: extensions.ExponentialShift('lr', 0.5), 4),
    'exponential from': (lambda: extensions.ExponentialShift(
        'lr', 0.5, init=0.3), 4),
    'exponential to': (lambda: extensions.ExponentialShift(
        'lr', 0.5, target=0.02), 2),
    'inverse': (lambda: extensions.InverseShift('lr', 0.1, 0.7), 1),
    'linear': (lambda: extensions.LinearShift(
        'lr', (0.1, 0.01), (3, 10)), 1),
    'multistep': (lambda: extensions.MultistepShift(
        'lr', 0.1, [2, 4, 8], 0.1), 1),
    'multistep every 4': (lambda: extensions.MultistepShift(
        'lr', 0.1, [1, 2], 0.1), 4),
    'polynomial': (lambda: extensions.PolynomialShift('lr', 2.0, 15), 1),
    'step': (lambda: extensions.StepShift('lr', 0.5, 3), 1),
    'warm-up': (lambda: extensions.WarmupShift('lr', 0.01, 8, 0.1), 1),
    'warm-up from the optimizer': (lambda: extensions.WarmupShift(
        'lr', None, 8, 0.1), 1),
    'warm-up every 4': (lambda: extensions.WarmupShift(
        'lr', 0.01, 3, 0.1), 4),
    'of one\'s own': (Halved, 4),
}


PARTS = [(0, STOP + 1), (STOP, STOP + 4), (STOP + 3, LAST)]


def rates(out, parts, add, own=False, **options):
    """The rate of each update, of runs that each go on from the last.

    ``own``: by Chainer's snapshots.
    """
    found = []
    for number, (start, last) in enumerate(parts):
        seen = []
        trainer = make(out, last, add=add, **{
            name: value[number] if isinstance(value, list) else value
            for name, value in options.items()})
        trainer.updater.get_optimizer('main').add_hook(recorded(seen), 'see')
        ends = training.triggers.ManualScheduleTrigger(
            [stop for stop, _ in parts], 'iteration')
        if own:
            trainer.extend(extensions.snapshot(
                filename='{.updater.iteration}'), trigger=ends)
            if start:
                chainer.serializers.load_npz(out / f'{start}', trainer)
        else:
            trainer.extend(Snapshot(ALONE), trigger=ends)
            if start:
                resume(trainer, ALONE,
                       str(out / f'snapshot_iter_{start}.ranks'))
        trainer.run()
        found.append(seen[-last + start:])
    return found


@pytest.mark.parametrize('kind', SHIFTS)
def test_a_rate_that_an_extension_shifts_goes_on(kind, tmp_path):
    """After two interruptions."""
    shift, every = SHIFTS[kind]

    def add(trainer):
        trainer.extend(shift(), trigger=(every, 'iteration'))
    whole, = rates(tmp_path / 'whole', [(0, LAST)], add)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        parts = rates(tmp_path / 'part', PARTS, add)
    assert parts == [whole[start:stop] for start, stop in PARTS]


def test_the_snapshots_rate_counts_not_the_scripts(tmp_path):
    """Which is set after the resume, if it is to be another one."""
    parts = [(0, STOP), (STOP, STOP + 4)]
    assert rates(tmp_path, parts, lambda trainer: None,
                 rate=[0.05, 0.001]) == [[0.05] * 5, [0.05] * 4]


def test_a_rate_that_is_set_after_the_resume_counts(tmp_path):
    trainer = make(tmp_path, STOP)
    trainer.extend(Snapshot(ALONE), trigger=(STOP, 'iteration'))
    trainer.run()
    trainer = make(tmp_path, STOP + 1)
    resume(trainer, ALONE, str(tmp_path))
    trainer.updater.get_optimizer('main').lr = 0.25
    rates = []
    trainer.updater.get_optimizer('main').add_hook(recorded(rates), 'see')
    trainer.run()
    assert rates == [0.25]


# --- what else they keep -----------------------------------------------------

class Remembering:
    """A hook with a state: numbers, texts and arrays."""

    name, call_for_each_param, timing = 'remembering', False, 'pre'

    def __init__(self):
        self.calls, self.last = 0, None
        self.kept = {}
        self.large = numpy.zeros(200_000)
        self.worst = math.nan       # unlike all numbers, itself, too
        self.function = print       # of the script

    def __call__(self, optimizer):
        self.calls += 1
        self.last = numpy.float32(self.calls / 3)
        for name, one in optimizer.target.namedparams():
            if one.grad is not None:
                one.grad = (one.grad + self.kept.get(name, one.grad)) / 2
                self.kept[name] = one.grad.copy()
        grad = optimizer.target.predictor[1].W.grad
        self.large += self.last
        self.worst = min(self.worst, float(abs(grad).max()))


def thaw(trainer):
    model_of(trainer).predictor[0].enable_update()
    model_of(trainer).predictor[1].W.update_rule.hyperparam.lr = 0.125
    model_of(trainer).predictor[1].b.update_rule.mine = 'x'


def frozen(trainer):
    optimizer = trainer.updater.get_optimizer('main')
    optimizer.add_hook(Remembering())
    model = optimizer.target
    model.predictor[0].disable_update()
    model.predictor[1].b.update_rule.add_hook(
        lambda rule, parameter: None, name='of a rule')
    optimizer.loss_scaling(interval=2)
    trainer.extend(thaw, name='thaw', trigger=(
        training.triggers.ManualScheduleTrigger(3, 'iteration')))


def test_all_that_an_optimizer_and_its_rules_keep_goes_on(tmp_path):
    whole = make(tmp_path / 'whole', LAST, add=frozen)
    whole.run()
    first = make(tmp_path / 'part', STOP, add=frozen)
    first.extend(Snapshot(ALONE), trigger=(STOP, 'iteration'))
    first.run()
    second = make(tmp_path / 'part', LAST, add=frozen)
    hook = second.updater.get_optimizer('main')._hookable._pre_update_hooks[
        'remembering']
    resume(second, ALONE, str(tmp_path / 'part'))
    second.run()
    assert weights(second) == weights(whole)
    optimizer = second.updater.get_optimizer('main')
    assert optimizer._loss_scale == whole.updater.get_optimizer(
        'main')._loss_scale
    rules = model_of(second).predictor[1]
    assert rules.W.update_rule.hyperparam.lr == 0.125
    assert rules.b.update_rule.mine == 'x'
    expected = whole.updater.get_optimizer('main')._hookable.\
        _pre_update_hooks['remembering']
    assert repr(vars(hook)) == repr(vars(expected))


# --- update rules that are gone, new, or others ------------------------------

@pytest.mark.parametrize(('before', 'after', 'match'), [
    (None, lambda: RMSpropRule(lr=0.1, alpha=0.9),
     r'optimizer:main/predictor/0/W/t is not in the snapshot'),
    (chainer.optimizers.adam.AdamRule,
     lambda: RMSpropRule(lr=0.1, alpha=0.9),
     'main/predictor/0/W has RMSpropRule, in the snapshot AdamRule')])
def test_another_update_rule_is_an_error_and_changes_nothing(
        before, after, match, tmp_path):
    def add(trainer, rule):
        model_of(trainer).predictor[0].W.update_rule = rule and rule()
    trainer = make(tmp_path, 2, optimizer=chainer.optimizers.Adam(0.1),
                   add=lambda trainer: add(trainer, before))
    trainer.run()
    save(trainer, ALONE, tmp_path)
    trainer = make(tmp_path, 2, optimizer=chainer.optimizers.Adam(0.1),
                   add=lambda trainer: add(trainer, after))
    weights_before = weights(trainer)
    with pytest.raises(ValueError, match=match):
        resume(trainer, ALONE, str(tmp_path / 'snapshot_iter_2.ranks'))
    assert weights(trainer) == weights_before
    assert trainer.updater.iteration == 0

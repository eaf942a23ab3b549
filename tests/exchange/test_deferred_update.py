"""Updates that are done when somebody looks, and block by block."""
import copy
import gc
import pickle
import threading

from chainer_fp8pipe.exchange import deferred_update
from chainer_fp8pipe.exchange.deferred_update import (
    BlockUpdate,
    DeferredUpdate,
    has_plain_arrays,
    is_elementwise,
)
from chainer_fp8pipe.intercept.access import hook_in
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from chainer import optimizer_hooks, optimizers
from hypothesis import given, settings
from hypothesis import strategies as st

ALL = ['/0/W', '/0/b', '/1/W', '/1/b']


class Waiting:
    """A model one of whose updates waits, and another that does not.

    Args:
        optimizer: Makes the optimizer of each.
        before: Is told of both optimizers when they are set up.
    """

    def __init__(self, optimizer=optimizers.MomentumSGD,
                 before=lambda optimizer: None):
        self.finished = []
        self.models, self.optimizers = [], []
        for _ in range(2):
            numpy.random.seed(0)
            self.models.append(chainer.Sequential(
                L.Linear(3, 4), F.tanh, L.Linear(4, 2)))
            self.optimizers.append(optimizer().setup(self.models[-1]))
            before(self.optimizers[-1])
        self.late, self.plain = self.models
        for number in range(2):     # the second one finds a momentum
            x = numpy.random.default_rng(number).normal(size=(5, 3))
            for model, made in zip(self.models, self.optimizers,
                                   strict=True):
                model.cleargrads()
                F.sum(model(x.astype('f4')) ** 2).backward()
                if number == 0:
                    made.update()
        means = {name: parameter.grad.copy()
                 for name, parameter in self.plain.namedparams()}
        for name, parameter in self.late.namedparams():
            parameter.grad[...] = numpy.nan     # not there yet
            means[name].flags.writeable = False
        parameters = dict(self.late.namedparams())

        def finish(name, use):
            self.finished.append(name)
            parameters[name].grad[...] = means[name]
        self.update = DeferredUpdate(parameters, finish)
        for made in self.optimizers:
            made.update()

    def same(self):
        """Whether both models, gradients and momenta are now the same."""
        for one, other in zip(self.late.params(), self.plain.params(),
                              strict=True):
            assert one.array.tobytes() == other.array.tobytes()
            assert one.grad.tobytes() == other.grad.tobytes()
            assert one.update_rule.t == other.update_rule.t
            for key, state in (other.update_rule.state or {}).items():
                assert numpy.array_equal(one.update_rule.state[key], state)
        return self.optimizers[0].t == self.optimizers[1].t


def test_an_access_to_one_parameter_waits_for_no_other():
    waiting = Waiting()
    assert (waiting.finished, waiting.optimizers[0].t) == ([], 2)
    assert waiting.late[2].b.array.tobytes() == (
        waiting.plain[2].b.array.tobytes())
    assert waiting.finished == ['/1/b']
    assert type(waiting.late[2].b) is chainer.Parameter
    waiting.late[0](numpy.zeros((1, 3), 'f4'))
    assert waiting.finished == ['/1/b', '/0/W', '/0/b']
    assert waiting.same()
    assert waiting.finished == ['/1/b', '/0/W', '/0/b', '/1/W']
    assert hook_in(waiting.late) is None


def save(waiting, folder):
    chainer.serializers.save_npz(folder / 'model.npz', waiting.late)


def save_optimizer(waiting, folder):
    chainer.serializers.save_npz(folder / 'made.npz', waiting.optimizers[0])
    with numpy.load(folder / 'made.npz') as saved:
        for number, layer in enumerate(waiting.plain.children()):
            assert numpy.array_equal(saved[f'{number}/W/v'],
                                     layer.W.update_rule.state['v'])
            assert saved[f'{number}/W/t'] == 2


def share(waiting, _):
    assert {type(one) for one in waiting.late.copy('share').params()} == {
        chainer.Parameter}


def copy_a_rule(waiting, _):
    assert type(copy.deepcopy(waiting.late[2].W.update_rule)) is type(
        waiting.plain[2].W.update_rule)


@pytest.mark.parametrize('look', [
    save, save_optimizer, share, copy_a_rule,
    lambda waiting, _: copy.copy(waiting.late[0].W).array,
    lambda waiting, _: copy.deepcopy(waiting.late),
    lambda waiting, _: pickle.dumps(waiting.late[2].W),
    lambda waiting, _: waiting.late.copy('copy'),
    lambda waiting, _: waiting.late[2].W.update_rule.state,
    lambda waiting, _: waiting.late[0].W.grad,
    lambda waiting, _: waiting.late[0].W.grad_var,
    lambda waiting, _: setattr(waiting.late[0].W, 'array',
                               waiting.late[0].W.array.copy()),
    lambda waiting, _: repr(waiting.late[0].W),
    lambda waiting, _: waiting.late[0].W.shape,
    lambda waiting, _: waiting.update.complete()])
def test_it_does_not_matter_how_one_looks(tmp_path, look):
    waiting = Waiting()
    look(waiting, tmp_path)
    assert waiting.finished
    assert waiting.same()


def test_gradients_can_be_cleared_while_the_update_waits():
    """Many scripts begin a step with it."""
    waiting = Waiting()
    for model in waiting.models:
        model.cleargrads()
    assert waiting.finished == []
    for one, other in zip(waiting.late.params(), waiting.plain.params(),
                          strict=True):
        assert one.array.tobytes() == other.array.tobytes()
        assert one.grad is None
        one.grad = numpy.ones_like(one.array)
        one.cleargrad()
        assert one.grad is None
    again = Waiting()
    for model, optimizer in zip(again.models, again.optimizers, strict=True):
        model.cleargrads()
        optimizer.update()      # finds no gradients
    for one, other in zip(*(model.params() for model in again.models),
                          strict=True):
        assert one.array.tobytes() == other.array.tobytes()


# --- what is for this update, and what for the next ---

def rates(model, optimizer):
    optimizer.lr = 100.0
    model[0].W.update_rule.hyperparam.lr = 200.0


def hooks_of(owner):
    return owner._hookable._pre_update_hooks.values()


def rates_of_hooks(model, optimizer):
    for owner in [optimizer, *(parameter.update_rule
                               for parameter in model.params())]:
        for hook in hooks_of(owner):
            hook.rate = 7.0


def one_hook_more(model, optimizer):
    for parameter in model.params():
        parameter.update_rule.add_hook(
            optimizer_hooks.WeightDecay(3.0), 'another')


@pytest.mark.parametrize(('change', 'frozen'), [
    (rates, False), (rates_of_hooks, False), (one_hook_more, False),
    (lambda model, optimizer: model[0].disable_update(), False),
    (lambda model, optimizer: model[0].enable_update(), True),
    (lambda model, optimizer: optimizer.remove_hook('WeightDecay'), False),
    (lambda model, optimizer: optimizer.use_fp32_update(), False),
    # A second update of the same gradients, by another optimizer or not:
    # each has a rule, and a state, of its own.
    (lambda model, optimizer: optimizer.update(), False),
    (lambda model, optimizer: optimizers.SGD(50.0).setup(model), False),
    (lambda model, optimizer: optimizers.SGD(0.5).setup(model).update(),
     False)])
@pytest.mark.parametrize('block', [1, deferred_update.BLOCK])
def test_what_is_changed_now_is_for_the_next_update(
        monkeypatch, change, frozen, block):
    monkeypatch.setattr(deferred_update, 'BLOCK', block)

    def before(optimizer):
        if frozen:
            optimizer.target[0].disable_update()
        optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
        for parameter in optimizer.target.params():
            parameter.update_rule.add_hook(
                optimizer_hooks.WeightDecay(0.2), 'of a rule')
    waiting = Waiting(before=before)
    assert waiting.finished == []
    for model, optimizer in zip(waiting.models, waiting.optimizers,
                                strict=True):
        change(model, optimizer)
    assert waiting.same()


class Counting:
    """Of a rule it changes itself, whatever it says of an optimizer's."""

    name = 'Counting'
    reads_gradients = False
    calls = 0

    def __call__(self, rule, parameter):
        self.calls += 1


def hook(*hooks):
    return lambda optimizer: [optimizer.add_hook(one) for one in hooks]


def hook_of_rules(one):
    return lambda optimizer: [
        parameter.update_rule.add_hook(one, 'of a rule')
        for parameter in optimizer.target.params()]


@pytest.mark.parametrize(('before', 'waits'), [
    (hook(), True), (hook(optimizer_hooks.WeightDecay(0.1)), True),
    (hook(optimizer_hooks.GradientHardClipping(-0.1, 0.1),
          optimizer_hooks.GradientLARS(), optimizer_hooks.Lasso(0.1)), True),
    (lambda optimizer: optimizer.loss_scaling(scale=8.0), True),
    (lambda optimizer: optimizer.target[0].disable_update(), True),
    (hook_of_rules(optimizer_hooks.GradientHardClipping(-0.1, 0.1)), True),
    (lambda optimizer: large_batch(optimizer, 64, 0.1, 32, 0, 5,
                                   samples=1000), True),
    # These must see all gradients first.
    (hook(optimizer_hooks.GradientClipping(0.1)), False),
    (lambda optimizer: optimizer.add_hook(lambda _: None, 'own'), False),
    (lambda optimizer: optimizer.loss_scaling(interval=100), False),
    (hook_of_rules(lambda rule, parameter: None), False),
    (hook_of_rules(Counting()), False)])
def test_an_optimizer_waits_if_parameters_may_come_one_by_one(before, waits):
    waiting = Waiting(before=before)
    assert sorted(waiting.finished) == ([] if waits else ALL)
    assert waiting.same()


# --- errors and threads ---

def test_an_error_comes_at_every_access_and_nothing_is_updated():
    model = L.Linear(2, 2)
    chainer.optimizers.SGD().setup(model)
    before, told = model.W.array.copy(), []
    model.zerograds()

    def finish(name, use):
        raise RuntimeError(f'no {name}')
    update = DeferredUpdate({'/W': model.W}, finish, told.append)
    for look in [lambda: model.W.array] * 2 + [update.complete]:
        with pytest.raises(RuntimeError, match='no /W'):
            look()
    assert len(told) == 1       # others raise as well
    assert numpy.array_equal(vars(model.W)['_data'][0], before)


@pytest.mark.parametrize(('error', 'later', 'match'), [
    (ZeroDivisionError, ZeroDivisionError, 'in it'),
    # Somebody presses Ctrl-C in the middle of it.
    (KeyboardInterrupt, RuntimeError, '/0/W was interrupted by Keyboard')])
def test_an_update_that_fails_is_an_error_from_then_on(error, later, match):
    waiting = Waiting()
    parameter = waiting.late[0].W

    def fails(rule, parameter):
        raise error('in it')
    waiting.update._waiting[id(parameter)].actions.insert(
        0, fails)
    with pytest.raises(error):
        parameter.array.sum()
    with pytest.raises(later, match=match):
        parameter.array.sum()
    assert waiting.late[2].W.array.tobytes() == (
        waiting.plain[2].W.array.tobytes())


def test_threads_may_access_at_the_same_time():
    waiting = Waiting()
    found = []
    threads = [threading.Thread(target=lambda: found.append(
        [parameter.array.tobytes() for parameter in waiting.late.params()]))
        for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == 8 * [[parameter.array.tobytes()
                          for parameter in waiting.plain.params()]]
    assert sorted(waiting.finished) == ALL


UPDATE = chainer.GradientMethod.update


def test_chainers_update_is_replaced_as_long_as_something_waits():
    gc.collect()        # other models are gone
    DeferredUpdate({}, lambda name, use: None).complete()
    assert chainer.GradientMethod.update is UPDATE
    waiting, another = Waiting(), Waiting()
    waiting.update.complete()
    for parameter in another.late.params():
        assert chainer.GradientMethod.update is not UPDATE
        parameter.array.sum()
    assert chainer.GradientMethod.update is UPDATE
    assert another.same()
    waiting = Waiting()
    assert chainer.GradientMethod.update is not UPDATE
    del waiting         # without any access
    gc.collect()
    assert chainer.GradientMethod.update is UPDATE


def test_another_thread_may_be_the_last_to_look_during_an_update():
    gc.collect()
    waiting = Waiting()
    adopt = waiting.update.adopt

    def adopt_late(optimizer):
        thread = threading.Thread(target=waiting.update.complete)
        thread.start()
        thread.join()
        assert chainer.GradientMethod.update is UPDATE
        return adopt(optimizer)
    waiting.update.adopt = adopt_late
    for optimizer in waiting.optimizers:
        optimizer.update()
    assert waiting.same()


# --- block by block ---

SIZE = 60
RULES = [optimizers.AdaDelta, optimizers.AdaGrad, optimizers.Adam,
         optimizers.AMSGrad, optimizers.AdaBound, optimizers.AMSBound,
         optimizers.AdamW, optimizers.CorrectedMomentumSGD,
         optimizers.MomentumSGD, optimizers.NesterovAG, optimizers.RMSprop,
         optimizers.RMSpropGraves, optimizers.SGD]
HOOKS = [optimizer_hooks.WeightDecay(0.1), optimizer_hooks.Lasso(0.05),
         optimizer_hooks.GradientHardClipping(-0.5, 0.5)]


def parameter_of(kind, updates=0):
    """One with a rule of this kind, after some updates."""
    def values(number):
        return numpy.random.default_rng(number).standard_normal(
            (6, SIZE // 6), numpy.float32)
    parameter = chainer.Parameter(values(0))
    rule = parameter.update_rule = kind().create_update_rule()
    for number in range(updates):
        parameter.grad = values(number + 1)
        rule.update(parameter)
    parameter.grad = values(updates + 1)
    return parameter


def updating(rule, parameter):
    rule.update(parameter)


def everything(parameter):
    rule = parameter.update_rule
    return (parameter.array.tobytes(), parameter.grad.tobytes(), rule.t,
            {name: value.tobytes() for name, value in rule.state.items()})


@pytest.mark.parametrize('kind', RULES)
@settings(max_examples=20)
@given(st.sets(st.integers(1, SIZE - 1), max_size=5), st.randoms(),
       st.integers(0, 2), st.sampled_from([(), *((hook,) for hook in HOOKS)]),
       st.sampled_from([None, 8.0]), st.integers(1, 2),
       st.sampled_from([1, 7, 25, SIZE]),
       st.sampled_from(['optimizer', 'pre', 'post']))
def test_any_ranges_in_any_order_give_the_bits_of_one_update(
        kind, cuts, order, updates, hooks, loss_scale, names, block, timing):
    """Chainer updates a parameter as often as it has names."""
    expected, found = parameter_of(kind, updates), parameter_of(kind, updates)
    for parameter in expected, found:
        parameter._loss_scale = loss_scale
        if timing != 'optimizer':
            for one in hooks:
                parameter.update_rule.add_hook(one, timing=timing)
    steps = names * [*(hooks if timing == 'optimizer' else ()), updating]
    for action in steps:
        action(expected.update_rule, expected)
    assert is_elementwise(found.update_rule, hooks)
    assert has_plain_arrays(found, found.update_rule)
    bounds = [0, *sorted(cuts), SIZE]
    ranges = list(zip(bounds[:-1], bounds[1:], strict=True))
    order.shuffle(ranges)
    flat = found.grad.reshape(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_update, 'BLOCK', block)
        update = BlockUpdate(found, found.update_rule, steps)
        for start, stop in ranges[len(ranges) // 2:]:
            update.update(start, stop, flat)
        update.complete()
    assert everything(found) == everything(expected)


def test_a_block_is_updated_once_when_all_of_it_is_there(monkeypatch):
    monkeypatch.setattr(deferred_update, 'BLOCK', 20)
    parameter = parameter_of(optimizers.MomentumSGD, 1)
    rule, before = parameter.update_rule, parameter.array.flatten()
    state, count = rule.state['v'], rule.t
    update = BlockUpdate(parameter, rule, [updating])
    flat = parameter.grad.reshape(-1)

    def changed():
        return [bool(part.all()) for part in numpy.split(
            parameter.array.ravel() != before, 3)]
    for start, stop, done in ((0, 12, []), (18, 33, []), (12, 18, [0]),
                              (38, 55, []), (33, 38, [1])):
        assert update.update(start, stop, flat) == bool(done)
    assert changed() == [True, True, False]
    assert rule.t == count              # of a whole update
    update.complete()
    assert changed() == [True] * 3
    assert rule.state['v'] is state
    assert rule.t == count + 1


@pytest.mark.parametrize(('dtype', 'shape'), [
    ('f2', (2, 3)), ('f8', (2, 3)), ('f4', ()), ('f4', (0, 3))])
def test_what_would_be_computed_in_another_way_is_updated_at_once(
        dtype, shape):
    parameter = chainer.Parameter(numpy.ones(shape, dtype))
    parameter.grad = numpy.ones(shape, dtype)
    rule = parameter.update_rule = optimizers.SGD(0.5).create_update_rule()
    assert not has_plain_arrays(parameter, rule) or not parameter.size


def test_an_action_that_fails_leaves_the_rule_whole(monkeypatch):
    parameter = parameter_of(optimizers.MomentumSGD, 1)
    rule = parameter.update_rule
    before = everything(parameter)
    monkeypatch.setattr(deferred_update, 'BLOCK', 5)
    with pytest.raises(ZeroDivisionError):
        BlockUpdate(parameter, rule, [lambda *_: 1 / 0]).update(
            0, 5, parameter.grad.reshape(-1))
    assert everything(parameter) == before
    assert rule.state['v'].shape == parameter.shape


class Own(optimizers.sgd.SGDRule):
    """It may do what it likes, and says nothing."""


def test_only_chainers_own_elementwise_rules_and_hooks_are(monkeypatch):
    rule = optimizers.SGD().create_update_rule()
    assert is_elementwise(rule, [])
    assert is_elementwise(rule, HOOKS)
    own = optimizers.SGD().create_update_rule()
    own.update_core = own.update_core       # of this one alone
    disabled = optimizers.SGD().create_update_rule()
    disabled.enabled = False
    for other, hooks in [
            (rule, [optimizer_hooks.GradientLARS()]),
            (rule, [lambda rule, parameter: None]), (Own(), []), (own, []),
            (disabled, []), (optimizers.MSVAG().create_update_rule(), []),
            (optimizers.SMORMS3().create_update_rule(), [])]:
        assert not is_elementwise(other, hooks)
    for name in 'update', 'update_core':    # somebody watches them
        with monkeypatch.context() as patch:
            patch.setattr(chainer.UpdateRule, name, lambda *_: None)
            assert not is_elementwise(rule, [])

"""Updates that are done when somebody looks."""
import copy
import gc
import pickle
import threading

from chainer_fp8pipe.exchange import blockwise_update
from chainer_fp8pipe.exchange.deferred_update import DeferredUpdate, deferred
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest


class Waiting:
    """A model one of whose updates waits, and another that does not.

    Args:
        optimizer: Makes the optimizer of each.
        before: Is told of both optimizers when they are set up.
    """

    def __init__(self, optimizer=chainer.optimizers.MomentumSGD,
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
            for model, made in zip(self.models, self.optimizers,
                                   strict=True):
                self.backward(model, number)
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

    @staticmethod
    def backward(model, seed):
        x = numpy.random.default_rng(seed).normal(size=(5, 3)).astype('f4')
        model.cleargrads()
        F.sum(model(x) ** 2).backward()

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


@pytest.mark.parametrize('optimizer', [
    chainer.optimizers.SGD, chainer.optimizers.MomentumSGD,
    chainer.optimizers.Adam, chainer.optimizers.RMSprop])
def test_whoever_looks_finds_the_update_done(optimizer):
    waiting = Waiting(optimizer)
    assert waiting.finished == []
    assert waiting.optimizers[0].t == 2
    assert waiting.same()
    assert deferred(waiting.late) is None


def test_an_access_to_one_parameter_waits_for_no_other():
    waiting = Waiting()
    assert waiting.late[2].b.array.tobytes() == (
        waiting.plain[2].b.array.tobytes())
    assert waiting.finished == ['/1/b']
    assert type(waiting.late[2].b) is chainer.Parameter
    waiting.late[0](numpy.zeros((1, 3), 'f4'))
    assert waiting.finished == ['/1/b', '/0/W', '/0/b']
    assert waiting.same()
    assert waiting.finished == ['/1/b', '/0/W', '/0/b', '/1/W']


def looks(tmp_path):
    def save(waiting):
        chainer.serializers.save_npz(tmp_path / 'model.npz', waiting.late)

    def save_optimizer(waiting):
        chainer.serializers.save_npz(tmp_path / 'optimizer.npz',
                                     waiting.optimizers[0])
        with numpy.load(tmp_path / 'optimizer.npz') as saved:
            for number, layer in enumerate(waiting.plain.children()):
                rule = layer.W.update_rule
                assert numpy.array_equal(saved[f'{number}/W/v'],
                                         rule.state['v'])
                assert saved[f'{number}/W/t'] == 2
    return {
        'save': save, 'save the optimizer': save_optimizer,
        'copy': lambda waiting: copy.copy(waiting.late[0].W).array,
        'a deep copy': lambda waiting: copy.deepcopy(waiting.late),
        'a pickle': lambda waiting: pickle.dumps(waiting.late[2].W),
        'copies of links': lambda waiting: waiting.late.copy('copy'),
        'shares of links': lambda waiting: waiting.late.copy('share'),
        'the state of a rule': lambda waiting: (
            waiting.late[2].W.update_rule.state),
        'a gradient': lambda waiting: waiting.late[0].W.grad,
        'a gradient as a variable': lambda waiting: (
            waiting.late[0].W.grad_var),
        'a new array': lambda waiting: setattr(
            waiting.late[0].W, 'array', waiting.late[0].W.array.copy()),
        'a new gradient': lambda waiting: setattr(
            waiting.late[0].W, 'grad', None),
        'repr': lambda waiting: repr(waiting.late[0].W),
        'shape': lambda waiting: waiting.late[0].W.shape,
        'all': lambda waiting: waiting.update.complete(),
    }


def test_gradients_can_be_cleared_while_the_update_waits():
    """Many scripts begin a step with it."""
    waiting = Waiting()
    waiting.late.cleargrads()
    waiting.plain.cleargrads()
    assert waiting.finished == []
    for one, other in zip(waiting.late.params(), waiting.plain.params(),
                          strict=True):
        assert one.array.tobytes() == other.array.tobytes()
        assert one.grad is None
        one.grad = numpy.ones_like(one.array)
        one.cleargrad()
        assert one.grad is None


def test_an_optimizer_after_that_finds_no_gradients():
    waiting = Waiting()
    for model, optimizer in zip((waiting.late, waiting.plain),
                                waiting.optimizers, strict=True):
        model.cleargrads()
        optimizer.update()
    assert waiting.same()


@pytest.mark.parametrize('look', looks(None))
def test_it_does_not_matter_how_one_looks(tmp_path, look):
    waiting = Waiting()
    looks(tmp_path)[look](waiting)
    assert waiting.finished
    for one, other in zip(waiting.late.params(), waiting.plain.params(),
                          strict=True):
        assert one.array.tobytes() == other.array.tobytes()


def test_copies_are_no_longer_marked():
    waiting = Waiting()
    shared = waiting.late.copy('share')
    rule = copy.deepcopy(waiting.late[2].W.update_rule)
    assert type(rule) is type(waiting.plain[2].W.update_rule)
    assert all(type(parameter) is chainer.Parameter
               for parameter in shared.params())
    assert waiting.same()


def test_a_learning_rate_set_now_is_for_the_next_update():
    waiting = Waiting()
    for made in waiting.optimizers:
        made.lr = 100.0
    waiting.late[0].W.update_rule.hyperparam.lr = 200.0
    assert waiting.same()
    assert waiting.late[0].W.update_rule.hyperparam.lr == 200.0
    assert waiting.late[2].W.update_rule.hyperparam.lr == 100.0


def of_a_rule(optimizer):
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(
            chainer.optimizer_hooks.GradientHardClipping(-0.1, 0.1))


def own(optimizer):
    large_batch(optimizer, 64, 0.1, 32, 0, 5, samples=1000)


def frozen(model, optimizer):
    model[0].disable_update()


def thawed(model, optimizer):
    model[0].enable_update()


def another_rate(model, optimizer):
    for hook in optimizer._hookable._pre_update_hooks.values():
        hook.rate = 7.0


def another_rate_of_rules(model, optimizer):
    for parameter in model.params():
        for hook in (parameter.update_rule._hookable._pre_update_hooks
                     .values()):
            hook.rate = 7.0


def one_hook_more(model, optimizer):
    for parameter in model.params():
        parameter.update_rule.add_hook(
            chainer.optimizer_hooks.WeightDecay(3.0), 'another')


def none_left(model, optimizer):
    optimizer.remove_hook('WeightDecay')


def half_precision(model, optimizer):
    optimizer.use_fp32_update()


@pytest.mark.parametrize('change', [
    frozen, thawed, another_rate, another_rate_of_rules, one_hook_more,
    none_left, half_precision])
def test_what_is_changed_now_is_for_the_next_update(change):
    def before(optimizer):
        if change is thawed:
            optimizer.target[0].disable_update()
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        for parameter in optimizer.target.params():
            parameter.update_rule.add_hook(
                chainer.optimizer_hooks.WeightDecay(0.2), 'of a rule')
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


def noise_of_a_rule(optimizer):
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(lambda rule, parameter: None, 'own')


def count_of_a_rule(optimizer):
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(Counting())


@pytest.mark.parametrize('before', [
    lambda optimizer: optimizer.add_hook(
        chainer.optimizer_hooks.WeightDecay(0.1)),
    lambda optimizer: [optimizer.add_hook(hook) for hook in (
        chainer.optimizer_hooks.GradientHardClipping(-0.1, 0.1),
        chainer.optimizer_hooks.GradientLARS(),
        chainer.optimizer_hooks.Lasso(0.1))],
    lambda optimizer: optimizer.loss_scaling(scale=8.0),
    of_a_rule, own])
def test_hooks_that_read_one_parameter_are_called_when_it_is_done(before):
    waiting = Waiting(before=before)
    assert waiting.finished == []
    assert waiting.same()


@pytest.mark.parametrize('before', [
    lambda optimizer: optimizer.add_hook(
        chainer.optimizer_hooks.GradientClipping(0.1)),
    lambda optimizer: optimizer.add_hook(lambda optimizer: None, 'own'),
    lambda optimizer: optimizer.loss_scaling(interval=100),
    noise_of_a_rule, count_of_a_rule])
def test_optimizers_that_must_see_all_gradients_first_do(before):
    waiting = Waiting(before=before)
    assert sorted(waiting.finished) == ['/0/W', '/0/b', '/1/W', '/1/b']
    assert waiting.same()


def test_parameters_that_are_not_updated_stay_as_they_are():
    waiting = Waiting(before=lambda optimizer: optimizer.target[
        0].disable_update())
    assert waiting.same()


def test_a_new_optimizer_does_not_get_the_old_ones_update():
    waiting = Waiting()
    chainer.optimizers.SGD(50.0).setup(waiting.late)
    for one, other in zip(waiting.late.params(), waiting.plain.params(),
                          strict=True):
        assert one.array.tobytes() == other.array.tobytes()


def test_an_error_comes_at_every_access_and_nothing_is_updated():
    model = L.Linear(2, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    before = model.W.array.copy()
    model.cleargrads()
    model.zerograds()

    def finish(name, use):
        raise RuntimeError(f'no {name}')
    update = DeferredUpdate({'/W': model.W}, finish)
    model.b.update_rule.enabled = False
    optimizer.update_rule = None
    for _ in range(2):
        with pytest.raises(RuntimeError, match='no /W'):
            model.W.array.sum()
    with pytest.raises(RuntimeError, match='no /W'):
        update.complete()
    assert numpy.array_equal(vars(model.W)['_data'][0], before)


def test_a_second_update_with_the_same_gradients_is_done_as_well():
    waiting = Waiting()
    for optimizer in waiting.optimizers:
        optimizer.update()
    assert waiting.same()


def test_a_second_optimizers_update_is_not_done_range_by_range(monkeypatch):
    """Each has a rule, and a state, of its own."""
    monkeypatch.setattr(blockwise_update, 'BLOCK', 1)
    waiting, uses = Waiting(), []
    finish = waiting.update._finish
    waiting.update._finish = lambda name, use: (
        uses.append(use), finish(name, use))
    for model in waiting.models:
        chainer.optimizers.SGD(0.5).setup(model).update()
    assert waiting.same()
    assert uses == [None] * 4


class Interrupted(dict):
    """Somebody presses Ctrl-C just after something was taken."""

    def pop(self, *arguments):
        super().pop(*arguments)
        raise KeyboardInterrupt


def test_an_update_that_is_interrupted_is_an_error_from_then_on():
    waiting = Waiting()
    parameter = waiting.late[0].W
    waiting.update._to_do = Interrupted(waiting.update._to_do)
    with pytest.raises(KeyboardInterrupt):
        parameter.array.sum()
    with pytest.raises(RuntimeError, match='/0/W was interrupted by Keyboard'):
        parameter.array.sum()


def test_an_update_that_fails_is_an_error_at_every_access():
    waiting = Waiting()
    parameter = waiting.late[0].W
    waiting.update._to_do['/0/W'].insert(
        0, (parameter.update_rule, lambda *_: 1 / 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            parameter.array.sum()
    assert waiting.late[2].W.array.tobytes() == (
        waiting.plain[2].W.array.tobytes())


def test_threads_may_access_at_the_same_time():
    waiting = Waiting()
    found = []
    threads = [threading.Thread(target=lambda: found.append(
        [parameter.array.copy() for parameter in waiting.late.params()]))
        for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(found) == 8
    for arrays in found:
        for array, parameter in zip(arrays, waiting.plain.params(),
                                    strict=True):
            assert array.tobytes() == parameter.array.tobytes()
    assert sorted(waiting.finished) == ['/0/W', '/0/b', '/1/W', '/1/b']


UPDATE = chainer.GradientMethod.update


@pytest.fixture
def other_models_gone():
    gc.collect()


@pytest.mark.usefixtures('other_models_gone')
def test_chainers_update_is_replaced_as_long_as_something_waits():
    assert chainer.GradientMethod.update is UPDATE
    waiting, another = Waiting(), Waiting()
    waiting.update.complete()
    assert chainer.GradientMethod.update is not UPDATE
    for parameter in another.late.params():
        assert chainer.GradientMethod.update is not UPDATE
        parameter.array.sum()
    assert chainer.GradientMethod.update is UPDATE
    assert another.same()


@pytest.mark.usefixtures('other_models_gone')
def test_an_update_without_any_access_replaces_nothing():
    waiting = Waiting()
    assert chainer.GradientMethod.update is not UPDATE
    del waiting
    gc.collect()
    assert chainer.GradientMethod.update is UPDATE


@pytest.mark.usefixtures('other_models_gone')
def test_an_update_of_no_parameters_replaces_nothing():
    update = DeferredUpdate({}, lambda name, use: None)
    assert chainer.GradientMethod.update is UPDATE
    update.complete()


@pytest.mark.usefixtures('other_models_gone')
def test_another_thread_may_be_the_last_to_look_during_an_update():
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

"""What is said to be final is what Chainer leaves in the parameters."""
import contextlib
import threading
import types

import chainer_fp8pipe
from chainer_fp8pipe.intercept.ready_gradients import unwatch, unwatched, watch

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from chainer import _backprop

from tests.communicators.networks import NETWORKS

assert chainer_fp8pipe


class Watcher:
    def __init__(self, model, wanted=True):
        self.model = model
        self.wanted = wanted
        self.passes = []
        self.finals = []

    def parameters(self):
        return {name: parameter for name, parameter
                in self.model.namedparams() if parameter.array is not None}

    def begin(self, names, kind, models, loss_scale):
        self.passes.append((names, kind, loss_scale))
        return self.wanted

    def final(self, name, gradient):
        self.finals.append((name, gradient))


@contextlib.contextmanager
def watching(model, **options):
    watcher = Watcher(model, **options)
    watch(watcher)
    try:
        yield watcher
    finally:
        unwatch(watcher)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.namedparams()
            if parameter.grad is not None}


@pytest.mark.parametrize('name', NETWORKS)
@pytest.mark.parametrize('passes', [1, 2])
def test_what_is_final_is_what_chainer_leaves(name, passes):
    def train(model):
        numpy.random.seed(0)
        model.cleargrads()
        for step in range(passes):
            model.loss(step).backward(loss_scale=2.0)
    numpy.random.seed(1)
    plain = NETWORKS[name]()
    train(plain)
    numpy.random.seed(1)
    model = NETWORKS[name]()
    with watching(model) as watcher:
        train(model)
    found = gradients(model)
    assert found.keys() == gradients(plain).keys()
    for key, gradient in gradients(plain).items():
        assert gradient.tobytes() == found[key].tobytes()
    assert len(watcher.passes) == passes
    assert {scale for _, _, scale in watcher.passes} == {2.0}
    last = dict(watcher.finals)
    if name == 'Forgetful':         # a pass inside of another
        assert set(last) == {'/outer/W', '/outer/b'}
    for key, gradient in last.items():
        assert gradient is found[key]
    if name in ('Plain', 'Shared', 'Branches', 'Recurrent', 'Penalty'):
        assert set(last) == set(found)


def test_layers_become_final_from_the_last_to_the_first():
    model = NETWORKS['Plain']()
    with watching(model) as watcher:
        model.loss(0).backward()
    layers = [name.split('/')[1] for name, _ in watcher.finals]
    assert layers == sorted(layers, key=lambda name: -int(name[1:]))


LAYERS = {
    'linear': (lambda: L.Linear(4, 4), (2, 4), 'LinearGradData'),
    'convolution': (lambda: L.Convolution2D(4, 4, 3, pad=1), (2, 4, 5, 5),
                    'Deconvolution2DFunction'),
    'without bias': (lambda: L.Convolution2D(4, 4, 3, pad=1, nobias=True),
                     (2, 4, 5, 5), 'Deconvolution2DFunction'),
    'three dimensions': (lambda: L.Convolution3D(4, 4, 3, pad=1),
                         (2, 4, 3, 3, 3), 'DeconvolutionND'),
    'deconvolution': (lambda: L.Deconvolution2D(4, 4, 3, pad=1),
                      (2, 4, 5, 5), None)}


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('debug', [False, True])
def test_weights_are_final_before_the_gradient_of_the_layers_input(
        kind, debug):
    class Look(chainer.FunctionHook):
        def forward_preprocess(self, function, data):
            if function.__class__.__name__ == below:
                before.append([name for name, _ in watcher.finals])

    def loss():
        model.cleargrads()
        return F.sum(model(x) ** 2)
    make, shape, below = LAYERS[kind]
    model = chainer.Sequential(make(), F.tanh, make())
    x = chainer.Variable(
        numpy.random.default_rng(0).normal(0, 1, shape).astype('f4'))
    with chainer.using_config('debug', debug):
        loss().backward()
        alone = {name: gradient.copy()
                 for name, gradient in gradients(model).items()}
        with watching(model) as watcher:
            last, before = loss(), []
            with Look():
                last.backward()
    assert {name: gradient.tobytes() for name, gradient in alone.items()} == {
        name: gradient.tobytes()
        for name, gradient in gradients(model).items()}
    assert dict(watcher.finals).keys() == alone.keys()
    if below:
        assert [sorted(names) for names in before] == [
            sorted(name for name in alone if name.startswith('/1/')),
            sorted(alone)]


class Odd(chainer.Chain):
    """Parameters that are used in unusual ways."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.x = chainer.Parameter(numpy.ones((2, 3), 'f4'))
            self.stopped = chainer.Parameter(numpy.zeros((2, 3), 'f4'))
            self.loss = chainer.Parameter(numpy.zeros((), 'f4'))
            self.layer, self.twice = L.Linear(3, 3), L.Linear(3, 3)


class Stop(chainer.FunctionNode):
    """Gives its second input no gradient."""

    def forward(self, inputs):
        return inputs[0] + inputs[1],

    def backward(self, indexes, gradients):
        return gradients[0], None


@pytest.mark.parametrize(('loss', 'final'), [
    # A layer's input, and a layer that is used twice.
    (lambda m: F.sum(m.twice(m.twice(m.layer(m.x)))),
     ['/layer/W', '/layer/b', '/twice/W', '/twice/b', '/x']),
    (lambda m: F.sum(Stop().apply((m.x, m.stopped))[0]), ['/x']),
    (lambda m: m.loss, [])])        # which has its gradient from elsewhere
def test_what_gets_a_gradient_from_a_function_is_final(loss, final):
    model = Odd()
    model.cleargrads()
    with watching(model) as watcher:
        loss(model).backward()
    found = gradients(model)
    assert sorted(name for name, _ in watcher.finals) == final
    assert all(gradient is found[name] for name, gradient in watcher.finals)
    assert model.stopped.grad is None


def test_a_pass_is_told_by_the_models_it_goes_through():
    first, second = (chainer.Sequential(L.Linear(2, 2)) for _ in range(2))
    x = numpy.ones((1, 2), 'f4')
    with watching(first) as one, watching(second) as other:
        F.sum(first(x)).backward()
        F.sum(second(first(x))).backward()
        F.sum(second(first(x)) + second(x)).backward()
        F.sum(second(first(x))).backward()
    kinds = [kind for _, kind, _ in one.passes]
    assert len(set(kinds)) == 3
    assert kinds[1] == kinds[3]
    assert [kind for _, kind, _ in other.passes] == kinds[1:]


def test_who_is_not_concerned_or_does_not_want_to_know_is_not_told():
    model, other = NETWORKS['Plain'](), NETWORKS['Plain']()
    with watching(model, wanted=False) as watcher:
        other.loss(0).backward()
        with unwatched():
            model.loss(0).backward()
        assert watcher.passes == []
        model.loss(0).backward()
    assert len(watcher.passes) == 1
    assert watcher.finals == []


def test_an_error_in_a_pass_leaves_nothing_behind():
    class Fail(chainer.FunctionNode):
        def forward(self, inputs):
            return inputs

        def backward(self, indexes, gradients):
            raise KeyError('here')
    model = NETWORKS['Plain']()
    with watching(model) as watcher:
        with pytest.raises(KeyError):
            F.sum(Fail().apply((model.l1.W,))[0]).backward()
        model.loss(0).backward()
    assert len(watcher.passes) == 2
    assert dict(watcher.finals)['/l1/W'] is model.l1.W.grad


def test_threads_do_not_hear_of_each_others_passes():
    model, other = NETWORKS['Plain'](), NETWORKS['Plain']()
    barrier = threading.Barrier(2)

    def run(model, watcher):
        barrier.wait()
        for step in range(20):
            watcher.finals.clear()
            model.cleargrads()
            model.loss(step).backward()
            assert all(gradient is gradients(model)[name]
                       for name, gradient in watcher.finals)
            results.append(len(watcher.finals))
    results = []
    with watching(model) as one, watching(other) as two:
        threads = [threading.Thread(target=run, args=pair)
                   for pair in ((model, one), (other, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [10] * 40


def in_chainer():
    return _backprop._backprop_to_all, _backprop._backprop_utils


ORIGINAL = in_chainer()


def test_chainer_has_its_own_loop_back_when_the_last_watcher_is_gone():
    model = NETWORKS['Plain']()
    with watching(model) as first:
        with watching(model):
            assert not set(map(id, in_chainer())) & set(map(id, ORIGINAL))
        assert not set(map(id, in_chainer())) & set(map(id, ORIGINAL))
        unwatch(first)
        assert in_chainer() == ORIGINAL
        unwatch(first)      # nobody's
    assert in_chainer() == ORIGINAL


def test_somebody_elses_step_and_table_are_used(monkeypatch):
    """The table where no watcher is concerned."""
    used = []

    class Table(_backprop._backprop_utils.GradTable):
        def __init__(self, **options):
            used.append('table')
            super().__init__(**options)

    def step(*arguments):
        used.append('step')
        original.backprop_step(*arguments)
    original = _backprop._backprop_utils
    theirs = types.SimpleNamespace(**{
        **vars(original), 'GradTable': Table, 'backprop_step': step})
    monkeypatch.setattr(_backprop, '_backprop_utils', theirs)
    model, other = NETWORKS['Plain'](), NETWORKS['Plain']()
    with watching(model) as watcher:
        model.loss(0).backward()
        assert set(used) == {'step'}
        other.loss(0).backward()
        assert 'table' in used
    assert len(watcher.passes) == 1
    assert _backprop._backprop_utils is theirs


def test_a_watcher_may_leave_during_a_pass():
    class Leaving(Watcher):
        def final(self, name, gradient):
            super().final(name, gradient)
            unwatch(self)
    model, plain = NETWORKS['Plain'](), NETWORKS['Plain']()
    plain.copyparams(model)
    for each in (model, plain):
        each.cleargrads()
    watcher = Leaving(model)
    watch(watcher)
    model.loss(0).backward()
    assert in_chainer() == ORIGINAL
    plain.loss(0).backward()
    assert {name: gradient.tobytes()
            for name, gradient in gradients(plain).items()} == {
        name: gradient.tobytes()
        for name, gradient in gradients(model).items()}

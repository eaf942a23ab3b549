"""What a program says of a model, and what it leaves behind: nothing."""
import gc
import sys
import tracemalloc
import weakref

from chainer_fp8pipe import atomic, deferred
from chainer_fp8pipe.chains import recorder
from chainer_fp8pipe.chains.calls import assign, order_of
from chainer_fp8pipe.chains.names import Names
from chainer_fp8pipe.chains.placeholder import PlaceholderError, is_placeholder
from chainer_fp8pipe.chains.recorder import (
    NOWHERE,
    Recorder,
    record_example,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models import MODELS

X = numpy.random.RandomState(0).randn(6, 4).astype('f')
T = numpy.zeros(6, 'i')


def recorded(model, *args, timed=False, train=True, **kwargs):
    """The program of a model's call."""
    recorder = Recorder(Names(model))
    if train:
        return record_example(
            recorder, lambda: model(*args, **kwargs), timed)
    with chainer.using_config('train', False), recorder.placeholders():
        return recorder.record(lambda: model(*args, **kwargs), NOWHERE)


def called(program):
    return [(call.name, call.link) for call in program.calls]


class Net(chainer.Chain):
    def __init__(self, function, extra=None):
        super().__init__()
        self.function = function
        with self.init_scope():
            self.one, self.two = L.Linear(4, 5), L.Linear(5, 3)
            self.inner, self.extra = Inner(), extra

    def forward(self, x):
        return F.sum(self.two(self.function(self, self.one(x))))


class Inner(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(5, 5)
            self.deepest = Looking()

    def forward(self, x):
        return self.deepest(self.linear(x))


class Looking(chainer.Link):
    def forward(self, x):
        return x * float(x.array.max())


def test_calls_are_those_of_the_model_with_their_links():
    program = recorded(L.Classifier(chainer.Sequential(
        L.Linear(4, 5), F.relu, L.Linear(5, 3))), X, T)
    assert called(program) == [
        ('LinearFunction', '/predictor/0'), ('ReLU', '/predictor'),
        ('LinearFunction', '/predictor/1'), ('SoftmaxCrossEntropy', '/'),
        ('Accuracy', '/')]
    assert [call.parameters for call in program.calls] == [
        ('/predictor/0/W', '/predictor/0/b'), (),
        ('/predictor/1/W', '/predictor/1/b'), (), ()]
    assert [source.call for call in program.calls
            for source in call.inputs] == [0, 1, 2, 2]
    assert program.result.shape == ()
    assert program.calls[1].outputs[0].shape == (6, 5)
    assert program.calls[0].outputs[0].wants


@pytest.mark.parametrize('deferring', [False, True])
def test_shapes_are_those_of_a_plain_run(deferring):
    case = MODELS['unet']
    batch = case.batch(numpy.random.RandomState(0), 2)
    shapes = []

    def noted(self, inputs, original=chainer.FunctionNode.apply):
        outs = original(self, inputs)
        shapes.append((self.label, [(out.shape, out.dtype) for out in outs]))
        return outs
    model = case.make()
    case.loss(model, batch)             # finds its shapes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chainer.FunctionNode, 'apply', noted)
        case.loss(model, batch)
    if deferring:
        with deferred():
            model = case.make()
    program = recorded(model, *batch)
    assert [(call.name, [(value.shape, value.dtype)
                         for value in call.outputs.values()
                         ][:len(call.results)])
            for call in program.calls] == shapes


def test_equal_calls_are_run_once():
    runs = []

    class Counted(chainer.FunctionNode):
        def __init__(self, scale):
            self.scale = scale

        def forward(self, inputs):
            runs.append(inputs[0].shape)
            return inputs[0] * numpy.float32(self.scale),

        def backward(self, indexes, gradients):
            return gradients[0] * self.scale,

    def several(model, h):
        for scale in (2, 3, 2, 2, 3):
            h, = Counted(scale).apply((h,))
        return h + Counted(2).apply((h[:2],))[0][:1]
    program = recorded(Net(several), X)
    assert runs == [(6, 5)] * 2 + [(2, 5)]
    assert sum(name == 'Counted' for name, _ in called(program)) == 6


class Given(chainer.FunctionNode):
    """Has a function of the user's among its attributes."""

    def __init__(self, function):
        self.function_of_users = function

    def forward(self, inputs):
        return inputs


def test_what_calls_were_given_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(recorder, '_MEASURED', 3)
    model = chainer.Sequential(lambda x: Given(kept[-1]).apply((x,))[0])
    one = recorder.Recorder(Names(model))
    kept = []
    for number in range(5):
        kept.append(lambda number=number: number)
        record_example(one, lambda: model(X), False)
    kept = [weakref.ref(function) for function in kept]
    gc.collect()
    assert [found() is None for found in kept] == [True] * 2 + [False] * 3


@pytest.mark.parametrize('timed', [False, True])
@pytest.mark.parametrize('name', [
    'dropout_and_norms', 'stateful_lm', 'preactivation_resnet', 'regression',
    'discrete', 'vector_quantised'])
def test_the_model_is_as_it_was(name, timed):
    """Running statistics, random numbers, state, values."""
    case = MODELS[name]
    numpy.random.seed(0)
    model = case.make()
    batch = case.batch(numpy.random.RandomState(1), case.samples)
    with chainer.using_config('train', False):
        case.loss(model, batch)         # finds its shapes

    def state():
        found = {}
        for path, link in model.namedlinks():
            for key, value in vars(link).items():
                if isinstance(value, chainer.Parameter):
                    value = value.array
                if not isinstance(value, (set, list, chainer.Link)):
                    found[path, key] = (id(value), numpy.copy(value)
                                        if isinstance(value, numpy.ndarray)
                                        else value)
        return found, numpy.random.get_state()[1:3]
    before, random = state()
    recorded(model, *batch, timed=timed)
    after, random_after = state()
    assert before.keys() == after.keys()
    for key, (identity, value) in before.items():
        assert after[key][0] == identity, key
        if isinstance(value, numpy.ndarray):
            numpy.testing.assert_array_equal(after[key][1], value, key)
    numpy.testing.assert_array_equal(random[0], random_after[0])
    assert random[1] == random_after[1]


def test_a_link_that_looks_is_found_without_a_mark():
    """The innermost one, and no more than it."""
    program = recorded(Net(lambda net, h: net.inner(h)), X)
    assert called(program) == [
        ('LinearFunction', '/one'), ('LinearFunction', '/inner/linear'),
        ('Looking', '/inner/deepest'), ('LinearFunction', '/two'),
        ('Sum', '/')]
    assert program.calls[2].whole == ('/inner/deepest',)


def test_parameters_inside_of_an_atomic_link_are_its_calls():
    class Chosen(chainer.Chain):
        def __init__(self):
            super().__init__(left=L.Linear(5, 5), right=L.Linear(5, 5))

        def forward(self, h):
            return (self.left if h.array.sum() > 0 else self.right)(h)
    call = recorded(Net(lambda net, h: net.extra(h), Chosen()), X).calls[1]
    assert call.name == 'Chosen'
    assert sorted(call.parameters) == [
        f'/extra/{side}/{name}' for side in ('left', 'right')
        for name in 'Wb']


def test_a_look_in_the_models_own_forward_names_the_line_and_the_remedy():
    def look(net, h):
        return h if h.array.sum() > 0 else -h       # this line
    with pytest.raises(PlaceholderError) as caught:
        recorded(Net(look), X)
    line = look.__code__.co_firstlineno + 1
    assert f'{__file__}:{line}: ' in str(caught.value)
    assert 'chainer_fp8pipe.atomic' in str(caught.value)
    assert 'call 0 (LinearFunction in /one)' in str(caught.value)


def test_memory_around_an_array_is_not_read_from_afar():
    """Another rank gets the array alone."""
    def strided(net, h):
        return F.as_strided(F.transpose(h), (6, 5), (5, 1), 0)
    with pytest.raises(PlaceholderError) as caught:
        recorded(Net(strided), X)
    line = strided.__code__.co_firstlineno + 1
    assert f'{__file__}:{line}: as_strided reads the memory' in str(
        caught.value)
    marked = recorded(Net(atomic(strided)), X)
    assert called(marked)[1] == ('strided', '/')


def test_a_large_model_is_never_in_memory():
    with deferred():
        model = chainer.Sequential(
            *(L.Linear(1500, 1500) for _ in range(6)), F.sum)
    tracemalloc.start()
    try:
        program = recorded(model, numpy.zeros((2, 1500), 'f'))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One layer's values and gradients at a time, of 9 MB each.
    assert peak < 4 * 9e6
    assert len(program.calls) == 7
    assert all(is_placeholder(layer.W._data[0]) for layer in model[:-1])


def test_memory_of_a_call_is_what_it_keeps_and_needs():
    class Keeping(chainer.FunctionNode):
        def forward(self, inputs):
            self.kept = numpy.ones(250_000, 'f')
            numpy.ones(1_000_000, 'f').sum()
            self.retain_inputs((0,))
            return inputs[0] * 2,

        def backward(self, indexes, gradients):
            return gradients[0] * 2,
    program = recorded(Net(lambda net, h: Keeping().apply((h,))[0]), X)
    call = program.calls[1]
    assert call.kept == pytest.approx(1e6, rel=.05)
    assert call.temporary == pytest.approx(4e6, rel=.05)
    assert call.retained == program.calls[1].inputs


def test_a_view_is_kept_in_the_memory_of_what_it_shows():
    """The same array, read twice by functions that keep what they read."""
    def viewed(net, h):
        h = F.exp(h)
        turned = F.transpose(F.reshape(h, (-1, 2)))
        weights = F.transpose(net.two.W)
        return (F.reshape(turned * turned, (-1, 5)) + h * h
                + F.sum(weights * weights))
    program = recorded(Net(viewed), X)
    made, = (number for number, call in enumerate(program.calls)
             if call.name == 'exp')
    assert [call.retained for call in program.calls
            if call.name == '_ * _'] == [((made, 0),), ((made, 0),), ()]


def test_times_are_taken_where_they_are_asked_for():
    net = Net(lambda net, h: F.relu(h))
    assert all(call.forward > 0 and call.backward > 0
               for call in recorded(net, X, timed=True).calls)
    assert all(call.forward == call.backward == 0
               for call in recorded(net, X).calls)


def test_what_draws_is_known():
    def dropped(net, h):
        return F.dropout(F.relu(h))
    assert [call.name for call in recorded(Net(dropped), X).calls
            if call.draws] == ['Dropout']
    assert not any(call.draws for call in recorded(
        Net(dropped), X, train=False).calls)


def test_a_parameter_that_is_not_the_models_is_named():
    stranger = L.Linear(5, 5)
    with pytest.raises(ValueError, match=r'test_recorder.py:\d+: .* parameter '
                       'that is not among its own; register it'):
        recorded(Net(lambda net, h: stranger(h)), X)


def test_links_that_keep_running_values_stay_whole():
    program = recorded(chainer.Sequential(
        L.LayerNormalization(4), L.Linear(4, 5), L.BatchRenormalization(5),
        L.Linear(5, 5), L.BatchNormalization(5), F.sum), X)
    assert [call.name for call in program.calls if call.whole] == [
        'BatchRenormalizationFunction', 'BatchNormalization']
    assert all(call.whole == (call.link,) for call in program.calls
               if call.whole)


@pytest.mark.parametrize(('between', 'expected'), [
    (lambda net, h: h, False), (lambda net, h: net.extra(h), True),
    (atomic(lambda net, h: net.extra(h)), True)])
def test_whether_a_batch_normalisation_is_called_is_known(between, expected):
    """Only then statistics are gathered."""
    program = recorded(Net(between, L.BatchNormalization(5)), X)
    assert expected == (bool(program.normalised) or any(
        call.figures.normalises for call in program.calls))


def test_what_reads_running_values_is_known():
    norm = L.BatchNormalization(5)
    net = Net(lambda net, h: net.extra(h) - norm.avg_mean[None], norm)
    program = recorded(net, X)
    assert [call.name for call in program.calls if call.reads] == [
        'BatchNormalization', '_ - _']
    program = recorded(net, X, train=False)
    assert [call.name for call in program.calls if call.reads] == [
        'FixedBatchNormalization', '_ - _']
    assert {call.reads for call in program.calls} == {(), ('/extra',)}
    assert not any(call.whole for call in program.calls)


def test_running_values_inside_of_one_call_are_that_call_s():
    class Normalising(Inner):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.norm = L.BatchNormalization(5)

        def forward(self, x):
            return Looking.forward(self, self.norm(x))
    for between in (lambda net, h: net.extra(h),
                    atomic(lambda net, h: net.extra.norm(h))):
        whole, = [call.whole for call in recorded(
            Net(between, Normalising()), X).calls if call.whole]
        assert '/extra/norm' in whole


@pytest.mark.parametrize('length', [2, 5])
def test_a_recurrent_model_is_in_the_order_of_its_layers(length):
    """Also where some parameters are used from the second step on only."""
    class Recurrent(chainer.Chain):
        def __init__(self):
            super().__init__(out=L.Linear(6, 2), l2=L.LSTM(6, 6),
                             l1=L.LSTM(3, 6), embed=L.EmbedID(9, 3))

        def forward(self, words):
            self.l1.reset_state()
            self.l2.reset_state()
            loss = 0
            for word in words.T:
                loss += F.sum(self.out(self.l2(self.l1(self.embed(word)))))
            return loss
    model = Recurrent()
    program = recorded(model, numpy.zeros((2, 3), 'i'))
    order = order_of(program.calls)
    assert [name.split('/')[1] for group in order for name in group] == (
        ['embed'] + ['l1'] * 3 + ['l2'] * 3 + ['out'] * 2)
    again = recorded(model, numpy.zeros((2, length), 'i'))
    cuts = [place for place in range(len(order))
            if order[place][0].startswith(('/l2', '/out'))]
    stages = assign(again.calls, order, [
        (cuts[0], 0), (cuts[-1], 0)]).chunks
    assert {call.link.split('/')[1]: stage for call, stage
            in zip(again.calls, stages, strict=True)
            if call.parameters} == {'embed': 0, 'l1': 0, 'l2': 1, 'out': 2}


def test_what_ranks_compare_tells_models_apart():
    def said(function, x=X):
        return recorded(Net(function), x).description()
    relu = said(lambda net, h: F.relu(h))
    assert relu == said(lambda net, h: F.relu(h))
    for other in (said(lambda net, h: F.tanh(h)),
                  said(lambda net, h: F.relu(h), X[:3]),
                  said(lambda net, h: F.relu(F.relu(h))),
                  said(lambda net, h: F.dropout(h, .2))):
        assert other != relu
    assert said(lambda net, h: F.dropout(h, .2)) != said(
        lambda net, h: F.dropout(h, .3))


def _written(array, value):
    array[...] = value
    return array


def _labelled(h, labels):
    return h * F.expand_dims(F.softmax_cross_entropy(
        h, labels, reduce='no'), 1)


#: Ways past NumPy's functions (more of them are in test_placeholder.py).
READS = {
    'asarray': lambda net, h: F.where(
        numpy.asarray(h.array > 0, dtype=bool), h, -h),
    'buffer': lambda net, h: _labelled(
        h, _written(numpy.zeros(6, 'i'), h.array.argmax(axis=1))),
    'condition': lambda net, h: h * F.sum(
        net.one(X[h.array.argmax(axis=1) == 2])),
    'branch': lambda net, h: (
        F.tanh if numpy.asarray(h.array).max() > 0 else F.relu)(h),
    'index': lambda net, h: h * numpy.arange(5, dtype='f')[
        h.array.argmax(axis=1), None],
    'report': lambda net, h: chainer.report(
        {'share': (numpy.asarray(h.array) > 0).mean()}, net) or h,
}


@pytest.mark.parametrize('name', READS)
def test_data_that_c_code_reads_are_found(name):
    with pytest.raises(PlaceholderError,
                       match='chainer_fp8pipe.atomic') as caught:
        recorded(Net(READS[name]), X)
    assert 'test_recorder.py:' in str(caught.value)
    # The remedy.
    recorded(Net(atomic(READS[name])), X)


def test_what_a_model_draws_itself_is_no_look():
    """From a generator of its own, and from NumPy's."""
    own = numpy.random.RandomState(0)

    def noisy(net, h):
        h = h + own.randn(6, 5).astype('f')
        return F.where(numpy.random.rand(6, 5) > .5, h, -h)
    assert len(recorded(Net(noisy), X).calls) == 6


_runs = []


@atomic
def counted(net, h):
    _runs.append(1)
    return h * 2


def test_calls_are_not_run_again_to_find_looks():
    _runs.clear()
    recorded(Net(counted), X)
    # Twice to see that what it returns beside arrays does not depend on
    # data, and once for its figures.
    assert len(_runs) == 3


def test_a_parameters_own_array_is_read_where_the_parameter_is():
    program = recorded(Net(
        lambda net, h: h * (net.inner.linear.b.array * 2)), X)
    assert program.calls[1].parameters == ('/inner/linear/b',)


def test_forward_sets_no_parameter():
    def setting(net, h):
        net.one.W.array = net.one.W.array * .5
        return h
    with pytest.raises(PlaceholderError, match='sets the array of parameter '
                       '/one/W.*atomic'):
        recorded(Net(setting), X)


def test_an_array_that_is_assigned_is_refused_with_the_line():
    def rounding(net, h):
        h = h * 1
        h.array = numpy.round(h.array)
        return h
    with pytest.raises(PlaceholderError, match=r'test_recorder.py:\d+: .*'
                       'assigned.*atomic'):
        recorded(Net(rounding), X)


def test_what_comes_of_the_batch_alone_may_be_read():
    def masked(net, h):
        mask = F.expand_dims(chainer.Variable(X[:, 0]), 1)
        mask = (mask * 2).array > 0
        assert isinstance(float(F.sum(mask.astype('f')).array), float)
        return F.where(numpy.broadcast_to(numpy.asarray(mask), (6, 5)), h, -h)
    assert 'Where' in [name for name, _ in called(recorded(Net(masked), X))]


@pytest.mark.parametrize('asked', [
    lambda x: numpy.isnan(x).any(), lambda x: not numpy.isfinite(x).all(),
    lambda x: numpy.isnan(x.sum()), lambda x: numpy.any(
        numpy.isnan(x) | numpy.isinf(x)), lambda x: (x != x).any()])
def test_a_guard_against_nan_is_no_look(asked):
    def guarded(net, h):
        if asked(h.array):
            raise ValueError('not a number')
        return h * 2
    program = recorded(Net(guarded), X)
    assert len(program.guards) == 1


def test_equal_calls_are_equal_in_what_their_shapes_depend_on():
    """Also where that is the values of arrays."""
    class Longest(chainer.FunctionNode):
        def forward(self, inputs):
            x, lengths = inputs
            return x[:, :lengths.max()],

        def backward(self, indexes, gradients):
            return F.pad(gradients[0], ((0, 0), (
                0, 5 - gradients[0].shape[1])), 'constant'), None

    def several(net, h):
        made = [h[numpy.arange(6) >= place] for place in (1, 2)]
        made += [F.split_axis(h, numpy.array([place]), 1)[0]
                 for place in (1, 2)]
        made += [h[True], h[1], h[:, 1:], h[:, 2:]]
        made += [F.sum(h, axis=axis) for axis in (None, 0)]
        made += [Longest().apply((h, numpy.full(6, length)))[0]
                 for length in (2, 3)]
        assert [one.shape for one in made] == [
            (5, 5), (4, 5), (6, 1), (6, 2), (1, 6, 5), (5,), (6, 4), (6, 3),
            (), (5,), (6, 2), (6, 3)]
        return h
    recorded(Net(several), X)


def test_words_do_not_make_other_calls():
    runs = []

    def embedded(net, h):
        for word in range(4):
            h = h + net.extra(numpy.full(6, word, 'i'))
        return h
    kind = F.connection.embed_id.EmbedIDFunction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, 'forward', lambda self, inputs, original=(
            kind.forward): runs.append(1) or original(self, inputs))
        recorded(Net(embedded, L.EmbedID(5, 5)), X)
    assert len(runs) == 1


def test_an_index_of_computed_conditions_is_a_look():
    with pytest.raises(PlaceholderError, match='indexing by a condition'):
        recorded(Net(lambda net, h: F.get_item(h, h.array > 0)), X)


class Around(chainer.Chain):
    def __init__(self, inner):
        super().__init__()
        with self.init_scope():
            self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def test_links_may_be_nested_as_deeply_as_in_plain_chainer():
    model = L.Linear(4, 3)
    for _ in range(250):
        model = Around(model)
    limit = sys.getrecursionlimit()
    model(X)
    assert len(recorded(model, X).calls) == 251
    assert sys.getrecursionlimit() == limit

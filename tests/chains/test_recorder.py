"""What a program says of a model, and what it leaves behind: nothing."""
import re
import tracemalloc

from chainer_fp8pipe import atomic, deferred
from chainer_fp8pipe.chains.attributes import Names
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


@pytest.mark.parametrize('name', [
    'dropout_and_norms', 'stateful_lm', 'preactivation_resnet', 'regression',
    'discrete', 'vector_quantised'])
def test_the_model_is_as_it_was(name):
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
    recorded(model, *batch, timed=True)
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


def _look(net, h):
    return h if h.array.sum() > 0 else -h       # 1


def _read(net, h):
    return (F.tanh if numpy.asarray(h.array).max() > 0 else F.relu)(h)     # 1


def _strided(net, h):
    return F.as_strided(F.transpose(h), (6, 5), (5, 1), 0)      # 1


def _round(net, h):
    h = h * 1
    h.array = numpy.round(h.array)      # 2
    return h


def _hooked(net, h):
    with chainer.function_hooks.TimerHook():
        return F.relu(h)        # 2


def _set(net, h):
    net.one.W.array = net.one.W.array * .5
    return h


class Kept(chainer.FunctionNode):
    def forward(self, inputs):
        self.sign = numpy.sign(inputs[0])
        return abs(inputs[0]),


def _kept(net, h):
    kept = Kept()
    return kept.apply((h,))[0] * kept.sign


#: What the model's own forward must not do; the line, and what is said.
REFUSED = [
    (_look, 1, r'__bool__ needs the value of call 2 \(gt in /\)'),
    (_read, 1, 'numpy.asarray.* needs the value'),
    # Another rank gets the array alone, not the memory around it.
    (_strided, 1, 'as_strided needs the value'),
    (_round, 2, 'assigned'), (_hooked, 2, 'would see no call'),
    (_set, 0, 'sets the array of parameter /one/W'),
    (_kept, 0, "'Kept' object has no attribute 'sign', as its forward")]


@pytest.mark.parametrize(('function', 'line', 'said'), REFUSED)
def test_what_cannot_be_cut_names_the_line_and_the_remedy(function, line,
                                                          said):
    place = f'{__file__}:{function.__code__.co_firstlineno + line}: '
    with pytest.raises(PlaceholderError, match=(
            re.escape(place) * bool(line) + f'.*{said}.*atomic')):
        recorded(Net(function), X)
    if function is not _set:
        marked = recorded(Net(atomic(function)), X)
        assert called(marked)[1] == (function.__name__, '/')


def test_a_parameter_that_is_not_the_models_is_named():
    stranger = L.Linear(5, 5)
    with pytest.raises(ValueError, match=r'test_recorder.py:\d+: .* parameter '
                       'that is not among its own; register it'):
        recorded(Net(lambda net, h: stranger(h)), X)


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


def test_a_parameters_own_array_is_read_where_the_parameter_is():
    program = recorded(Net(
        lambda net, h: h * (net.inner.linear.b.array * 2)), X)
    assert program.calls[1].parameters == ('/inner/linear/b',)


def test_what_comes_of_the_batch_alone_may_be_read():
    def masked(net, h):
        mask = F.expand_dims(chainer.Variable(X[:, 0]), 1)
        mask = (mask * 2).array > 0
        assert isinstance(float(F.sum(mask.astype('f')).array), float)
        return F.where(numpy.broadcast_to(numpy.asarray(mask), (6, 5)), h, -h)
    assert 'Where' in [name for name, _ in called(recorded(Net(masked), X))]


def test_an_index_is_that_of_the_call_whatever_is_written_later():
    def function(net, h):
        index, columns = numpy.arange(6), [0, 1, 2, 3, 4]
        h = h[index][:, columns]
        index[:], columns[0] = 0, 3
        return h
    _, rows, columns, *_ = recorded(Net(function), X).takes
    assert rows[1]['slices'][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert columns[1]['slices'][1] == [0, 1, 2, 3, 4]


def test_averages_are_not_read_after_they_have_moved():
    norm = L.BatchNormalization(5)

    def function(net, h):
        h = norm(h)
        with chainer.using_config('train', False):
            return norm(h)
    model = Net(function)
    model.add_link('norm', norm)
    with pytest.raises(ValueError, match='read them before'):
        recorded(model, X)


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


def _scaled(value):
    return lambda net, h: h * value


def _configured(name, value):
    def function(net, h):
        with chainer.using_config(name, value):
            return F.dropout(h)
    return function


def _unchained(net, h):
    h = F.relu(h)
    h.unchain()
    return h


class Relu(chainer.Link):
    def forward(self, x):
        return F.relu(x)


@atomic
def _of_link(net, h):
    return h * 1., net.beta


class Helper:
    def __init__(self, beta):
        self.beta = beta

    def run(self, h):
        return h * 1., self.beta


def _times(value, of):
    def run(net, h):
        def by_keyword(h, *, beta=value):
            return h * 1., beta
        net.beta = value
        h, beta = (_of_link(net, h) if of == 'link' else atomic(
            Helper(value).run if of == 'helper' else by_keyword)(h))
        return h * beta
    return run


def _power(net, h):
    def power(h, n):
        return power(h, n - 1) * h if n else h
    return atomic(power)(h, 2)


#: What a link does in the place of which another batch does another.
VARIANTS = {
    'a number': _scaled(2.), 'another number': _scaled(3.),
    'the number as an integer': _scaled(2), 'not a number': _scaled(
        float('nan')),
    'an index': lambda net, h: h[:, :5],
    'another index': lambda net, h: h[:, ::-1],
    'an array': lambda net, h: h * numpy.full((6, 5), 2, 'f'),
    'a variable without a way back': lambda net, h: chainer.Variable(h.array),
    'the variable': lambda net, h: h, 'unchained': _unchained,
    'a function': lambda net, h: F.relu(h),
    **{f'{of} with {value}': _times(value, of)
       for of in ('link', 'helper', 'keyword') for value in (2., 3.)},
    'a function that calls itself': _power,
    'a function in a link': lambda net, h: net.relu(h),
    'a difference': lambda net, h: h - F.relu(h),
    'another difference': lambda net, h: F.relu(h) - h,
    'the usual ratio': lambda net, h: F.dropout(h),
    'a ratio': lambda net, h: F.dropout(h, .3),
    'another ratio': lambda net, h: F.dropout(h, .4),
    'a setting': _configured('train', False),
    'another setting': _configured('compute_mode', 'fast'),
    'a parameter': lambda net, h: F.linear(h, net.inner.linear.W),
    'another parameter': lambda net, h: F.linear(h, net.other.W),
    'a link': lambda net, h: net.inner.linear(h),
    'another link': lambda net, h: net.other(h),
    'an order': lambda net, h: F.relu(h) - F.tanh(h),
    'another order': lambda net, h: F.tanh(h) - F.relu(h),
    'parts': lambda net, h: F.concat(F.split_axis(h, [2, 4], 1)[::-1]),
    'other parts': lambda net, h: F.concat(F.split_axis(h, [1, 4], 1)[::-1]),
    'statistics': lambda net, h: net.norm(h),
    'running statistics': lambda net, h: F.fixed_batch_normalization(
        h, net.norm.gamma, net.norm.beta, net.norm.avg_mean,
        net.norm.avg_var),
}


def written(program):
    """All that a program says of its calls, but for the calls' arrays."""
    def about(value):
        return repr([(type(one), getattr(one, 'shape', one)) for one in (
            value if isinstance(value, (tuple, list)) else [value])])
    return [(
        call.name.partition(' ')[0],    # which has a number, now and then
        call.link, call.inputs, call.parameters, call.outputs, call.draws,
        call.whole, call.reads, call.config, call.hidden,
        {name: about(value) for name, value in attributes.items()
         if not callable(value)}, list(map(about, arguments)))
        for call, (_, attributes, arguments) in zip(
            program.calls, program.takes, strict=True)] + [
            repr(program.notes.numbers)]


def test_a_batch_is_recorded_as_if_it_were_the_first():
    def programs(recorder, *names):
        for name in names:
            net.function = VARIANTS[name]
            with recorder.placeholders():
                yield written(recorder.record(net, ((X,), {}), NOWHERE))
    net = Net(None)
    with net.init_scope():
        net.other, net.relu = L.Linear(5, 5), Relu()
        net.norm = L.BatchNormalization(5)
    first = {name: next(programs(Recorder(Names(net)), name))
             for name in VARIANTS}
    recorder = Recorder(Names(net))
    for one in VARIANTS:
        for other in VARIANTS:
            assert list(programs(recorder, one, other)) == [
                first[one], first[other]]

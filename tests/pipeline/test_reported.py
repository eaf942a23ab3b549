"""Whatever a model reports is what it reports on the whole batch."""
from chainer_fp8pipe import Divisible, PipelineUpdater, partition
from chainer_fp8pipe.pipeline.means import add, of_all, report_of
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks

X = np.random.RandomState(0).rand(8, 4).astype('f')

#: What a model may report of its hidden values, and of its input.
REPORTS = {
    'a variable': lambda h, x: F.mean(h),
    'an array without axes': lambda h, x: F.mean(h).array,
    'a number of Python': lambda h, x: 2.5,
    'an integer': lambda h, x: 3,
    'a number of NumPy': lambda h, x: x.mean(),
    'a vector': lambda h, x: F.mean(h, axis=0),
    'a vector of one element': lambda h, x: F.mean(h).reshape(1),
    'an array of the input': lambda h, x: x.mean(axis=0),
    'integers': lambda h, x: np.arange(3),
    'a number and its weight': lambda h, x: (F.mean(h), len(x)),
    'nothing': lambda h, x: None,
    'a text': lambda h, x: 'warm-up',
    'a list': lambda h, x: [1, 'two'],
}


class Net(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(4, 5, initialW=np.ones((5, 4), 'f')),
                         b=L.Linear(5, 1, initialW=np.ones((1, 5), 'f')))

    def forward(self, x):
        h = F.tanh(self.a(x))
        loss = F.mean(self.b(h))
        chainer.report({'loss': loss}, self)
        for name, value in REPORTS.items():
            chainer.report({name: value(h, x)}, self.a)
        return loss


def observed(updater):
    """The reports of two updates."""
    model = updater.get_optimizer('main').target
    reporter, found = chainer.Reporter(), {}
    reporter.add_observers('main', model.namedlinks())
    for _ in range(2):
        found = {}
        with reporter.scope(found):
            updater.update()
    return found


def iterator(data):
    return chainer.iterators.SerialIterator(data, len(data), shuffle=False)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_variable = isinstance(value, chainer.Variable)
        assert isinstance(found[name], chainer.Variable) == is_variable, name
        value, other = (getattr(one, 'array', one)
                        for one in (value, found[name]))
        if isinstance(value, tuple):
            value, other = ([float(getattr(item, 'array', item))
                             for item in one] for one in (value, other))
        if value is None or isinstance(value, (str, list)) and (
                not isinstance(value[0], float)):
            assert other == value, name
        else:
            assert np.shape(other) == np.shape(value), name
            assert isinstance(other, np.ndarray) == is_variable or (
                np.ndim(value) > 0 and not isinstance(value, list)), name
            np.testing.assert_allclose(other, value, rtol=1e-5, err_msg=name)


def serially():
    return observed(StandardUpdater(
        iterator(X), chainer.optimizers.SGD(0.1).setup(Net())))


@on_ranks(1, 2)
def test_of_a_partitioned_chain(comm):
    model = partition(Net(), X[:2], comm, micro_batches=4)
    updater = PipelineUpdater(
        iterator(X), chainer.optimizers.SGD(0.1).setup(model), comm)
    updater.pipeline.reports_variables = True
    found = observed(updater)
    same(found, serially())
    assert [list(one) for one in comm.allgather(found)] == (
        [list(found)] * comm.size)


@on_ranks(1, 2)
def test_of_a_loss_of_layers(comm):
    """Also with an observer, which a script registers in its Trainer."""
    def loss(y, t):
        chainer.report({'half': F.mean(y).array * 0 + .5})
        chainer.report({'rows': len(t)}, model)
        return F.softmax_cross_entropy(y, t)
    model = Divisible(L.Linear(4, 3), L.Linear(3, 2)).stage(comm)
    pipeline = Pipeline(chainer.optimizers.SGD().setup(model), comm,
                        micro_batches=2, loss_func=loss)
    found = pipeline.step(X, np.zeros(len(X), 'i'))
    assert (found['half'], found['rows']) == (.5, 4)


def means(*ranks):
    """Means of (name, value, weight) of each rank."""
    everyone = []
    for reports in ranks:
        everyone.append({})
        for name, value, weight in reports:
            add(everyone[-1], name, report_of(value, weight))
    return {name: one.mean() for name, one in of_all(everyone).items()}


def test_a_value_that_counts_nothing_changes_no_mean():
    found = means([('a', float('nan'), 0.0), ('a', 1.0, 1.0),
                   ('b', float('nan'), 0.0), ('p', (float('nan'), 0), 1.0),
                   ('v', np.full(2, np.nan), 0.0), ('v', np.ones(2), 1.0)])
    assert found.pop('v').tolist() == [1, 1]
    assert found == {'a': 1.0, 'b': 0.0, 'p': (0.0, 0.0)}


def test_what_other_ranks_cannot_get_is_refused_at_once():
    with pytest.raises(TypeError, match='cannot be sent to the other'):
        report_of(lambda: None, 1.0)

"""``PipelineUpdater.predict`` of a model that ``partition`` has cut."""
from chainer_fp8pipe import Divisible, PipelineUpdater, partition

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.ranks import on_ranks


class Net(chainer.Chain):
    """Has its loss, a predictor of its own, and other outputs."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(5, 7)
            self.middle = L.Linear(7, 7)
            self.last = L.Linear(7, 4)

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(self.predict(x), t)
        chainer.report({'loss': loss}, self)
        return loss

    def predict(self, x):
        return self.last(F.dropout(F.relu(self.middle(F.relu(
            self.first(x))))))

    def both(self, x):
        hidden = F.relu(self.first(x))
        return {'hidden': hidden, 'scores': [F.softmax(self.predict(x))]}

    def total(self, x):
        return F.sum(self.predict(x))


class Predictor(chainer.Chain):
    """What a Classifier is put around."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(None, 7)
            self.middle = L.Linear(None, 7)
            self.last = L.Linear(None, 4)

    def __call__(self, x):
        return self.last(F.relu(self.middle(F.relu(self.first(x)))))


class Speechless(Net):
    predict = None

    def forward(self, x, t):
        return F.softmax_cross_entropy(Net.predict(self, x), t)


X = np.random.RandomState(0).rand(11, 5).astype(np.float32)
T = (np.arange(11) % 4).astype(np.int32)


def build(kind):
    np.random.seed(0)
    return L.Classifier(Predictor()) if kind is Predictor else kind()


def staged(comm, kind):
    """The updater of a model over all ranks, and the model in one piece."""
    model = partition(build(kind), (X[:3], T[:3]), comm, micro_batches=3)
    updater = PipelineUpdater(
        None if comm.rank else chainer.iterators.SerialIterator(
            list(zip(X, T, strict=True)), 9),
        chainer.optimizers.SGD(0.1).setup(model), comm, micro_batches=3)
    return updater, build(kind)


def serial(function, *inputs):
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        return function(*inputs)


@on_ranks(2, 3)
def test_a_classifier_predicts_with_its_predictor(comm):
    updater, model = staged(comm, Predictor)
    found = updater.predict(*() if comm.rank else (X,))
    expected = serial(model.predictor, X).array
    assert found.shape == (11, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@on_ranks(2, 3)
def test_a_model_predicts_with_its_method_predict(comm):
    updater, model = staged(comm, Net)
    found = updater.predict(X, wanted=comm.rank == 0)
    if comm.rank:
        assert found is None
    else:
        np.testing.assert_allclose(found, serial(model.predict, X).array,
                                   rtol=1e-5)


@on_ranks(2, 3)
def test_a_named_method_gives_arrays_in_the_form_it_returns(comm):
    updater, model = staged(comm, Net)
    found = updater.predict(X, method='both')
    expected = serial(model.both, X)
    assert list(found) == ['hidden', 'scores']
    np.testing.assert_allclose(found['hidden'], expected['hidden'].array,
                               rtol=1e-5)
    np.testing.assert_allclose(found['scores'][0],
                               expected['scores'][0].array, rtol=1e-5)


@on_ranks(2)
def test_a_prediction_after_training_sees_the_new_parameters(comm):
    updater, model = staged(comm, Net)
    before = updater.predict(X)
    updater.update()
    after = updater.predict(X)
    assert not np.allclose(before, after)
    np.testing.assert_array_equal(after, updater.predict(X))


@on_ranks(2)
def test_fewer_samples_than_micro_batches_are_predicted(comm):
    updater, model = staged(comm, Net)
    np.testing.assert_allclose(updater.predict(X[:2]),
                               serial(model.predict, X[:2]).array, rtol=1e-5)


@on_ranks(2)
def test_a_model_without_an_output_says_how_to_name_one(comm):
    updater, _ = staged(comm, Speechless)
    with pytest.raises(ValueError, match="pass method='name'"):
        updater.predict(X)
    with pytest.raises(ValueError, match="no method 'scores'"):
        updater.predict(X, method='scores')


@on_ranks(2)
def test_an_output_without_rows_for_the_samples_is_refused(comm):
    updater, _ = staged(comm, Net)
    with pytest.raises(Exception, match='a row for each sample'):
        updater.predict(X, method='total')


@on_ranks(2)
def test_ranks_that_name_different_methods_are_told(comm):
    updater, _ = staged(comm, Net)
    with pytest.raises(ValueError, match='the method that predicts'):
        updater.predict(X, method='both' if comm.rank else 'predict')


@pytest.mark.parametrize('micro_batches', [1, 4])
@on_ranks(1, 2)
def test_a_divisible_refuses_outputs_without_rows_for_the_samples(
        comm, micro_batches):
    model = Divisible(L.Linear(5, 3), lambda h: F.mean(
        h, axis=0, keepdims=True)).stage(comm, balance='layers')
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator([0], 1),
        chainer.optimizers.SGD().setup(model), comm,
        micro_batches=micro_batches, loss_fun=lambda y, t: F.sum(y))
    with pytest.raises(RuntimeError, match=r'shape \(1, 3\) for a '
                       'micro-batch of .*a row for each sample'):
        updater.predict(X)

"""``PipelineUpdater.predict`` of layers, and of what ``partition`` has cut."""
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
        super().__init__(first=L.Linear(5, 7), middle=L.Linear(7, 7),
                         last=L.Linear(7, 4))

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


class Speechless(Net):
    predict = None

    def forward(self, x, t):
        return F.softmax_cross_entropy(Net.predict(self, x), t)


class Layers(Divisible):
    """The layers of ``Net``, and its outputs in two forms."""

    def __init__(self, *last):
        super().__init__(L.Linear(5, 7), F.relu, L.Linear(7, 7), F.relu,
                         F.dropout, L.Linear(7, 4), *last)

    predict = Divisible.__call__


def mean():
    return Layers(lambda h: F.mean(h, axis=0, keepdims=True))


X = np.random.RandomState(0).rand(11, 5).astype(np.float32)
T = (np.arange(11) % 4).astype(np.int32)


def staged(comm, kind, micro_batches=3, **options):
    """The updater of a model over all ranks, and the model in one piece."""
    np.random.seed(0)
    model = kind()
    if isinstance(model, Divisible):
        model = model.stage(comm, 'layers')
    else:
        partition(model, (X[:3], T[:3]), comm, micro_batches=micro_batches)
    updater = PipelineUpdater(
        None if comm.rank else chainer.iterators.SerialIterator(
            list(zip(X, T, strict=True)), 9),
        chainer.optimizers.SGD(0.1).setup(model), comm,
        micro_batches=micro_batches, **options)
    np.random.seed(0)
    return updater, kind()


def serial(function, *inputs):
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        return function(*inputs)


@pytest.mark.parametrize('samples', [1, 2, 11])
@pytest.mark.parametrize('kind', [Net, Layers])
@on_ranks(1, 2, 3)
def test_a_prediction_reaches_all_ranks(comm, kind, samples):
    """With fewer samples than micro-batches as well."""
    updater, model = staged(comm, kind)
    expected = serial(model.predict, X[:samples]).array
    for given in (X[:samples], None if comm.rank else X[:samples]):
        np.testing.assert_allclose(updater.predict(given), expected, 1e-5,
                                   1e-6)


@on_ranks(2, 3)
def test_outputs_come_in_the_form_they_are_returned_in(comm):
    updater, model = staged(comm, Net)
    found = updater.predict(X, method='both')
    expected = serial(model.both, X)
    assert list(found) == ['hidden', 'scores']
    np.testing.assert_allclose(found['hidden'], expected['hidden'].array,
                               rtol=1e-5)
    np.testing.assert_allclose(found['scores'][0],
                               expected['scores'][0].array, rtol=1e-5)
    h, total = staged(comm, lambda: Layers(lambda h: (h, F.sum(h, 1))))[
        0].predict(X)
    np.testing.assert_allclose(h.sum(1), total, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_method_that_is_not_there_or_another_on_each_rank_is_told(comm):
    updater, _ = staged(comm, Speechless)
    with pytest.raises(ValueError, match="pass method='name'"):
        updater.predict(X)
    with pytest.raises(ValueError, match="no method scores"):
        updater.predict(X, method='scores')
    updater, _ = staged(comm, Net)
    for one, other, said in ('predict', 'both', 'the method that predicts'), (
            None, 'gone', "rank 1: Net has no method gone"):
        with pytest.raises(ValueError, match=said):
            updater.predict(X, method=other if comm.rank else one)
    assert updater.predict(X).shape == (11, 4)      # no harm was done


@pytest.mark.parametrize(('kind', 'micro_batches', 'options'), [
    (Net, 3, {'method': 'total'}), (mean, 1, {}), (mean, 4, {})])
@on_ranks(1, 2)
def test_an_output_without_rows_for_the_samples_is_refused(
        comm, kind, micro_batches, options):
    updater, _ = staged(comm, kind, micro_batches)
    with pytest.raises(RuntimeError, match=r'an output has shape .* for a '
                       'micro-batch of .*a row for each sample'):
        updater.predict(X, **options)

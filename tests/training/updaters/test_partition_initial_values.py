"""Initial values that a link gives its parameters in its first forward."""
from chainer_fp8pipe import PipelineUpdater, partition
from chainer_fp8pipe.chains.cuts import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks

X, T = numpy.ones((2, 8), 'f'), numpy.zeros(2, 'i')


class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(8, 8)
            self.lstm = L.StatelessLSTM(None, 8)    # shapes in forward
            self.out = L.Linear(8, 4)

    def forward(self, x, t):
        _, h = self.lstm(None, None, F.relu(self.a(x)))
        return F.softmax_cross_entropy(self.out(h), t)


@on_ranks(2)
def test_a_recurrent_link_without_input_size_draws_its_own_weights(comm):
    model = partition(Recurrent(), (X, T), comm, micro_batches=2)
    optimizer = chainer.optimizers.SGD(0.0).setup(model)
    iterator = chainer.iterators.SerialIterator(
        [(X[0], numpy.int32(0))] * 4, 4)
    updater = PipelineUpdater(iterator, optimizer, comm)
    for _ in range(2):
        updater.update()
    found = {}
    for several in comm.allgather({
            name: parameter.array for name, parameter
            in model.namedparams()}):
        found.update(several)
    # As the link's own initialisation: normal weights, a forget bias of 1.
    for name in '/lstm/upward/W', '/lstm/lateral/W':
        assert 0.2 < found[name].std() * numpy.sqrt(8) < 2, name
    assert found['/lstm/upward/b'].tolist() == [0, 0, 1, 0] * 8


def looking(x, t):
    return F.sum(x) * float(x.array.max())


@on_ranks(1, 2)
def test_a_model_that_was_not_cut_gets_its_shapes_as_ever(comm):
    for loss, options in (
            (F.softmax_cross_entropy, {'memory': '1 kB'}), (looking, {}),
            (F.softmax_cross_entropy, {'plan': {'format': 0}})):
        model = L.Classifier(chainer.Sequential(
            L.Linear(None, 5), L.BatchNormalization(axis=0), L.Linear(5, 4)),
            loss)
        with pytest.raises((DoesNotFit, ValueError)):
            partition(model, (X, T), comm, micro_batches=2, **options)
        assert sum(not one.is_initialized for one in model.params()) == 3
        model.lossfun = F.softmax_cross_entropy
        assert numpy.isfinite(model(X, T).array)
        weights = model.predictor[0].W.array
        assert type(weights) is numpy.ndarray
        assert weights.shape == (5, 8)
        assert numpy.std(weights) > .1

"""Initial values that a link gives its parameters in its first forward."""
from chainer_fp8pipe import PipelineUpdater, partition

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

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

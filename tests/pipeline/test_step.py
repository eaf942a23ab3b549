"""A pipeline's step in a loop without updater and Trainer."""
from chainer_fp8pipe import (
    Divisible,
    ProcessGrid,
    create_communicator,
    partition,
)
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest

from tests.ranks import on_ranks

X = numpy.random.RandomState(0).rand(8, 4).astype('f')
T = (numpy.arange(8) % 3).astype('i')


class Breaking(chainer.FunctionNode):
    """Fails where something is in a list."""

    bad: list = []

    def forward(self, inputs):
        if self.bad:
            raise KeyError('here')
        return inputs[0] * 1,

    def backward(self, indexes, gradients):
        return gradients


def breaking(x):
    return F.tanh(Breaking().apply((x,))[0])


def layers(middle=F.tanh):
    return [L.Linear(4, 6, initialW=numpy.eye(6, 4, dtype='f')), middle,
            L.Linear(6, 3, initialW=numpy.eye(3, 6, dtype='f'))]


class CountsBatches(L.Classifier):
    count = 0

    def forward(self, x, t):
        self.count += 1
        return super().forward(F.leaky_relu(x, 1 / self.count), t)


def pipeline_of(comm, kind, middle=F.tanh):
    if kind == 'layers':
        model = Divisible(*layers(middle)).stage(comm, balance='layers')
    else:
        make = CountsBatches if kind == 'counting' else L.Classifier
        model = partition(make(chainer.Sequential(*layers(middle))),
                          (X[:4], T[:4]), comm, micro_batches=2)
    optimizer = chainer.optimizers.SGD(0.5)
    if getattr(comm, 'replicas', 1) > 1:
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, create_communicator('float32', mpi_comm=comm.data))
    return Pipeline(optimizer.setup(model), comm, micro_batches=2)


def serially():
    model = L.Classifier(chainer.Sequential(*layers()))
    optimizer = chainer.optimizers.SGD(0.5).setup(model)
    losses = []
    for _ in range(3):
        optimizer.update(model, X, T)
        losses.append(float(model.loss.array))
    return losses, model.predictor(X).array


@pytest.mark.parametrize('kind', ['layers', 'chain'])
@on_ranks(1, 2)
def test_steps_are_those_of_serial_training(comm, kind):
    pipeline = pipeline_of(comm, kind)
    batch = (X, T) if pipeline.grid.stage_index == 0 else ()
    found = [pipeline.step(*batch) for _ in range(3)]
    losses, outputs = serially()
    numpy.testing.assert_allclose([one['loss'] for one in found], losses,
                                  rtol=1e-5)
    assert pipeline.iteration == 3
    assert set(found[0]) == {'loss', 'accuracy'}
    assert set(pipeline.evaluate(*batch)) == {'loss', 'accuracy'}
    numpy.testing.assert_allclose(pipeline.predict(*batch[:1]), outputs,
                                  rtol=1e-4, atol=1e-5)


class Counting:
    """A communicator that counts collective calls."""

    def __init__(self, comm, calls):
        self._comm, self._calls = comm, calls

    def __getattr__(self, name):
        if name in ('Iallgather', 'Iallreduce', 'Ibcast', 'allgather',
                    'bcast', 'allreduce', 'Barrier'):
            self._calls.append(name)
        return getattr(self._comm, name)


@on_ranks(2)
def test_a_step_has_three_collective_calls(comm):
    pipeline = pipeline_of(comm, 'chain')
    for _ in range(3):
        pipeline.step(X, T)
    calls = []
    for meeting in pipeline._meetings._meetings.values():
        meeting.comm = Counting(meeting.comm, calls)
    grid = pipeline.grid
    grid.pipeline, grid.data = (Counting(one, calls)
                                for one in (grid.pipeline, grid.data))
    pipeline.step(X, T)
    assert calls == ['Iallgather'] * 3


# --- what fails --------------------------------------------------------------

@pytest.mark.parametrize('kind', ['layers', 'counting'])
@on_ranks(1, 2, 4)
def test_training_goes_on_after_an_evaluation_or_prediction_that_failed(
        comm, kind):
    """Of four ranks one pipeline fails, and its replica hears nothing."""
    grid = ProcessGrid(comm, pipeline=min(comm.size, 2))
    pipeline, other = (pipeline_of(grid, kind, breaking)
                       for _ in range(2))
    for _ in range(2):
        found = pipeline.step(X, T)
        assert found == other.step(X, T)
        for infer in (lambda: pipeline.evaluate(X, T),
                      lambda: pipeline.predict(X)):
            before = infer()
            if grid.replica_index == grid.replicas - 1:
                Breaking.bad.append(1)
                try:
                    with pytest.raises(RuntimeError, match='here'):
                        infer()
                finally:
                    Breaking.bad.clear()
                with pytest.raises(ValueError, match='3'):
                    pipeline.evaluate(X, T[:3])
            numpy.testing.assert_equal(infer(), before)
    assert pipeline.step(X, T) == other.step(X, T)
    grid.free()


class TwoLosses(chainer.Chain):
    """The second has several labels a sample."""

    def __init__(self):
        super().__init__(a=L.Linear(4, 3))

    def forward(self, x, t, u):
        y = self.a(x)
        return F.softmax_cross_entropy(y, t) + F.softmax_cross_entropy(
            F.broadcast_to(y[:, :, None], (*y.shape, u.shape[1])), u)


@on_ranks(2)
def test_replicas_weigh_in_one_unit(comm):
    grid = ProcessGrid(comm, pipeline=1)
    u = numpy.zeros((8, 2 - comm.rank), 'i')
    model = partition(TwoLosses(), (X[:4], T[:4], u[:4, :1]), grid,
                      micro_batches=2)
    pipeline = Pipeline(chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), create_communicator(
            'float32', mpi_comm=grid.data)).setup(model), grid)
    with pytest.raises(ValueError, match=r'loss_weight=\) gives, is samples '
                                         'on rank 0 but labels on rank 1'):
        pipeline.step(X, T, u)
    pipeline.step(X, T, u[:, :1])
    grid.free()


# --- batches -----------------------------------------------------------------

class Two(chainer.Chain):
    def forward(self, a, b):
        return F.concat([a, 2 * b])


@on_ranks(1, 2, 3)
def test_a_divisible_has_inputs_and_then_the_target(comm):
    model = Divisible(Two(), F.relu, L.Linear(8, 3, initialW=numpy.eye(3, 8)))
    pipeline = Pipeline(chainer.optimizers.SGD(0.5).setup(model.stage(
        comm, balance='layers')), comm, micro_batches=2)
    first = comm.rank == 0
    pipeline.step(*(X, X + 1, T) if first else ())
    with pytest.raises(ValueError, match="make one of 'a', 't', by name"):
        pipeline.evaluate(**dict(a=X, t=T) if first else {})
    with pytest.raises(ValueError, match='make one of 1 arrays'):
        pipeline.evaluate(*[X] if first else ())
    with pytest.raises(ValueError, match='a float32, not an array'):
        pipeline.evaluate(*[numpy.float32(1), T] if first else ())

"""A pipeline's step in a loop without updater and Trainer."""
from chainer_fp8pipe import Divisible, partition
from chainer_fp8pipe.pipeline.step import Pipeline

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks

X = numpy.random.RandomState(0).rand(8, 4).astype('f')
T = (numpy.arange(8) % 3).astype('i')


def layers():
    return [L.Linear(4, 6, initialW=numpy.eye(6, 4, dtype='f')), F.tanh,
            L.Linear(6, 3, initialW=numpy.eye(3, 6, dtype='f'))]


def pipeline_of(comm, kind):
    if kind == 'layers':
        model = Divisible(*layers()).stage(comm, balance='layers')
    else:
        model = partition(L.Classifier(chainer.Sequential(*layers())),
                          (X[:4], T[:4]), comm, micro_batches=2)
    return Pipeline(chainer.optimizers.SGD(0.5).setup(model), comm,
                    micro_batches=2)


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
    for meeting in pipeline._together._meetings.values():
        meeting.comm = Counting(meeting.comm, calls)
    grid = pipeline.grid
    grid.pipeline, grid.data = (Counting(one, calls)
                                for one in (grid.pipeline, grid.data))
    pipeline.step(X, T)
    assert calls == ['Iallgather'] * 3


@on_ranks(2)
def test_a_batch_by_position_and_by_name_is_refused_on_all_ranks(comm):
    pipeline = pipeline_of(comm, 'layers')
    with pytest.raises(ValueError, match='by position, or all of them by'):
        pipeline.step(X, t=T)
    pipeline.step(X, T)         # no harm was done

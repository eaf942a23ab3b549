"""An Evaluator over stages and replicas gives what it gives serially."""
from chainer_fp8pipe.training.iterators import ReplicaIterator

import chainer
import chainer.links as L
import chainermn
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.trainers import Job
from tests.training.updaters.networks import NETWORKS, dataset
from tests.training.updaters.test_pipeline_updater import serial


def serially(model, data, batch):
    """What Chainer's Evaluator gives for the whole model."""
    return extensions.Evaluator(serial(data, batch, repeat=False),
                                L.Classifier(model))()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(('network', 'stages', 'shared'), [
    ('Plain', None, False), ('Noisy', None, False), ('Plain', 2, False),
    ('Plain', 2, True)])
def test_the_evaluator_gives_what_it_gives_serially(
        comm, network, stages, shared):
    """Where each pipeline evaluates all data, and where each its share."""
    data = dataset(20)      # the last batch is short
    job = Job(comm, network, stages if comm.size > 1 else 1, data=data,
              micro_batches=4,
              optimizer=chainer.optimizers.SGD(0.0))
    evaluator = extensions.Evaluator(ReplicaIterator(
        chainer.datasets.TupleDataset(*data), 8,
        grid=job.grid if shared else None, repeat=False, shuffle=False),
        job.model, eval_func=job.updater.evaluate)
    if shared and job.communicator is not None:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, job.communicator)
    found = evaluator()
    assert found == pytest.approx(
        serially(NETWORKS[network](), data, 8), rel=1e-5)
    job.update()
    assert evaluator() == found
    assert comm.allgather(found) == [found] * comm.size


@on_ranks(2)
def test_ranks_that_want_different_steps_get_an_error(comm):
    job = Job(comm)
    step = job.updater.evaluate if comm.rank else job.updater.predict
    with pytest.raises(ValueError, match='rank 1: this rank is about to '
                                         'evaluate, but the first stage to '
                                         'predict'):
        step(*job.data[:1 + comm.rank])

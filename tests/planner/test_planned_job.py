import functools
import json

from chainer_fp8pipe import Divisible, PipelineUpdater
from chainer_fp8pipe.links import lazy
from chainer_fp8pipe.planner import plan as planning
from chainer_fp8pipe.planner.layered import layer_counts
from chainer_fp8pipe.planner.planned_job import PlannedJob
from chainer_fp8pipe.planning.calls import Position
from chainer_fp8pipe.planning.cuts import DoesNotFit
from chainer_fp8pipe.planning.partition_plan import Cut, PartitionPlan

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest

from tests.ranks import on_ranks

#: What is measured need not be right here.
plan = functools.partial(planning.plan, budget=0.5)


class Net(chainer.Chain):
    def __init__(self, units=16):
        super().__init__(fc1=L.Linear(6, units), fc2=L.Linear(units, units),
                         fc3=L.Linear(units, 3))

    def forward(self, x, t):
        h = F.relu(self.fc2(F.relu(self.fc1(x))))
        return F.softmax_cross_entropy(self.fc3(h), t)


def batch(samples=8, seed=0):
    generator = numpy.random.RandomState(seed)
    return (generator.rand(samples, 6).astype('f'),
            generator.randint(0, 3, samples).astype('i'))


def make(units=16):
    numpy.random.seed(3)
    return Net(units)


def pairs(samples):
    return list(zip(*batch(samples), strict=True))


def refused(comm, words, error=ValueError, **options):
    given = {'model': make(), 'example': batch(), 'comm': comm, **options}
    with pytest.raises(error, match=words) as found:
        plan(**given)
    texts = comm.allgather(str(found.value))
    assert len(set(texts)) == 1


@on_ranks(2)
def test_a_planned_pipeline_trains_as_one_process_does(comm):
    planned = plan(make(), batch(), comm, stages=(2,), batch=8,
                   optimizer=chainer.optimizers.SGD(.1))
    choice = planned.plan.choice
    assert (choice.stages, choice.replicas) == (2, 1)
    text = json.dumps(planned.plan.as_dict())
    assert comm.allgather(text) == [text] * 2
    again = PlannedJob(json.loads(text))
    assert (again.plan, str(again)) == (planned.plan, str(planned))
    with pytest.raises(ValueError, match=r'/fc1/W has shape \(20, 6\)'):
        planned.partition(make(20), comm=comm)
    model, plain = planned.partition(make(), comm=comm), make()
    optimizer = chainer.optimizers.SGD(.1).setup(model)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(pairs(8), 8, shuffle=False),
        optimizer, planned.grid(comm))
    updater.update()
    serial = chainer.optimizers.SGD(.1).setup(plain)
    serial.update(plain, *batch())
    expected = dict(plain.namedparams())
    for name, parameter in model.namedparams():
        numpy.testing.assert_allclose(
            parameter.array, expected[name].array, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_divisible_is_planned_and_trains_by_layers(comm):
    def model():
        linear = functools.partial(lazy, L.Linear)
        numpy.random.seed(0)
        return Divisible(linear(6, 16), F.relu, linear(16, 16), F.relu,
                         linear(16, 3))
    planned = plan(model(), batch(), comm, stages=(2,), batch=8)
    assert set(planned.plan.model) == {
        f'/{number}/{name}' for number in (0, 2, 4) for name in 'Wb'}
    # Where the processors are busy, one says that a rank is slow.
    assert ['Divisible' in remark
            for remark in planned.plan.remarks].count(True) == 1
    again = PlannedJob(json.loads(json.dumps(planned.plan.as_dict())))
    part = again.partition(model(), comm=comm)
    assert sum(comm.allgather(len(part.numbered_layers()))) == 5
    optimizer = chainer.optimizers.SGD(.1).setup(part)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(pairs(8), 8, shuffle=False),
        optimizer, again.grid(comm))
    updater.update()
    with pytest.raises(ValueError, match='/0/W has shape|is only in the'):
        again.partition(Divisible(L.Linear(5, 16), F.relu, L.Linear(16, 16),
                                  F.relu, L.Linear(16, 3)), comm=comm)


@on_ranks(2)
def test_planned_replicas_were_tried_and_average_their_gradients(comm):
    planned = plan(make(), batch(), comm, stages=(1,), codecs=('float32',))
    choice = planned.plan.choice
    assert not choice.options
    assert (choice.stages, choice.replicas) == (1, 2)
    assert choice.codec in ('float32', 'naive')
    tried = planned.plan.trials
    late = [remark.partition(' was not tried: the time was over')[0]
            for remark in planned.plan.remarks]     # on a busy machine
    assert {'2 replicas, naive', '2 replicas, float32 direct', 'one process',
            str(choice)} <= {*(one.way for one in tried), *late}
    assert [one.seconds for one in tried] == sorted(
        one.seconds for one in tried)
    assert all(one.way in str(planned) for one in tried)
    model = make()
    assert planned.partition(model, comm=comm) is model
    communicator = planned.communicator(comm)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.1), communicator).setup(model)
    optimizer.update(model, *batch(seed=comm.rank))     # broadcasts
    optimizer.update(model, *batch(seed=comm.rank))
    plain = make()
    serial = chainer.optimizers.SGD(.1).setup(plain)
    serial.update(plain, *(numpy.concatenate(arrays) for arrays in zip(
        batch(seed=0), batch(seed=1), strict=True)))
    for (_, mine), (_, expected) in zip(
            model.namedparams(), plain.namedparams(), strict=True):
        numpy.testing.assert_allclose(mine.array, expected.array, rtol=1e-5,
                                      atol=1e-6)
    communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize('stages', [(), (2,)])
def test_a_plan_for_more_ranks_is_made_from_these(comm, stages):
    # Of 2 stages here, there would be no exchange to measure.
    planned = plan(make(), batch(), comm, ranks=4, stages=stages)
    choice = planned.plan.choice
    assert choice.stages * choice.replicas == planned.plan.ranks == 4
    assert choice.stages in (stages or (1, 2, 4))
    assert planned.plan.batch == 32
    with pytest.raises(ValueError, match='is for 4 ranks, and there are'):
        planned.communicator(comm)


@on_ranks(2)
def test_what_cannot_be_planned_is_an_error_on_all_ranks(comm):
    refused(comm, r"codecs must be some of .*, not 'fp9'", codecs=['fp9'])
    refused(comm, 'stages=3 does not divide the 2 ranks', stages=[3])
    refused(comm, 'batch must be a number', batch=0)
    refused(comm, 'budget must be seconds', budget=0)
    refused(comm, 'budget must be seconds', budget=float('inf'))
    refused(comm, 'is no size', memory='much')
    refused(comm, 'takes a chainer.Link', model=3)
    refused(comm, 'must be a chainer.Optimizer', optimizer='Adam')
    refused(comm, 'first axis', example=(numpy.zeros((4, 6), 'f'),
                                         numpy.zeros(3, 'i')))
    refused(comm, 'no way to run this job fits', DoesNotFit, memory='1 kB')


@on_ranks(2)
def test_ranks_that_plan_different_jobs_are_told(comm):
    refused(comm, 'batch is 8 on rank 0 but 16 on rank 1',
            batch=8 * (1 + comm.rank))
    refused(comm, 'the model is', model=make(16 + comm.rank))


@on_ranks(1)
def test_more_ranks_cannot_be_planned_on_one(comm):
    refused(comm, 'cannot be planned on one rank, which has no link', ranks=2)


@pytest.mark.parametrize(('cuts', 'counts'), [
    ([Position(1, 0)], [2, 3]), ([Position(1, 1)], [3, 2]),
    # Before the loss: the last layer at least stays.
    ([Position(2, 1)], [4, 1]), ([Position(1, 0), Position(2, 0)], [2, 2, 1]),
    ([Position(2, 0), Position(2, 1)], [3, 1, 1])])
def test_cuts_of_a_divisible_are_between_layers(cuts, counts):
    order = ('/0/W',), ('/2/W',), ('/4/W',)
    cut = PartitionPlan(order, tuple(Cut.at(order, one) for one in cuts),
                        len(cuts) + 1, (False,) * (len(cuts) + 1), 4, '1f1b')
    assert layer_counts(cut, 5) == counts

"""The fastest ways are tried, and of equally fast ones the simplest is taken.
"""
import itertools

from chainer_fp8pipe.planner import trials
from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.planned_job import PlannedJob
from chainer_fp8pipe.planning.job.choices import Candidate
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_plan import JobPlan, Trial

import chainer
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks

NAIVE = Configuration(2, codec='naive')
PLAIN = Configuration(2)
DEFERRED = Configuration(2, overlap='next_forward')
FP8 = Configuration(2, codec='fp8')


@pytest.mark.parametrize(('found', 'taken'), [
    ([(FP8, 1.0, 0.0), (PLAIN, 1.04, 0.0)], PLAIN),     # within 5 %
    ([(FP8, 1.0, 0.0), (PLAIN, 1.06, 0.0)], FP8),
    ([(FP8, 1.0, 0.1), (PLAIN, 1.09, 0.0)], PLAIN),     # within the spread
    ([(FP8, 1.0, 0.0), (PLAIN, 1.09, 0.1)], PLAIN),
    ([(DEFERRED, 1.0, 0.0), (PLAIN, 1.0, 0.0), (NAIVE, 1.0, 0.0)], NAIVE),
    ([(DEFERRED, 1.0, 0.0), (FP8, 0.99, 0.0)], DEFERRED),   # exact first
    ([(DEFERRED, 1.0, 0.0), (PLAIN, 1.2, 0.0), (NAIVE, 2.0, 0.1)], DEFERRED)])
def test_of_equally_fast_ways_the_exact_and_simplest_is_taken(found, taken):
    for order in itertools.permutations(found):
        tried = [(way, Trial('', seconds, spread))
                 for way, seconds, spread in order]
        assert tried[trials.preferred(tried)][0] == taken


def test_other_kinds_are_tried_and_the_plain_way_always():
    codecs = 'fp8', 'int4', 'float16', 'int5', 'float32'
    ways = [Configuration(4, codec=codec, algorithm=algorithm,
                          overlap=overlap)
            for codec, overlap, algorithm in itertools.product(
                codecs, (True, False), ('ring', 'direct'))]
    found = trials.promising([Candidate(way, object()) for way in ways]
                             + [Candidate(Configuration(1), None)])
    assert [(way.codec, way.overlap) for way in found] == [
        ('fp8', True), ('fp8', False), ('int4', True), ('int4', False),
        ('float16', True), ('float32', False)]


@on_ranks(2)
@pytest.mark.parametrize('way', [PLAIN, DEFERRED, NAIVE])
def test_a_trial_leaves_model_optimizer_and_random_numbers_alone(comm, way):
    class Drops(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.fc = L.Linear(4, 2)

        def forward(self, x):
            return chainer.functions.sum(
                chainer.functions.dropout(self.fc(x)))
    model = Drops()
    before = model.fc.W.array.copy()
    optimizer = chainer.optimizers.Adam().setup(model)
    example = Example(numpy.ones((8, 4), 'f'))
    numpy.random.seed(3)
    expected = numpy.random.RandomState(3).rand()
    job = PlannedJob(JobPlan(way, 2, 16))
    found = trials.try_way(way, job, model, optimizer, example, 16, comm)
    alone = trials.try_one_process(model, optimizer, example, 16, comm)
    assert isinstance(found, Trial), found
    assert isinstance(alone, Trial), alone
    assert numpy.random.rand() == expected
    assert (model.fc.W.array == before).all()
    assert optimizer.t == 0
    assert optimizer.target is model
    assert not comm.allreduce(found != comm.bcast(found))


@on_ranks(2)
@pytest.mark.parametrize('everywhere', [True, False])
def test_a_way_that_fails_says_so_on_all_ranks(comm, everywhere):
    class Fails(L.Linear):
        def forward(self, x):
            if everywhere or comm.rank:
                raise RuntimeError('out of memory')
            return chainer.functions.sum(super().forward(x))
    model = Fails(4, 2)
    found = trials.try_one_process(
        model, chainer.optimizers.SGD().setup(model),
        Example(numpy.ones((8, 4), 'f')), 16, comm)
    assert isinstance(found, str) == everywhere

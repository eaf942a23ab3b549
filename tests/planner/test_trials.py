"""The fastest ways are tried, and of equally fast ones the simplest is taken.
"""
import itertools
import math

from chainer_fp8pipe.planner import exchange_times, trials
from chainer_fp8pipe.planner.example import Data, Endless, Example
from chainer_fp8pipe.planning.job_plan import Configuration, Timing

import chainer
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.planner.nets import batch
from tests.ranks import on_ranks

NAIVE = Configuration(2, codec='naive')
PLAIN = Configuration(2)
OVERLAP = Configuration(2, overlap=True)
FP8 = Configuration(2, codec='fp8')


def test_an_example_gives_its_first_samples_or_repeats_them():
    x, t = batch(4)
    few_x, few_t = Example((x, t)).of(3)
    numpy.testing.assert_array_equal(few_x, x[:3])
    numpy.testing.assert_array_equal(few_t, t[:3])
    many = Example({'x': x}).of(9)['x']
    numpy.testing.assert_array_equal(many, numpy.concatenate([x, x, x[:1]]))


@pytest.mark.parametrize('example', [
    (numpy.zeros((4, 2)), numpy.zeros(3)), numpy.zeros((0, 2)),
    (numpy.float32(1.0),), ()])
def test_an_example_without_samples_is_refused(example):
    with pytest.raises(ValueError, match='sample'):
        Example(example)


@pytest.mark.parametrize(('samples', 'micro_batch', 'sizes'), [
    (8, 2, (8, 2)), (8, 8, (8, 2)), (8, 9, (8, 2)), (8, 0, (8, 1)),
    (2, 2, (2, 1)), (1, 1, (1, 1))])
def test_a_model_is_measured_with_fewer_samples_as_well(
        samples, micro_batch, sizes):
    assert Example(numpy.zeros((samples, 3))).sizes(micro_batch) == sizes


@pytest.mark.parametrize(('found', 'taken'), [
    ([(FP8, 1.0, 0.0), (PLAIN, 1.02, 0.0)], PLAIN),     # within 3 %
    ([(FP8, 1.0, 0.0), (PLAIN, 1.06, 0.0)], FP8),
    ([(FP8, 1.0, 0.1), (PLAIN, 1.09, 0.0)], PLAIN),     # within the spread
    ([(FP8, 1.0, 0.0), (PLAIN, 1.09, 0.1)], PLAIN),
    ([(OVERLAP, 1.0, 0.0), (PLAIN, 1.0, 0.0), (NAIVE, 1.0, 0.0)], NAIVE),
    ([(OVERLAP, 1.0, 0.0), (FP8, 0.99, 0.0)], OVERLAP),   # exact first
    ([(OVERLAP, 1.0, 0.0), (PLAIN, 1.2, 0.0), (NAIVE, 2.0, 0.1)], OVERLAP)])
def test_of_equally_fast_ways_the_exact_and_simplest_is_taken(found, taken):
    for order in itertools.permutations(found):
        assert trials.preferred([
            (way, Timing('', seconds, spread))
            for way, seconds, spread in order]) == taken


def test_ways_near_the_fastest_are_tried_again():
    ways = [PLAIN, FP8, OVERLAP, NAIVE]
    seconds = dict(zip(map(str, ways), (
        [1.0, 1.2], [.9, 1.0], [5.0], 'it failed'), strict=True))
    said, limits = [], []

    def run(way, limit):
        limits.append(limit)
        return seconds[str(way)]
    found, problems = trials.try_all(ways, run, said.append)
    assert found == [
        (PLAIN, Timing(str(PLAIN), 1.1, pytest.approx(.1 / 1.1))),
        (FP8, Timing(str(FP8), .95, pytest.approx(.05 / .95))),
        (OVERLAP, Timing(str(OVERLAP), 5.0, 0.0))]
    assert problems == [f'{NAIVE} was not tried: it failed']
    assert said == [*(f'trying {way}' for way in ways),
                    *[f'trying {PLAIN} again', f'trying {FP8} again'] * 2]
    # A way that is twice as slow as the fastest so far need not go on.
    assert limits == pytest.approx([
        math.inf, 1.96 * 1.1, 1.96 * .95, 1.96 * .95, *[math.inf] * 4])
    found, problems = trials.try_all(ways[:3], run, said.append,
                                     lambda: -7)
    assert [way for way, _ in found] == ways[:2]
    assert problems == [f'{OVERLAP} was not tried: the time was over']
    assert said[-1] == f'trying {FP8}'


class Works:
    """What takes so many seconds each time, and counts."""

    def __init__(self, each):
        self.now, self.made, self._each = 0.0, 0, each

    def __call__(self):
        self.now += self._each
        self.made += 1
        return self.made

    def clock(self):
        return self.now


@pytest.mark.parametrize(('each', 'updates', 'blocks'), [
    (.001, 2 + 1 + 1 + 4 * 20, 4), (.1, 2 + 1 + 1 + 4 * 3, 4),
    (1.0, 2 + 2, 2), (2.0, 2, 1)])
def test_long_updates_are_made_fewer_times(each, updates, blocks):
    work = Works(each)
    found = trials.blocks_of(work, MPI.COMM_SELF, 1.5, 1.9, work.clock)
    assert found == pytest.approx([each] * blocks)
    assert work.made == updates


@pytest.mark.parametrize(('each', 'count'), [(.01, 9), (.2, 2)])
def test_long_exchanges_are_made_fewer_times(each, count):
    work = Works(each)
    found = exchange_times.repeated(MPI.COMM_SELF, work, .5, work.clock)
    assert found == list(range(2, count + 2))


class Drops(chainer.Chain):
    def __init__(self):
        super().__init__(fc=L.Linear(4, 2))

    def forward(self, x):
        return chainer.functions.sum(chainer.functions.dropout(self.fc(x)))


@on_ranks(2)
@pytest.mark.parametrize(('way', 'shared'), [
    (PLAIN, None), (OVERLAP, True), (NAIVE, False)])
def test_a_trial_leaves_model_optimizer_and_random_numbers_alone(
        comm, way, shared):
    model = Drops()
    before = model.fc.W.array.copy()
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    model.fc.b.update_rule.enabled = False
    data = None
    if shared is not None:      # a script's, which ends after each epoch
        data = Data(Endless(chainer.iterators.SerialIterator(
            list(numpy.ones((24, 4), 'f')), 16 if shared else 8,
            repeat=False)), chainer.dataset.concat_examples, shared)
    numpy.random.seed(3)
    expected = numpy.random.RandomState(3).rand()
    trained = trials.Trained(model, optimizer, Example(numpy.ones(
        (8, 4), 'f')), 16, data)
    for one in way, Configuration():
        found = trials.try_way(one, trained, comm, .05)
        assert isinstance(found, list), found
        assert comm.allgather(found) == [found] * 2
    assert numpy.random.rand() == expected
    assert (model.fc.W.array == before).all()
    assert optimizer.t == 0
    assert optimizer.target is model


@on_ranks(2)
@pytest.mark.parametrize('everywhere', [True, False])
def test_a_way_that_fails_says_so_on_all_ranks(comm, everywhere):
    class Fails(L.Linear):
        def forward(self, x):
            if everywhere or comm.rank:
                raise RuntimeError('out of memory')
            return chainer.functions.sum(super().forward(x))
    model = Fails(4, 2)
    found = trials.try_way(Configuration(), trials.Trained(
        model, chainer.optimizers.SGD().setup(model),
        Example(numpy.ones((8, 4), 'f')), 16), comm, .05)
    assert isinstance(found, str) == everywhere

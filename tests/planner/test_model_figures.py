import chainer_fp8pipe  # noqa: F401, before chainer
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.planner.model_figures import (
    Example,
    measure_model,
    measure_optimizer,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks


class Net(chainer.Chain):
    """With running averages and random numbers in forward."""

    def __init__(self, reads=False):
        super().__init__()
        self.reads = reads
        with self.init_scope():
            self.fc1 = L.Linear(6, 8)
            self.bn = L.BatchNormalization(8)
            self.fc2 = L.Linear(8, 3)

    def forward(self, x, t):
        h = F.relu(self.bn(self.fc1(x)))
        if self.reads and float(h.array.sum()) < 0:
            h = -h
        loss = F.softmax_cross_entropy(self.fc2(F.dropout(h)), t)
        chainer.report({'loss': loss}, self)
        return loss


def batch(samples=8):
    generator = numpy.random.RandomState(0)
    return (generator.rand(samples, 6).astype('f'),
            generator.randint(0, 3, samples).astype('i'))


def content(model):
    """All values of a model, and what else measuring might change."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    found = {name: numpy.array(value)
             for name, value in serializer.target.items()}
    found.update({f'grad {name}': p.grad
                  for name, p in model.namedparams()})
    return found


def test_an_example_gives_its_first_samples_or_repeats_them():
    x, t = batch(4)
    few_x, few_t = Example((x, t)).of(3)
    numpy.testing.assert_array_equal(few_x, x[:3])
    numpy.testing.assert_array_equal(few_t, t[:3])
    many = Example({'x': x}).of(9)['x']
    numpy.testing.assert_array_equal(many, numpy.concatenate([x, x, x[:1]]))
    assert Example(x).samples == 4


@pytest.mark.parametrize('example', [
    (numpy.zeros((4, 2)), numpy.zeros(3)), numpy.zeros((0, 2)),
    (numpy.float32(1.0),), ()])
def test_an_example_without_samples_is_refused(example):
    with pytest.raises(ValueError, match='sample'):
        Example(example)


@pytest.mark.parametrize(('optimizer', 'arrays'), [
    (chainer.optimizers.SGD(), 0), (chainer.optimizers.MomentumSGD(), 1),
    (chainer.optimizers.Adam(), 2)])
def test_an_optimizer_is_timed_on_parameters_of_its_own(optimizer, arrays):
    model = Net()
    optimizer.setup(model)
    before = content(model)
    seconds, kept, temporary = measure_optimizer(
        optimizer, parameters_of(Names(model)), model.device)
    assert kept == arrays
    assert seconds.value > 0
    assert temporary >= 0
    assert optimizer.target is model
    assert optimizer.t == 0
    for name, value in content(model).items():
        numpy.testing.assert_array_equal(value, before[name], name)


@on_ranks(1, 2)
def test_a_measured_model_stays_as_it_was(comm):
    numpy.random.seed(7)
    model = Net()
    before, state = content(model), numpy.random.get_state()[1].copy()
    figures, sharing = measure_model(
        comm, model, Example(batch()), chainer.optimizers.Adam(), 2, True)
    numpy.testing.assert_array_equal(numpy.random.get_state()[1], state)
    for name, value in content(model).items():
        numpy.testing.assert_array_equal(value, before[name], name)
    assert not hasattr(model, 'partition')
    assert figures.elements == model.count_params()
    assert (figures.samples, figures.few) == (8, 2)
    assert len(figures.calls) == len(figures.calls_few) > 5
    assert sorted(sum(figures.buckets, ())) == sorted(figures.parameters)
    assert min(*figures.plain, *figures.plain_few) > 0
    assert all(call.forward >= 0 for call in figures.calls)
    assert len(sharing.cores.pools) == len(sharing.speeds) == comm.size


@on_ranks(2)
def test_a_model_that_reads_values_is_measured_as_a_whole(comm):
    figures, _ = measure_model(
        comm, Net(reads=True), Example(batch()), chainer.optimizers.SGD(), 2,
        True)
    assert 'GhostError' in figures.undivided
    assert {name for call in figures.calls for name in call.parameters} == (
        set(figures.parameters))


@on_ranks(2)
def test_without_room_for_a_copy_single_calls_are_timed(comm):
    figures, _ = measure_model(
        comm, Net(), Example(batch()), chainer.optimizers.SGD(), 2, False)
    assert figures.plain == (
        sum(call.forward for call in figures.calls),
        sum(call.backward for call in figures.calls))
    assert figures.plain[0] > 0

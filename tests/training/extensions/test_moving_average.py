
from chainer_fp8pipe import (
    Divisible,
    ProcessGrid,
    lazy,
)
from chainer_fp8pipe.training.extensions import MovingAverage, Snapshot, resume

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training import extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tests.ranks import on_ranks

from ..trainers import Net, arrays, bits, make_trainer, weights


def net():
    return Divisible(lazy(L.Linear, 4, 5), F.tanh, lazy(L.Linear, 5, 3))


def change(model, generator):
    """Gives all floating-point arrays other values."""
    for parameter in model.params():
        parameter.array = generator.normal(size=parameter.shape).astype(
            parameter.dtype)
    for link in model.links():
        if isinstance(link, L.BatchNormalization):
            link.avg_mean = generator.normal(size=link.avg_mean.shape).astype(
                link.avg_mean.dtype)
            link.N += 1


@settings(max_examples=20)
@given(st.integers(0, 2 ** 32 - 1), st.floats(0.01, 0.999),
       st.integers(1, 40))
def test_the_average_is_that_of_the_definition(seed, decay, updates):
    model, generator = Net(), numpy.random.default_rng(seed)
    average = MovingAverage(model, decay)
    expected = {}
    for number in range(updates):
        change(model, generator)
        average()
        for key, array in arrays(model).items():
            d = min(decay, (1 + number) / (10 + number)) if number else 0
            expected[key] = (d * expected.get(key, 0)
                             + (1 - d) * array.astype(float))
    own = arrays(model)
    with average.weights():
        inside = arrays(model)
        for key, array in inside.items():
            assert array.dtype == own[key].dtype
            if key != 'bn/N':
                assert_allclose(array, expected[key], rtol=1e-4, atol=1e-5)
    assert inside['bn/N'] == own['bn/N'] == updates


def test_the_weights_come_back_also_after_an_error():
    model, generator = Net(), numpy.random.default_rng(0)
    average = MovingAverage(model)
    for _ in range(3):
        change(model, generator)
        average()
    model.l1.W.grad = gradient = numpy.ones_like(model.l1.W.array)
    before, array = bits(model), model.l1.W.array

    def fail():
        with average.weights():
            assert bits(model) != before
            # Not even what is done to the weights is done to the average.
            model.l2.W.array[...] = 7
            raise KeyError('stop')
    for _ in range(2):
        with pytest.raises(KeyError, match='stop'):
            fail()
    assert bits(model) == before
    assert model.l1.W.array is array
    assert model.l1.W.grad is gradient
    with average.weights():
        assert not (model.l2.W.array == 7).any()


def test_float16_is_averaged_in_float32():
    """Of the copies that the optimizer updates; 1e-4 is lost in float16."""
    model = chainer.Sequential(L.Linear(2, 2, initialW=1.0))
    model[0].W.array = model[0].W.array.astype('f2')
    optimizer = chainer.optimizers.SGD(1e-4)
    optimizer.use_fp32_update()
    optimizer.setup(model)
    average = MovingAverage(model, 0.5)
    for _ in range(10):
        model.cleargrads()
        model[0].W.grad = numpy.ones((2, 2), 'f2')
        optimizer.update()
        average()
    assert (model[0].W.array == 1 - 2 ** -10).all()
    kept = chainer.serializers.DictionarySerializer()
    kept.save(average)
    expected = 1 - 1e-4
    for number in range(1, 10):
        d = min(0.5, (1 + number) / (10 + number))
        expected += (1 - d) * (1 - 1e-4 * (number + 1) - expected)
    assert kept.target['average/0/W'].dtype == numpy.float32
    assert_allclose(kept.target['average/0/W'], expected, rtol=1e-6)
    with average.weights():
        assert model[0].W.array.dtype == numpy.float16


@on_ranks(1, 2)
def test_an_evaluator_sees_the_average_and_training_does_not(comm, tmp_path):
    results = {}
    for averaged in (False, True):
        trainer, communicator = make_trainer(comm, tmp_path, 2)
        model = trainer.updater.get_optimizer('main').target
        seen = []
        iterator = chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(
                numpy.ones((9, 6), 'f4'), numpy.zeros(9, 'i4')), 4,
            repeat=False, shuffle=False)

        def note(evaluator, model=model, seen=seen):
            seen.append(bits(model))
        evaluator = chainermn.create_multi_node_evaluator(
            extensions.Evaluator(iterator, model, eval_hook=note),
            communicator)
        average = MovingAverage(model, 0.9)
        if averaged:
            trainer.extend(average)
            assert average.evaluator(evaluator) is evaluator
        trainer.extend(evaluator, name='average')
        trainer.run()
        results[averaged] = weights(trainer), seen
        if averaged:
            with average.weights():
                assert bits(model) == seen[-1]
            assert 'average/main/loss' in trainer.observation
    assert results[True][0] == results[False][0]
    assert results[True][1] != results[False][1]
    # Statistics of batch normalisation are each rank's own.
    assert len({one['predictor/l1/W'] for one in comm.allgather(
        results[True][1][-1])}) == 1


@on_ranks(2)
def test_a_snapshot_of_two_stages_is_one_of_the_whole_model(comm, tmp_path):
    """The averages move with the layers."""
    grid = ProcessGrid(comm, pipeline=2)

    def trainer_of(model, iterations):
        optimizer = chainer.optimizers.SGD().setup(model)
        updater = _Still(optimizer)
        trainer = chainer.training.Trainer(
            updater, (iterations, 'iteration'), str(tmp_path))
        average = MovingAverage(model, 0.5)
        trainer.extend(average)
        return trainer, average
    stage = net().stage(grid)
    trainer, average = trainer_of(stage, 3)
    trainer.extend(Snapshot(grid), trigger=(3, 'iteration'))
    trainer.run()
    if comm.rank == 0:
        alone = comm.Split(0)
        model = net().share(0, 1)
        second, everything = trainer_of(model, 3)
        resume(second, alone, str(tmp_path))
        with everything.weights():
            found = bits(model)
    else:
        comm.Split(1).Free()
        found = None
    found = comm.bcast(found)
    with average.weights():
        for key, value in bits(stage).items():
            assert found[key] == value


class _Still(chainer.training.updaters.StandardUpdater):
    """Adds one to all weights."""

    def __init__(self, optimizer):
        super().__init__(chainer.iterators.SerialIterator([0], 1), optimizer)

    def update_core(self):
        for parameter in self.get_optimizer('main').target.params():
            parameter.array = parameter.array + 1


@pytest.mark.parametrize('decay', [1, 0, -0.5, 1.5, float('nan'), '0.9'])
def test_bad_decays_are_errors(decay):
    with pytest.raises(ValueError, match='decay must be'):
        MovingAverage(Net(), decay)

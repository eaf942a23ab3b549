"""Several models on one communicator, one after the other or together."""
import gc

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import Snapshot, resume

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer import training

from tests.ranks import on_ranks

from ..trainers import bits


class _Optimizers(training.StandardUpdater):
    """Each batch is for the two optimizers in turn."""

    def update_core(self):
        batch = self.converter(self.get_iterator('main').next())
        for optimizer in self.get_all_optimizers().values():
            optimizer.update(optimizer.target, *batch)


def optimizer_for(communicator, seed, width):
    numpy.random.seed(seed)
    model = L.Classifier(chainer.Sequential(
        L.Linear(6, width), F.relu, L.Linear(width, 3)))
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.05), communicator).setup(model)


def train(communicator, out, stop, seeds=(5,), width=20, again=False):
    """A training from its beginning, or from where it was; its models."""
    optimizers = {f'of {seed}': optimizer_for(communicator, seed, width)
                  for seed in seeds}
    if len(optimizers) == 1:
        optimizers = {'main': optimizers.popitem()[1]}
    random = numpy.random.RandomState(communicator.rank)
    data = chainer.datasets.TupleDataset(
        random.randn(40, 6).astype('f'), random.randint(0, 3, 40).astype('i'))
    updater = (_Optimizers if len(seeds) > 1 else training.StandardUpdater)(
        chainer.iterators.SerialIterator(data, 8), optimizers)
    trainer = training.Trainer(updater, (stop, 'iteration'), out=str(out))
    trainer.extend(Snapshot(communicator), trigger=(3, 'iteration'))
    if again:
        resume(trainer, communicator, str(out))
    trainer.run()
    return [optimizer.target for optimizer in optimizers.values()]


@pytest.mark.parametrize('width', [20, 24])
@on_ranks(2)
def test_a_second_training_goes_on_bit_for_bit_without_the_first(
        comm, tmp_path, width):
    """Whether the first one's parameters have the same shapes or not."""
    def fresh():
        return create_communicator('fp8', comm, warmup=2)
    communicator = fresh()
    train(communicator, tmp_path / 'first', 6, width=width)
    whole, = train(communicator, tmp_path / 'whole', 9)
    communicator = fresh()
    train(communicator, tmp_path / 'first again', 6, width=width)
    train(communicator, tmp_path / 'cut', 5)
    again, = train(fresh(), tmp_path / 'cut', 9, again=True)
    assert bits(again) == bits(whole)


@on_ranks(2)
def test_models_of_a_snapshot_may_come_in_another_order(comm, tmp_path):
    """They have the same parameters; each belongs to its optimizer."""
    def fresh():
        return create_communicator('fp8', comm, warmup=2)
    whole = train(fresh(), tmp_path / 'whole', 9, (1, 2))
    train(fresh(), tmp_path / 'cut', 5, (1, 2))
    again = train(fresh(), tmp_path / 'cut', 9, (2, 1), again=True)
    assert [bits(model) for model in again[::-1]] == [
        bits(model) for model in whole]


@on_ranks(2)
def test_a_snapshot_holds_nothing_of_models_that_are_gone(comm, tmp_path):
    communicator = create_communicator('int4', comm, warmup=0)
    sizes = []
    for number in range(3):
        train(communicator, tmp_path / str(number), 3)
        path, = (tmp_path / str(number)).glob('snapshot_*')
        sizes.append(path.stat().st_size)
        comm.Barrier()
    assert max(sizes) < 1.05 * min(sizes)
    gc.collect()
    assert not communicator._setup.exchanges

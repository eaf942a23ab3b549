from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import (
    FollowEpochs,
    Snapshot,
    resume,
)
from chainer_fp8pipe.training.large_batch import large_batch
from chainer_fp8pipe.training.learning_rate import LearningRate

import chainer
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training import Trainer
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks

from .helpers import weights

RATE = LearningRate(0.05, 32, 8, 1, 6)


def make_trainer(out, comm=None, samples=None, size=40, epochs=3,
                 follow=True):
    """Batches of 8 per rank; returns the trainer and all rates so far."""
    numpy.random.seed(0)
    model = L.Classifier(L.Linear(6, 3))
    numpy.random.seed(1 + (comm.rank if comm else 0))
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(
            numpy.random.rand(size, 6).astype('f4'),
            numpy.random.randint(0, 3, size).astype('i4')), 8)
    optimizer = large_batch(
        chainer.optimizers.MomentumSGD(), 32, 0.05, 8, 1, 6,
        samples=samples)
    if comm:
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    trainer = Trainer(StandardUpdater(iterator, optimizer.setup(model)),
                      (epochs, 'epoch'), str(out))
    rates = []

    def note(trainer):
        rates.append(trainer.updater.get_optimizer('main').lr)
    trainer.extend(note, trigger=(1, 'iteration'))
    if follow:
        trainer.extend(FollowEpochs())
    return trainer, rates


def test_the_rate_follows_the_iterators_epochs(tmp_path):
    trainer, rates = make_trainer(tmp_path)
    trainer.run()
    assert rates == pytest.approx([RATE.at(step / 5) for step in range(15)])


def test_neither_samples_nor_epochs_is_an_error_with_both_remedies(tmp_path):
    trainer, _ = make_trainer(tmp_path, follow=False)
    with pytest.raises(RuntimeError, match='samples=.*FollowEpochs'):
        trainer.run()


def test_the_number_of_samples_is_preferred(tmp_path):
    trainer, rates = make_trainer(tmp_path, samples=320)
    trainer.run()
    assert rates == pytest.approx([RATE.at(step / 10) for step in range(15)])


@on_ranks(2)
def test_ranks_with_shares_of_other_sizes_keep_one_rate(comm, tmp_path):
    communicator = create_communicator('float32', comm)
    trainer, rates = make_trainer(tmp_path, communicator,
                                  size=40 + 16 * comm.rank)
    trainer.stop_trigger = chainer.training.get_trigger((15, 'iteration'))
    trainer.run()
    # The first update of ChainerMN's optimizer is none.
    assert rates[1:] == pytest.approx(
        [RATE.at(step / 5) for step in range(1, 15)])
    assert comm.allgather(rates) == [rates] * 2
    assert len(set(comm.allgather(weights(trainer)['predictor/W']))) == 1


@on_ranks(2)
@pytest.mark.parametrize('samples', [None, 80])
def test_a_resumed_run_ends_with_the_same_bits(comm, tmp_path, samples):
    """Snapshot in mid-epoch, during the warm-up."""
    communicator = create_communicator('float32', comm)

    def run(folder, iterations, resumed=False):
        trainer, rates = make_trainer(tmp_path / folder, communicator,
                                      samples, follow=samples is None)
        trainer.stop_trigger = chainer.training.get_trigger(
            (iterations, 'iteration'))
        trainer.extend(Snapshot(communicator), trigger=(4, 'iteration'))
        if resumed:
            resume(trainer, communicator, str(tmp_path / folder))
        trainer.run()
        return trainer, rates
    whole, rates = run('whole', 11)
    run('part', 4)
    part, rest = run('part', 11, resumed=True)
    assert rates[4:] == rest
    assert weights(whole) == weights(part)


def test_nothing_to_follow_for_is_an_error(tmp_path):
    trainer, _ = make_trainer(tmp_path, follow=False)
    trainer.updater.get_optimizer('main').remove_hook('Schedule')
    trainer.extend(FollowEpochs())
    with pytest.raises(ValueError, match='nothing to follow for'):
        trainer.run()

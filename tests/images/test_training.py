"""Chainer's Trainer with images, on several ranks."""
import json

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.images import ImageFolder, batch_arrays
from chainer_fp8pipe.images.transforms import CenterCrop, RandomResizedCrop

import chainer
import chainermn
import numpy
import pytest
from chainer import links
from chainer.training import extensions

from tests.ranks import on_ranks

from .folders import make_folder


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 30, classes=2, step=8)


def trainer(comm, root, out, epochs, workers=1, converter=batch_arrays,
            evaluate=True):
    """Two classes, which red tells; and what has to be finalized."""
    communicator = create_communicator('float32', comm)
    train = ImageFolder(root, RandomResizedCrop(8), shard=comm,
                        cache='memory').iterator(8 // comm.size, workers, 2)
    valid = ImageFolder(root, CenterCrop(8), shard=comm).iterator(
        8 // comm.size, workers, 2, repeat=False,
        shuffle=False)
    with chainer.using_config('dtype', numpy.float32):
        numpy.random.seed(0)
        model = links.Classifier(links.Linear(192, 2))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.02), communicator).setup(model)
    updater = chainer.training.StandardUpdater(
        train, optimizer, converter=converter)
    made = chainer.training.Trainer(updater, (epochs, 'epoch'), str(out))
    evaluator = chainermn.create_multi_node_evaluator(
        extensions.Evaluator(valid, model, converter=converter),
        communicator)
    if evaluate:
        made.extend(evaluator)
    made.extend(extensions.LogReport(trigger=(1, 'iteration'),
                                     filename=f'log{comm.rank}'))
    return made, model, valid


@on_ranks(2)
def test_a_trainer_learns_and_evaluates(comm, root, tmp_path):
    made, _, valid = trainer(comm, root, tmp_path, 10)
    made.run()
    valid.finalize()
    last = json.loads((tmp_path / f'log{comm.rank}').read_text())[-1]
    assert last['epoch'] == 10
    assert last['iteration'] == 10 * made.updater.get_iterator(
        'main').batches_per_epoch
    assert last['validation/main/accuracy'] > 0.9

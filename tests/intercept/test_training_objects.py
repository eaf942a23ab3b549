"""What a script makes for its training is made by another in a block."""
from chainer_fp8pipe.intercept.training_objects import substituting

import chainer
import chainermn
import numpy
from chainer.serializers import npz
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater


class Notes:
    """A substitute that notes what it is asked for, and has Chainer do it."""

    def __init__(self):
        self.asked, self.create = [], lambda _, *given, **more: (given, more)

    def __getattr__(self, name):
        def act(original, first, *args, **kwargs):
            self.asked.append(name)
            return original(first, *args, **kwargs)
        return act


def train(out):
    model = chainer.links.Classifier(chainer.links.Linear(2, 2))
    data = [(numpy.ones(2, 'f'), numpy.int32(1))] * 4
    updater = StandardUpdater(
        chainer.iterators.SerialIterator(data, 2),
        chainer.optimizers.SGD().setup(model))
    trainer = chainer.training.Trainer(updater, (1, 'iteration'), out=out)
    trainer.extend(Evaluator(chainer.iterators.SerialIterator(
        data, 2, repeat=False), model))
    trainer.get_extension('validation')()
    trainer.run()
    chainer.serializers.save_npz(f'{out}/model', model)
    npz.load_npz(f'{out}/model', model)


PLACES = [(StandardUpdater, '__init__'), (StandardUpdater, 'update'),
          (chainer.GradientMethod, 'update'), (Evaluator, 'evaluate'),
          (chainer.training.Trainer, 'run'), (npz, 'save_npz'),
          (chainer.serializers, 'load_npz'),
          (chainer.serializers, 'save_hdf5'),
          *((owner, 'create_communicator')
            for owner in (chainermn, chainermn.communicators))]
ORIGINALS = [vars(owner)[name] for owner, name in PLACES]


def test_the_substitute_is_asked_in_the_block_only(tmp_path):
    notes = Notes()
    with substituting(notes):
        train(tmp_path)
        for owner, name in PLACES[-2:]:
            assert getattr(owner, name)('fp8', mpi_comm=1) == (
                ('fp8',), {'mpi_comm': 1})
    # That save_npz('name') calls save_npz(file) is Chainer's own affair.
    assert notes.asked == [
        'make_updater', 'evaluate', 'run_trainer', 'update',
        'update_optimizer', 'save', 'load']
    notes.asked.clear()
    train(tmp_path)
    assert not notes.asked
    assert [vars(owner)[name] for owner, name in PLACES] == ORIGINALS

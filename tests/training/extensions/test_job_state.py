import re

from chainer_fp8pipe.training.extensions import resume
from chainer_fp8pipe.training.snapshots.file import Manifest
from chainer_fp8pipe.training.snapshots.state import collect, wanted

import chainer
import chainer.links as L
import numpy
import pytest
from chainer.training import extensions, triggers
from mpi4py import MPI

from ..trainers import SERIAL, Job, save

ALONE = MPI.COMM_SELF


def test_layer_1_is_not_taken_for_layer_11(tmp_path):
    whole = ['updater/optimizer:main/11/W/m', 'updater/optimizer:main/1/W/m',
             'job/optimizer/main/11/W/float32',
             'job/optimizer/main/1/W/float32']
    model, trainer = keeping(0, tmp_path, **{'1': L.Linear(3, 3)})
    part = Manifest('x.npz', 0, 1, '', 'none', dict.fromkeys(whole, ''))
    assert set(wanted([part], 0, collect(trainer, ALONE)[0], trainer)[0]
               ) == {whole[1], whole[3]}


# --- extensions and triggers -------------------------------------------------

class Counting(extensions.Evaluator):
    """Reports numbers that get better and then worse."""

    trigger = 1, 'iteration'
    count = 0

    def __init__(self):
        pass

    def __call__(self, trainer):
        self.count += 1
        chainer.report({'number': (self.count - 3) ** 2})

    def serialize(self, serializer):
        self.count = serializer('count', self.count)

    def finalize(self):
        pass


def watched(tmp_path):
    """A trainer with extensions and triggers that have a state."""
    trainer = Job(ALONE, 'Plain', SERIAL).trainer(tmp_path, 1)
    trainer.extend(Counting(), name='counting')
    trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    trainer.extend(extensions.PlotReport(
        ['number'], trigger=(9, 'iteration'), file_name='x.png'))
    trainer.extend(extensions.snapshot(filename='chainer'),
                   trigger=(99, 'iteration'))
    for name, trigger in (
            ('best', triggers.MinValueTrigger('number', (1, 'iteration'))),
            ('none yet', triggers.MaxValueTrigger('number', (9, 'epoch'))),
            ('once', triggers.OnceTrigger()),
            ('listed', triggers.ManualScheduleTrigger([2, 9], 'iteration'))):
        trainer.extend(lambda trainer: None, name=name, trigger=trigger)
    trainer.stop_trigger = triggers.EarlyStoppingTrigger(
        (1, 'iteration'), 'number', patience=2, max_trigger=(5, 'iteration'))
    return trainer


def words(trainer):
    """What extensions and triggers keep, without the time."""
    return re.sub('0x[0-9a-f]+', '', repr([
        trainer.stop_trigger.__dict__.items(),
        *((name, getattr(entry.extension, 'count', None),
           getattr(entry.extension, '_log', None),
           getattr(entry.extension, '_data', None),
           [(key, value) for key, value in vars(entry.trigger).items()
            if isinstance(value, (int, float, type(None)))])
          for name, entry in trainer._extensions.items()
          if 'values' not in name)]))


def test_extensions_and_triggers_are_restored_as_by_chainer(tmp_path):
    trainer = watched(tmp_path)
    trainer.run()
    assert trainer.updater.iteration == 5
    save(trainer, ALONE, tmp_path)
    chainer.serializers.save_npz(tmp_path / 'chainer.npz', trainer)
    own, chainers = watched(tmp_path), watched(tmp_path)
    before = words(own)
    resume(own, ALONE, str(tmp_path / 'snapshot_iter_5.ranks'))
    chainer.serializers.load_npz(tmp_path / 'chainer.npz', chainers)
    assert words(own) == words(chainers) != before
    assert own.get_extension('LogReport').log


# --- persistent values that have changed -------------------------------------

ARRAY = numpy.arange(3, dtype='f')


def keeping(value, tmp_path, **links):
    """A trainer of a link that keeps a value."""
    model = chainer.Chain(**links)
    model.add_persistent('kept', value)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator([1], 1),
        chainer.optimizers.SGD().setup(model))
    return model, chainer.training.Trainer(updater, (1, 'iteration'),
                                           str(tmp_path))


def restored(before, after, tmp_path):
    model, trainer = keeping(before, tmp_path)
    save(trainer, ALONE, tmp_path)
    model, trainer = keeping(after, tmp_path)
    resume(trainer, ALONE, str(tmp_path / 'snapshot_iter_0.ranks'))
    return model.kept


@pytest.mark.parametrize(('before', 'after'), [
    (numpy.float32(0.1), 0.0), (7, 0.0), (True, 1),
    ('fine-tuning', 'warm-up'), ('', 'x'), ([0, 1, 1], [0]), ([], [1, 2]),
    ((1.5, 2.5), ()), (None, 1.0), (None, ARRAY), (ARRAY, None),
    ('text', None), (numpy.array(2.5, 'f'), ARRAY), (ARRAY * 2, ARRAY),
    (ARRAY.astype('f2'), ARRAY), (3, ARRAY)])
def test_a_persistent_value_that_has_changed_is_loaded_as_by_chainer(
        before, after, tmp_path):
    def copy(value):
        return value.copy() if isinstance(value, numpy.ndarray) else value
    found = restored(copy(before), copy(after), tmp_path)
    chainer.serializers.save_npz(tmp_path / 'chainer.npz',
                                 keeping(copy(before), tmp_path)[0])
    expected, _ = keeping(copy(after), tmp_path)
    chainer.serializers.load_npz(tmp_path / 'chainer.npz', expected)
    assert type(found) is type(expected.kept)
    assert repr(found) == repr(expected.kept)

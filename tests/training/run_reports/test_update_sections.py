"""What updates of updaters that write nothing themselves do."""
from chainer_fp8pipe.report.stream import EventStream
from chainer_fp8pipe.training.run_reports.watching import (
    UpdateSections,
)

import chainer
import chainer.links as L
import numpy
import pytest
from chainer.training.updaters import StandardUpdater

from ..trainers import Net


class TwoModels(StandardUpdater):
    """Trains two models, one after the other, as those of a GAN are."""

    def update_core(self):
        batch = self.converter(self.get_iterator('main').next(), -1)
        for name in 'one', 'other':
            optimizer = self.get_optimizer(name)
            loss = optimizer.target(*batch)
            optimizer.target.cleargrads()
            loss.backward()
            optimizer.update()


def iterator():
    return chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(
        numpy.random.rand(20, 6).astype('f'), numpy.zeros(20, 'i')), 5)


def optimizer():
    return chainer.optimizers.SGD().setup(L.Classifier(Net()))


def names(updater, work=None):
    """Events of one update, by their start."""
    stream = EventStream()
    stream.record(0, 0.0)
    sections = UpdateSections(stream, updater, writes_itself=False)
    try:
        (work or updater.update)()
    finally:
        sections.settle()
        sections.remove()
    return [event.name for event in sorted(
        stream.events, key=lambda event: (event.start, -event.end))]


def test_an_update_is_input_passes_and_update():
    assert names(StandardUpdater(iterator(), optimizer())) == [
        'input', 'forward', 'backward', 'update']


def test_each_model_has_passes_and_an_update_of_its_own():
    updater = TwoModels(iterator(), {'one': optimizer(),
                                     'other': optimizer()})
    assert names(updater) == [
        'input', *['forward', 'backward', 'update'] * 2]


def test_models_are_called_in_training_alone():
    updater = StandardUpdater(iterator(), optimizer())
    model = updater.get_optimizer('main').target
    batch = numpy.zeros((2, 6), 'f'), numpy.zeros(2, 'i')

    def evaluate():
        with chainer.using_config('train', False):
            model(*batch)
        model.copy()(*batch)        # another model
    assert names(updater, evaluate) == ['forward']


def test_other_iterators_and_their_copies_are_not_watched():
    updater, other = StandardUpdater(iterator(), optimizer()), iterator()
    assert names(updater, lambda: (other.next(), next(other))) == []
    watched = updater.get_iterator('main')
    assert names(updater, lambda: (watched.next(), next(watched))) == [
        'input', 'input']


@pytest.mark.parametrize('where', ['forward', 'hook'])
def test_an_error_leaves_nothing_open(where):
    stream, made = EventStream(), optimizer()
    updater = StandardUpdater(iterator(), made)
    sections = UpdateSections(stream, updater, writes_itself=False)

    def fail(*_):
        raise KeyError
    if where == 'forward':
        made.target.predictor.forward = fail
    else:
        made.add_hook(fail, 'fail')
    with pytest.raises(KeyError):
        updater.update()
    sections.settle()
    assert not stream._thread.open
    sections.remove()


def test_a_hook_that_somebody_has_removed_is_no_error():
    made = optimizer()
    sections = UpdateSections(EventStream(), StandardUpdater(
        iterator(), made), writes_itself=False)
    made.remove_hook('RunReport pre')
    made.target.delete_hook('RunReport')
    sections.remove()
    assert not made._hookable._post_update_hooks

"""What a rank notes of its updates: sections, times, events, values."""
from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.report import stream
from chainer_fp8pipe.report.events import Event
from chainer_fp8pipe.report.record import RecordedUpdate
from chainer_fp8pipe.report.stream import EventStream, events_of
from chainer_fp8pipe.training.run_reports import watching
from chainer_fp8pipe.training.run_reports.watching import (
    CurveMeans,
    UpdateSections,
    UpdateTimes,
    together,
)

import chainer
import chainer.links as L
import numpy
import pytest
from chainer.training.updaters import StandardUpdater

# --- sections of updaters that write nothing themselves ----------------------


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
    return chainer.optimizers.SGD().setup(L.Classifier(
        L.Linear(6, 3)))


def names(updater, work=None):
    """Events of one update, by their start."""
    stream = EventStream()
    kept = stream.keep()
    sections = UpdateSections(stream, updater, writes_itself=False)
    try:
        (work or updater.update)()
    finally:
        sections.settle()
        sections.remove()
    return [event.name for event in sorted(
        events_of(kept, 0, 0.0),
        key=lambda event: (event.start, -event.end))]


def test_each_model_has_passes_and_an_update_of_its_own():
    assert names(StandardUpdater(iterator(), optimizer())) == [
        'input', 'forward', 'backward', 'update']
    assert names(TwoModels(iterator(), {
        'one': optimizer(), 'other': optimizer()})) == [
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


# --- times and events of updates ---------------------------------------------

class Rank:
    """A rank whose clock goes on when it is told what it does."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(stream, 'time', self)
        self.stream = EventStream()
        self.times = UpdateTimes(self.stream, 3, self.now, 0)
        self.iteration = 0

    def monotonic(self):
        return self.now

    def update(self, before=0.0, rest=0.0, **sections):
        """One update, after so many seconds of something else."""
        self.now += before
        self.times.update_begins(self.now)
        for name, seconds in sections.items():
            with self.stream.section(name):
                self.now += seconds
        self.now += rest
        self.iteration += 1
        self.times.update_ends(self.now, self.iteration)


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_phases_add_up_to_a_step(rank):
    rank.update(before=1, input=1, forward=2, backward=3, exchange=4,
                update=1, rest=2)
    rank.update(before=3, input=1, forward=2, backward=3, exchange=8,
                update=1, rest=4)
    interval, _, _ = rank.times.summary(start=5)
    assert interval[:4] == (5, 3, 1, 2)
    assert interval.phases == {
        'input': 1, 'forward': 2, 'backward': 3, 'exchange': 6, 'update': 1,
        'other': 3, 'between': 2}
    assert interval.seconds == 18
    assert interval.step == (16, 18, 20)
    # Without the exchange: 10 and 14 seconds.
    assert interval.own == (11, 12, 13)


def test_an_interval_begins_where_the_last_one_ended(rank):
    for seconds in 1, 2:
        rank.update(forward=seconds)
        interval, _, _ = rank.times.summary(0)
        assert interval.phases == {'forward': seconds}
        assert interval.first == interval.last == seconds
    assert rank.times.summary(0) == (None, (0, 0, 0), [])


def test_bytes_are_those_of_an_update(rank):
    for count in 10, 30:
        rank.stream.sent(count)
        rank.stream.carried(2 * count, 5 * count)
        rank.update(forward=1)
    assert rank.times.summary(0)[1] == (20, 40, 100)


def test_events_of_chosen_and_slow_updates_are_kept(rank):
    rank.times.choose({4})
    for number in range(1, 21):     # the first is like no other
        rank.update(forward={1: 9, 7: 3, 9: 1.3}.get(number, 1))
    _, _, kept = rank.times.summary(0)
    assert [(one.iteration, one.is_slow) for one in kept] == [
        (4, False), (7, True), (9, True)]
    assert kept[1].events == (Event(3, 'forward', 114.0, 117.0),)


def test_what_lies_between_updates_is_no_part_of_one(rank):
    rank.times.choose({2})
    rank.update(forward=1)
    with rank.stream.section('forward'):     # an evaluation
        rank.now += 5
    rank.update(forward=1)
    interval, _, (kept,) = rank.times.summary(0)
    assert interval.phases == {'forward': 1, 'between': 2.5}
    assert kept.events == (Event(3, 'forward', 106.0, 107.0),)


def test_nothing_is_noted_after_the_end(rank):
    rank.times.end()
    with rank.stream.section('forward'):
        rank.now += 5
    assert not rank.times._written


def test_only_the_slowest_of_many_slow_updates_are_offered(rank):
    for number in range(1, 101):
        rank.update(forward=1 + number % 10)
    _, _, kept = rank.times.summary(0)
    assert len(kept) == watching._OFFERED
    assert {one.iteration % 10 for one in kept} == {9}


# --- of all ranks ------------------------------------------------------------

def kept(iteration, is_slow, seconds, rank, start=7):
    return RecordedUpdate(start, iteration, is_slow, (
        Event(rank, 'forward', seconds, 2 * seconds),), seconds)


def test_updates_that_not_all_ranks_have_kept_are_left():
    found = together([
        [kept(3, False, 1.0, 0), kept(5, True, 2.0, 0)],
        [kept(5, True, 2.0, 1), kept(3, False, 1.0, 1),
         kept(8, True, 2.0, 1)]])
    assert [one[:3] for one in found] == [(7, 3, False), (7, 5, True)]
    assert found[1].events == (Event(0, 'forward', 2.0, 4.0),
                               Event(1, 'forward', 2.0, 4.0))


def test_the_slowest_updates_of_an_interval_are_kept():
    found = together([[
        kept(number, True, float(number % 7), rank)
        for number in range(1, 7)] for rank in range(2)])
    assert [one.iteration for one in found] == [5, 6]


# --- values that are reported ------------------------------------------------

def add(means, iteration, **values):
    means.add(SimpleNamespace(
        updater=SimpleNamespace(iteration=iteration,
                                epoch_detail=iteration / 4),
        observation=values, elapsed_time=0.5 * iteration))


def test_each_update_is_a_point_at_first():
    means = CurveMeans(3, 10)
    add(means, 11, loss=numpy.float32(2.0), note='text')
    add(means, 12, loss=(4.0, 3), accuracy=0.5)
    one, other = means.take()
    assert one == (3, 11, 2.75, 5.5, {'loss': 2.0})
    assert other == (3, 12, 3.0, 6.0, {'loss': 4.0, 'accuracy': 0.5})
    assert means.take() == []
    add(means, 13)          # which reports nothing
    assert means.take() == []


def test_many_points_are_means_of_several_updates():
    means = CurveMeans(0, 0)
    with mock.patch.object(watching, '_MANY', 4):
        for iteration in range(1, 29):
            add(means, iteration, loss=float(iteration))
    assert [(point.iteration, point.values['loss'])
            for point in means.take()] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (6, 5.5), (8, 7.5), (10, 9.5),
        (12, 11.5), (16, 14.5), (20, 18.5), (24, 22.5), (28, 26.5)]

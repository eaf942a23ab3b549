"""Something is done before a marked object is looked at."""
import copy
import pickle

from chainer_fp8pipe.intercept.access import (
    keeper_of,
    mark,
    unmark,
    unmarked,
)

import pytest


class Thing:
    unset = 'by the class'

    def __init__(self):
        self.watched, self.free = 1, 2


class Keeper:
    """Makes what is watched ten times as much, and takes the mark off."""

    def __init__(self, takes_off=True):
        self.subjects, self.takes_off = [], takes_off

    def look_at(self, subject):
        self.subjects.append(subject)
        vars(subject)['watched'] *= 10
        if self.takes_off:
            unmark(subject)


def marked(**options):
    thing, keeper = Thing(), Keeper(**options)
    mark(thing, ('watched', 'unset'), keeper, thing)
    return thing, keeper


@pytest.mark.parametrize(('look', 'found'), [
    (lambda thing: thing.watched, 10),
    (lambda thing: thing.unset, 'by the class'),
    (lambda thing: copy.copy(thing).watched, 10),
    (lambda thing: copy.deepcopy(thing).watched, 10),
    (lambda thing: pickle.loads(pickle.dumps(thing)).watched, 10)])
def test_the_keeper_is_asked_before_a_look(look, found):
    thing, keeper = marked()
    assert isinstance(thing, Thing)
    assert keeper_of(thing) is keeper
    assert look(thing) == found
    assert keeper.subjects == [thing]
    assert type(thing) is Thing
    assert keeper_of(thing) is None
    assert vars(thing) == {'watched': 10, 'free': 2}


def test_other_attributes_are_free():
    thing, keeper = marked()
    thing.free += 1
    assert (thing.free, keeper.subjects) == (3, [])


def test_what_is_set_is_set_after_the_keeper_is_through():
    thing, keeper = marked()
    thing.watched = 7
    assert (thing.watched, keeper.subjects) == (7, [thing])


def test_while_the_mark_is_on_every_look_asks():
    thing, keeper = marked(takes_off=False)
    assert (thing.watched, thing.watched) == (10, 100)
    thing.watched = 5
    assert vars(thing)['watched'] == 5
    assert len(keeper.subjects) == 3


def test_an_object_that_is_not_marked_stays_as_it_is():
    thing = Thing()
    unmark(thing)
    assert type(thing) is Thing
    assert keeper_of(thing) is None


def test_an_object_has_one_mark_at_a_time():
    thing, keeper = marked()
    with pytest.raises(RuntimeError, match='Thing object is marked already'):
        mark(thing, ('free',), keeper, thing)
    assert thing.watched == 10
    mark(thing, ('free',), keeper, thing)
    assert (thing.watched, thing.free) == (10, 2)
    assert type(thing) is Thing


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy])
def test_a_copy_is_plain_even_if_the_mark_stays(copied):
    thing, keeper = marked(takes_off=False)
    made = copied(thing)
    assert type(made) is Thing
    assert vars(made) == {'watched': 10, 'free': 2}
    assert keeper_of(thing) is keeper


def test_somebody_elses_class_survives_and_asks_nobody_any_more():
    thing, keeper = marked()
    thing.__class__ = theirs = type('Theirs', (type(thing),), {})
    assert thing.watched == 10
    assert type(thing) is theirs
    assert keeper_of(thing) is None
    thing.watched = 5
    assert (thing.watched, thing.unset, thing.free) == (5, 'by the class', 2)
    assert len(keeper.subjects) == 1
    assert vars(copy.copy(thing)) == {'watched': 5, 'free': 2}
    mark(thing, ('watched', 'unset'), keeper, thing)
    assert (thing.watched, type(thing)) == (50, theirs)


def test_an_unmarked_copy_asks_nobody_and_leaves_the_mark():
    thing, keeper = marked()
    for owner in thing, Thing():
        made = unmarked(owner)
        assert type(made) is Thing
        made.watched += 1
        assert vars(made) == {'watched': 2, 'free': 2}
    assert keeper.subjects == []
    assert keeper_of(thing) is keeper
    assert thing.watched == 10

"""A hook is called before an object is accessed."""
import copy
import pickle

from chainer_fp8pipe.intercept.access import (
    add_hook,
    hook_of,
    remove_hook,
    without_hook,
)

import pytest


class Thing:
    unset = 'by the class'

    def __init__(self):
        self.watched, self.free = 1, 2


class Hook:
    """Makes what is watched ten times as much, and removes the hook."""

    def __init__(self, removes=True):
        self.subjects, self.removes = [], removes

    def before_access(self, subject):
        self.subjects.append(subject)
        vars(subject)['watched'] *= 10
        if self.removes:
            remove_hook(subject)


def hooked(**options):
    thing, hook = Thing(), Hook(**options)
    add_hook(thing, ('watched', 'unset'), hook, thing)
    return thing, hook


@pytest.mark.parametrize(('access', 'found'), [
    (lambda thing: thing.watched, 10),
    (lambda thing: thing.unset, 'by the class'),
    (lambda thing: copy.copy(thing).watched, 10),
    (lambda thing: copy.deepcopy(thing).watched, 10),
    (lambda thing: pickle.loads(pickle.dumps(thing)).watched, 10)])
def test_the_hook_is_called_before_an_access(access, found):
    thing, hook = hooked()
    assert isinstance(thing, Thing)
    assert hook_of(thing) is hook
    assert access(thing) == found
    assert hook.subjects == [thing]
    assert type(thing) is Thing
    assert hook_of(thing) is None
    assert vars(thing) == {'watched': 10, 'free': 2}


def test_other_attributes_are_free():
    thing, hook = hooked()
    thing.free += 1
    assert (thing.free, hook.subjects) == (3, [])


def test_what_is_set_is_set_after_the_hook_is_through():
    thing, hook = hooked()
    thing.watched = 7
    assert (thing.watched, hook.subjects) == (7, [thing])


def test_every_access_calls_a_hook_that_stays():
    thing, hook = hooked(removes=False)
    assert (thing.watched, thing.watched) == (10, 100)
    thing.watched = 5
    assert vars(thing)['watched'] == 5
    assert len(hook.subjects) == 3


def test_an_object_without_a_hook_stays_as_it_is():
    thing = Thing()
    remove_hook(thing)
    assert type(thing) is Thing
    assert hook_of(thing) is None


def test_an_object_has_one_hook_at_a_time():
    thing, hook = hooked()
    with pytest.raises(RuntimeError, match='Thing object has an access hook'):
        add_hook(thing, ('free',), hook, thing)
    assert thing.watched == 10
    add_hook(thing, ('free',), hook, thing)
    assert (thing.watched, thing.free) == (10, 2)
    assert type(thing) is Thing


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy])
def test_a_copy_is_plain_even_if_the_hook_stays(copied):
    thing, hook = hooked(removes=False)
    made = copied(thing)
    assert type(made) is Thing
    assert vars(made) == {'watched': 10, 'free': 2}
    assert hook_of(thing) is hook


def test_somebody_elses_class_survives_and_asks_nobody_any_more():
    thing, hook = hooked()
    thing.__class__ = theirs = type('Theirs', (type(thing),), {})
    assert thing.watched == 10
    assert type(thing) is theirs
    assert hook_of(thing) is None
    thing.watched = 5
    assert (thing.watched, thing.unset, thing.free) == (5, 'by the class', 2)
    assert len(hook.subjects) == 1
    assert vars(copy.copy(thing)) == {'watched': 5, 'free': 2}
    add_hook(thing, ('watched', 'unset'), hook, thing)
    assert (thing.watched, type(thing)) == (50, theirs)


def test_a_copy_without_hook_calls_nothing_and_leaves_the_hook():
    thing, hook = hooked()
    for owner in thing, Thing():
        made = without_hook(owner)
        assert type(made) is Thing
        made.watched += 1
        assert vars(made) == {'watched': 2, 'free': 2}
    assert hook.subjects == []
    assert hook_of(thing) is hook
    assert thing.watched == 10

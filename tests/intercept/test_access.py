"""A hook is called before an object is accessed, and before updates."""
import copy
import pickle

from chainer_fp8pipe.intercept.access import (
    UPDATES,
    add_hook,
    hook_of,
    remove_hook,
    without_hook,
)

import chainer
import chainer.links as L
import numpy
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


def test_attributes_that_are_set_are_set_after_the_hook_is_through():
    thing, hook = hooked()
    thing.free += 1
    assert (thing.free, hook.subjects) == (3, [])
    thing.watched = 7
    assert (thing.watched, hook.subjects) == (7, [thing])
    remove_hook(thing)                  # which it has not any more
    assert type(thing) is Thing


def test_every_access_calls_a_hook_that_stays():
    thing, hook = hooked(removes=False)
    assert (thing.watched, thing.watched) == (10, 100)
    thing.watched = 5
    assert vars(thing)['watched'] == 5
    assert len(hook.subjects) == 3
    for copied in copy.copy, copy.deepcopy:
        made = copied(thing)
        assert type(made) is Thing
        assert vars(made) == {'watched': vars(thing)['watched'], 'free': 2}
    assert hook_of(thing) is hook


def test_an_object_has_one_hook_at_a_time():
    thing, hook = hooked()
    with pytest.raises(RuntimeError, match='Thing object has an access hook'):
        add_hook(thing, ('free',), hook, thing)
    assert thing.watched == 10
    add_hook(thing, ('free',), hook, thing)
    assert (thing.watched, thing.free) == (10, 2)
    assert type(thing) is Thing


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


class Asked:
    """A hook that takes updates over, or not."""

    def __init__(self, answer):
        self.answer, self.optimizers = answer, []

    def adopt(self, optimizer):
        self.optimizers.append(optimizer)
        return self.answer


@pytest.mark.parametrize('with_loss', [False, True])
@pytest.mark.parametrize('answer', [None, False, True])
def test_an_update_takes_place_unless_a_hook_takes_it_over(answer, with_loss):
    """One with a loss function asks nobody."""
    model, asked = L.Linear(2, 2, initialW=0), Asked(answer)
    optimizer = chainer.optimizers.SGD(1.).setup(model)
    before = chainer.GradientMethod.update
    end = UPDATES.hold(asked)
    if answer is not None:
        add_hook(model.W, ('never',), asked, model.W)
    model.W.grad, model.b.grad = -numpy.ones((2, 2), 'f'), numpy.zeros(2, 'f')
    optimizer.update(*[lambda: -chainer.functions.sum(model.W)] * with_loss)
    done = with_loss or not answer
    assert model.W.array[0, 0] == optimizer.t == done
    assert asked.optimizers == [optimizer] * (
        answer is not None and not with_loss)
    remove_hook(model.W)
    optimizer.update()
    assert optimizer.t == done + 1
    end()
    assert chainer.GradientMethod.update is before

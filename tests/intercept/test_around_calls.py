"""Blocks around the calls of some objects' methods."""
import contextlib
import copy

from chainer_fp8pipe.intercept.around_calls import AroundCalls

import pytest


class Iterator:
    def next(self, value):
        return value + 1


class Inheriting(Iterator):
    pass


@pytest.fixture
def seen():
    return []


@pytest.fixture
def around(seen):
    @contextlib.contextmanager
    def block():
        seen.append('begin')
        yield
        seen.append('end')
    return block


@pytest.mark.parametrize('kind', [Iterator, Inheriting])
def test_calls_of_the_object_alone_are_in_the_block(kind, seen, around):
    calls, one = AroundCalls(), kind()
    before = kind.next
    assert calls.add(one, 'next', around)
    assert one.next(4) == 5
    assert seen == ['begin', 'end']
    assert kind().next(1) == copy.copy(one).next(1) == 2
    assert seen == ['begin', 'end']
    calls.remove()
    assert kind.next is before
    assert ('next' in vars(kind)) == (kind is Iterator)
    assert one.next(4) == 5
    assert seen == ['begin', 'end']


def test_calls_of_all_objects_of_a_class_are_in_the_block(seen, around):
    calls = AroundCalls()
    calls.add(Iterator, 'next', around)
    assert Inheriting().next(1) + Iterator().next(1) == 4
    assert seen == ['begin', 'end'] * 2
    calls.remove()


def test_two_users_are_around_each_other_and_leave_in_any_order(seen, around):
    one, other, iterator = AroundCalls(), AroundCalls(), Iterator()
    before = Iterator.next
    one.add(iterator, 'next', around)
    other.add(iterator, 'next', around)
    iterator.next(1)
    assert seen == ['begin', 'begin', 'end', 'end']
    one.remove()
    del seen[:]
    iterator.next(1)
    assert seen == ['begin', 'end']
    other.remove()
    assert iterator.next(1) == 2
    assert seen == ['begin', 'end']
    assert Iterator.next(Iterator(), 1) == before(Iterator(), 1)


@pytest.mark.parametrize(('owner', 'name'), [
    (iter([]), '__next__'), (Iterator(), 'absent'), (None, 'next')])
def test_what_cannot_be_changed_is_left(owner, name, around):
    assert not AroundCalls().add(owner, name, around)


def test_an_error_goes_through_the_block():
    calls, iterator, seen = AroundCalls(), Iterator(), []

    @contextlib.contextmanager
    def block():
        try:
            yield
        finally:
            seen.append('end')
    calls.add(iterator, 'next', block)
    with pytest.raises(TypeError):
        iterator.next('text')
    assert seen == ['end']
    calls.remove()
